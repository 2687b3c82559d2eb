//! Drives the state machine: turns its actions into tasks, tokens, timers and events, and the tasks' reports
//! into calls.
//!
//! Every call completes under one lock, so no caller sees half a transition. The runs that it starts are spawned
//! after the release: the tasks need the lock themselves. Code of other crates (hooks, the log, a runnable's drop) runs
//! outside of the lock, too; only wakers run below it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, timeout};

use crate::cancellation::{RunCancellation, RunSignal};
use crate::containment::{DropContained, catch_panic};
use crate::context::Context;
use crate::event::{Event, RunnableChange};
use crate::event_buffer::EventQueue;
use crate::event_log::log_event;
use crate::fsm::{
    AddChildError, ControlError, NewChild, Removal, RunKey, RunOutcome, RunnableSettings, TreeAction,
    TreeFsm, TreeTime,
};
use crate::name::DependencyError;
use crate::output::OutputSink;
use crate::policy::GroupPolicy;
use crate::process::{HostSettings, ProcessHost, RecordProblem};
use crate::runnable::{ChildSpec, Runnable};
use crate::state::RunnableState;
use crate::task;
use crate::waiters::ReadyWaiters;
use crate::wall_clock::wall_clock_time;

/// The state that all contexts of one supervisor share.
pub(crate) struct TreeDriver {
    state: Mutex<DriverState>,
    defaults: Arc<RunnableSettings>,
    runtime: Handle,
    started_at: Instant,
    /// Wakes the timer task when the next deadline has changed.
    deadline_changed: Notify,
    /// Counts the tree's changes.
    version: watch::Sender<u64>,
    finished: watch::Sender<bool>,
    /// Nothing is running and nothing will start by itself.
    ended: watch::Sender<bool>,
    pub(crate) output: DropContained<Box<dyn OutputSink>>,
    host_settings: HostSettings,
    /// The host of child processes, from the first of them on.
    process_host: Mutex<Option<Arc<ProcessHost>>>,
}

struct DriverState {
    fsm: TreeFsm,
    /// Empty: the memory for the state machine's next actions.
    actions: Vec<TreeAction>,
    /// Indexed by slot.
    runs: Vec<Option<SlotRun>>,
    waiters: ReadyWaiters,
    /// Those that wait until a runnable is neither ready nor done.
    loss_waiters: ReadyWaiters,
    /// Callers that wait until a runnable has left the tree, by its slot.
    removals: HashMap<u32, Vec<oneshot::Sender<()>>>,
    /// The hook's queue, if there is a hook.
    events: Option<Arc<EventQueue>>,
    next_seq: u64,
    armed_deadline: Option<TreeTime>,
    has_ended: bool,
    /// The tree has changed while it had no watcher.
    has_uncounted_change: bool,
    /// The first runs of added children, until [`AddedRuns`] spawns them.
    added_runs: Vec<PreparedRun>,
}

struct SlotRun {
    /// Taken in a shutdown, once it is not running.
    runnable: DropContained<Arc<dyn Runnable>>,
    /// Of the latest start.
    cancellation: Arc<RunCancellation>,
}

/// A run whose task is not spawned yet.
struct PreparedRun {
    runnable: DropContained<Arc<dyn Runnable>>,
    context: Context,
}

/// Spawns the first runs of added children when it is dropped. Its task drops it at once. A runtime that stops drops
/// it, too, so that each run reports its exit.
///
/// A parent usually adds all its children before it first waits, and only then does its thread come to this task.
/// Until then, each child would wake another thread, which would take the lock from the parent.
struct AddedRuns(Arc<TreeDriver>);

impl Drop for AddedRuns {
    fn drop(&mut self) {
        let added = std::mem::take(&mut self.0.lock().added_runs);
        spawn_runs(&self.0.runtime, added);
    }
}

/// A runnable that is not running, and never will again.
struct IdleRunnable {
    dn: Arc<str>,
    runnable: DropContained<Arc<dyn Runnable>>,
}

/// Stops the tree when it is dropped, also by a runtime that stops.
struct StopAll(Arc<TreeDriver>);

impl StopAll {
    /// Drops runnables first. These drops are code of other crates: one that blocks has as much time as a stop.
    async fn after_drops(self, released: Vec<IdleRunnable>) {
        let driver = &self.0;
        let (sender, dropping) = watch::channel(Arc::from(""));
        let drops = move || {
            for IdleRunnable { dn, runnable } in released {
                sender.send_replace(dn);
                drop(runnable);
            }
        };
        let within = driver.defaults.stop_timeout;
        if timeout(within, driver.runtime.spawn_blocking(drops)).await.is_err() {
            let dn = Arc::clone(&dropping.borrow());
            tracing::warn!(dn = "supervisor", "the drop of runnable {dn} does not return within {within:?}");
            driver.apply(|fsm, _| fsm.add_straggler(dn, within));
        }
    }
}

impl Drop for StopAll {
    fn drop(&mut self) {
        self.0.apply(TreeFsm::stop_all);
    }
}

fn spawn_runs(runtime: &Handle, runs: Vec<PreparedRun>) {
    for PreparedRun { runnable, context } in runs {
        runtime.spawn(task::run_incarnation(runnable, context));
    }
}

/// Work to do after the lock is released.
#[derive(Default)]
struct DeferredEffects {
    starts: Vec<PreparedRun>,
    events: Vec<Event>,
    /// Runnables to drop, which may run foreign code.
    dropped_runs: Vec<SlotRun>,
}

impl DeferredEffects {
    fn apply_deferred(self, driver: &TreeDriver) {
        spawn_runs(&driver.runtime, self.starts);
        drop(self.dropped_runs);
        for event in &self.events {
            // A subscriber that panics must not end the task that this call comes from, such as that of the timers.
            let _ = catch_panic(|| log_event(event));
            // The process that an earlier program has kept for it ends with it, also if no run could adopt that.
            if matches!(event.change, RunnableChange::Stopped | RunnableChange::Removed) {
                driver.end_kept_process(&event.dn);
            }
        }
    }
}

impl TreeDriver {
    /// Creates the driver, starts the root and spawns the timer task. `events` gets every event.
    pub(crate) fn start_tree(
        root: ChildSpec,
        defaults: Arc<RunnableSettings>,
        output: Box<dyn OutputSink>,
        events: Option<Arc<EventQueue>>,
        host_settings: HostSettings,
    ) -> Arc<Self> {
        let settings = root.settings(&defaults);
        let state = DriverState {
            fsm: TreeFsm::new(TreeTime::ZERO, settings, random_seed()),
            actions: Vec::new(),
            runs: vec![Some(SlotRun::new(root.runnable))],
            waiters: ReadyWaiters::default(),
            loss_waiters: ReadyWaiters::default(),
            removals: HashMap::new(),
            events,
            next_seq: 1,
            armed_deadline: None,
            has_ended: false,
            has_uncounted_change: false,
            added_runs: Vec::new(),
        };
        let driver = Arc::new(Self {
            state: Mutex::new(state),
            defaults,
            // Runs are spawned here, also when a thread without a runtime adds a child.
            runtime: Handle::current(),
            started_at: Instant::now(),
            deadline_changed: Notify::new(),
            version: watch::Sender::new(0),
            finished: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            output: DropContained::new(output),
            host_settings,
            process_host: Mutex::default(),
        });
        // Before the root runs: leftovers end, and kept processes are there for their adoption.
        if driver.host_settings.records.is_some()
            && let Err(error) = driver.process_host()
        {
            tracing::warn!(dn = "supervisor", %error, "can't prepare to run child processes");
        }
        // The state machine has queued the start of the root; an empty call performs it.
        driver.apply(|_, _| ());
        driver.runtime.spawn(run_timers(Arc::clone(&driver)));
        driver
    }

    /// Calls the state machine, and performs its actions.
    pub(crate) fn apply<R>(self: &Arc<Self>, call: impl FnOnce(&mut TreeFsm, TreeTime) -> R) -> R {
        self.apply_locked(self.lock(), call)
    }

    fn apply_locked<R>(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, DriverState>,
        call: impl FnOnce(&mut TreeFsm, TreeTime) -> R,
    ) -> R {
        // The time is read under the lock, so for the state machine it never goes back.
        let now = self.now();
        let result = call(&mut state.fsm, now);
        let outcome = self.perform_actions(&mut state, now);
        drop(state);
        outcome.apply_deferred(self);
        result
    }

    /// Starts the shutdown. The runnables that are not running are dropped before anything is canceled: what stops may
    /// wait for what they hold, such as an open directory.
    pub(crate) fn shut_down(self: &Arc<Self>) {
        if !self.apply(TreeFsm::begin_shutdown) {
            return;
        }
        let mut state = self.lock();
        let idle: Vec<(u32, Arc<str>)> = state.fsm.idle_slots().collect();
        let released = idle
            .into_iter()
            .filter_map(|(slot, dn)| Some(IdleRunnable { dn, runnable: state.take_runnable(slot)? }));
        let released: Vec<IdleRunnable> = released.collect();
        drop(state);
        let stop = StopAll(Arc::clone(self));
        if !released.is_empty() {
            self.runtime.spawn(stop.after_drops(released));
        }
    }

    /// Reports the exit of a run. In a shutdown, its runnable is dropped before anything else is canceled, as in
    /// [`shut_down`](Self::shut_down).
    pub(crate) fn report_exit(self: &Arc<Self>, key: RunKey, outcome: RunOutcome) {
        let mut state = self.lock();
        if let Some(slot) = state.fsm.slot_of_last_run(key) {
            let released = state.take_runnable(slot);
            drop(state);
            drop(released);
            state = self.lock();
        }
        // Another call may have come in between; `handle_exit` resolves the key again.
        self.apply_locked(state, |fsm, now| fsm.handle_exit(now, key, outcome));
    }

    pub(crate) fn add_group(
        self: &Arc<Self>,
        parent: RunKey,
        parent_dn: &str,
        policy: GroupPolicy,
        children: Vec<ChildSpec>,
    ) -> Result<(), AddChildError> {
        self.insert_children(parent_dn, children, |fsm, now, named| fsm.add_group(now, parent, policy, named))
    }

    /// Adds a child below a runnable that may be ready.
    pub(crate) fn add_child(self: &Arc<Self>, parent: &str, child: ChildSpec) -> Result<(), ControlError> {
        self.insert_children(parent, vec![child], |fsm, now, named| {
            Ok(vec![fsm.add_child(now, parent, named[0].clone())?])
        })
    }

    /// Replaces what the next run of a child runs, and its settings from now on.
    pub(crate) fn replace_child(&self, parent: &str, child: ChildSpec) -> Result<(), ControlError> {
        let child = child.below(parent)?;
        // Before the lock, as for a new child.
        let settings = child.settings(&self.defaults);
        let mut state = self.lock();
        let slot = state.fsm.replace_settings(&format!("{parent}.{}", child.name), settings)?;
        let former = std::mem::replace(&mut state.run_mut(slot).runnable, child.runnable);
        drop(state);
        // Its drop may be code of another crate.
        drop(former);
        Ok(())
    }

    /// Adds children by a call of the state machine, which returns their slots, in order.
    fn insert_children<E: From<DependencyError>>(
        self: &Arc<Self>,
        parent: &str,
        children: Vec<ChildSpec>,
        call: impl FnOnce(&mut TreeFsm, TreeTime, &[NewChild<'_>]) -> Result<Vec<u32>, E>,
    ) -> Result<(), E> {
        let children: Vec<_> =
            children.into_iter().map(|child| child.below(parent)).collect::<Result<_, _>>()?;
        // Before the lock: the settings ask the runnable for its stop timeout, which is code of another crate.
        let named: Vec<_> = children
            .iter()
            .map(|child| NewChild { name: &child.name, settings: child.settings(&self.defaults) })
            .collect();
        let mut state = self.lock();
        let now = self.now();
        let slots = call(&mut state.fsm, now, &named)?;
        // Before the actions, which start the runs of these slots.
        for (slot, child) in slots.into_iter().zip(children) {
            let slot = slot as usize;
            if state.runs.len() <= slot {
                state.runs.resize_with(slot + 1, || None);
            }
            state.runs[slot] = Some(SlotRun::new(child.runnable));
        }
        let mut outcome = self.perform_actions(&mut state, now);
        // The first of them wakes the task that spawns all of them.
        let is_first = state.added_runs.is_empty() && !outcome.starts.is_empty();
        state.added_runs.append(&mut outcome.starts);
        drop(state);
        if is_first {
            let added = AddedRuns(Arc::clone(self));
            self.runtime.spawn(async move { drop(added) });
        }
        outcome.apply_deferred(self);
        Ok(())
    }

    pub(crate) fn read<R>(&self, look: impl FnOnce(&TreeFsm) -> R) -> R {
        look(&self.lock().fsm)
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn now(&self) -> TreeTime {
        self.started_at.elapsed()
    }

    /// The moment of a point in the tree's time.
    pub(crate) fn moment_of(&self, time: TreeTime) -> std::time::Instant {
        (self.started_at + time).into_std()
    }

    /// Its time by the wall clock, as that is set now.
    pub(crate) fn wall_time(&self, time: TreeTime) -> SystemTime {
        wall_clock_time(self.moment_of(time))
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        // A panic below the lock is a bug of the state machine; the tree remains usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs the state machine's actions in order, except those that must wait for the release of the
    /// lock.
    fn perform_actions(self: &Arc<Self>, state: &mut DriverState, now: TreeTime) -> DeferredEffects {
        let mut outcome = DeferredEffects::default();
        let mut actions = std::mem::take(&mut state.actions);
        // The state machine goes on with the empty vector, so a call rarely allocates.
        state.fsm.swap_actions(&mut actions);
        for action in actions.drain(..) {
            match action {
                TreeAction::StartRun { key, dn, generation } => {
                    let run = state.run_mut(key.slot);
                    // The memory of the last run's cancellation, unless a leaked context still refers to it.
                    match Arc::get_mut(&mut run.cancellation) {
                        Some(unused) => *unused = RunCancellation::default(),
                        None => run.cancellation = Arc::default(),
                    }
                    let cancellation = Arc::clone(&run.cancellation);
                    let context = Context::new(Arc::clone(self), key, dn, generation, cancellation);
                    let runnable = DropContained::new(Arc::clone(&run.runnable));
                    outcome.starts.push(PreparedRun { runnable, context });
                }
                TreeAction::CancelRun(key) => state.run_mut(key.slot).cancellation.send(RunSignal::Cancel),
                TreeAction::AbortRun(key) => state.run_mut(key.slot).cancellation.send(RunSignal::Abort),
                TreeAction::DropRunnable { slot } => {
                    outcome.dropped_runs.extend(state.runs[slot as usize].take());
                    for removed in state.removals.remove(&slot).into_iter().flatten() {
                        // The receiver is gone if the caller no longer waits.
                        let _ = removed.send(());
                    }
                }
                TreeAction::EmitEvent { dn, generation, change } => {
                    let at = self.moment_of(now);
                    outcome.events.push(state.publish_event(at, dn, generation, change));
                }
                TreeAction::ShutdownComplete => {
                    // No event follows: the task of the hook ends after those that are queued.
                    if let Some(events) = &state.events {
                        events.close();
                    }
                    // Dropping their senders fails those who still wait.
                    state.waiters.clear();
                    state.loss_waiters.clear();
                    outcome.dropped_runs.extend(state.runs.drain(..).flatten());
                    // Without a receiver, `send` would not store the value.
                    self.finished.send_replace(true);
                }
            }
        }
        state.actions = actions;
        if state.fsm.is_shutting_down() {
            // Nothing leaves the tree any more: dropping their senders fails those who still wait.
            state.removals.clear();
        }
        if !outcome.events.is_empty() {
            self.count_change(state);
        }
        let has_ended = state.fsm.has_ended();
        if std::mem::replace(&mut state.has_ended, has_ended) != has_ended {
            self.ended.send_replace(has_ended);
        }
        let next = state.fsm.next_deadline();
        if next != state.armed_deadline {
            state.armed_deadline = next;
            // It keeps a permit, so a change while the timer task is not waiting is not lost.
            self.deadline_changed.notify_one();
        }
        outcome
    }

    // Callers that wait for the tree.

    /// Resolves when the runnable with this DN is ready or done, or with `ready` false when it is neither; at once if it
    /// already is so. Fails when the tree is shut down.
    pub(crate) fn wait_readiness(&self, dn: &str, ready: bool) -> oneshot::Receiver<()> {
        let mut state = self.lock();
        let (reached, waiting) = oneshot::channel();
        // The check and the registration share one lock: no change comes in between.
        if (state.fsm.readiness_of(dn) == Some(true)) == ready {
            let _ = reached.send(());
        } else if !state.fsm.is_shutting_down() {
            state.waiters_for(ready).add(dn, reached);
        }
        // Else the sender is dropped, which fails the wait.
        waiting
    }

    /// Notifies those who wait until a runnable is no longer ready, of a loss without an event.
    pub(crate) fn notify_lost(&self, dn: &str) {
        self.lock().notify_waiters(dn, false);
    }

    /// Starts to remove a runnable. Resolves when it has left the tree; fails when the shutdown starts before.
    pub(crate) fn remove_runnable(
        self: &Arc<Self>,
        dn: &str,
        removal: Removal,
    ) -> Result<oneshot::Receiver<()>, ControlError> {
        let (removed, waiting) = oneshot::channel();
        let mut state = self.lock();
        let now = self.now();
        let key = state.fsm.remove_runnable(now, dn, removal)?;
        // Before the actions: it may have left the tree in this call.
        state.removals.entry(key.slot).or_default().push(removed);
        let outcome = self.perform_actions(&mut state, now);
        drop(state);
        outcome.apply_deferred(self);
        Ok(waiting)
    }

    /// Records for the status that a runnable waits for another one, or no longer does.
    pub(crate) fn set_dependency(&self, key: RunKey, dn: Option<Arc<str>>) {
        let mut state = self.lock();
        state.fsm.set_dependency(key, dn);
        self.count_change(&mut state);
    }

    /// Counts a change that has no event.
    pub(crate) fn announce_status_change(&self) {
        self.count_change(&mut self.lock());
    }

    /// Counts a change for those who watch the tree. Usually none does, and a notification takes as long as the rest of
    /// a signal, so the count is then left to [`version`](Self::version).
    fn count_change(&self, state: &mut DriverState) {
        state.has_uncounted_change = self.version.receiver_count() == 0;
        if !state.has_uncounted_change {
            self.version.send_modify(|version| *version += 1);
        }
    }

    /// A counter that changes with the tree.
    pub(crate) fn version(&self) -> watch::Receiver<u64> {
        let mut state = self.lock();
        if std::mem::take(&mut state.has_uncounted_change) {
            self.version.send_modify(|version| *version += 1);
        }
        self.version.subscribe()
    }

    /// Resolves when a shutdown is complete, all its events are queued for the hook, and every process that
    /// can be killed has exited.
    pub(crate) async fn finished(&self) {
        let mut finished = self.finished.subscribe();
        // `self` owns the sender, so this can't fail.
        drop(finished.wait_for(|finished| *finished).await);
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(host) = host {
            host.wait_reaped().await;
        }
        *self.process_host.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Resolves when nothing is running and nothing will start by itself.
    pub(crate) async fn ended(&self) {
        // `self` owns the sender, so this can't fail.
        drop(self.ended.subscribe().wait_for(|ended| *ended).await);
    }

    // Child processes.

    /// The host of child processes, created by the first caller.
    pub(crate) fn process_host(&self) -> std::io::Result<Arc<ProcessHost>> {
        let mut processes = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = &*processes {
            return Ok(Arc::clone(host));
        }
        // Under the lock, so that two first callers do not create two hosts.
        let (host, leftovers) = ProcessHost::new(&self.host_settings)?;
        for leftover in leftovers {
            let change = RunnableChange::LeftoverEnded { pid: leftover.pid, name: leftover.name.into() };
            let at = self.moment_of(self.now());
            // Not for the log: each kill is in it already.
            self.lock().publish_event(at, "supervisor".into(), 0, change);
        }
        Ok(Arc::clone(processes.insert(Arc::new(host))))
    }

    /// The reason why processes of an earlier program may still run.
    pub(crate) fn record_problems(&self) -> Vec<RecordProblem> {
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        host.as_ref().map(|host| host.record_problems().to_vec()).unwrap_or_default()
    }

    /// Returns whether a process of this DN that an earlier program has kept waits for its adoption.
    pub(crate) fn has_kept_process(&self, dn: &str) -> bool {
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner);
        host.as_ref().is_some_and(|host| host.has_unclaimed(dn))
    }

    /// Ends the process of this DN that an earlier program has kept, if it waits for its adoption. Returns at once.
    fn end_kept_process(&self, dn: &Arc<str>) {
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(host) = host.filter(|host| host.has_unclaimed(dn)) {
            let dn = Arc::clone(dn);
            self.runtime.spawn_blocking(move || host.end_unclaimed(&dn));
        }
    }
}

impl DriverState {
    /// Numbers an event and queues it for the hook. Returns it for the log.
    fn publish_event(
        &mut self,
        at: std::time::Instant,
        dn: Arc<str>,
        generation: u64,
        change: RunnableChange,
    ) -> Event {
        let event = Event { seq: self.next_seq, at, dn, generation, change };
        self.next_seq += 1;
        let is_ready = matches!(event.change.new_state(), Some(RunnableState::Ready | RunnableState::Done));
        self.notify_waiters(&event.dn, is_ready);
        if let Some(events) = &self.events {
            events.push(event.clone());
        }
        event
    }

    fn waiters_for(&mut self, ready: bool) -> &mut ReadyWaiters {
        if ready { &mut self.waiters } else { &mut self.loss_waiters }
    }

    /// Notifies those who wait for a runnable that may have become ready or done, or have ceased to be: one whose run is
    /// ending is not ready.
    fn notify_waiters(&mut self, dn: &str, ready: bool) {
        if self.waiters_for(ready).waits_for(dn) && (self.fsm.readiness_of(dn) == Some(true)) == ready {
            self.waiters_for(ready).notify(dn);
        }
    }

    fn run_mut(&mut self, slot: u32) -> &mut SlotRun {
        self.runs[slot as usize].as_mut().expect("a slot that is referred to has a runnable")
    }

    /// Takes the runnable of a slot that never starts again; `None` when the shutdown is complete.
    fn take_runnable(&mut self, slot: u32) -> Option<DropContained<Arc<dyn Runnable>>> {
        Some(self.runs.get_mut(slot as usize)?.as_mut()?.runnable.take())
    }
}

impl SlotRun {
    fn new(runnable: DropContained<Arc<dyn Runnable>>) -> Self {
        Self { runnable, cancellation: Arc::default() }
    }
}

impl std::fmt::Debug for TreeDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeDriver").finish_non_exhaustive()
    }
}

/// A seed that differs between supervisors: the keys of std's hash maps are the only randomness without
/// another crate.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// Calls the state machine at each deadline, and without one sleeps until a change.
async fn run_timers(driver: Arc<TreeDriver>) {
    let mut finished = driver.finished.subscribe();
    // The value counts as seen, so `changed` below resolves only after another one.
    while !*finished.borrow_and_update() {
        let next = driver.read(TreeFsm::next_deadline);
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(driver.started_at + at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => driver.apply(TreeFsm::fire_timers),
            () = driver.deadline_changed.notified() => {}
            _ = finished.changed() => {}
        }
    }
}
