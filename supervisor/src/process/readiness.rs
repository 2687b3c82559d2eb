//! When a process counts as ready.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Process;
use super::command;
use super::host::Host;
use super::notify::Said;
use crate::runnable::Failure;

/// The pause after a failed probe doubles from here.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// And ends here.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// One probe that takes longer has failed, so that one lost packet does not cost the whole time.
const LONGEST_PROBE: Duration = Duration::from_secs(5);

/// What [`Probe::probe`] returns.
pub type ProbeFuture = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Asks a process whether it works. Every `Fn() -> impl Future<Output = Result<(), E>>` is one.
///
/// # Contract
/// A probe makes one real request and does not retry: that is done for it, with growing pauses from 20 ms to 1 s. It is
/// dropped when it takes longer than five seconds, or when the process ends. One that panics has failed.
pub trait Probe: Send + Sync + 'static {
    /// Asks once.
    fn probe(&self) -> ProbeFuture;
}

impl<F, Fut, E> Probe for F
where
    F: Fn() -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<Failure>,
{
    fn probe(&self) -> ProbeFuture {
        let probe = self();
        Box::pin(async move { probe.await.map_err(Into::into) })
    }
}

/// When a process is ready. Default: [`started`](Self::started).
#[derive(Clone, Default)]
pub struct Readiness {
    pub(super) notify: bool,
    pub(super) exit: bool,
    probe: Option<Arc<dyn Probe>>,
    /// What asks instead of a probe, until there is a host to run it.
    command: Option<Arc<Process>>,
    within: Option<Duration>,
}

impl Readiness {
    /// As soon as its program runs. Only for programs that can't say more.
    pub fn started() -> Self {
        Self::default()
    }

    /// When it, or a descendant of it, sends `READY=1` to its `NOTIFY_SOCKET`, see `sd_notify(3)`.
    ///
    /// The socket is an abstract one: a process in another network namespace can't reach it.
    pub fn notify() -> Self {
        Self { notify: true, ..Self::default() }
    }

    /// When a probe of it succeeds.
    pub fn probe(probe: impl Probe) -> Self {
        Self::default().and_probe(probe)
    }

    /// When another program, started anew for each question, exits with code 0. It is asked as a [`Probe`] is, and all that
    /// descends from it ends with the question. Its output is not kept, but for the last line of one that fails; when it is
    /// ready itself, and how it is stopped, do not matter.
    pub fn command(command: Process) -> Self {
        Self { command: Some(Arc::new(command)), ..Self::default() }
    }

    /// When it has exited with code 0: it is a task to be done once, and the runnable is done then.
    ///
    /// It has all the time it wants, unless [`within`](Self::within) says otherwise.
    pub fn exit() -> Self {
        Self { exit: true, ..Self::default() }
    }

    /// Also asks a probe, once everything else says that it is ready.
    #[must_use]
    pub fn and_probe(mut self, probe: impl Probe) -> Self {
        self.probe = Some(Arc::new(probe));
        self
    }

    /// How long it may take; then the process is stopped and the run has failed. Default: a minute. The process can ask
    /// for more by `EXTEND_TIMEOUT_USEC=`.
    #[must_use]
    pub fn within(mut self, time: Duration) -> Self {
        self.within = Some(time);
        self
    }

    /// The same with a probe in the place of its command.
    pub(super) fn on(mut self, host: &Arc<Host>) -> Self {
        let Some(asked) = self.command.take() else { return self };
        let host = Arc::clone(host);
        self.and_probe(move || command::ask(Arc::clone(&host), Arc::clone(&asked)))
    }

    /// Resolves when the process is ready, or when it has taken too long: with the time it had, and what is missing.
    ///
    /// It never resolves for a process that has to exit first, unless that takes too long.
    pub(super) async fn wait(
        &self,
        mut said: Option<watch::Receiver<Said>>,
    ) -> Result<(), (Duration, String)> {
        let began = Instant::now();
        let within = self.within.unwrap_or(if self.exit { Duration::MAX } else { Duration::from_secs(60) });
        // A time too long for the clock is none.
        let mut deadline = began.checked_add(within);
        if self.exit {
            return Err((expired(deadline, within).await, "it has not exited".to_owned()));
        }
        let missing = match &mut said {
            Some(said) => self.wait_said(said, &mut deadline).await,
            None => Ok(()),
        };
        let missing = match (missing, &self.probe) {
            (Ok(()), Some(probe)) => wait_probe(&**probe, said, &mut deadline).await,
            (missing, _) => missing,
        };
        missing.map_err(|missing| (deadline.map_or(within, |at| at - began), missing))
    }

    async fn wait_said(
        &self,
        said: &mut watch::Receiver<Said>,
        deadline: &mut Option<Instant>,
    ) -> Result<(), String> {
        loop {
            let Said { ready, status, extended } = said.borrow_and_update().clone();
            if ready {
                return Ok(());
            }
            *deadline = later(*deadline, extended);
            // Without a listener it can't become ready any more, so the time goes by.
            let changed = async {
                if said.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            if at(*deadline, changed).await.is_none() {
                let status = status.map(|status| format!(", its status is {status:?}")).unwrap_or_default();
                return Err(format!("it has not sent READY=1{status}"));
            }
        }
    }
}

/// The value of a future, unless it comes too late.
async fn at<T>(deadline: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(at) => timeout_at(at, future).await.ok(),
        None => Some(future.await),
    }
}

async fn expired(deadline: Option<Instant>, within: Duration) -> Duration {
    at(deadline, std::future::pending::<()>()).await;
    within
}

async fn wait_probe(
    probe: &dyn Probe,
    mut said: Option<watch::Receiver<Said>>,
    deadline: &mut Option<Instant>,
) -> Result<(), String> {
    let mut last = "it was never answered".to_owned();
    let mut pause = FIRST_PAUSE;
    let probing = async {
        loop {
            // It has nothing of ours that a panic could leave half done.
            let asked = AssertUnwindSafe(async { probe.probe().await }).catch_unwind();
            match timeout(LONGEST_PROBE, asked).await {
                Ok(Ok(Ok(()))) => return,
                Ok(Ok(Err(failure))) => last = failure.to_string(),
                Ok(Err(_panic)) => last = "it panics".to_owned(),
                Err(_) => last = format!("no answer within {LONGEST_PROBE:?}"),
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    };
    tokio::select! {
        biased;
        () = probing => return Ok(()),
        () = over(&mut said, deadline) => {}
    }
    Err(format!("its probe fails: {last}"))
}

/// Resolves when the time is over, with what the process asks for meanwhile.
async fn over(said: &mut Option<watch::Receiver<Said>>, deadline: &mut Option<Instant>) {
    loop {
        let changed = async {
            if let Some(said) = said
                && said.changed().await.is_ok()
            {
                return said.borrow_and_update().extended;
            }
            std::future::pending().await
        };
        let Some(extended) = at(*deadline, changed).await else { return };
        *deadline = later(*deadline, extended);
    }
}

/// What is left of a time when more was asked for.
fn later(deadline: Option<Instant>, extended: Option<Instant>) -> Option<Instant> {
    deadline.map(|at| extended.map_or(at, |extended| at.max(extended)))
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readiness")
            .field("notify", &self.notify)
            .field("exit", &self.exit)
            .field("probe", &self.probe.is_some())
            .field("command", &self.command.as_ref().map(|command| command.program()))
            .field("within", &self.within)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test(start_paused = true)]
    async fn a_probe_is_asked_again_with_growing_pauses() {
        let (asked, began) = (Arc::new(AtomicU32::new(0)), Instant::now());
        let count = Arc::clone(&asked);
        let probe = move || {
            let asked = count.fetch_add(1, Ordering::Relaxed) + 1;
            async move { if asked < 9 { Err("not yet") } else { Ok(()) } }
        };
        Readiness::probe(probe).wait(None).await.expect("the ninth says yes");
        assert_eq!(asked.load(Ordering::Relaxed), 9);
        let pauses = 20 + 40 + 80 + 160 + 320 + 640 + 1000 + 1000;
        assert_eq!(began.elapsed().as_millis() / 10, pauses / 10);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_probe_said_last_is_told() {
        let readiness =
            Readiness::probe(|| async { Err::<(), _>("connection refused") }).within(Duration::from_secs(3));
        let late = readiness.wait(None).await.expect_err("it never succeeds");
        assert_eq!(late, (Duration::from_secs(3), "its probe fails: connection refused".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_hangs_is_asked_again() {
        let asked = Arc::new(AtomicU32::new(0));
        let probe = move || {
            let first = asked.fetch_add(1, Ordering::Relaxed) == 0;
            async move {
                if first {
                    std::future::pending::<()>().await;
                }
                Ok::<(), Failure>(())
            }
        };
        Readiness::probe(probe).wait(None).await.expect("the second is answered");
    }

    #[tokio::test(start_paused = true)]
    async fn the_process_can_ask_for_more_time() {
        let (say, said) = watch::channel(Said::default());
        let began = Instant::now();
        let extended = Some(began + Duration::from_secs(9));
        say.send_modify(|said| *said = Said { status: Some("loading".into()), extended, ..Said::default() });
        let readiness = Readiness::notify().within(Duration::from_secs(3));
        let late = readiness.wait(Some(said)).await.expect_err("it never says so");
        let missing = "it has not sent READY=1, its status is \"loading\"".to_owned();
        assert_eq!(late, (Duration::from_secs(9), missing));
        assert_eq!(began.elapsed().as_secs(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn the_process_can_ask_for_more_time_while_it_is_probed() {
        let (say, said) = watch::channel(Said { ready: true, ..Said::default() });
        let began = Instant::now();
        let probe = move || {
            say.send_modify(|said| said.extended = Some(began + Duration::from_secs(9)));
            async { Err::<(), _>("loading") }
        };
        let readiness = Readiness::notify().and_probe(probe).within(Duration::from_secs(3));
        let late = readiness.wait(Some(said)).await.expect_err("it never succeeds");
        assert_eq!(late, (Duration::from_secs(9), "its probe fails: loading".to_owned()));
        assert_eq!(began.elapsed().as_secs(), 9);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_panics_has_failed_and_is_asked_again() {
        let asked = AtomicU32::new(0);
        let probe = move || {
            let first = asked.fetch_add(1, Ordering::Relaxed) == 0;
            assert!(!first, "a bug of the probe");
            async { Ok::<(), Failure>(()) }
        };
        Readiness::probe(probe).wait(None).await.expect("the second is answered");
        let always = || async { if true { panic!("a bug") } else { Ok::<(), Failure>(()) } };
        let late = Readiness::probe(always).within(Duration::from_secs(3)).wait(None).await;
        assert_eq!(late, Err((Duration::from_secs(3), "its probe fails: it panics".to_owned())));
    }
}
