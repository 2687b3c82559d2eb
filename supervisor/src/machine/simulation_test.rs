//! Random operations on the machine, in a world that plays its driver and holds it to the invariants.
//!
//! `NODEKEEL_OPS` sets how many operations are made, `NODEKEEL_SEED` replays the one round that failed.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Action, Ended, Key, Machine, Settings, Time};
use crate::event::{Cause, Change};
use crate::policy::{Policy, Restart};
use crate::process::ProcessExit;
use crate::state::{Exit, State, WaitingFor};

const STOP_WITHIN: Duration = Duration::from_secs(5);
const OPS_PER_ROUND: u32 = 400;

/// What the driver would know of one node, from the actions alone.
#[derive(Debug, Clone)]
struct Known {
    state: State,
    key: Option<Key>,
    /// Its context is cancelled.
    cancelled: bool,
    signalled_ready: bool,
    signalled_done: bool,
    ended_ok: bool,
    ready_since: Time,
    /// Since when it has been on its way to its end.
    ending_since: Option<Time>,
    last_exit: Option<State>,
    /// When an operator last asked for a start that skips the backoff.
    pushed: bool,
    settings: Settings,
    group: (String, u64),
}

impl Known {
    /// It is going to be started again after a delay.
    fn scheduled(&mut self, dn: &str, delay: Time, failures: Option<u32>) {
        let before = self.state;
        let has_ended = matches!(before, State::Dead | State::Canceled | State::Done);
        assert!(has_ended, "{dn}: {before} → scheduled");
        let failed = before == State::Dead && !self.pushed;
        let failures = failures.expect("what is scheduled is in the tree");
        let interval = self.settings.policy.backoff.interval(failures);
        if failed {
            assert!(failures >= 1, "{dn} died and backs off from no failure");
            assert!(delay >= interval.mul_f64(0.499), "{dn}: {delay:?} after {failures} failures");
        }
        assert!(self.pushed || failed || delay.is_zero(), "{dn} did not fail and backs off");
        assert!(delay <= interval.mul_f64(1.501), "{dn}: {delay:?} after {failures} failures");
        assert!(interval <= Duration::from_secs(60), "{dn}: {delay:?} after {failures} failures");
        (self.cancelled, self.pushed) = (false, false);
    }

    /// It has ended, and `failures` in a row are what it is to count from now on.
    fn exited(&mut self, dn: &str, state: State, exit: &Exit, now: Time, failures: &mut u32) {
        let before = self.state;
        let never_started = before == State::Waiting && state == State::Canceled;
        assert!(before.is_running() || never_started, "{dn}: {before} → {state}");
        if state == State::Done {
            let one_shot = self.settings.policy.restart != Restart::Always && !self.cancelled;
            let as_agreed = self.signalled_ready && self.signalled_done;
            assert!(self.ended_ok && (as_agreed || one_shot), "{dn} is done without having said so");
        }
        assert_eq!(state == State::Canceled, *exit == Exit::Cancelled, "{dn}: {exit}");
        let worked = self.ending_since.unwrap_or(now).saturating_sub(self.ready_since);
        let stable = before == State::Ready && worked >= self.settings.policy.stable_after;
        if stable || state == State::Done {
            *failures = 0;
        }
        if state == State::Dead {
            *failures += 1;
            self.cancelled = true;
        }
        self.last_exit = Some(state);
    }
}

/// A task that the world runs.
#[derive(Debug, Clone)]
struct Task {
    dn: Arc<str>,
    key: Key,
    cancelled: bool,
    aborted: bool,
}

struct World {
    machine: Machine,
    now: Time,
    random: u64,
    nodes: BTreeMap<Arc<str>, Known>,
    tasks: Vec<Task>,
    seen: HashSet<u64>,
    stale: Vec<Key>,
    next_group: u64,
    /// Settings and group of children whose start has not been seen yet.
    adding: BTreeMap<String, (Settings, (String, u64))>,
    finished: u32,
    shutting_down: bool,
    given_up: HashSet<Arc<str>>,
    /// Failures in a row by DN, over all incarnations.
    failures: BTreeMap<Arc<str>, u32>,
    /// What an operator holds.
    held: HashSet<Arc<str>>,
    counts: BTreeMap<&'static str, u64>,
}

fn settings(restart: Restart) -> Settings {
    Settings { policy: Policy { restart, ..Policy::default() }, stop_within: STOP_WITHIN }
}

/// A run's own child process, known by its pid.
fn process_of(key: Key) -> Arc<ProcessExit> {
    let pid = u32::try_from(key.incarnation).expect("a round is short");
    Arc::new(ProcessExit { pid, code: Some(0), signal: None, core_dumped: false, tail: Vec::new() })
}

impl World {
    fn new(seed: u64) -> Self {
        let root = settings(Restart::Always);
        let mut world = Self {
            machine: Machine::new(Time::ZERO, root, seed),
            now: Time::ZERO,
            random: seed,
            nodes: BTreeMap::new(),
            tasks: Vec::new(),
            seen: HashSet::new(),
            stale: Vec::new(),
            next_group: 1,
            adding: BTreeMap::from([("root".to_owned(), (root, (String::new(), 0)))]),
            finished: 0,
            shutting_down: false,
            given_up: HashSet::new(),
            failures: BTreeMap::new(),
            held: HashSet::new(),
            counts: BTreeMap::new(),
        };
        world.absorb();
        world
    }

    fn pick(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// One random operation, and everything that must hold after it.
    fn step(&mut self) {
        match self.pick(100) {
            0..=24 => self.add_children(),
            25..=39 => self.signal_ready(),
            40..=46 => self.signal_done(),
            47..=69 => self.end_a_task(),
            70..=76 => self.act_with_a_stale_key(),
            77..=90 => self.let_time_pass(),
            91..=98 => self.operate(),
            _ => self.misuse(),
        }
        self.absorb();
        self.check();
    }

    fn some_task(&mut self) -> Option<usize> {
        (!self.tasks.is_empty()).then(|| self.pick(self.tasks.len()))
    }

    fn add_children(&mut self) {
        let Some(at) = self.some_task() else { return };
        let task = self.tasks[at].clone();
        if task.dn.split('.').count() > 5 || self.nodes.len() > 60 {
            return;
        }
        let mut names = Vec::new();
        for _ in 0..=self.pick(3) {
            names.push(["a", "b", "c", "d", "e", "NOT A NAME"][self.pick(6) % 6]);
        }
        let restart = [Restart::Always, Restart::Always, Restart::OnFailure, Restart::Never][self.pick(4)];
        let children: Vec<_> = names.iter().map(|name| (*name, settings(restart))).collect();
        let group = (task.dn.to_string(), self.next_group);
        self.next_group += 1;
        for (name, settings) in &children {
            self.adding.insert(format!("{}.{name}", task.dn), (*settings, group.clone()));
        }
        let existing: Vec<bool> = names
            .iter()
            .map(|name| self.nodes.contains_key(format!("{}.{name}", task.dn).as_str()))
            .collect();
        let result = self.machine.spawn(self.now, task.key, &children);
        let distinct = names.iter().collect::<HashSet<_>>().len() == names.len();
        if result.is_ok() {
            assert!(
                distinct && !existing.contains(&true) && !names.contains(&"NOT A NAME"),
                "bad names were taken"
            );
            assert!(!task.cancelled, "children were added below a cancelled context");
            assert_eq!(self.nodes[&task.dn].state, State::New, "children were added after ready");
            self.count("groups added");
        } else {
            self.count("groups refused");
        }
    }

    fn signal_ready(&mut self) {
        let Some(at) = self.some_task() else { return };
        let task = self.tasks[at].clone();
        let was_new = self.nodes[&task.dn].state == State::New;
        if was_new || self.pick(10) == 0 {
            let result = self.machine.ready(self.now, task.key);
            assert_eq!(result.is_ok(), was_new, "ready is accepted exactly from new runnables");
            self.count("ready");
        }
    }

    fn signal_done(&mut self) {
        let Some(at) = self.some_task() else { return };
        let task = self.tasks[at].clone();
        let known = &self.nodes[&task.dn];
        let legal = known.state == State::Ready && !known.signalled_done;
        if legal || self.pick(10) == 0 {
            let result = self.machine.done(self.now, task.key);
            assert_eq!(result.is_ok(), legal, "done is accepted once, after ready");
            if legal {
                self.nodes.get_mut(&task.dn).expect("known").signalled_done = true;
            }
            self.count("done");
        }
    }

    fn end_a_task(&mut self) {
        // Those that have been told to end come first, so that trees come down and up again.
        let told: Vec<usize> = (0..self.tasks.len()).filter(|at| self.tasks[*at].cancelled).collect();
        let at = match told.is_empty() || self.pick(4) == 0 {
            true => self.some_task(),
            false => Some(told[self.pick(told.len())]),
        };
        let Some(at) = at else { return };
        let kind = self.pick(10);
        self.end(at, kind);
    }

    fn end(&mut self, at: usize, kind: usize) {
        let task = self.tasks.remove(at);
        self.stale.push(task.key);
        let ended = match kind {
            _ if task.aborted => Ended::Failed(Exit::Aborted),
            0..=1 => Ended::Ok,
            2..=6 if task.cancelled => Ended::Cancelled,
            2 => Ended::Cancelled,
            3 => Ended::Failed(Exit::Panicked { message: "boom".into() }),
            4..=6 if self.nodes[&task.dn].signalled_done => Ended::Ok,
            _ => Ended::Failed(Exit::Failed { error: "failed".into(), process: None }),
        };
        if let Some(known) = self.nodes.get_mut(&task.dn).filter(|known| known.key == Some(task.key)) {
            known.ended_ok = ended == Ended::Ok;
        }
        if task.key.incarnation.is_multiple_of(2) {
            self.machine.process_ended(task.key, process_of(task.key));
        }
        if self.pick(4) == 0 {
            self.machine.returned(self.now, task.key, ended.clone());
        }
        self.machine.exited(self.now, task.key, ended);
        self.count("exits");
    }

    /// A context of a run that has ended gets errors and changes nothing.
    fn act_with_a_stale_key(&mut self) {
        if self.stale.is_empty() {
            return;
        }
        let at = self.pick(self.stale.len());
        let key = self.stale[at];
        let before = self.machine.next_deadline();
        assert!(self.machine.ready(self.now, key).is_err(), "a stale context signalled ready");
        assert!(self.machine.done(self.now, key).is_err(), "a stale context signalled done");
        assert!(self.machine.sub_span(key, "x").is_err(), "a stale context took a name");
        let spawned = self.machine.spawn(self.now, key, &[("stale", settings(Restart::Always))]);
        assert!(spawned.is_err(), "a stale context added a child");
        self.machine.process_ended(key, process_of(key));
        self.machine.doom(self.now, key, Exit::Returned);
        self.machine.exited(self.now, key, Ended::Failed(Exit::Returned));
        assert_eq!(self.machine.drain_actions().count(), 0, "a stale context made something happen");
        assert_eq!(self.machine.next_deadline(), before, "a stale context moved a deadline");
        self.count("stale contexts");
    }

    fn let_time_pass(&mut self) {
        let to_deadline =
            self.machine.next_deadline().map_or(Duration::ZERO, |at| at.saturating_sub(self.now));
        let passed = match self.pick(4) {
            0 => Duration::from_millis(self.pick(50) as u64),
            1 => Duration::from_secs(self.pick(30) as u64),
            _ => to_deadline,
        };
        self.now += passed;
        self.machine.tick(self.now);
        assert!(self.machine.next_deadline().is_none_or(|at| at > self.now), "something due was left undone");
        self.count("ticks");
    }

    fn operate(&mut self) {
        let dns: Vec<Arc<str>> = self.nodes.keys().cloned().collect();
        let dn = Arc::clone(&dns[self.pick(dns.len())]);
        let wish = self.pick(3);
        let result = match wish {
            0 => self.machine.hold(self.now, &dn),
            1 => self.machine.start_held(self.now, &dn),
            _ => self.machine.restart_now(self.now, &dn),
        };
        if result.is_err() {
            assert!(self.machine.drain_actions().next().is_none(), "a refused wish made something happen");
            return;
        }
        match wish {
            0 => self.held.insert(Arc::clone(&dn)),
            _ => self.held.remove(&dn),
        };
        if result.is_ok() {
            self.nodes.get_mut(&dn).expect("known").pushed = true;
            self.count("operator's wishes");
        }
    }

    fn misuse(&mut self) {
        let Some(at) = self.some_task() else { return };
        let key = self.tasks[at].key;
        self.machine.doom(self.now, key, Exit::Panicked { message: "a helper".into() });
        self.count("helper panics");
    }

    /// Plays the driver: believes every action, and doubts each.
    fn absorb(&mut self) {
        let actions: Vec<Action> = self.machine.drain_actions().collect();
        for action in actions {
            self.count("actions");
            match action {
                Action::Start { key, dn, generation } => self.on_start(key, &dn, generation),
                Action::Cancel(key) => {
                    for task in self.tasks.iter_mut().filter(|task| task.key == key) {
                        task.cancelled = true;
                    }
                    for known in self.nodes.values_mut().filter(|known| known.key == Some(key)) {
                        known.cancelled = true;
                    }
                }
                Action::Abort(key) => {
                    let task =
                        self.tasks.iter_mut().find(|task| task.key == key).expect("an abort hits a task");
                    assert!(task.cancelled, "{} was aborted without having been cancelled", task.dn);
                    task.aborted = true;
                    if self.shutting_down {
                        self.given_up.insert(Arc::clone(&task.dn));
                    }
                }
                Action::Forget { .. } => {}
                Action::Event { dn, change, .. } => self.on_event(&dn, &change),
                Action::Finished => self.finished += 1,
            }
        }
    }

    fn parent(dn: &str) -> Option<&str> {
        dn.rsplit_once('.').map(|(parent, _)| parent)
    }

    /// The tasks of a node and of all below it.
    fn tasks_within<'a>(&'a self, dn: &'a str) -> impl Iterator<Item = &'a Task> {
        self.tasks.iter().filter(move |task| {
            task.dn.strip_prefix(dn).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    fn on_start(&mut self, key: Key, dn: &Arc<str>, generation: u64) {
        assert!(self.seen.insert(key.incarnation), "incarnation of {dn} was used twice");
        let running: Vec<_> = self.tasks_within(dn).map(|task| task.dn.clone()).collect();
        assert!(running.is_empty(), "{dn} was started over running tasks: {running:?}");
        assert!(!self.shutting_down, "{dn} was started in a shutdown");
        assert!(!self.held.contains(dn), "{dn} was started while an operator holds it");
        if let Some(parent) = Self::parent(dn) {
            let parent = &self.nodes[parent];
            assert!(!parent.cancelled, "{dn} was started below a cancelled context");
        }
        assert!(generation > 0);
        if !self.nodes.contains_key(dn) {
            self.appear(dn, State::Waiting);
        }
        let known = self.nodes.get_mut(dn).expect("just added");
        known.key = Some(key);
        known.cancelled = false;
        self.tasks.push(Task { dn: Arc::clone(dn), key, cancelled: false, aborted: false });
    }

    fn appear(&mut self, dn: &Arc<str>, state: State) {
        let (settings, group) = self.adding.get(&**dn).expect("what starts was added").clone();
        self.nodes.insert(
            Arc::clone(dn),
            Known {
                state,
                key: None,
                cancelled: false,
                signalled_ready: false,
                signalled_done: false,
                ended_ok: false,
                ready_since: Time::ZERO,
                ending_since: None,
                last_exit: None,
                pushed: false,
                settings,
                group,
            },
        );
    }

    fn on_event(&mut self, dn: &Arc<str>, change: &Change) {
        if let Change::Stopped = change
            && !self.nodes.contains_key(dn)
        {
            // Born held: an operator had stopped it before its parent's restart.
            return self.appear(dn, State::Stopped);
        }
        let now = self.now;
        // Unknown where the same call has also removed the node.
        let failures = self.machine.statuses().into_iter().find(|status| status.dn == dn).map(|s| s.failures);
        if let Change::Cancelling { cause: Cause::Shutdown } = change {
            self.check_order_of_stop(dn);
        }
        let known =
            self.nodes.get_mut(dn).unwrap_or_else(|| panic!("{dn} is reported and unknown: {change}"));
        let before = known.state;
        match change {
            Change::Scheduled { delay } => known.scheduled(dn, *delay, failures),
            Change::Started => {
                assert!(matches!(before, State::Waiting | State::Stopped), "{dn}: {before} → {change}");
                (known.signalled_ready, known.signalled_done, known.ended_ok) = (false, false, false);
                (known.pushed, known.ending_since) = (false, None);
            }
            Change::Ready => {
                assert_eq!(before, State::New, "{dn}: {before} → {change}");
                (known.signalled_ready, known.ready_since) = (true, now);
            }
            Change::Exited { state, exit } => {
                if let Exit::Failed { process: Some(process), .. } = exit {
                    let of = known.key.map(process_of);
                    assert_eq!(
                        Some(process),
                        of.as_ref(),
                        "{dn} is told to have ended as another run's process"
                    );
                }
                let expected = self.failures.entry(Arc::clone(dn)).or_default();
                known.exited(dn, *state, exit, now, expected);
                assert_eq!(failures.unwrap_or(*expected), *expected, "{dn} counts its failures wrong");
            }
            Change::Stopped => assert_ne!(before, State::Stopped, "{dn} was stopped twice"),
            Change::Removed => {
                assert!(!before.is_running(), "{dn} was removed while {before}");
                let dn = Arc::clone(dn);
                assert_eq!(self.tasks_within(&dn).count(), 0, "{dn} was removed with running tasks");
                self.nodes.remove(&dn);
                return;
            }
            Change::Cancelling { .. } | Change::Straggling { .. } => {
                assert!(before.is_running(), "{dn}: {before} and {change}");
                known.ending_since.get_or_insert(now);
            }
        }
        if let Some(state) = change.state() {
            known.state = state;
            if state == State::Stopped {
                known.cancelled = false;
            }
        }
    }

    /// Groups go down in the reverse of their order, and children before their parent.
    fn check_order_of_stop(&self, dn: &str) {
        let below = self.tasks_within(dn).filter(|task| &*task.dn != dn && !self.given_up.contains(&task.dn));
        assert_eq!(below.count(), 0, "{dn} was stopped before what runs below it");
        let group = &self.nodes[dn].group;
        for (other, known) in &self.nodes {
            if known.group.0 == group.0 && known.group.1 > group.1 {
                let running = self.tasks_within(other).filter(|task| !self.given_up.contains(&task.dn));
                assert_eq!(running.count(), 0, "{dn} was stopped before {other}, which was added later");
            }
        }
    }

    /// What must hold between any two operations.
    fn check(&self) {
        let statuses = self.machine.statuses();
        assert_eq!(statuses.len(), self.nodes.len(), "the events do not tell which nodes there are");
        for status in &statuses {
            let dn = &**status.dn;
            let known = &self.nodes[dn];
            assert_eq!(status.state, known.state, "{dn}: the events do not tell its state");
            let task = self.tasks.iter().find(|task| known.key == Some(task.key));
            let runs = task.is_some() && !self.given_up.contains(dn);
            assert_eq!(
                status.state.is_running(),
                runs,
                "{dn} is {} and its task exists: {runs}",
                status.state
            );
            if let WaitingFor::Backoff(until) = status.waiting_for {
                assert!(until > self.now, "{dn} is due and was not started");
                assert!(self.machine.next_deadline().is_some_and(|at| at <= until), "nobody will start {dn}");
            }
            self.check_not_forgotten(dn, known);
        }
        for task in &self.tasks {
            if let Some(parent) = Self::parent(&task.dn) {
                let parent = &self.nodes[parent];
                assert!(!parent.cancelled || task.cancelled, "{} runs on below a cancelled context", task.dn);
            }
        }
    }

    /// What can be restarted has been.
    fn check_not_forgotten(&self, dn: &str, known: &Known) {
        let parent_live = Self::parent(dn).is_none_or(|parent| !self.nodes[parent].cancelled);
        let wants = matches!(known.state, State::Dead | State::Canceled)
            || (known.state == State::Done && known.cancelled);
        let due = wants && parent_live && known.settings.policy.restart != Restart::Never;
        if due && !self.shutting_down {
            assert_ne!(
                self.tasks_within(dn).count(),
                0,
                "{dn} is {} and nobody starts it again",
                known.state
            );
        }
    }

    /// Shuts down; tasks end when they are told to, or don't.
    fn shut_down(&mut self) {
        self.shutting_down = true;
        self.machine.shut_down(self.now);
        self.absorb();
        self.check();
        for _ in 0..100_000 {
            if self.finished > 0 {
                break;
            }
            let obedient: Vec<usize> = (0..self.tasks.len()).filter(|at| self.tasks[*at].cancelled).collect();
            match (obedient.is_empty(), self.pick(10)) {
                (false, 0..=7) => {
                    let (kind, at) = (self.pick(10), obedient[self.pick(obedient.len())]);
                    self.end(at, kind);
                }
                (_, 8) => self.add_children(),
                _ => self.let_time_pass(),
            }
            self.absorb();
            self.check();
        }
        assert_eq!(self.finished, 1, "the shutdown ends, once");
        let left: Vec<_> = self.tasks.iter().filter(|task| !self.given_up.contains(&task.dn)).collect();
        assert!(left.is_empty(), "tasks are left after the shutdown: {left:?}");
        let named: HashSet<Arc<str>> =
            self.machine.stragglers().iter().map(|(dn, _)| Arc::clone(dn)).collect();
        assert_eq!(named, self.given_up, "the stragglers are not those that were given up on");
        for (dn, known) in &self.nodes {
            let terminal = !known.state.is_running() && known.state != State::Waiting;
            assert!(terminal, "{dn} is {} after the shutdown", known.state);
        }
        assert_eq!(self.machine.next_deadline(), None, "a timer outlives the shutdown");
        self.count("shutdowns");
    }
}

fn round(seed: u64) -> BTreeMap<&'static str, u64> {
    let mut world = World::new(seed);
    for _ in 0..OPS_PER_ROUND {
        world.step();
    }
    world.shut_down();
    world.counts
}

#[test]
fn random_operations_keep_the_invariants() {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    if let Some(seed) = number("NODEKEEL_SEED") {
        round(seed);
        return;
    }
    let rounds = number("NODEKEEL_OPS").unwrap_or(200_000).div_ceil(u64::from(OPS_PER_ROUND));
    let mut totals: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..rounds {
        let counts = std::panic::catch_unwind(|| round(seed))
            .unwrap_or_else(|_| panic!("replay this round with NODEKEEL_SEED={seed}"));
        for (what, count) in counts {
            *totals.entry(what).or_default() += count;
        }
    }
    // Whoever asks for a count of his own gets that; the default is a promise.
    let is_default = number("NODEKEEL_OPS").is_none();
    let made: u64 = totals.iter().filter(|(what, _)| **what != "actions").map(|(_, count)| count).sum();
    assert!(made >= 100_000 || !is_default, "only {made} operations had something to work on");
    println!("{made} operations in {rounds} rounds: {totals:?}");
}
