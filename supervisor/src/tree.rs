//! The supervisor: the owner of a tree, which inspects it and shuts it down.

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{Mutex, watch};
use tokio::task::coop::consume_budget;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::timeout;

use crate::containment::{DropContained, catch_panic};
use crate::context::WaitReadyError;
use crate::driver::TreeDriver;
use crate::event::EventHook;
use crate::event_buffer::EventQueue;
use crate::failure::CanceledError;
use crate::fsm::{ControlError, EntryStatus, Removal, RunnableSettings};
use crate::name::{ROOT, is_dn};
use crate::output::{LogOutput, OutputSink};
use crate::policy::ChildPolicy;
use crate::process::{CgroupParent, HostSettings, ProcessRecords, RecordProblem, Rlimit};
use crate::runnable::{ChildSpec, Runnable};
use crate::shutdown_signals::StopSignals;
use crate::state::{ExitReason, ExitRecord, RunnableStatus};

/// The stop timeout where neither the runnable nor its child specification sets one.
const DEFAULT_STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of events that wait for a slow hook: some megabytes, at about 0.3 KiB and the text of the exit for
/// each.
const DEFAULT_PENDING_EVENTS: NonZeroUsize = NonZeroUsize::new(16_384).expect("not zero");

/// A running tree.
///
/// Dropping it starts a shutdown in the background; [`shutdown`](Self::shutdown) waits for its end.
#[derive(Debug)]
pub struct Supervisor {
    driver: Arc<TreeDriver>,
    hook: Option<HookDelivery>,
}

/// The task that calls the hook.
#[derive(Debug)]
struct HookDelivery {
    /// The name of the hook's type.
    name: &'static str,
    events: Arc<EventQueue>,
    /// The time that the hook has for the last events.
    timeout: Duration,
    /// Locked while a caller waits for its end, so that a concurrent caller waits too.
    task: Mutex<JoinHandle<()>>,
}

/// The settings from which a [`Supervisor`] starts.
pub struct SupervisorBuilder {
    default_policy: ChildPolicy,
    stop_timeout: Duration,
    output_sink: Box<dyn OutputSink>,
    /// With the name of its type.
    event_hook: Option<(&'static str, Box<dyn EventHook>)>,
    max_pending_events: NonZeroUsize,
    host_settings: HostSettings,
}

/// The result of a shutdown.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// The runnables that did not stop in time, in the order of their timeouts; empty after a clean shutdown.
    pub stragglers: Vec<Straggler>,
    /// The event hook, if it did not handle the last events in time.
    pub slow_hook: Option<SlowHook>,
    /// A second signal ended [`run_until_signal`](Supervisor::run_until_signal) before everything had stopped.
    pub is_forced: bool,
}

impl ShutdownReport {
    /// Returns whether everything has stopped, in time.
    pub fn is_clean(&self) -> bool {
        self.problems().next().is_none()
    }

    /// What did not stop in time, in words.
    pub fn problems(&self) -> impl Iterator<Item = String> {
        let forced = self.is_forced.then(|| "a second signal forced the exit".to_owned());
        let stragglers = self.stragglers.iter().map(Straggler::to_string);
        stragglers.chain(self.slow_hook.iter().map(SlowHook::to_string)).chain(forced)
    }
}

/// An event hook that did not handle the last events in time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SlowHook {
    /// The name of its type, as the compiler prints it.
    pub name: &'static str,
    /// The time that the shutdown waited for it, after everything else had stopped.
    pub waited: Duration,
    /// The number of events that it did not get.
    pub undelivered: usize,
}

impl fmt::Display for SlowHook {
    /// `the event hook main::{{closure}} did not return within 30s, and missed 12 events`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, waited, undelivered } = self;
        write!(f, "the event hook {name} did not return within {waited:?}, and missed {undelivered} events")
    }
}

/// A runnable that did not stop in time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Straggler {
    /// The DN.
    pub dn: Arc<str>,
    /// The time that the shutdown waited for it.
    pub waited: Duration,
}

impl fmt::Display for Straggler {
    /// `root.a did not stop within 30s and was abandoned`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} did not stop within {:?} and was abandoned", self.dn, self.waited)
    }
}

impl Supervisor {
    /// A builder with the defaults: [`ChildPolicy::default`], a stop timeout of 30 seconds, output logged,
    /// no hook.
    pub fn builder() -> SupervisorBuilder {
        SupervisorBuilder {
            default_policy: ChildPolicy::default(),
            stop_timeout: DEFAULT_STOP_TIMEOUT,
            output_sink: Box::new(LogOutput),
            event_hook: None,
            max_pending_events: DEFAULT_PENDING_EVENTS,
            host_settings: HostSettings::default(),
        }
    }

    /// The current state of the tree: each parent before its children, children in the order of their
    /// addition.
    pub fn snapshot(&self) -> Vec<RunnableStatus> {
        self.driver.read(|fsm| {
            fsm.entry_statuses().into_iter().map(|status| self.runnable_status(&status)).collect()
        })
    }

    /// A counter that changes whenever the tree does: wait for a change, then take a
    /// [`snapshot`](Self::snapshot).
    pub fn watch_changes(&self) -> watch::Receiver<u64> {
        self.driver.version()
    }

    /// The reason why processes that an earlier program left behind may still run, although this one has its
    /// [records](SupervisorBuilder::process_records); as of the start.
    pub fn record_problems(&self) -> Vec<RecordProblem> {
        self.driver.record_problems()
    }

    /// Waits until the runnable with this DN is ready or done, also one that is not in the tree yet.
    ///
    /// # Errors
    /// [`WaitReadyError::Canceled`] when the tree is shut down, [`WaitReadyError::InvalidDn`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, dn: &str) -> Result<(), WaitReadyError> {
        if !is_dn(dn) {
            return Err(WaitReadyError::InvalidDn { dn: dn.to_owned() });
        }
        self.driver.wait_readiness(dn, true).await.map_err(|_| WaitReadyError::Canceled(CanceledError))
    }

    /// Waits until nothing is running and nothing will start by itself, and returns how the root exited: the root
    /// and all below it are done, or dead and not to be restarted, or the tree was shut down. An operator can
    /// still start what has ended; [`shutdown`](Self::shutdown) rules that out.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn ended(&self) -> ExitReason {
        self.driver.ended().await;
        let exit = self.driver.read(|fsm| fsm.root_exit().map(|past| past.exit.clone()));
        exit.expect("a root that has ended has exited")
    }

    /// Stops a runnable and its subtree, and keeps it stopped, also across restarts of its parent, until
    /// [`start_runnable`](Self::start_runnable) or [`restart_runnable`](Self::restart_runnable). Returns
    /// before the runnable has stopped. Its group keeps running, however the runnable exits.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn stop_runnable(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|fsm, now| fsm.stop_runnable(now, dn))
    }

    /// Starts a runnable that is stopped, waits for its backoff, or has ended. Does nothing to a running one.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn start_runnable(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|fsm, now| fsm.start_runnable(now, dn))
    }

    /// Stops a runnable and its subtree, and restarts it at once, without a backoff. Its group keeps running.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn restart_runnable(&self, dn: &str) -> Result<(), ControlError> {
        self.driver.apply(|fsm, now| fsm.restart_runnable(now, dn))
    }

    /// Keeps a runnable that runs from being ready, for this reason, whatever it signals itself; `None` gives its own
    /// readiness back. For what others know of it: a monitor, a probe from outside. Each run starts without it, and one
    /// that does not run, or has signaled done, is left as it is.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub fn withhold_ready(&self, dn: &str, reason: Option<Arc<str>>) -> Result<(), ControlError> {
        self.driver.apply(|fsm, now| fsm.withhold_ready(now, dn, reason))
    }

    /// Adds a child below a running runnable, also one that is ready, and starts it, in a separate group. A child that
    /// left the tree before has left its generation to one of its name, and an operator's stop if it left
    /// [for a replacement](Removal::ForReplacement). The parent's next run has to add it by itself.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing was added.
    pub fn add_child(&self, parent: &str, child: ChildSpec) -> Result<(), ControlError> {
        self.driver.add_child(parent, child)
    }

    /// Replaces a child without a stop: its present run goes on, and the next one is of the new runnable, with its
    /// [dependencies](ChildSpec::depends_on). The policy, the stop timeout and the order of a shutdown are the new ones from now
    /// on. The parent's next run has to add the new one by itself.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing was replaced.
    pub fn replace_child(&self, parent: &str, child: ChildSpec) -> Result<(), ControlError> {
        self.driver.replace_child(parent, child)
    }

    /// Stops a runnable and its subtree, and removes it from the tree: it does not restart. Returns when it has left.
    /// The group keeps running, however the runnable exits. The parent's next run must not add it.
    ///
    /// # Errors
    /// See [`ControlError`]; [`ControlError::ShuttingDown`] also when the shutdown starts while it stops.
    ///
    /// # Cancel safety
    /// The removal continues when this future is dropped.
    pub async fn remove_runnable(&self, dn: &str, removal: Removal) -> Result<(), ControlError> {
        self.driver.remove_runnable(dn, removal)?.await.map_err(|_| ControlError::ShuttingDown)
    }

    /// Stops everything: children before their parent, each runnable before those that it
    /// [depends on](crate::ChildSpec::depends_on) and [stops before](crate::ChildSpec::stop_before), and
    /// everything else at the same time. The supervisor aborts and reports a runnable that does not stop within
    /// its timeout, and stops waiting for it. It starts nothing any more. When all has stopped, the event hook has the
    /// supervisor's [stop timeout](SupervisorBuilder::stop_timeout) for the last events; then it gets no more.
    ///
    /// [`snapshot`](Self::snapshot) keeps working during the shutdown and after it.
    ///
    /// # Cancel safety
    /// The shutdown continues when this future is dropped; call it again to wait for its end.
    pub async fn shutdown(&self) -> ShutdownReport {
        self.driver.shut_down();
        self.driver.finished().await;
        let slow_hook = match &self.hook {
            Some(hook) => hook.wait_end().await,
            None => None,
        };
        ShutdownReport { stragglers: self.stragglers(), slow_hook, is_forced: false }
    }

    /// Waits for a stop signal, or until the tree has [ended](Self::ended), and shuts down. Another signal, a second after
    /// the first or later, ends the wait for that: then the program should exit at once.
    pub async fn run_until_signal(&self, signals: &mut StopSignals) -> ShutdownReport {
        tokio::select! {
            () = signals.wait_for_stop() => {
                tracing::info!(dn = "supervisor", "stopping; a second signal, from 1 s on, forces the exit");
            }
            exit = self.ended() => tracing::info!(dn = "supervisor", "the tree has ended: {exit}"),
        }
        tokio::select! {
            report = self.shutdown() => report,
            () = signals.wait_for_forced_stop() => {
                ShutdownReport { stragglers: self.stragglers(), slow_hook: None, is_forced: true }
            }
        }
    }

    fn stragglers(&self) -> Vec<Straggler> {
        self.driver.read(|fsm| {
            let named = fsm.stragglers().iter();
            named.map(|(dn, waited)| Straggler { dn: Arc::clone(dn), waited: *waited }).collect()
        })
    }

    fn runnable_status(&self, status: &EntryStatus<'_>) -> RunnableStatus {
        let record = |past: &crate::fsm::PastExit| ExitRecord {
            at: self.driver.wall_time(past.at),
            generation: past.generation,
            state: past.state,
            exit: past.exit.clone(),
        };
        let clear_in = status.failures_clear_at.map(|at| at.saturating_sub(self.driver.now()));
        // The state machine clears failures at the next signal or exit; the status shows them as cleared from this
        // time on.
        let is_stable = clear_in == Some(Duration::ZERO);
        RunnableStatus {
            dn: Arc::clone(status.dn),
            state: status.state,
            since: self.driver.wall_time(status.since),
            generation: status.generation,
            failures: if is_stable { 0 } else { status.failures },
            failing_since: (status.failures > 0 && !is_stable)
                .then(|| self.driver.wall_time(status.failing_since)),
            failures_clear_in: clear_in.filter(|_| !is_stable),
            exits: status.exits.iter().map(record).collect(),
            waiting_for: status.waiting_for.clone().map_time(|until| self.driver.wall_time(until)),
            withheld: status.withheld.cloned(),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.driver.shut_down();
    }
}

impl SupervisorBuilder {
    /// The policy of children that have none.
    #[must_use]
    pub fn default_policy(mut self, policy: ChildPolicy) -> Self {
        self.default_policy = policy;
        self
    }

    /// The stop timeout of a runnable, unless the runnable or its [`ChildSpec`] sets one. Default 30 s.
    #[must_use]
    pub fn stop_timeout(mut self, time: Duration) -> Self {
        self.stop_timeout = time;
        self
    }

    /// The sink for raw output. Default: each line is an event of `tracing`, at the level INFO, with the fields `dn`,
    /// `generation` and `stream`. `|_: OutputOrigin<'_>| io::sink()` discards it.
    #[must_use]
    pub fn output_sink(mut self, output: impl OutputSink) -> Self {
        self.output_sink = Box::new(output);
        self
    }

    /// The hook that gets the events. Default: none.
    #[must_use]
    pub fn event_hook<Hook: EventHook>(mut self, hook: Hook) -> Self {
        self.event_hook = Some((std::any::type_name::<Hook>(), Box::new(hook)));
        self
    }

    /// The number of events that wait for a slow hook. Beyond it, the runnable with the most waiting events loses its
    /// oldest one, see [`FairEventBuffer`](crate::FairEventBuffer). Default 16,384.
    #[must_use]
    pub fn max_pending_events(mut self, events: NonZeroUsize) -> Self {
        self.max_pending_events = events;
        self
    }

    /// The parent of the dedicated cgroups of child processes. Default: [`CgroupParent::Current`].
    #[must_use]
    pub fn cgroup_parent(mut self, cgroups: CgroupParent) -> Self {
        self.host_settings.cgroups = cgroups;
        self
    }

    /// The directory in which the supervisor records the child processes that it starts. The next supervisor with these
    /// records ends those that a killed program has left behind, and adopts those that it has kept. Default: none.
    #[must_use]
    pub fn process_records(mut self, records: ProcessRecords) -> Self {
        self.host_settings.records = Some(records);
        self
    }

    /// Limits of child processes in place of this program's own, unless a process has
    /// [its own](crate::process::ProcessLimits::rlimits) of the same resource. Default: none.
    #[must_use]
    pub fn child_limits(mut self, limits: Vec<Rlimit>) -> Self {
        self.host_settings.child_limits = limits;
        self
    }

    /// An existing directory for the sockets to which processes report by sd_notify(3): for a
    /// [readiness by notification](crate::process::Readiness::on_notify), a watchdog, or an extended stop. It must
    /// belong to this program's user, with mode 0711 or less, and other users of processes must be able to enter it.
    /// unix(7) limits the length of a path, see [`longest_notify_path`](crate::process::longest_notify_path). Default:
    /// none; then such processes don't start.
    #[must_use]
    pub fn notify_directory(mut self, dir: impl Into<PathBuf>) -> Self {
        self.host_settings.notify_dir = Some(dir.into());
        self
    }

    /// Runs a tree with this runnable as its root until SIGTERM, SIGINT or SIGHUP, or until the tree has ended, and shuts
    /// it down: the whole `main` of many programs. See [`Supervisor::run_until_signal`].
    ///
    /// # Errors
    /// The kernel's error when a handler can't be installed; nothing was started.
    ///
    /// # Panics
    /// Outside of a tokio runtime, or in one without its time or IO driver.
    pub async fn run_until_signal(self, root: impl Runnable) -> io::Result<ShutdownReport> {
        // Before the start, so that no signal is lost during it.
        let mut signals = StopSignals::listen()?;
        Ok(self.start(root).run_until_signal(&mut signals).await)
    }

    /// Starts a tree with this runnable as its root.
    ///
    /// # Panics
    /// Outside of a tokio runtime, or in one without its time driver.
    pub fn start(self, root: impl Runnable) -> Supervisor {
        let (events, hook) = match self.event_hook {
            Some((name, hook)) => {
                let events = Arc::new(EventQueue::new(self.max_pending_events));
                let task = tokio::spawn(deliver_events(Arc::clone(&events), DropContained::new(hook)));
                let delivery = HookDelivery {
                    name,
                    events: Arc::clone(&events),
                    timeout: self.stop_timeout,
                    task: Mutex::new(task),
                };
                (Some(events), Some(delivery))
            }
            None => (None, None),
        };
        let root = ChildSpec::new(ROOT, root);
        let defaults = RunnableSettings {
            policy: self.default_policy,
            stop_timeout: self.stop_timeout,
            stop_before: Vec::new(),
        };
        let driver =
            TreeDriver::start_tree(root, Arc::new(defaults), self.output_sink, events, self.host_settings);
        Supervisor { driver, hook }
    }
}

impl fmt::Debug for SupervisorBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("policy", &self.default_policy).finish_non_exhaustive()
    }
}

impl HookDelivery {
    /// Waits until the hook has got the last event, of a queue that is closed. If it does not in time, returns it; then it
    /// gets no more.
    async fn wait_end(&self) -> Option<SlowHook> {
        let mut task = self.task.lock().await;
        if task.is_finished() || timeout(self.timeout, &mut *task).await.is_ok() {
            return None;
        }
        Some(SlowHook { name: self.name, waited: self.timeout, undelivered: self.events.discard() })
    }
}

/// Calls code that may block. The runnables go on if the runtime has other threads.
fn without_others<R>(call: impl FnOnce() -> R) -> R {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => block_in_place(call),
        _ => call(),
    }
}

/// Passes the events to the hook, until the queue is closed.
async fn deliver_events(events: Arc<EventQueue>, hook: DropContained<Box<dyn EventHook>>) {
    let mut next_report = 1;
    while let Some((event, dropped)) = events.next().await {
        if dropped >= next_report {
            tracing::warn!(dn = "supervisor", "the event hook is too slow: {dropped} events dropped so far");
            // The threshold doubles, so a slow hook does not fill the log.
            next_report = dropped * 2;
        }
        if let Err(panic) = without_others(|| catch_panic(|| hook.on_event(&event))) {
            tracing::error!(dn = "supervisor", "the event hook panicked at event {}: {panic}", event.seq);
        }
        // With a queue that never empties, the task would starve the others of its thread.
        consume_budget().await;
    }
}
