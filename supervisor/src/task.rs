//! The task of one run: runs the runnable and its helpers, catches panics, and reports the exit exactly once.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{self, Poll, ready};

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::containment::{DropContained, await_contained, catch_panic, panic_message};
use crate::context::Context;
use crate::failure::Failure;
use crate::fsm::{RunKey, RunOutcome};
use crate::runnable::Runnable;
use crate::state::ExitReason;

tokio::task_local! {
    /// The incarnation that this task belongs to.
    static CURRENT_RUN: u64;
}

/// Returns whether this task is known to belong to another run than `key`.
pub(crate) fn is_other_run(key: RunKey) -> bool {
    // Outside of a run's tasks, such as in a thread, the sender is unknown: its signal is accepted.
    CURRENT_RUN.try_with(|current| *current != key.incarnation).unwrap_or(false)
}

/// Work as a part of a run: its log has the name of the run, and a panic becomes an `Err` with its message.
pub(crate) fn part_of_run<T>(
    context: &Context,
    work: impl Future<Output = T>,
) -> impl Future<Output = Result<T, String>> {
    let work = CURRENT_RUN.scope(context.run_key().incarnation, work).instrument(context.span());
    AssertUnwindSafe(work).catch_unwind().map(|ended| ended.map_err(panic_message))
}

/// Polls a part until it ends, or until the run is aborted: `None`. Then drops it, at its current await; a panic of
/// that becomes an `Err`, too.
pub(crate) fn poll_part<T>(
    cx: &mut task::Context<'_>,
    aborted: Pin<&mut impl Future<Output = ()>>,
    mut part: Pin<&mut Option<impl Future<Output = Result<T, String>>>>,
) -> Poll<Option<Result<T, String>>> {
    let ended = match part.as_mut().as_pin_mut() {
        // The abort first: a part that is always ready must not hold it up.
        Some(part) if aborted.poll(cx).is_pending() => Some(ready!(part.poll(cx))),
        _ => None,
    };
    Poll::Ready(match catch_panic(|| part.set(None)) {
        Ok(()) => ended,
        Err(message) => Some(Err(message)),
    })
}

/// Runs one incarnation to its end. Every run has this task: a byte of it is a byte of each runnable.
pub(crate) fn run_incarnation(
    runnable: DropContained<Arc<dyn Runnable>>,
    context: Context,
) -> impl Future<Output = ()> + Send {
    let mut report = ExitReporter { context, is_started: false, is_reported: false };
    async move {
        report.is_started = true;
        // Boxed, and from a separate block: the task has room for it from the start, and what the block needs shares
        // its room with what comes after.
        let outcome = async {
            // `run` is called within the future, so that a panic in it is caught as well.
            let run = async {
                await_contained(runnable.run(report.context.clone())).await.map_err(DropContained::new)
            };
            let mut run = pin!(Some(part_of_run(&report.context, run)));
            let mut aborted = pin!(report.context.wait_aborted());
            let ended = poll_fn(move |cx| poll_part(cx, aborted.as_mut(), run.as_mut())).await;
            Box::new(outcome_of(ended))
        }
        .await;
        // This reference goes before the report: in a shutdown, the driver then drops the last one before it
        // cancels others.
        drop(runnable);
        report.context.join_helpers(&outcome).await;
        report.report_exit(*outcome);
    }
}

/// The outcome of a run's main part; `None` if it was aborted.
fn outcome_of(ended: Option<Result<Result<(), DropContained<Failure>>, String>>) -> RunOutcome {
    match ended {
        Some(Ok(Ok(()))) => RunOutcome::Ok,
        Some(Ok(Err(failure))) if failure.is_canceled() => RunOutcome::Canceled,
        Some(Ok(Err(failure))) => RunOutcome::Failed(ExitReason::failed(failure.to_string())),
        Some(Err(message)) => RunOutcome::Failed(ExitReason::panicked(message)),
        None => RunOutcome::Failed(ExitReason::Aborted),
    }
}

/// Reports the exit of a run, also if its task is dropped with the runtime.
struct ExitReporter {
    context: Context,
    /// The task was polled.
    is_started: bool,
    is_reported: bool,
}

impl ExitReporter {
    fn report_exit(mut self, outcome: RunOutcome) {
        self.is_reported = true;
        self.context.report_exit(outcome);
    }
}

impl Drop for ExitReporter {
    fn drop(&mut self) {
        if !self.is_reported {
            if !self.is_started {
                // The runtime has stopped. It would drop each restart at once, too.
                self.context.forbid_starts();
            }
            self.context.report_exit(RunOutcome::Failed(ExitReason::Aborted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// tokio adds 104 bytes, and rounds up to a multiple of 128.
    #[test]
    #[cfg(target_pointer_width = "64")]
    fn the_task_of_a_run_takes_384_bytes() {
        fn output_size<A, B, Output>(_: fn(A, B) -> Output) -> usize {
            size_of::<Output>()
        }
        let bytes = output_size(run_incarnation);
        assert!(bytes + 104 <= 384, "{bytes}");
    }
}
