//! The runnable, its child specification, and its failure.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;

use crate::containment::{Contained, await_contained, catch_panic};
use crate::context::Context;
use crate::fsm::RunnableSettings;
use crate::policy::ChildPolicy;

/// What [`Runnable::run`] returns.
pub type RunFuture = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// A unit of work under supervision. Implemented for every
/// `Fn(Context) -> impl Future<Output = Result<(), E>>`.
///
/// # Contract
/// - The supervisor calls it for each start, and never while an earlier incarnation or its subtree is still
///   running.
/// - It adds its children, then [signals ready](Context::signal_ready), then works until
///   [`canceled`](Context::canceled) resolves. Then it cleans up and returns the [`CanceledError`] that it
///   got. An `Ok` without [`signal_done`](Context::signal_done) is a failure.
/// - Cleanup that must happen on every exit belongs in a `Drop`: the supervisor drops a run that ignores its
///   cancellation, at an await.
pub trait Runnable: Send + Sync + 'static {
    /// Runs one incarnation.
    fn run(&self, ctx: Context) -> RunFuture;

    /// How long it may take to stop after its cancellation. `None`: the value of the [`ChildSpec`], else the
    /// supervisor's.
    fn stop_timeout(&self) -> Option<Duration> {
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
        Box::pin(await_contained(self(ctx)).map(|ended| ended.map_err(Into::into)))
    }
}

/// Why a runnable failed; holds any error.
///
/// It deliberately does not implement `Error`, so that `?` converts every error into it.
pub struct Failure(Box<dyn Error + Send + Sync>);

impl Failure {
    /// Wraps an error, or a text.
    pub fn new(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(error.into())
    }

    /// The error with its causes, outermost first.
    pub(crate) fn error_chain(&self) -> impl Iterator<Item = &(dyn Error + 'static)> {
        std::iter::successors(Some(&*self.0 as &(dyn Error + 'static)), |error| next_cause(*error))
    }

    /// Whether a [`CanceledError`] is anywhere among the causes.
    pub fn is_canceled(&self) -> bool {
        self.error_chain().any(|error| error.is::<CanceledError>())
    }
}

/// The next cause. The `source` of an `io::Error` that wraps another error skips that error, so this uses
/// `get_ref`.
fn next_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => catch_panic(|| error.source()).ok().flatten(),
    }
}

/// The text of an error. If its `Display` fails, its `Debug` form with a note.
fn error_text(error: &(dyn Error + 'static)) -> String {
    catch_panic(|| error.to_string()).unwrap_or_else(|panic| {
        let debug = catch_panic(|| format!("{error:?}"));
        let debug = debug.unwrap_or_else(|_| "an error whose Debug panicked as well".to_owned());
        format!("{debug} (its Display panicked: {panic})")
    })
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl fmt::Display for Failure {
    /// The error with its causes, joined by `: `. A cause that repeats the text before it is left out. An
    /// error whose `Display` panics appears in its `Debug` form, with a note.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = String::new();
        for error in self.error_chain() {
            let text = error_text(error);
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

/// The runnable ended because its context was canceled. This is not a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("canceled")]
pub struct CanceledError;

/// A runnable with its name and, optionally, its dependencies, a policy and a stop timeout. A group consists of
/// these.
pub struct ChildSpec {
    pub(crate) name: String,
    pub(crate) runnable: Contained<Arc<dyn Runnable>>,
    pub(crate) policy: Option<ChildPolicy>,
    pub(crate) stop_timeout: Option<Duration>,
    pub(crate) stop_before: Vec<Arc<str>>,
}

impl ChildSpec {
    /// A child with this name and the supervisor's default policy.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        let runnable: Contained<Arc<dyn Runnable>> = Contained::new(Arc::new(runnable));
        Self { name: name.into(), runnable, policy: None, stop_timeout: None, stop_before: Vec::new() }
    }

    /// It needs the runnables with these DNs: each of its runs starts when they are ready or done, in this order;
    /// one that is stopping is not ready. A shutdown stops it [before them](Self::stop_before). A DN may be of a
    /// runnable that is added later, or below another one. A run that waits is new, and its status names what it
    /// waits for; so does the status of each runnable of a cycle, which never starts.
    ///
    /// Readiness counts at the start only: no run ends because a dependency does. For that, use a
    /// [group](Context::run_group).
    #[must_use]
    pub fn depends_on<Dn: Into<Arc<str>>>(mut self, dns: impl IntoIterator<Item = Dn>) -> Self {
        let dns: Vec<Arc<str>> = dns.into_iter().map(Into::into).collect();
        if dns.is_empty() {
            return self;
        }
        let dependent = DependentRunnable { runnable: self.runnable, depends_on: dns.clone().into() };
        self.runnable = Contained::new(Arc::new(dependent));
        self.stop_before(dns)
    }

    /// A shutdown stops it, with its subtree, before it stops anything in the subtrees of these DNs. It orders
    /// neither starts nor restarts. DNs that are not in the tree at the shutdown, of ancestors and of descendants
    /// have no effect: children always stop before their parent. A cycle stops last, together
    /// with what it stops before, without an order.
    #[must_use]
    pub fn stop_before<Dn: Into<Arc<str>>>(mut self, dns: impl IntoIterator<Item = Dn>) -> Self {
        self.stop_before.extend(dns.into_iter().map(Into::into));
        self
    }

    /// Restarts it by this policy.
    #[must_use]
    pub fn policy(mut self, policy: ChildPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// The supervisor aborts it when it is still running this long after its cancellation. Default: the
    /// runnable's [`stop_timeout`](Runnable::stop_timeout), else the supervisor's
    /// [`stop_timeout`](crate::SupervisorBuilder::stop_timeout).
    #[must_use]
    pub fn stop_timeout(mut self, time: Duration) -> Self {
        self.stop_timeout = Some(time);
        self
    }

    pub(crate) fn settings(&self, defaults: &Arc<RunnableSettings>) -> Arc<RunnableSettings> {
        let stop_timeout = self.stop_timeout.or_else(|| self.runnable.stop_timeout());
        let settings = RunnableSettings {
            policy: self.policy.unwrap_or(defaults.policy),
            stop_timeout: stop_timeout.unwrap_or(defaults.stop_timeout),
            stop_before: self.stop_before.clone(),
        };
        if settings == **defaults { Arc::clone(defaults) } else { Arc::new(settings) }
    }
}

impl fmt::Debug for ChildSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChildSpec")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// A runnable whose runs wait for others to be ready.
struct DependentRunnable {
    runnable: Contained<Arc<dyn Runnable>>,
    depends_on: Arc<[Arc<str>]>,
}

impl Runnable for DependentRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        let (runnable, depends_on) =
            (Contained::new(Arc::clone(&self.runnable)), Arc::clone(&self.depends_on));
        Box::pin(async move {
            if ctx.has_kept_process() {
                ctx.defer_dependencies(depends_on);
            } else {
                for dn in depends_on.iter() {
                    ctx.wait_dependency(dn).await?;
                }
            }
            await_contained(runnable.run(ctx)).await
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.runnable.stop_timeout()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("can't read the config")]
    struct ReadConfigError(#[source] io::Error);

    #[test]
    fn a_cancellation_is_found_wherever_it_is_wrapped() {
        assert!(Failure::new(CanceledError).is_canceled());
        assert!(Failure::new(ReadConfigError(io::Error::other(CanceledError))).is_canceled());
        assert!(!Failure::new("canceled").is_canceled());
    }

    #[test]
    fn each_cause_is_printed_once() {
        assert_eq!(
            Failure::new(ReadConfigError(io::Error::other("disk gone"))).to_string(),
            "can't read the config: disk gone"
        );
    }
}
