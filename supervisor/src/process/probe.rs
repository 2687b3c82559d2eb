//! Probes of a process, by code.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use thiserror::Error;

use super::error::ProcessError;
use super::pause::pausable_timeout;
use super::settings::Process;
use crate::containment::{DropContained, await_contained, panic_message};
use crate::failure::Failure;

/// The default timeout of one probe, so that one lost packet does not use up the whole start timeout.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of [`ProcessProbe::probe`].
pub type ProbeFuture = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Probes whether a process is ready, or alive. Implemented for every `Fn() -> impl Future<Output = Result<(), E>>`.
///
/// # Contract
/// A probe makes one real request and does not retry. The supervisor repeats it: until the process is
/// [ready](super::Readiness), with growing pauses from 20 ms to 1 s, and then for its [liveness](super::Liveness). It
/// drops a probe at its timeout, or when the process exits. A probe that panics has failed. One that fails because the host
/// has no process, descriptor or memory left (`EAGAIN` of a start, `EMFILE`, `ENFILE`, `ENOMEM`) does not count: see
/// [`ProcessHandle::probe_problem`](super::ProcessHandle::probe_problem).
pub trait ProcessProbe: Send + Sync + 'static {
    /// Probes once.
    fn probe(&self) -> ProbeFuture;
}

impl<F, Fut, E> ProcessProbe for F
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

/// Runs a program to its exit, as a probe or a reload of another one. Exit code 0 is success. Its descendants are
/// killed when it has exited, or when the future is dropped.
pub(super) type CommandRunner = Arc<dyn Fn(Arc<Process>) -> ProbeFuture + Send + Sync>;

/// The error of a probe whose process answers, and can't do its work at present: one without a majority, or with a disk
/// that stands still. It takes the readiness, as each failure does; and it ends no process by its
/// [liveness](super::Liveness), since a restart would not help.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Unready(String);

impl Unready {
    /// With the reason in words: a clause about the process.
    pub fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

/// The reason why one probe did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ProbeFailure {
    /// The process is alive, and can't do its work: see [`Unready`].
    Unready(String),
    /// The process is not well, or did not answer in time.
    Failed(String),
    /// The host had no process, descriptor or memory for the probe, which tells nothing about the process.
    NotAsked(String),
}

impl std::fmt::Display for ProbeFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unready(reason) | Self::Failed(reason) => f.write_str(reason),
            Self::NotAsked(reason) => write!(f, "could not ask: {reason}"),
        }
    }
}

/// Is told why a process could not be asked; or `None` once it was.
pub(super) type UnaskedReport<'a> = &'a (dyn Fn(Option<&ProbeFailure>) + Send + Sync);

/// Probes once.
pub(super) async fn probe_once(
    probe: &dyn ProcessProbe,
    within: Duration,
    report_unasked: UnaskedReport<'_>,
) -> Result<(), ProbeFailure> {
    // The probe shares no state with this task that a panic could leave inconsistent.
    let attempt = AssertUnwindSafe(async { await_contained(probe.probe()).await }).catch_unwind();
    let result = match pausable_timeout(within, attempt).await {
        Some(Ok(Ok(()))) => Ok(()),
        Some(Ok(Err(failure))) => {
            let failure = DropContained::new(failure);
            let reason = failure.to_string();
            Err(if is_shortage(&failure) {
                ProbeFailure::NotAsked(reason)
            } else if failure.error_chain().any(|error| error.is::<Unready>()) {
                ProbeFailure::Unready(reason)
            } else {
                ProbeFailure::Failed(reason)
            })
        }
        Some(Err(panic)) => Err(ProbeFailure::Failed(format!("it panicked: {}", panic_message(panic)))),
        None => Err(ProbeFailure::Failed(format!("no result within {within:?}"))),
    };
    report_unasked(result.as_ref().err().filter(|failure| matches!(failure, ProbeFailure::NotAsked(_))));
    result
}

/// Returns whether a probe has failed for lack of what it needs itself.
fn is_shortage(failure: &Failure) -> bool {
    failure.error_chain().any(|error| {
        let (errno, is_start) = match error.downcast_ref() {
            Some(ProcessError::Start { source, .. }) => (source.raw_os_error(), true),
            _ => (error.downcast_ref().and_then(std::io::Error::raw_os_error), false),
        };
        // A file or socket that has nothing yet fails with EAGAIN, too.
        matches!(errno, Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
            || is_start && errno == Some(libc::EAGAIN)
    })
}
