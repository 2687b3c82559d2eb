//! The supervisor: what owns a tree, looks at it and brings it down.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;

use crate::driver::Driver;
use crate::event::{Event, EventHook};
use crate::machine::{ControlError, Machine, Settings, Status};
use crate::name::ROOT;
use crate::output::{Discard, OutputSink};
use crate::policy::Policy;
use crate::process::Cgroups;
use crate::runnable::{Child, Runnable};
use crate::state::{ExitRecord, NodeStatus};

/// How long a runnable may take to stop where nobody says otherwise.
const DEFAULT_STOP_WITHIN: Duration = Duration::from_secs(30);

/// A running tree.
///
/// Dropping it begins a shutdown that nobody waits for; [`shutdown`](Self::shutdown) waits.
#[derive(Debug)]
pub struct Supervisor {
    driver: Arc<Driver>,
    /// Locked while its end is waited for: whoever comes second waits too.
    hook: Mutex<Option<JoinHandle<()>>>,
}

/// Settings of a [`Supervisor`] to be.
pub struct Builder {
    policy: Policy,
    stop_within: Duration,
    output: Box<dyn OutputSink>,
    hook: Option<Box<dyn EventHook>>,
    cgroups: Cgroups,
}

/// What a shutdown left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Who did not stop in time, in the order in which they were given up on; empty after a clean shutdown.
    pub stragglers: Vec<Straggler>,
}

/// A runnable that did not stop in time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Straggler {
    /// Its DN.
    pub dn: Arc<str>,
    /// How long it was waited for.
    pub waited: Duration,
}

impl Supervisor {
    /// A supervisor with the defaults: [`Policy::default`], 30 seconds to stop, output discarded, no hook.
    pub fn builder() -> Builder {
        Builder {
            policy: Policy::default(),
            stop_within: DEFAULT_STOP_WITHIN,
            output: Box::new(Discard),
            hook: None,
            cgroups: Cgroups::default(),
        }
    }

    /// The tree as it stands: each parent before its children, these in the order in which they were added.
    pub fn snapshot(&self) -> Vec<NodeStatus> {
        self.driver
            .read(|machine| machine.statuses().into_iter().map(|status| self.status(&status)).collect())
    }

    /// A counter that changes whenever the tree does: wait for a change, then take a [`snapshot`](Self::snapshot).
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.driver.version()
    }

    /// Stops a runnable and all below it, and keeps it stopped, also across restarts of its parent, until
    /// [`start`](Self::start) or [`restart`](Self::restart). Returns before it has stopped; its group goes on, however it
    /// takes that.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stop(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|machine, now| machine.hold(now, dn))
    }

    /// Starts a runnable that is stopped, waits for its backoff, or has ended. What runs already goes on as it is.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn start(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|machine, now| machine.start_held(now, dn))
    }

    /// Stops a runnable and all below it, and starts it again at once, without a backoff; its group goes on.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn restart(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|machine, now| machine.restart_now(now, dn))
    }

    /// Stops everything, in the reverse of the order in which it was added: the last group first, a group's members at
    /// the same time, children before their parent. Who does not stop in time is aborted, named, and no longer waited
    /// for. Nothing is started any more.
    ///
    /// The tree can be looked at meanwhile, and afterwards.
    ///
    /// # Cancel safety
    /// The shutdown goes on when this is dropped; call it again to wait for its end.
    pub async fn shutdown(&self) -> ShutdownReport {
        self.driver.apply(Machine::shut_down);
        self.driver.finished().await;
        let mut hook = self.hook.lock().await;
        if let Some(delivery) = hook.as_mut() {
            // It contains the hook's panics, and nobody aborts it.
            let _ = delivery.await;
            *hook = None;
        }
        let stragglers = self.driver.read(|machine| {
            let named = machine.stragglers().iter();
            named.map(|(dn, waited)| Straggler { dn: Arc::clone(dn), waited: *waited }).collect()
        });
        ShutdownReport { stragglers }
    }

    fn status(&self, status: &Status<'_>) -> NodeStatus {
        let record = |past: &crate::machine::Past| ExitRecord {
            at: self.driver.wall(past.at),
            generation: past.generation,
            state: past.state,
            exit: past.exit.clone(),
        };
        NodeStatus {
            dn: Arc::clone(status.dn),
            state: status.state,
            since: self.driver.wall(status.since),
            generation: status.generation,
            failures: status.failures,
            exits: status.exits.iter().map(record).collect(),
            waiting_for: status.waiting_for.clone().at(|until| self.driver.wall(until)),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.driver.apply(Machine::shut_down);
    }
}

impl Builder {
    /// Restarts children by this policy unless they have their own.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// How long a runnable may take to stop, unless it or its child says otherwise. Default 30 s.
    #[must_use]
    pub fn stop_within(mut self, time: Duration) -> Self {
        self.stop_within = time;
        self
    }

    /// Sends raw output here.
    #[must_use]
    pub fn output(mut self, output: impl OutputSink) -> Self {
        self.output = Box::new(output);
        self
    }

    /// Reports every event here.
    #[must_use]
    pub fn hook(mut self, hook: impl EventHook) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Where child processes get cgroups of their own. Default: [`Cgroups::Own`].
    #[must_use]
    pub fn cgroups(mut self, cgroups: Cgroups) -> Self {
        self.cgroups = cgroups;
        self
    }

    /// Starts a tree whose root is this runnable.
    ///
    /// # Panics
    /// Outside of a tokio runtime, or in one without its time driver.
    pub fn start(self, root: impl Runnable) -> Supervisor {
        let (events, hook) = match self.hook {
            Some(hook) => {
                let (events, received) = mpsc::unbounded_channel();
                (Some(events), Some(tokio::spawn(deliver(received, hook))))
            }
            None => (None, None),
        };
        let root = Child::new(ROOT, root);
        let defaults = Settings { policy: self.policy, stop_within: self.stop_within };
        let driver = Driver::start(root, defaults, self.output, events, self.cgroups);
        Supervisor { driver, hook: Mutex::new(hook) }
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// Hands the events to the hook, until the last one has been sent.
async fn deliver(mut events: mpsc::UnboundedReceiver<Event>, hook: Box<dyn EventHook>) {
    while let Some(event) = events.recv().await {
        if std::panic::catch_unwind(AssertUnwindSafe(|| hook.event(&event))).is_err() {
            tracing::error!(dn = "supervisor", "the event hook panicked at event {}", event.seq);
        }
    }
}
