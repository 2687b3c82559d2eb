//! The probe of a process that was ready.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::probe::{CommandRunner, PROBE_TIMEOUT, ProbeFailure, ProcessProbe, UnaskedReport, probe_once};
use super::settings::Process;

/// A probe that is repeated from when a process is ready otherwise. It is ready while the probe succeeds, and from the first
/// failure on it is not. When it fails several times in a row, the process is stopped, and its run has failed; but not for
/// [`Unready`](super::Unready), nor while a thread of it waits in the kernel (state D of proc_pid_stat(5)), as for a disk
/// that does not answer: a restart would not help.
///
/// The terms are those of a Kubernetes liveness probe, which also takes the readiness here. A probe costs a wake-up, and
/// for a command a process, each period.
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

/// What the liveness knows of its process, and whom it tells.
#[derive(Clone, Copy)]
pub(super) struct WatchedProcess<'a> {
    pub(super) report_unasked: UnaskedReport<'a>,
    /// Is told why it is not ready; or `None` once it is again.
    pub(super) report_ready: &'a (dyn Fn(Option<String>) + Send + Sync),
    /// Returns whether a thread of it waits in the kernel for something that no signal interrupts.
    pub(super) waits_in_kernel: &'a (dyn Fn() -> bool + Send + Sync),
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

    /// The pause between two probes. Default: ten seconds.
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
        watched: WatchedProcess<'_>,
    ) -> LivenessFailure {
        match &self.probe {
            LivenessProbe::Code(probe) => self.repeat_probe(&**probe, watched).await,
            LivenessProbe::Command(command) => {
                let (run_command, command) = (Arc::clone(run_command), Arc::clone(command));
                self.repeat_probe(&move || run_command(Arc::clone(&command)), watched).await
            }
        }
    }

    async fn repeat_probe(&self, probe: &dyn ProcessProbe, watched: WatchedProcess<'_>) -> LivenessFailure {
        let (mut failures, mut is_ready) = (0, false);
        let mut pause = Duration::ZERO;
        loop {
            sleep(std::mem::replace(&mut pause, self.period)).await;
            let unready = match probe_once(probe, self.timeout, watched.report_unasked).await {
                // Neither a failure nor a success: the next one tells.
                Err(ProbeFailure::NotAsked(_)) => continue,
                Ok(()) => {
                    failures = 0;
                    None
                }
                Err(ProbeFailure::Unready(reason)) => {
                    failures = 0;
                    Some(reason)
                }
                Err(ProbeFailure::Failed(reason)) => {
                    failures += 1;
                    let mut why = format!("its liveness probe fails: {reason}");
                    if failures >= self.failure_threshold {
                        if !(watched.waits_in_kernel)() {
                            return LivenessFailure { failures, last: reason };
                        }
                        why += ", and a thread of it waits in the kernel, as for a disk that does not answer";
                    }
                    Some(why)
                }
            };
            if !is_ready || unready.is_some() {
                is_ready = unready.is_none();
                (watched.report_ready)(unready);
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
    use super::super::probe::Unready;
    use super::*;
    use crate::failure::Failure;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::time::Instant;

    /// Repeats a probe that answers by its attempts, counted from 1, until the process is no longer alive. Returns that,
    /// and each report of its readiness.
    async fn repeat<F>(
        liveness: Liveness,
        waits_in_kernel: impl Fn() -> bool + Send + Sync,
        answer: impl Fn(u32) -> F + Send + Sync + 'static,
    ) -> (LivenessFailure, Vec<Option<String>>)
    where
        F: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let attempts = AtomicU32::new(0);
        let probe = move || answer(attempts.fetch_add(1, Ordering::Relaxed) + 1);
        let reported = std::sync::Mutex::new(Vec::new());
        let watched = WatchedProcess {
            report_unasked: &|_| (),
            report_ready: &|unready| reported.lock().expect("no panic").push(unready),
            waits_in_kernel: &waits_in_kernel,
        };
        let failure = liveness.repeat_probe(&probe, watched).await;
        (failure, reported.into_inner().expect("no panic"))
    }

    /// A liveness whose probe is given to each test by itself.
    fn every_two_seconds() -> Liveness {
        Liveness::probe(|| async { Ok::<(), Failure>(()) }).with_period(Duration::from_secs(2))
    }

    #[tokio::test(start_paused = true)]
    async fn only_failures_in_a_row_count_and_no_probe_that_could_not_be_made() {
        // Failures at the probes 1, 3, 5, 7 and 9; 6 and 8 could not be made.
        let started = Instant::now();
        let (failure, reported) = repeat(
            every_two_seconds(),
            || false,
            |attempt| async move {
                match attempt {
                    2 | 4 => Ok(()),
                    6 | 8 => Err(Failure::from(std::io::Error::from_raw_os_error(libc::EMFILE))),
                    _ => Err(Failure::new(format!("attempt {attempt}"))),
                }
            },
        )
        .await;
        assert_eq!(failure, LivenessFailure { failures: 3, last: "attempt 9".to_owned() });
        assert_eq!(started.elapsed().as_secs(), 16);
        let fails = |attempt| Some(format!("its liveness probe fails: attempt {attempt}"));
        assert_eq!(reported, [fails(1), None, fails(3), None, fails(5), fails(7)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_is_unready_or_waits_in_the_kernel_is_alive() {
        let in_kernel = AtomicU32::new(0);
        // In the kernel at the third and the fourth failure in a row.
        let waits = move || in_kernel.fetch_add(1, Ordering::Relaxed) < 2;
        let (failure, reported) = repeat(every_two_seconds(), waits, |attempt| async move {
            match attempt {
                2 => Err(Unready::new("no leader").into()),
                _ => Err(Failure::new(format!("attempt {attempt}"))),
            }
        })
        .await;
        assert_eq!(failure, LivenessFailure { failures: 5, last: "attempt 7".to_owned() });
        let reported: Vec<_> = reported.into_iter().flatten().collect();
        let kernel = ", and a thread of it waits in the kernel, as for a disk that does not answer";
        let fails = |attempt, why| format!("its liveness probe fails: attempt {attempt}{why}");
        assert_eq!(
            reported,
            [
                fails(1, ""),
                "no leader".into(),
                fails(3, ""),
                fails(4, ""),
                fails(5, kernel),
                fails(6, kernel)
            ]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_hangs_has_failed_at_its_timeout() {
        let liveness = every_two_seconds().with_timeout(Duration::from_secs(1)).with_failure_threshold(0);
        let (failure, _) = repeat(liveness, || false, |_| std::future::pending()).await;
        assert_eq!(failure, LivenessFailure { failures: 1, last: "no result within 1s".to_owned() });
    }
}
