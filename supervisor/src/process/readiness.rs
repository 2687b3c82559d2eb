//! The condition under which a process is ready, and its start timeout.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::notify::{NotifyReports, NotifyState};
use super::pause::PausableDeadline;
use super::probe::{CommandRunner, PROBE_TIMEOUT, ProbeFailure, ProcessProbe, UnaskedReport, probe_once};
use super::settings::Process;

/// The pause after the first failed probe; it doubles after each further failure.
const INITIAL_PROBE_PAUSE: Duration = Duration::from_millis(20);
const MAX_PROBE_PAUSE: Duration = Duration::from_secs(1);

/// When a process is ready. Default: [`on_start`](Self::on_start).
#[derive(Clone, Default)]
pub struct Readiness {
    pub(super) on_notify: bool,
    pub(super) on_exit: bool,
    on_probe: Option<Arc<dyn ProcessProbe>>,
    /// Replaced by a probe once there is a host to run it.
    on_command: Option<Arc<Process>>,
    timeout: Option<Duration>,
    probe_timeout: Option<Duration>,
    progress: Option<ProgressQuestion>,
}

/// Asks whether a process has made progress since the question before.
type ProgressQuestion = Arc<dyn Fn() -> bool + Send + Sync>;

impl Readiness {
    /// As soon as its program runs. Only for programs that can't report readiness.
    pub fn on_start() -> Self {
        Self::default()
    }

    /// When it or one of its descendants sends `READY=1` to its `NOTIFY_SOCKET`, see `sd_notify(3)`.
    ///
    /// The sender must still be running when the message is read, as systemd-notify(1) is, which waits for that by
    /// `BARRIER=1`, and have the user as which the process was started. It needs a directory for the socket:
    /// [`notify_directory`](crate::SupervisorBuilder::notify_directory).
    pub fn on_notify() -> Self {
        Self { on_notify: true, ..Self::default() }
    }

    /// When a probe succeeds.
    pub fn on_probe(probe: impl ProcessProbe) -> Self {
        Self::default().and_probe(probe)
    }

    /// When another program exits with code 0. The program is started for each probe, under the same rules as
    /// a [`ProcessProbe`], but has all the time until the start timeout; its descendants end with it. Its output is
    /// discarded, except the last line of a failed probe. Its readiness and stop settings are ignored.
    pub fn on_command(command: Process) -> Self {
        Self { on_command: Some(Arc::new(command)), ..Self::default() }
    }

    /// When it has exited with code 0: it is a one-shot task, and its runnable is then done.
    ///
    /// The task has no timeout, unless [`with_timeout`](Self::with_timeout) sets one.
    pub fn on_exit() -> Self {
        Self { on_exit: true, ..Self::default() }
    }

    /// Also requires a probe to succeed, after every other condition is met.
    #[must_use]
    pub fn and_probe(mut self, probe: impl ProcessProbe) -> Self {
        self.on_probe = Some(Arc::new(probe));
        self
    }

    /// The start timeout: a process that is not ready by then is stopped, and its run has failed. Default: a
    /// minute. The process can extend it by `EXTEND_TIMEOUT_USEC=`.
    #[must_use]
    pub fn with_timeout(mut self, time: Duration) -> Self {
        self.timeout = Some(time);
        self
    }

    /// Asks, each time the start timeout expires, whether the process has made progress since the time before; if so, it gets
    /// the timeout again. Default: nothing is asked.
    #[must_use]
    pub fn with_progress(mut self, has_progressed: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(has_progressed));
        self
    }

    /// The timeout of one probe, after which it is dropped and repeated. Default: five seconds; for a
    /// [command](Self::on_command), the start timeout.
    #[must_use]
    pub fn with_probe_timeout(mut self, time: Duration) -> Self {
        self.probe_timeout = Some(time);
        self
    }

    /// Replaces the command by a probe that runs it.
    pub(super) fn with_command_probe(mut self, run_command: &CommandRunner) -> Self {
        let Some(command) = self.on_command.take() else { return self };
        let run_command = Arc::clone(run_command);
        self.probe_timeout.get_or_insert(Duration::MAX);
        self.and_probe(move || run_command(Arc::clone(&command)))
    }

    /// Resolves when the process is ready. A process that is ready on exit never is here: its run sees the exit.
    pub(super) async fn wait_ready(
        &self,
        reports: Option<NotifyReports>,
        report_unasked: UnaskedReport<'_>,
    ) -> Result<(), NotReady> {
        if self.on_exit {
            // The task has the time that it was given, and can't extend it.
            let mut start =
                StartTimeout::new(self.timeout.unwrap_or(Duration::MAX), None, self.progress.clone());
            while start.next_report().await {}
            return Err(start.not_ready("it has not exited".to_owned()));
        }
        let mut start = StartTimeout::new(
            self.timeout.unwrap_or(Duration::from_secs(60)),
            reports,
            self.progress.clone(),
        );
        if self.on_notify && start.reports.is_some() {
            // An adopted process may have been ready before, which its record remembers.
            while !start.last.ready {
                if !start.next_report().await {
                    let status = start.last.status.as_ref();
                    let status = status.map(|status| format!(", its status is {status:?}"));
                    return Err(
                        start.not_ready(format!("it has not sent READY=1{}", status.unwrap_or_default()))
                    );
                }
            }
        }
        let Some(probe) = &self.on_probe else { return Ok(()) };
        let last = Mutex::new(ProbeFailure::Failed("it never returned".to_owned()));
        let lock = || last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut probing = std::pin::pin!(async {
            let mut pause = INITIAL_PROBE_PAUSE;
            let within = self.probe_timeout.unwrap_or(PROBE_TIMEOUT);
            while let Err(failure) = probe_once(&**probe, within, report_unasked).await {
                *lock() = failure;
                sleep(pause).await;
                // Most programs are ready soon; one that is not should not be kept busy by its probes.
                pause = (pause * 2).min(MAX_PROBE_PAUSE);
            }
        });
        loop {
            tokio::select! {
                biased;
                () = &mut probing => return Ok(()),
                // Reports go on while it is probed: they may extend the timeout.
                () = async { while start.next_report().await {} } => {}
            }
            let failure = lock().clone();
            match failure {
                // It may well be ready: nobody could ask.
                ProbeFailure::NotAsked(_) => start.restart(),
                ProbeFailure::Unready(reason) | ProbeFailure::Failed(reason) => {
                    return Err(start.not_ready(format!("its probe fails: {reason}")));
                }
            }
        }
    }
}

/// A process that was not ready at its start timeout.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotReady {
    /// The timeout with its extensions.
    pub(super) timeout: Duration,
    /// The condition that was not met, with the last status or failure.
    pub(super) missing: String,
}

/// The start timeout of one start, and the reports of the process, which can extend it.
struct StartTimeout {
    started: Instant,
    within: Duration,
    deadline: PausableDeadline,
    /// `None` without a `NOTIFY_SOCKET`.
    reports: Option<NotifyReports>,
    last: NotifyState,
    progress: Option<ProgressQuestion>,
}

impl StartTimeout {
    fn new(within: Duration, mut reports: Option<NotifyReports>, progress: Option<ProgressQuestion>) -> Self {
        let last = reports.as_mut().map(NotifyReports::last).unwrap_or_default();
        let started = Instant::now();
        let deadline = PausableDeadline::since(started, within);
        let mut start = Self { started, within, deadline, reports, last, progress };
        start.extend();
        start
    }

    /// Waits for the next report, which is then the last, or for an expired timeout that is granted again. False when the
    /// timeout expires.
    async fn next_report(&mut self) -> bool {
        let is_reported = self.report_in_time().await;
        let is_granted =
            !is_reported && self.progress.as_ref().is_some_and(|has_progressed| has_progressed());
        if is_granted {
            self.restart();
        }
        is_reported || is_granted
    }

    async fn report_in_time(&mut self) -> bool {
        let Some(reports) = &mut self.reports else {
            self.deadline.wait().await;
            return false;
        };
        let report = tokio::select! {
            biased;
            report = reports.next() => report,
            () = self.deadline.wait() => {
                let report = reports.read_all();
                if report == self.last {
                    return false;
                }
                report
            }
        };
        self.last = report;
        self.extend();
        true
    }

    /// An extension never shortens the timeout.
    fn extend(&mut self) {
        if let (Some(at), Some(extended)) = (&mut self.deadline.at, self.last.extended_deadline) {
            *at = extended.max(*at);
        }
    }

    /// Grants the whole time again.
    fn restart(&mut self) {
        self.deadline = PausableDeadline::after(self.within);
    }

    fn not_ready(&self, missing: String) -> NotReady {
        NotReady { timeout: self.deadline.at.map_or(self.within, |at| at - self.started), missing }
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness")
            .field("on_notify", &self.on_notify)
            .field("on_exit", &self.on_exit)
            .field("on_probe", &self.on_probe.is_some())
            .field("on_command", &self.on_command.as_ref().map(|command| command.program_path()))
            .field("timeout", &self.timeout)
            .field("probe_timeout", &self.probe_timeout)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use crate::process::notify::reports_of;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::sync::watch;

    #[tokio::test(start_paused = true)]
    async fn a_probe_is_retried_with_growing_pauses() {
        let (attempts, started) = (Arc::new(AtomicU32::new(0)), Instant::now());
        let count = Arc::clone(&attempts);
        let probe = move || {
            let attempts = count.fetch_add(1, Ordering::Relaxed) + 1;
            async move { if attempts < 9 { Err("not yet") } else { Ok(()) } }
        };
        Readiness::on_probe(probe).wait_ready(None, &|_| ()).await.expect("the ninth attempt succeeds");
        assert_eq!(attempts.load(Ordering::Relaxed), 9);
        let pauses = 20 + 40 + 80 + 160 + 320 + 640 + 1000 + 1000;
        assert_eq!(started.elapsed().as_millis() / 10, pauses / 10);
    }

    fn not_ready(seconds: u64, missing: &str) -> NotReady {
        NotReady { timeout: Duration::from_secs(seconds), missing: missing.to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_has_the_time_that_it_is_given() {
        let slow = || async {
            sleep(Duration::from_secs(6)).await;
            Ok::<(), Failure>(())
        };
        let readiness = |time| Readiness::on_probe(slow).with_probe_timeout(time);
        readiness(Duration::from_secs(7)).wait_ready(None, &|_| ()).await.expect("it answers after 6 s");
        readiness(Duration::MAX).wait_ready(None, &|_| ()).await.expect("it answers after 6 s");
        let cut =
            Readiness::on_probe(slow).with_timeout(Duration::from_secs(20)).wait_ready(None, &|_| ()).await;
        assert_eq!(cut, Err(not_ready(20, "its probe fails: no result within 5s")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_can_extend_its_start_timeout() {
        let (sender, notify) = watch::channel(NotifyState::default());
        let started = Instant::now();
        let extended = Some(started + Duration::from_secs(9));
        sender.send_modify(|state| {
            *state = NotifyState {
                status: Some("loading".into()),
                extended_deadline: extended,
                ..NotifyState::default()
            }
        });
        let readiness = Readiness::on_notify().with_timeout(Duration::from_secs(3));
        let late = readiness
            .wait_ready(Some(reports_of(notify)), &|_| ())
            .await
            .expect_err("it never becomes ready");
        assert_eq!(late, not_ready(9, "it has not sent READY=1, its status is \"loading\""));
        assert_eq!(started.elapsed().as_secs(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_makes_progress_gets_its_start_timeout_again() {
        let (started, asked) = (Instant::now(), AtomicU32::new(0));
        let readiness = Readiness::on_notify()
            .with_timeout(Duration::from_secs(3))
            .with_progress(move || asked.fetch_add(1, Ordering::Relaxed) < 4);
        let (_sender, notify) = watch::channel(NotifyState::default());
        let late = readiness.wait_ready(Some(reports_of(notify)), &|_| ()).await;
        assert_eq!(late, Err(not_ready(15, "it has not sent READY=1")));
        assert_eq!(started.elapsed().as_secs(), 15);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_can_extend_its_start_timeout_while_it_is_probed() {
        let (sender, notify) = watch::channel(NotifyState { ready: true, ..NotifyState::default() });
        let started = Instant::now();
        let probe = move || {
            sender.send_modify(|state| state.extended_deadline = Some(started + Duration::from_secs(9)));
            async { Err::<(), _>("loading") }
        };
        let readiness = Readiness::on_notify().and_probe(probe).with_timeout(Duration::from_secs(3));
        let late =
            readiness.wait_ready(Some(reports_of(notify)), &|_| ()).await.expect_err("it never succeeds");
        assert_eq!(late, not_ready(9, "its probe fails: loading"));
        assert_eq!(started.elapsed().as_secs(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_can_not_be_made_uses_up_no_timeout() {
        let (attempts, started) = (AtomicU32::new(0), Instant::now());
        let probe = move || {
            let attempt = attempts.fetch_add(1, Ordering::Relaxed);
            async move { if attempt < 20 { Err(std::io::Error::from_raw_os_error(libc::EMFILE)) } else { Ok(()) } }
        };
        let readiness = Readiness::on_probe(probe).with_timeout(Duration::from_secs(3));
        let unasked = AtomicU32::new(0);
        let report = |failure: Option<&ProbeFailure>| {
            _ = unasked.fetch_add(failure.is_some().into(), Ordering::Relaxed)
        };
        readiness.wait_ready(None, &report).await.expect("the last attempt is made");
        assert_eq!(unasked.into_inner(), 20);
        assert!(started.elapsed().as_secs() > 10);
    }

    #[derive(Debug)]
    struct PanicsInDrop;

    impl Drop for PanicsInDrop {
        fn drop(&mut self) {
            panic!("in its drop");
        }
    }

    impl fmt::Display for PanicsInDrop {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("no answer")
        }
    }

    impl std::error::Error for PanicsInDrop {}

    #[tokio::test(start_paused = true)]
    async fn a_probe_whose_errors_and_panic_values_panic_in_their_drop_has_failed() {
        let missing = async |readiness: Readiness| {
            let late = readiness.with_timeout(Duration::from_secs(3)).wait_ready(None, &|_| ()).await;
            late.expect_err("it never succeeds").missing
        };
        let fails = || async { Err::<(), Failure>(PanicsInDrop.into()) };
        assert_eq!(missing(Readiness::on_probe(fails)).await, "its probe fails: no answer");
        let panics =
            || async { if true { std::panic::panic_any(PanicsInDrop) } else { Ok::<(), Failure>(()) } };
        let text = "its probe fails: it panicked: a panic value that is not text";
        assert_eq!(missing(Readiness::on_probe(panics)).await, text);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_hangs_or_panics_has_failed_and_is_retried() {
        for panics in [false, true] {
            let attempts = AtomicU32::new(0);
            let probe = move || {
                let is_first = attempts.fetch_add(1, Ordering::Relaxed) == 0;
                assert!(!is_first || !panics, "a bug of the probe");
                async move {
                    if is_first {
                        std::future::pending::<()>().await;
                    }
                    Ok::<(), Failure>(())
                }
            };
            Readiness::on_probe(probe).wait_ready(None, &|_| ()).await.expect("the second attempt succeeds");
        }
        let always = || async { if true { panic!("a bug") } else { Ok::<(), Failure>(()) } };
        let late =
            Readiness::on_probe(always).with_timeout(Duration::from_secs(3)).wait_ready(None, &|_| ()).await;
        assert_eq!(late, Err(not_ready(3, "its probe fails: it panicked: a bug")));
    }
}
