//! A runnable of a part that is ready to start.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{ChildPolicy, ChildSpec, Context, RunFuture, Runnable};

/// The reason why a runnable can't be prepared. Its message has the hint.
pub type PrepareError = Box<dyn Error + Send + Sync>;

/// A runnable that is ready to start, in each incarnation of its parent.
#[derive(Clone)]
pub struct PreparedRunnable {
    runnable: Arc<dyn Runnable>,
    policy: Option<ChildPolicy>,
    restarts_with_dependencies: bool,
    /// DNs that must be ready before it starts, and stop after it.
    start_after: Vec<Arc<str>>,
    /// DNs that stop after it.
    stop_before: Vec<Arc<str>>,
}

impl PreparedRunnable {
    /// A runnable with the supervisor's default policy.
    pub fn new(runnable: impl Runnable) -> Self {
        let (start_after, stop_before) = (Vec::new(), Vec::new());
        let (policy, restarts_with_dependencies) = (None, false);
        Self { runnable: Arc::new(runnable), policy, restarts_with_dependencies, start_after, stop_before }
    }

    /// Restarts it by this policy.
    #[must_use]
    pub fn policy(self, policy: ChildPolicy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// Restarts it when one of the DNs that it starts after is no longer ready.
    #[must_use]
    pub(crate) fn restart_with_dependencies(self, restarts: bool) -> Self {
        Self { restarts_with_dependencies: restarts, ..self }
    }

    /// Starts it when these DNs are ready, and stops it before them.
    #[must_use]
    pub(crate) fn start_after(mut self, dns: &[String]) -> Self {
        for dn in dns {
            if !self.start_after.iter().any(|known| **known == **dn) {
                self.start_after.push(dn.as_str().into());
            }
        }
        self
    }

    /// Replaces some of the DNs of [`start_after`](Self::start_after); those that it has by itself stay.
    pub(crate) fn replace_dependencies(&mut self, former: &[String], new: &[String]) {
        self.start_after.retain(|dn| former.iter().all(|former| **former != **dn));
        *self = self.clone().start_after(new);
    }

    /// Stops it before this DN.
    #[must_use]
    pub fn stop_before(mut self, dn: &str) -> Self {
        self.stop_before.push(dn.into());
        self
    }

    /// The child of one incarnation of its parent.
    pub(crate) fn to_child(&self, name: &str) -> ChildSpec {
        // The supervisor takes a `ChildSpec` by value, so that each incarnation gets a new one around the shared
        // runnable.
        let child = ChildSpec::new(name, SharedRunnable(Arc::clone(&self.runnable)));
        let child =
            child.depends_on(self.start_after.iter().cloned()).stop_before(self.stop_before.iter().cloned());
        let child = if self.restarts_with_dependencies { child.restart_with_dependencies() } else { child };
        match &self.policy {
            Some(policy) => child.policy(*policy),
            None => child,
        }
    }
}

impl fmt::Debug for PreparedRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedRunnable").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// A runnable that its parent starts in each of its incarnations.
struct SharedRunnable(Arc<dyn Runnable>);

impl Runnable for SharedRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        self.0.run(ctx)
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.0.stop_timeout()
    }
}
