//! Drives the state machine: its actions become tasks, tokens, timers and events; what tasks do becomes calls.
//!
//! Every call runs to its end under one lock, the tasks that it starts included, so nobody ever sees half of a
//! transition. But for wakers, code that is not this crate's runs outside of it: hooks, the log, a runnable's drop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::context::Context;
use crate::event::{Change, Event};
use crate::machine::{Action, Key, Machine, Settings, SpawnError, Time};
use crate::output::OutputSink;
use crate::process::{Cgroups, Host};
use crate::runnable::{Child, Runnable};
use crate::state::State;
use crate::switch::Switches;
use crate::task;

/// What all contexts of one supervisor share.
pub(crate) struct Driver {
    state: Mutex<DriverState>,
    defaults: Settings,
    runtime: Handle,
    began: Instant,
    began_wall: SystemTime,
    /// Wakes the timer task when the next deadline has changed.
    deadline_changed: Notify,
    /// Counts the tree's changes.
    version: watch::Sender<u64>,
    finished: watch::Sender<bool>,
    pub(crate) output: Box<dyn OutputSink>,
    cgroups: Cgroups,
    /// What runs child processes, from the first of them on.
    processes: Mutex<Option<Arc<Host>>>,
}

struct DriverState {
    machine: Machine,
    /// By slot.
    runs: Vec<Option<Run>>,
    waiters: Vec<Waiter>,
    /// Gone when there is no hook, or when the last event has been sent.
    events: Option<mpsc::UnboundedSender<Event>>,
    next_seq: u64,
    armed: Option<Time>,
}

struct Run {
    runnable: Arc<dyn Runnable>,
    /// Of the latest start.
    switches: Arc<Switches>,
}

/// What is left to do when the lock is free: it calls code that is not this crate's.
#[derive(Default)]
struct Outcome {
    events: Vec<Event>,
    /// Runnables whose drop is theirs to define.
    forgotten: Vec<Run>,
}

impl Outcome {
    fn tell(self) {
        drop(self.forgotten);
        for event in &self.events {
            log(event);
        }
    }
}

/// Somebody who waits for a node to become ready.
struct Waiter {
    dn: Arc<str>,
    ready: oneshot::Sender<()>,
}

impl Driver {
    /// A driver whose root has been started, with its timer task and the receiving end of its events.
    pub(crate) fn start(
        root: Child,
        defaults: Settings,
        output: Box<dyn OutputSink>,
        events: Option<mpsc::UnboundedSender<Event>>,
        cgroups: Cgroups,
    ) -> Arc<Self> {
        let settings = settings_of(&root, &defaults);
        let state = DriverState {
            machine: Machine::new(Time::ZERO, settings, seed()),
            runs: vec![Some(Run::of(root.runnable))],
            waiters: Vec::new(),
            events,
            next_seq: 1,
            armed: None,
        };
        let driver = Arc::new(Self {
            state: Mutex::new(state),
            defaults,
            runtime: Handle::current(),
            began: Instant::now(),
            began_wall: SystemTime::now(),
            deadline_changed: Notify::new(),
            version: watch::Sender::new(0),
            finished: watch::Sender::new(false),
            output,
            cgroups,
            processes: Mutex::default(),
        });
        driver.apply(|_, _| ());
        driver.runtime.spawn(keep_time(Arc::clone(&driver)));
        driver
    }

    /// Calls the machine, and does what it says.
    pub(crate) fn apply<R>(self: &Arc<Self>, call: impl FnOnce(&mut Machine, Time) -> R) -> R {
        let mut state = self.lock();
        let result = call(&mut state.machine, self.began.elapsed());
        let outcome = self.perform(&mut state);
        drop(state);
        outcome.tell();
        result
    }

    /// Adds a group of children.
    pub(crate) fn spawn(self: &Arc<Self>, parent: Key, children: Vec<Child>) -> Result<(), SpawnError> {
        let named: Vec<_> =
            children.iter().map(|child| (child.name.as_str(), settings_of(child, &self.defaults))).collect();
        let mut state = self.lock();
        let slots = state.machine.spawn(self.began.elapsed(), parent, &named)?;
        for (slot, child) in slots.into_iter().zip(children) {
            let slot = slot as usize;
            if state.runs.len() <= slot {
                state.runs.resize_with(slot + 1, || None);
            }
            state.runs[slot] = Some(Run::of(child.runnable));
        }
        let outcome = self.perform(&mut state);
        drop(state);
        outcome.tell();
        Ok(())
    }

    /// Reads the machine.
    pub(crate) fn read<R>(&self, look: impl FnOnce(&Machine) -> R) -> R {
        look(&self.lock().machine)
    }

    /// Resolves when a node of this DN is ready or done; at once where it is. `None` where there is none now.
    pub(crate) fn wait_ready(&self, dn: &str) -> Option<oneshot::Receiver<()>> {
        let mut state = self.lock();
        let (ready, waiting) = oneshot::channel();
        match state.machine.state_of(dn)? {
            State::Ready | State::Done => _ = ready.send(()),
            _ => {
                state.waiters.retain(|waiter| !waiter.ready.is_closed());
                state.waiters.push(Waiter { dn: dn.into(), ready });
            }
        }
        Some(waiting)
    }

    /// What runs child processes, made by the first who asks.
    pub(crate) fn processes(&self) -> std::io::Result<Arc<Host>> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        match &*processes {
            Some(host) => Ok(Arc::clone(host)),
            None => Ok(Arc::clone(processes.insert(Arc::new(Host::new(&self.cgroups)?)))),
        }
    }

    /// Notes for the status that a runnable waits for another one, or no longer does.
    pub(crate) fn note_dependency(&self, key: Key, dn: Option<Arc<str>>) {
        self.lock().machine.set_dependency(key, dn);
        self.version.send_modify(|version| *version += 1);
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// A counter that changes with the tree.
    pub(crate) fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Resolves when a shutdown is complete, every event of it is on its way to the hook, and no process is left that can
    /// be killed.
    pub(crate) async fn finished(&self) {
        let mut finished = self.finished.subscribe();
        // The sender lives as long as `self`, so this can't fail.
        drop(finished.wait_for(|finished| *finished).await);
        let host = self.processes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(host) = host {
            host.buried().await;
        }
        *self.processes.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The time of day of a point in the tree's time.
    pub(crate) fn wall(&self, time: Time) -> SystemTime {
        self.began_wall + time
    }

    fn lock(&self) -> MutexGuard<'_, DriverState> {
        // A panic below the lock is a bug of the machine; the tree stays as usable as it is.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what the machine says, in its order, as far as that needs the lock.
    fn perform(self: &Arc<Self>, state: &mut DriverState) -> Outcome {
        let mut outcome = Outcome::default();
        let actions: Vec<Action> = state.machine.drain_actions().collect();
        for action in actions {
            match action {
                Action::Start { key, dn, generation } => self.start_run(state, key, dn, generation),
                Action::Cancel(key) => state.run_mut(key.slot).switches.cancel(),
                Action::Abort(key) => state.run_mut(key.slot).switches.aborted.happen(),
                Action::Forget { slot } => outcome.forgotten.extend(state.runs[slot as usize].take()),
                Action::Event { dn, generation, change } => {
                    outcome.events.push(self.event(state, dn, generation, change));
                }
                Action::Finished => {
                    state.events = None;
                    outcome.forgotten.extend(state.runs.drain(..).flatten());
                    self.finished.send_replace(true);
                }
            }
        }
        if !outcome.events.is_empty() {
            self.version.send_modify(|version| *version += 1);
        }
        let next = state.machine.next_deadline();
        if next != state.armed {
            state.armed = next;
            self.deadline_changed.notify_one();
        }
        outcome
    }

    fn start_run(self: &Arc<Self>, state: &mut DriverState, key: Key, dn: Arc<str>, generation: u64) {
        let run = state.run_mut(key.slot);
        run.switches = Arc::default();
        let context = Context::new(Arc::clone(self), key, dn, generation, Arc::clone(&run.switches));
        self.runtime.spawn(task::run(Arc::clone(&run.runnable), context));
    }

    fn event(&self, state: &mut DriverState, dn: Arc<str>, generation: u64, change: Change) -> Event {
        let event =
            Event { seq: state.next_seq, at: self.wall(self.began.elapsed()), dn, generation, change };
        state.next_seq += 1;
        if matches!(event.change.state(), Some(State::Ready | State::Done)) && !state.waiters.is_empty() {
            let (ready, waiting) = state.waiters.drain(..).partition(|waiter| waiter.dn == event.dn);
            state.waiters = waiting;
            for waiter in Vec::from_iter::<Vec<Waiter>>(ready) {
                // Who no longer waits needs no answer.
                let _ = waiter.ready.send(());
            }
        }
        if let Some(events) = &state.events {
            // The hook's task ends only when this sender is gone.
            drop(events.send(event.clone()));
        }
        event
    }
}

impl DriverState {
    fn run_mut(&mut self, slot: u32) -> &mut Run {
        self.runs[slot as usize].as_mut().expect("a slot that is referred to has a runnable")
    }
}

impl Run {
    fn of(runnable: Box<dyn Runnable>) -> Self {
        Self { runnable: runnable.into(), switches: Arc::default() }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

fn settings_of(child: &Child, defaults: &Settings) -> Settings {
    Settings {
        policy: child.policy.unwrap_or(defaults.policy),
        stop_within: child
            .stop_within
            .or_else(|| child.runnable.stop_within())
            .unwrap_or(defaults.stop_within),
    }
}

/// A seed that differs between supervisors: the keys of std's hash maps are the only chance that needs no crate.
fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// Calls the machine when something comes due, and sleeps without an end where nothing will.
async fn keep_time(driver: Arc<Driver>) {
    let mut finished = driver.finished.subscribe();
    while !*finished.borrow_and_update() {
        let next = driver.read(Machine::next_deadline);
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(driver.began + at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => driver.apply(Machine::tick),
            () = driver.deadline_changed.notified() => {}
            _ = finished.changed() => {}
        }
    }
}

/// Tells the log what happened to a node: failures at the node's own name, the rest at the supervisor's.
fn log(event: &Event) {
    let (dn, change) = (&*event.dn, &event.change);
    match change {
        Change::Exited { state: State::Dead, exit } => {
            tracing::error!(dn, generation = event.generation, "runnable died: {exit}");
        }
        Change::Scheduled { delay } => {
            tracing::info!(dn = "supervisor", "rescheduling supervised node {dn} with backoff {delay:?}");
        }
        Change::Straggling { after } => tracing::warn!(
            dn = "supervisor",
            "supervised node {dn} still runs {after:?} after its cancellation and keeps its ancestors from restarting"
        ),
        _ => tracing::debug!(dn = "supervisor", "{dn}: {change}"),
    }
}
