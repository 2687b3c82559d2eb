//! The task of one run: runs the runnable and its helpers, catches panics, and reports the exit exactly once.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::containment::{Contained, await_contained, catch_panic, panic_message};
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

/// Work as a part of a run: its log has the name of the run, and a panic becomes an `Err` with its message.
pub(crate) fn part_of_run<T>(
    context: &Context,
    work: impl Future<Output = T>,
) -> impl Future<Output = Result<T, String>> {
    let work = CURRENT_RUN.scope(context.run_key(), work).instrument(context.span());
    AssertUnwindSafe(work).catch_unwind().map(|ended| ended.map_err(panic_message))
}

/// Runs a part until it ends, or until the run is aborted. Then drops it, at its current await; a panic of that
/// becomes an `Err`, too. The caller pins the part: as an argument, the task would keep it twice.
pub(crate) async fn run_until_aborted<T>(
    context: &Context,
    mut part: Pin<&mut Option<impl Future<Output = Result<T, String>>>>,
) -> Option<Result<T, String>> {
    let ended = match part.as_mut().as_pin_mut() {
        Some(part) => tokio::select! {
            biased;
            () = context.wait_aborted() => None,
            ended = part => Some(ended),
        },
        None => None,
    };
    match catch_panic(|| part.set(None)) {
        Ok(()) => ended,
        Err(message) => Some(Err(message)),
    }
}

/// Runs one incarnation to its end.
pub(crate) fn run_incarnation(
    runnable: Contained<Arc<dyn Runnable>>,
    context: Context,
) -> impl Future<Output = ()> + Send {
    // Reports the exit also if the task is dropped with its runtime.
    let report = ExitReporter { context, outcome: Some(RunOutcome::Failed(ExitReason::Aborted)) };
    run_reporting_exit(runnable, report)
}

async fn run_reporting_exit(runnable: Contained<Arc<dyn Runnable>>, mut report: ExitReporter) {
    let context = &report.context;
    let ended = {
        let run = async { await_contained(runnable.run(context.clone())).await.map_err(Contained::new) };
        let run = pin!(Some(part_of_run(context, run)));
        run_until_aborted(context, run).await
    };
    let outcome = match ended {
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
