//! The task of one run: the runnable and its helpers, panics contained, the end reported exactly once.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::context::Context;
use crate::machine::{Ended, Key};
use crate::process::ProcessError;
use crate::runnable::{Failure, Runnable};
use crate::state::Exit;

tokio::task_local! {
    /// Whose task it is.
    static CURRENT: Key;
}

/// Whether this is known to be the task of another run than `key`.
pub(crate) fn is_foreign(key: Key) -> bool {
    CURRENT.try_with(|current| *current != key).unwrap_or(false)
}

/// Runs a part of a run until it ends, or until the run is aborted: then it is dropped at the await where it stands.
/// What it panics with is an `Err`.
pub(crate) async fn contain<T>(
    context: &Context,
    part: impl Future<Output = T>,
) -> Option<Result<T, String>> {
    let part = CURRENT.scope(context.key(), part).instrument(context.span());
    let until_aborted = async move {
        // Pinned here, so that it is not stored once more.
        let mut part = pin!(part);
        tokio::select! {
            biased;
            () = context.aborted() => None,
            ended = &mut part => Some(ended),
        }
    };
    match AssertUnwindSafe(until_aborted).catch_unwind().await {
        Ok(ended) => ended.map(Ok),
        Err(panic) => Some(Err(panic_message(&*panic))),
    }
}

/// Runs one incarnation to its end.
pub(crate) async fn run(runnable: Arc<dyn Runnable>, context: Context) {
    // Reports the end also if the task is dropped with its runtime.
    let mut report = Report { context: context.clone(), ended: Some(Ended::Failed(Exit::Aborted)) };
    let run = async { runnable.run(context.clone()).await };
    let ended = match contain(&context, run).await {
        Some(Ok(Ok(()))) => Ended::Ok,
        Some(Ok(Err(failure))) if failure.is_cancelled() => Ended::Cancelled,
        Some(Ok(Err(failure))) => Ended::Failed(failed(&failure)),
        Some(Err(message)) => Ended::Failed(Exit::Panicked { message }),
        None => Ended::Failed(Exit::Aborted),
    };
    drop(runnable);
    context.join_helpers(&ended).await;
    report.ended = Some(ended);
}

struct Report {
    context: Context,
    ended: Option<Ended>,
}

impl Drop for Report {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            self.context.exited(ended);
        }
    }
}

fn failed(failure: &Failure) -> Exit {
    let process =
        failure.chain().find_map(|error| error.downcast_ref::<ProcessError>()).and_then(ProcessError::exit);
    Exit::Failed { error: failure.to_string(), process: process.cloned().map(Arc::new) }
}

/// What a panic said, where it said it in words.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a value that is not a text").to_owned()
}
