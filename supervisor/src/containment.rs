//! Contains panics in code of other crates: in drops, and in the texts of errors.

use std::any::Any;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use futures_util::FutureExt as _;

/// A value of another crate. A panic of its drop is logged and goes no further: the next one, while the stack
/// unwinds, would abort the program.
pub(crate) struct DropContained<T>(Option<T>);

impl<T> DropContained<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Takes the value out. The rest must only be dropped.
    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }
}

impl<T> Deref for DropContained<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("only take and drop take it")
    }
}

impl<T> DerefMut for DropContained<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("only take and drop take it")
    }
}

impl<T> Drop for DropContained<T> {
    fn drop(&mut self) {
        let Some(value) = self.0.take() else { return };
        if let Err(message) = catch_panic(|| drop(value)) {
            tracing::error!(dn = "supervisor", "a drop panicked: {message}");
        }
    }
}

/// Calls code of another crate. A panic becomes an `Err` with its message.
pub(crate) fn catch_panic<R>(call: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(panic_message)
}

/// Awaits a future of another crate. A panic of its poll waits until the future has been dropped, because that
/// may panic, too. A combinator: an `async fn` would keep the future twice.
pub(crate) fn await_contained<F: Future>(future: F) -> impl Future<Output = F::Output> {
    // The map drops the future before it calls the function.
    AssertUnwindSafe(future).catch_unwind().map(|ended| ended.unwrap_or_else(|panic| resume_unwind(panic)))
}

/// The message of a panic, if it is text.
pub(crate) fn panic_message(panic: Box<dyn Any + Send>) -> String {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = text.unwrap_or("a panic value that is not text").to_owned();
    if let Err(next) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        // Values that panic in their drop could follow each other without an end.
        std::mem::forget(next);
    }
    message
}
