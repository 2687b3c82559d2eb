//! The task of one run: runs the runnable and its helpers, catches panics, and reports the exit exactly once.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::containment::{Contained, await_contained, panic_message};
use crate::context::Context;
use crate::fsm::{RunKey, RunOutcome};
use crate::runnable::Runnable;
use crate::state::ExitReason;

tokio::task_local! {
    /// The run that this task belongs to.
    static CURRENT_RUN: RunKey;
}

/// Whether this task is known to belong to another run than `key`.
pub(crate) fn is_other_run(key: RunKey) -> bool {
    CURRENT_RUN.try_with(|current| *current != key).unwrap_or(false)
}

/// Runs a part of a run until it ends, or until the run is aborted; then the part is dropped at its current
/// await. A panic becomes an `Err` with its message.
pub(crate) async fn run_catching_panics<T>(
    context: &Context,
    part: impl Future<Output = T>,
) -> Option<Result<T, String>> {
    let part = CURRENT_RUN.scope(context.run_key(), part).instrument(context.span());
    // A panic of the part is caught before the part is dropped, because that may panic, too.
    let part = AssertUnwindSafe(part).catch_unwind();
    let until_aborted = async move {
        // Pinned here to avoid another copy of the future.
        let mut part = pin!(part);
        tokio::select! {
            biased;
            () = context.wait_aborted() => None,
            ended = &mut part => Some(ended.map_err(panic_message)),
        }
    };
    AssertUnwindSafe(until_aborted)
        .catch_unwind()
        .await
        .unwrap_or_else(|panic| Some(Err(panic_message(panic))))
}

/// Runs one incarnation to its end.
pub(crate) async fn run_incarnation(runnable: Contained<Arc<dyn Runnable>>, context: Context) {
    // Reports the exit also if the task is dropped with its runtime.
    let mut report =
        ExitReporter { context: context.clone(), outcome: Some(RunOutcome::Failed(ExitReason::Aborted)) };
    let run = async { await_contained(runnable.run(context.clone())).await.map_err(Contained::new) };
    let outcome = match run_catching_panics(&context, run).await {
        Some(Ok(Ok(()))) => RunOutcome::Ok,
        Some(Ok(Err(failure))) if failure.is_canceled() => RunOutcome::Canceled,
        Some(Ok(Err(failure))) => RunOutcome::Failed(ExitReason::failed(failure.to_string())),
        Some(Err(message)) => RunOutcome::Failed(ExitReason::panicked(message)),
        None => RunOutcome::Failed(ExitReason::Aborted),
    };
    drop(runnable);
    context.join_helpers(&outcome).await;
    report.outcome = Some(outcome);
}

struct ExitReporter {
    context: Context,
    outcome: Option<RunOutcome>,
}

impl Drop for ExitReporter {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome.take() {
            self.context.report_exit(outcome);
        }
    }
}
