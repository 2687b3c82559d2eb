//! What the tree runs, and how it says that it failed.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::context::Context;
use crate::policy::Policy;

/// What [`Runnable::run`] returns.
pub type RunFuture = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Something to run under supervision. Every `Fn(Context) -> impl Future<Output = Result<(), E>>` is one.
///
/// # Contract
/// - It is called anew for each start, and never while an earlier run of the same node, or anything below it, lives.
/// - It adds its children, then signals [`ready`](Context::ready), then works until [`cancelled`](Context::cancelled);
///   then it cleans up and returns the [`Cancelled`] that it got. An `Ok` without [`done`](Context::done) is a failure.
/// - What must happen on every end belongs into a `Drop`: a run that ignores its cancellation is dropped at an await.
pub trait Runnable: Send + Sync + 'static {
    /// Runs once.
    fn run(&self, ctx: Context) -> RunFuture;

    /// How long it may take to stop once it is cancelled. `None`: what the child or the supervisor says.
    fn stop_within(&self) -> Option<Duration> {
        None
    }
}

impl<F, Fut, E> Runnable for F
where
    F: Fn(Context) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<Failure>,
{
    fn run(&self, ctx: Context) -> RunFuture {
        let run = self(ctx);
        Box::pin(async move { run.await.map_err(Into::into) })
    }
}

/// Why a runnable failed: any error.
///
/// It deliberately is no `Error` itself, so that `?` turns every error into one.
pub struct Failure(Box<dyn Error + Send + Sync>);

impl Failure {
    /// Wraps an error, or a text.
    pub fn new(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(error.into())
    }

    /// The error with its causes, outermost first.
    pub(crate) fn chain(&self) -> impl Iterator<Item = &(dyn Error + 'static)> {
        std::iter::successors(Some(&*self.0 as &(dyn Error + 'static)), |error| cause(*error))
    }

    /// Whether a [`Cancelled`] is anywhere among the causes.
    pub fn is_cancelled(&self) -> bool {
        self.chain().any(|error| error.is::<Cancelled>())
    }
}

/// The next cause. An `io::Error` made of another error skips that one in `source`, so it is asked for it directly.
fn cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl fmt::Display for Failure {
    /// The error with its causes, joined by `: `; one that repeats the text before it is left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = String::new();
        for error in self.chain() {
            let text = error.to_string();
            if last.is_empty() {
                f.write_str(&text)?;
            } else if !last.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
        }
        Ok(())
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The runnable ended because its context was cancelled: not a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cancelled")]
pub struct Cancelled;

/// A runnable with a name and, where wanted, its own policy: what a group is made of.
pub struct Child {
    pub(crate) name: String,
    pub(crate) runnable: Box<dyn Runnable>,
    pub(crate) policy: Option<Policy>,
    pub(crate) stop_within: Option<Duration>,
}

impl Child {
    /// A child of this name, restarted by the supervisor's policy.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        Self { name: name.into(), runnable: Box::new(runnable), policy: None, stop_within: None }
    }

    /// Restarts it by `policy`.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Aborts it when it still runs so long after its cancellation. Default: what the runnable says of itself, else the
    /// supervisor's [`stop_within`](crate::Builder::stop_within).
    #[must_use]
    pub fn stop_within(mut self, time: Duration) -> Self {
        self.stop_within = Some(time);
        self
    }
}

impl fmt::Debug for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Child")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("read the config")]
    struct Step(#[source] io::Error);

    #[test]
    fn a_cancellation_is_found_wherever_it_is_wrapped() {
        assert!(Failure::new(Cancelled).is_cancelled());
        assert!(Failure::new(Step(io::Error::other(Cancelled))).is_cancelled());
        assert!(!Failure::new("cancelled").is_cancelled());
    }

    #[test]
    fn causes_are_told_once_each() {
        assert_eq!(
            Failure::new(Step(io::Error::other("disk gone"))).to_string(),
            "read the config: disk gone"
        );
    }
}
