//! The task of one run: the runnable and its helpers, panics contained, the end reported exactly once.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tracing::Instrument as _;

use crate::context::Context;
use crate::machine::Ended;
use crate::process::ProcessError;
use crate::runnable::{Failure, Runnable};
use crate::state::Exit;

/// Runs one incarnation to its end.
pub(crate) async fn run(runnable: Arc<dyn Runnable>, context: Context) {
    let span = context.span();
    // Reports the end also when the task is dropped, which is how an abort arrives.
    let mut report = Report { context: context.clone(), ended: Some(Ended::Failed(Exit::Aborted)) };
    let run = async { runnable.run(context.clone()).await };
    let ended = match AssertUnwindSafe(run).catch_unwind().instrument(span).await {
        Ok(Ok(())) => Ended::Ok,
        Ok(Err(failure)) if failure.is_cancelled() => Ended::Cancelled,
        Ok(Err(failure)) => Ended::Failed(failed(&failure)),
        Err(panic) => Ended::Failed(Exit::Panicked { message: panic_message(&*panic) }),
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
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a value that is not a text").to_owned()
}
