//! Random operations on the state machine. A simulated driver checks the invariants after each.
//!
//! `NODEKEEL_OPS` sets the number of operations, `NODEKEEL_SEED` replays one failed pass.

mod checks;
mod expected;
mod requests;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::{NewChild, RunKey, RunOutcome, RunnableSettings, TreeAction, TreeFsm, TreeTime};
use crate::policy::{GroupPolicy, RestartPolicy};
use crate::process_exit::{ForcedKill, ProcessExit, Signal};
use crate::state::{ExitReason, RunnableState};

use expected::{Barrier, ExpectedEntry, ExpectedGroup};
use requests::settings_with;

const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const OPS_PER_PASS: u32 = 400;

#[derive(Debug, Clone)]
struct SimulatedTask {
    dn: Arc<str>,
    key: RunKey,
    canceled: bool,
    aborted: bool,
}

struct SimulatedDriver {
    fsm: TreeFsm,
    now: TreeTime,
    random: u64,
    entries: BTreeMap<Arc<str>, ExpectedEntry>,
    tasks: Vec<SimulatedTask>,
    used_incarnations: HashSet<u64>,
    stale_keys: Vec<RunKey>,
    next_group: u64,
    /// The settings and group of children whose start has not been seen yet.
    pending_children: BTreeMap<String, (Arc<RunnableSettings>, ExpectedGroup)>,
    barriers: Vec<Barrier>,
    /// The order of the shutdown has no cycles.
    is_ordered: bool,
    finished: u32,
    shutting_down: bool,
    expected_stragglers: HashSet<Arc<str>>,
    /// Consecutive failures by DN, over all incarnations.
    failures: BTreeMap<Arc<str>, u32>,
    /// The runnables that an operator has stopped.
    held_by_operator: HashSet<Arc<str>>,
    /// The runnables that leave the tree when they have ended.
    removals: HashSet<Arc<str>>,
    counts: BTreeMap<&'static str, u64>,
}

/// A child process whose pid identifies its run.
fn exit_of_process(key: RunKey) -> Arc<ProcessExit> {
    let pid = u32::try_from(key.incarnation).expect("a pass is short");
    Arc::new(ProcessExit {
        pid,
        code: Some(0),
        signal: None,
        core_dumped: false,
        oom_kill: None,
        tail: Vec::new(),
        output_problem: None,
    })
}

impl SimulatedDriver {
    fn new(seed: u64) -> Self {
        let root = Arc::new(settings_with(RestartPolicy::Always));
        let top = ExpectedGroup { number: 0, policy: GroupPolicy::OneForOne, rank: 0 };
        let mut driver = Self {
            fsm: TreeFsm::new(TreeTime::ZERO, root.clone(), seed),
            now: TreeTime::ZERO,
            random: seed,
            entries: BTreeMap::new(),
            tasks: Vec::new(),
            used_incarnations: HashSet::new(),
            stale_keys: Vec::new(),
            next_group: 1,
            pending_children: BTreeMap::from([("root".to_owned(), (root, top))]),
            barriers: Vec::new(),
            is_ordered: seed.is_multiple_of(2),
            finished: 0,
            shutting_down: false,
            expected_stragglers: HashSet::new(),
            failures: BTreeMap::new(),
            held_by_operator: HashSet::new(),
            removals: HashSet::new(),
            counts: BTreeMap::new(),
        };
        driver.apply_actions();
        driver
    }

    fn random_below(&mut self, below: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below.max(1)
    }

    fn count_operation(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Performs one random operation, and checks all invariants after it.
    fn random_step(&mut self) {
        match self.random_below(100) {
            0..=24 => self.add_children(),
            25..=36 => self.signal_ready(),
            37..=38 => self.signal_not_ready(),
            39 => self.withhold_ready(),
            40..=46 => self.signal_done(),
            47..=69 => self.end_random_task(),
            70..=76 => self.use_stale_key(),
            77..=90 => self.advance_time(),
            91..=95 => self.send_control_request(),
            96..=98 => self.kill_processes(),
            _ => self.panic_in_helper(),
        }
        self.apply_actions();
        self.check_invariants();
    }

    fn random_task(&mut self) -> Option<usize> {
        (!self.tasks.is_empty()).then(|| self.random_below(self.tasks.len()))
    }

    fn signal_ready(&mut self) {
        let Some(at) = self.random_task() else { return };
        let task = self.tasks[at].clone();
        let is_first = !self.entries[&task.dn].signaled_ready;
        if is_first || self.random_below(10) == 0 {
            let result = self.fsm.signal_ready(self.now, task.key);
            assert_eq!(result.is_ok(), is_first, "ready is accepted once, until it is taken back");
            self.entries.get_mut(&task.dn).expect("known").signaled_ready = true;
            self.count_operation("ready");
        }
    }

    fn signal_not_ready(&mut self) {
        let Some(at) = self.random_task() else { return };
        let task = self.tasks[at].clone();
        let result = self.fsm.signal_not_ready(self.now, task.key, "no leader".into());
        assert!(result.is_ok(), "a running runnable may always signal that it is not ready");
        let known = self.entries.get_mut(&task.dn).expect("known");
        known.signaled_ready &= known.signaled_done;
        self.count_operation("not ready");
    }

    fn withhold_ready(&mut self) {
        let Some(at) = self.random_task() else { return };
        let dn = Arc::clone(&self.tasks[at].dn);
        let is_withheld = self.random_below(3) == 0;
        let reason = is_withheld.then(|| "no disk".into());
        self.fsm.withhold_ready(self.now, &dn, reason).expect("it is in the tree");
        let known = self.entries.get_mut(&dn).expect("known");
        if !known.signaled_done {
            known.is_withheld = is_withheld;
        }
        self.count_operation("withheld");
    }

    fn signal_done(&mut self) {
        let Some(at) = self.random_task() else { return };
        let task = self.tasks[at].clone();
        let known = &self.entries[&task.dn];
        let legal = known.signaled_ready && !known.signaled_done;
        if legal || self.random_below(10) == 0 {
            let result = self.fsm.signal_done(self.now, task.key);
            assert_eq!(result.is_ok(), legal, "done is accepted once, after ready");
            if legal {
                self.entries.get_mut(&task.dn).expect("known").signaled_done = true;
            }
            self.count_operation("done");
        }
    }

    fn end_random_task(&mut self) {
        // Canceled tasks come first, so that trees stop and restart.
        let canceled: Vec<usize> = (0..self.tasks.len()).filter(|at| self.tasks[*at].canceled).collect();
        let at = if canceled.is_empty() || self.random_below(4) == 0 {
            self.random_task()
        } else {
            Some(canceled[self.random_below(canceled.len())])
        };
        let Some(at) = at else { return };
        let kind = self.random_below(10);
        self.end_task(at, kind);
    }

    fn end_task(&mut self, at: usize, kind: usize) {
        let task = self.tasks.remove(at);
        self.stale_keys.push(task.key);
        let ended = match kind {
            _ if task.aborted => RunOutcome::Failed(ExitReason::Aborted),
            0..=1 => RunOutcome::Ok,
            2..=6 if task.canceled => RunOutcome::Canceled,
            2 => RunOutcome::Canceled,
            3 => RunOutcome::Failed(ExitReason::Panicked { message: "boom".into() }),
            4..=6 if self.entries[&task.dn].signaled_done => RunOutcome::Ok,
            _ => RunOutcome::Failed(ExitReason::Failed { error: "failed".into(), process: None }),
        };
        if let Some(known) = self.entries.get_mut(&task.dn).filter(|known| known.key == Some(task.key)) {
            known.ended_ok = ended == RunOutcome::Ok;
        }
        if task.key.incarnation.is_multiple_of(2) {
            self.fsm.record_process_exit(task.key, exit_of_process(task.key));
        }
        if self.random_below(4) == 0 {
            self.fsm.handle_return(self.now, task.key, ended.clone());
        }
        self.fsm.handle_exit(self.now, task.key, ended);
        self.barriers.retain(|barrier| self.tasks.iter().any(|task| barrier.keys.contains(&task.key)));
        self.count_operation("exits");
    }

    /// The context of an ended run returns errors and changes nothing.
    fn use_stale_key(&mut self) {
        if self.stale_keys.is_empty() {
            return;
        }
        let at = self.random_below(self.stale_keys.len());
        let key = self.stale_keys[at];
        let before = self.fsm.next_deadline();
        assert!(self.fsm.signal_ready(self.now, key).is_err(), "a stale context signaled ready");
        let not_ready = self.fsm.signal_not_ready(self.now, key, "stale".into());
        assert!(not_ready.is_err(), "a stale context signaled that it is not ready");
        assert!(self.fsm.signal_done(self.now, key).is_err(), "a stale context signaled done");
        assert!(self.fsm.reserve_sub_span(key, "x").is_err(), "a stale context took a name");
        let child = NewChild { name: "stale", settings: Arc::new(settings_with(RestartPolicy::Always)) };
        let spawned = self.fsm.add_group(self.now, key, GroupPolicy::OneForAll, &[child]);
        assert!(spawned.is_err(), "a stale context added a child");
        self.fsm.record_process_exit(key, exit_of_process(key));
        let grace_period = Duration::from_secs(1);
        self.fsm.report_kill(key, ForcedKill { stop_signal: Signal::TERM, grace_period, main_process: true });
        self.fsm.fail_run(self.now, key, ExitReason::ReturnedWithoutDone);
        self.fsm.restart_with_dependency(self.now, key, "root.stale".into());
        self.fsm.handle_exit(self.now, key, RunOutcome::Failed(ExitReason::ReturnedWithoutDone));
        assert_eq!(self.fsm.drain_actions().count(), 0, "a stale context had an effect");
        assert_eq!(self.fsm.next_deadline(), before, "a stale context moved a deadline");
        self.count_operation("stale contexts");
    }

    fn advance_time(&mut self) {
        let to_deadline = self.fsm.next_deadline().map_or(Duration::ZERO, |at| at.saturating_sub(self.now));
        let passed = match self.random_below(4) {
            0 => Duration::from_millis(self.random_below(50) as u64),
            1 => Duration::from_secs(self.random_below(30) as u64),
            _ => to_deadline,
        };
        self.now += passed;
        self.fsm.fire_timers(self.now);
        assert!(self.fsm.next_deadline().is_none_or(|at| at > self.now), "a due timer has not fired");
        self.count_operation("ticks");
    }

    fn kill_processes(&mut self) {
        let Some(at) = self.random_task() else { return };
        let (stop_signal, grace_period) = (Signal::TERM, Duration::from_secs(1));
        let kill = ForcedKill { stop_signal, grace_period, main_process: true };
        self.fsm.report_kill(self.tasks[at].key, kill);
        self.count_operation("kills");
    }

    fn panic_in_helper(&mut self) {
        let Some(at) = self.random_task() else { return };
        let key = self.tasks[at].key;
        self.fsm.fail_run(self.now, key, ExitReason::Panicked { message: "a helper".into() });
        self.count_operation("helper panics");
    }

    /// Acts as the driver: performs every action, and checks each.
    fn apply_actions(&mut self) {
        let actions: Vec<TreeAction> = self.fsm.drain_actions().collect();
        for action in actions {
            self.count_operation("actions");
            match action {
                TreeAction::StartRun { key, dn, generation } => self.on_start(key, &dn, generation),
                TreeAction::CancelRun(key) => {
                    for task in self.tasks.iter_mut().filter(|task| task.key == key) {
                        task.canceled = true;
                    }
                    for known in self.entries.values_mut().filter(|known| known.key == Some(key)) {
                        known.canceled = true;
                    }
                }
                TreeAction::AbortRun(key) => {
                    let task =
                        self.tasks.iter_mut().find(|task| task.key == key).expect("an abort hits a task");
                    assert!(task.canceled, "{} was aborted without having been canceled", task.dn);
                    task.aborted = true;
                    if self.shutting_down {
                        self.expected_stragglers.insert(Arc::clone(&task.dn));
                    }
                }
                TreeAction::DropRunnable { .. } => {}
                TreeAction::EmitEvent { dn, change, .. } => self.on_event(&dn, &change),
                TreeAction::ShutdownComplete => self.finished += 1,
            }
        }
    }

    fn parent_dn(dn: &str) -> Option<&str> {
        dn.rsplit_once('.').map(|(parent, _)| parent)
    }

    /// The tasks of an entry and of its descendants.
    fn tasks_within<'a>(&'a self, dn: &'a str) -> impl Iterator<Item = &'a SimulatedTask> {
        self.tasks.iter().filter(move |task| {
            task.dn.strip_prefix(dn).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    /// Shuts down; canceled tasks end, or don't.
    fn shut_down(&mut self) {
        self.shutting_down = true;
        assert!(self.fsm.begin_shutdown(self.now), "it is the first");
        self.apply_actions();
        self.fsm.stop_all(self.now);
        self.apply_actions();
        self.check_invariants();
        for _ in 0..100_000 {
            if self.finished > 0 {
                break;
            }
            let obedient: Vec<usize> = (0..self.tasks.len()).filter(|at| self.tasks[*at].canceled).collect();
            match (obedient.is_empty(), self.random_below(10)) {
                (false, 0..=7) => {
                    let (kind, at) = (self.random_below(10), obedient[self.random_below(obedient.len())]);
                    self.end_task(at, kind);
                }
                (_, 8) => self.add_children(),
                _ => self.advance_time(),
            }
            self.apply_actions();
            self.check_invariants();
        }
        assert_eq!(self.finished, 1, "the shutdown ends, once");
        let left: Vec<_> =
            self.tasks.iter().filter(|task| !self.expected_stragglers.contains(&task.dn)).collect();
        assert!(left.is_empty(), "tasks are left after the shutdown: {left:?}");
        let named: HashSet<Arc<str>> = self.fsm.stragglers().iter().map(|(dn, _)| Arc::clone(dn)).collect();
        assert_eq!(named, self.expected_stragglers, "the reported stragglers are not the aborted ones");
        for (dn, known) in &self.entries {
            let terminal = !known.state.is_running() && known.state != RunnableState::Waiting;
            assert!(terminal, "{dn} is {} after the shutdown", known.state);
        }
        assert_eq!(self.fsm.next_deadline(), None, "a timer is left after the shutdown");
        self.count_operation("shutdowns");
    }
}

fn run_pass(seed: u64) -> BTreeMap<&'static str, u64> {
    let mut driver = SimulatedDriver::new(seed);
    for _ in 0..OPS_PER_PASS {
        driver.random_step();
    }
    driver.shut_down();
    driver.counts
}

#[test]
fn random_operations_keep_the_invariants() {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse::<u64>().ok());
    if let Some(seed) = number("NODEKEEL_SEED") {
        run_pass(seed);
        return;
    }
    let rounds = number("NODEKEEL_OPS").unwrap_or(200_000).div_ceil(u64::from(OPS_PER_PASS));
    let mut totals: BTreeMap<&'static str, u64> = BTreeMap::new();
    for seed in 0..rounds {
        let counts = std::panic::catch_unwind(|| run_pass(seed))
            .unwrap_or_else(|_| panic!("replay this pass with NODEKEEL_SEED={seed}"));
        for (what, count) in counts {
            *totals.entry(what).or_default() += count;
        }
    }
    // A count from the environment is used as it is; the default has a guaranteed minimum.
    let is_default = number("NODEKEEL_OPS").is_none();
    let made: u64 = totals.iter().filter(|(what, _)| **what != "actions").map(|(_, count)| count).sum();
    assert!(made >= 100_000 || !is_default, "only {made} operations had something to work on");
    println!("{made} operations in {rounds} rounds: {totals:?}");
}
