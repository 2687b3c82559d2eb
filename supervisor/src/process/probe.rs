//! Probes of a process, by code.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::timeout;

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
/// drops a probe at its timeout, or when the process exits. A probe that panics has failed.
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

/// Probes once. An error is the reason of the failure.
pub(super) async fn probe_once(probe: &dyn ProcessProbe, within: Duration) -> Result<(), String> {
    // The probe shares no state with this task that a panic could leave inconsistent.
    let attempt = AssertUnwindSafe(async { await_contained(probe.probe()).await }).catch_unwind();
    match timeout(within, attempt).await {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(failure))) => Err(DropContained::new(failure).to_string()),
        Ok(Err(panic)) => Err(format!("it panicked: {}", panic_message(panic))),
        Err(_) => Err(format!("no result within {within:?}")),
    }
}
