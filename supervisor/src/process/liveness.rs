//! The probe of a process that was ready.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::probe::{CommandRunner, PROBE_TIMEOUT, ProbeFailure, ProcessProbe, UnaskedReport, probe_once};
use super::settings::Process;

/// A probe that is repeated while a process is ready. When it fails several times in a row, the process is stopped,
/// and its run has failed.
///
/// The terms are those of a Kubernetes liveness probe. A probe costs a wake-up, and for a command a process, each
/// period.
#[derive(Clone)]
pub struct Liveness {
    probe: LivenessProbe,
    period: Duration,
    timeout: Duration,
    failure_threshold: u32,
}

#[derive(Clone)]
enum LivenessProbe {
    Code(Arc<dyn ProcessProbe>),
    Command(Arc<Process>),
}

/// The failures in a row after which a process is no longer alive.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LivenessFailure {
    pub(super) failures: u32,
    /// The reason of the last one.
    pub(super) last: String,
}

impl Liveness {
    /// Probes by code.
    pub fn probe(probe: impl ProcessProbe) -> Self {
        Self::new(LivenessProbe::Code(Arc::new(probe)))
    }

    /// Probes by a program, as [`Readiness::on_command`](super::Readiness::on_command) does: exit code 0 is success.
    pub fn command(command: Process) -> Self {
        Self::new(LivenessProbe::Command(Arc::new(command)))
    }

    fn new(probe: LivenessProbe) -> Self {
        Self { probe, period: Duration::from_secs(10), timeout: PROBE_TIMEOUT, failure_threshold: 3 }
    }

    /// The pause before each probe. Default: ten seconds.
    #[must_use]
    pub fn with_period(mut self, period: Duration) -> Self {
        self.period = period;
        self
    }

    /// The timeout of one probe, after which it has failed. Default: five seconds.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The number of probes in a row that must fail; 0 counts as 1. Default: three.
    #[must_use]
    pub fn with_failure_threshold(mut self, failures: u32) -> Self {
        self.failure_threshold = failures.max(1);
        self
    }

    /// Resolves when the process is no longer alive.
    pub(super) async fn wait_failure(
        &self,
        run_command: &CommandRunner,
        report_unasked: UnaskedReport<'_>,
    ) -> LivenessFailure {
        match &self.probe {
            LivenessProbe::Code(probe) => self.repeat_probe(&**probe, report_unasked).await,
            LivenessProbe::Command(command) => {
                let (run_command, command) = (Arc::clone(run_command), Arc::clone(command));
                self.repeat_probe(&move || run_command(Arc::clone(&command)), report_unasked).await
            }
        }
    }

    async fn repeat_probe(
        &self,
        probe: &dyn ProcessProbe,
        report_unasked: UnaskedReport<'_>,
    ) -> LivenessFailure {
        let mut failures = 0;
        loop {
            // Before the first probe, too: the process has just become ready.
            sleep(self.period).await;
            match probe_once(probe, self.timeout, report_unasked).await {
                Ok(()) => failures = 0,
                // Neither a failure nor a success: the next one tells.
                Err(ProbeFailure::NotAsked(_)) => {}
                Err(ProbeFailure::Failed(reason)) => {
                    failures += 1;
                    tracing::warn!(failures, reason, "the liveness probe failed");
                    if failures >= self.failure_threshold {
                        return LivenessFailure { failures, last: reason };
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Liveness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let command = match &self.probe {
            LivenessProbe::Code(_) => None,
            LivenessProbe::Command(command) => Some(command.program_path()),
        };
        f.debug_struct("Liveness")
            .field("command", &command)
            .field("period", &self.period)
            .field("timeout", &self.timeout)
            .field("failure_threshold", &self.failure_threshold)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn only_failures_in_a_row_count_and_no_probe_that_could_not_be_made() {
        // Failures at the probes 1, 3, 5, 7 and 9; 6 and 8 could not be made.
        let attempts = AtomicU32::new(0);
        let probe = move || {
            let attempt = attempts.fetch_add(1, Ordering::Relaxed) + 1;
            async move {
                match attempt {
                    2 | 4 => Ok(()),
                    6 | 8 => Err(Failure::from(std::io::Error::from_raw_os_error(libc::EMFILE))),
                    _ => Err(Failure::new(format!("attempt {attempt}"))),
                }
            }
        };
        let started = Instant::now();
        let liveness = Liveness::probe(probe).with_period(Duration::from_secs(2));
        let LivenessProbe::Code(probe) = &liveness.probe else { panic!("it is code") };
        let reported = std::sync::Mutex::new(Vec::new());
        let report =
            |unasked: Option<&ProbeFailure>| reported.lock().expect("no panic").push(unasked.is_some());
        assert_eq!(
            liveness.repeat_probe(&**probe, &report).await,
            LivenessFailure { failures: 3, last: "attempt 9".to_owned() }
        );
        assert_eq!(started.elapsed().as_secs(), 18);
        assert_eq!(
            *reported.lock().expect("no panic"),
            [false, false, false, false, false, true, false, true, false]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_hangs_has_failed_at_its_timeout() {
        let probe = || std::future::pending::<Result<(), String>>();
        let liveness = Liveness::probe(probe).with_timeout(Duration::from_secs(1)).with_failure_threshold(0);
        let LivenessProbe::Code(probe) = &liveness.probe else { panic!("it is code") };
        let failure = LivenessFailure { failures: 1, last: "no result within 1s".to_owned() };
        assert_eq!(liveness.repeat_probe(&**probe, &|_| ()).await, failure);
    }
}
