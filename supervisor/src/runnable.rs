//! The runnable and its child specification.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;

use crate::containment::{DropContained, await_contained};
use crate::context::Context;
use crate::failure::Failure;
use crate::fsm::RunnableSettings;
use crate::name::{DependencyError, resolve_dn};
use crate::policy::ChildPolicy;

/// The result of [`Runnable::run`].
pub type RunFuture = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// A unit of work under supervision. Implemented for every
/// `Fn(Context) -> impl Future<Output = Result<(), E>>`.
///
/// # Contract
/// - The supervisor calls it for each start, and never while an earlier incarnation or its subtree is still
///   running.
/// - It adds its children, then [signals ready](Context::signal_ready), then works until
///   [`canceled`](Context::canceled) resolves. Then it cleans up and returns the [`CanceledError`](crate::CanceledError) that it
///   got. An `Ok` without [`signal_done`](Context::signal_done) is a failure under
///   [`RestartPolicy::Always`](crate::RestartPolicy::Always).
/// - Cleanup that must happen on every exit belongs in a `Drop`: the supervisor drops a run that ignores its
///   cancellation, at an await.
pub trait Runnable: Send + Sync + 'static {
    /// Runs one incarnation.
    fn run(&self, ctx: Context) -> RunFuture;

    /// The time that it may take to stop after its cancellation. `None`: the value of the [`ChildSpec`], else the
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

/// A runnable with its name and, optionally, its dependencies, a policy and a stop timeout. A group consists of
/// these.
pub struct ChildSpec {
    pub(crate) name: String,
    pub(crate) runnable: DropContained<Arc<dyn Runnable>>,
    pub(crate) policy: Option<ChildPolicy>,
    pub(crate) stop_timeout: Option<Duration>,
    depends_on: Vec<Arc<str>>,
    stop_before: Vec<Arc<str>>,
    restarts_with_dependencies: bool,
}

impl ChildSpec {
    /// A child with this name and the supervisor's default policy.
    pub fn new(name: impl Into<String>, runnable: impl Runnable) -> Self {
        let runnable: DropContained<Arc<dyn Runnable>> = DropContained::new(Arc::new(runnable));
        Self {
            name: name.into(),
            runnable,
            policy: None,
            stop_timeout: None,
            depends_on: Vec::new(),
            stop_before: Vec::new(),
            restarts_with_dependencies: false,
        }
    }

    /// Makes it depend on these runnables, siblings by their name, others by their DN: each of its runs starts when they
    /// are ready or done, in this order; one that is stopping is not ready. A shutdown stops it
    /// [before them](Self::stop_before). Any of them may be added later, or below another runnable. A run that waits is
    /// new, and its status names what it waits for; so does the status of each runnable of a cycle, which never starts.
    /// A dependency that can't come is an error when the child is added: see [`DependencyError`].
    ///
    /// Readiness counts at the start only: no run ends because a dependency does, unless it
    /// [restarts with them](Self::restart_with_dependencies).
    #[must_use]
    pub fn depends_on<Name: Into<Arc<str>>>(mut self, runnables: impl IntoIterator<Item = Name>) -> Self {
        self.depends_on.extend(runnables.into_iter().map(Into::into));
        self
    }

    /// Stops its run as soon as one of the runnables that it [depends on](Self::depends_on) is no longer ready, and starts
    /// it again when all are; without a backoff, and not as a failure. A process that an earlier program has kept runs
    /// on until one of them is lost that has been ready.
    #[must_use]
    pub fn restart_with_dependencies(mut self) -> Self {
        self.restarts_with_dependencies = true;
        self
    }

    /// A shutdown stops it, with its subtree, before it stops anything in the subtrees of these runnables: siblings by
    /// their name, others by their DN. It orders
    /// neither starts nor restarts. Runnables that are not in the tree at the shutdown, ancestors and descendants
    /// have no effect: children always stop before their parent. A cycle stops last, together
    /// with what it stops before, without an order.
    #[must_use]
    pub fn stop_before<Name: Into<Arc<str>>>(mut self, runnables: impl IntoIterator<Item = Name>) -> Self {
        self.stop_before.extend(runnables.into_iter().map(Into::into));
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

    /// The child as one of `parent`, whose dependencies are DNs.
    pub(crate) fn below(mut self, parent: &str) -> Result<Self, DependencyError> {
        if self.depends_on.is_empty() && self.stop_before.is_empty() {
            return Ok(self);
        }
        let child = format!("{parent}.{}", self.name);
        let resolve = |text: &Arc<str>| {
            let invalid =
                || DependencyError::Invalid { child: child.clone(), dependency: text.as_ref().to_owned() };
            resolve_dn(parent, text).ok_or_else(invalid)
        };
        let needs = |text: &Arc<str>| {
            let dependency = resolve(text)?;
            match dependency.strip_prefix(&*child) {
                Some(below) if below.is_empty() || below.starts_with('.') => {
                    Err(DependencyError::OnItself { child: child.clone(), dependency })
                }
                _ => Ok(Arc::from(dependency)),
            }
        };
        let depends_on =
            self.depends_on.drain(..).map(|text| needs(&text)).collect::<Result<Arc<[_]>, _>>()?;
        let stop_before: Result<Vec<_>, _> =
            self.stop_before.iter().map(|text| resolve(text).map(Arc::from)).collect();
        self.stop_before = depends_on.iter().cloned().chain(stop_before?).collect();
        if !depends_on.is_empty() {
            let restarts = self.restarts_with_dependencies;
            let dependent = DependentRunnable { runnable: self.runnable, depends_on, restarts };
            self.runnable = DropContained::new(Arc::new(dependent));
        }
        Ok(self)
    }

    pub(crate) fn settings(&self, defaults: &Arc<RunnableSettings>) -> Arc<RunnableSettings> {
        let stop_timeout = self.stop_timeout.or_else(|| self.runnable.stop_timeout());
        let settings = RunnableSettings {
            policy: self.policy.unwrap_or(defaults.policy),
            stop_timeout: stop_timeout.unwrap_or(defaults.stop_timeout),
            stop_before: self.stop_before.clone(),
        };
        // Most children have the defaults: a large tree keeps them once.
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
    runnable: DropContained<Arc<dyn Runnable>>,
    depends_on: Arc<[Arc<str>]>,
    /// True if a run ends with the readiness of any of them.
    restarts: bool,
}

impl Runnable for DependentRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        let (runnable, depends_on) =
            (DropContained::new(Arc::clone(&self.runnable)), Arc::clone(&self.depends_on));
        let restarts = self.restarts;
        Box::pin(async move {
            let is_kept = ctx.has_kept_process();
            if is_kept {
                // A kept process is running already and is adopted at once. The dependencies count only if it must be
                // started.
                ctx.defer_dependencies(Arc::clone(&depends_on));
            } else {
                // One may be lost again while it waits for another.
                while !ctx.are_ready(&depends_on) {
                    for dn in depends_on.iter() {
                        ctx.wait_dependency(dn).await?;
                    }
                }
            }
            let mut run = pin!(await_contained(runnable.run(ctx.clone())));
            if restarts {
                tokio::select! {
                    result = &mut run => return result,
                    lost = ctx.wait_lost_dependency(&depends_on, !is_kept) => ctx.restart_with_dependency(lost),
                }
            }
            run.await
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.runnable.stop_timeout()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;
    use crate::{RunnableState, Supervisor};

    /// As a process that has sent `STOPPING=1`.
    #[tokio::test(start_paused = true)]
    async fn a_dependent_restarts_with_a_dependency_that_is_ending() {
        let ends_late = |ctx: Context| async move {
            ctx.signal_ready()?;
            sleep(Duration::from_secs(10)).await;
            ctx.mark_ending();
            sleep(Duration::from_secs(10)).await;
            Err::<(), Failure>(Failure::new("it has ended"))
        };
        let steady = |ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.until_canceled().await
        };
        let supervisor = Supervisor::builder().start(move |ctx: Context| async move {
            ctx.run_child("a", ends_late)?;
            ctx.run_child_with(ChildSpec::new("b", steady).depends_on(["a"]).restart_with_dependencies())?;
            ctx.signal_ready()?;
            ctx.until_canceled().await
        });
        let dependent = || supervisor.snapshot().remove(2);
        sleep(Duration::from_secs(9)).await;
        assert_eq!((dependent().state, dependent().generation), (RunnableState::Ready, 1));
        sleep(Duration::from_secs(2)).await;
        assert_eq!((dependent().state, dependent().generation), (RunnableState::New, 2));
    }
}
