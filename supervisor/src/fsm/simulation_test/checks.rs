//! The checks of each action, and the invariants between any two operations.

use std::sync::Arc;

use super::super::{RunKey, TreeFsm, TreeTime};
use super::expected::{Barrier, ExpectedEntry};
use super::{SimulatedDriver, SimulatedTask, exit_of_process};
use crate::event::{CancelCause, RunnableChange};
use crate::policy::{GroupPolicy, RestartLimitAction, RestartPolicy};
use crate::state::{ExitReason, RunnableState, WaitReason};

impl TreeFsm {
    /// Checks that the group of an entry knows whether that is ready, if its members start in order.
    pub(in super::super) fn check_order(&self, slot: u32) {
        let entry = self.entry(slot);
        let Some(parent) = entry.parent else { return };
        let group = self.entry(parent).group(entry.group);
        let is_unready = group.policy == GroupPolicy::RestForOne && !entry.is_ready_or_done();
        let known = (group.last_unready_before(entry.rank + 1), group.first_unready_from(entry.rank));
        let knows = [known.0, known.1].map(|unready| unready == Some(slot));
        assert_eq!(knows, [is_unready; 2], "{} is {}, and its group knows {known:?}", entry.dn, entry.state);
        assert!(group.members().any(|member| member == slot), "{} is not in its group", entry.dn);
    }
}

impl SimulatedDriver {
    pub(super) fn on_start(&mut self, key: RunKey, dn: &Arc<str>, generation: u64) {
        assert!(self.used_incarnations.insert(key.incarnation), "incarnation of {dn} was used twice");
        let running: Vec<_> = self.tasks_within(dn).map(|task| task.dn.clone()).collect();
        assert!(running.is_empty(), "{dn} was started over running tasks: {running:?}");
        assert!(!self.shutting_down, "{dn} was started in a shutdown");
        assert!(!self.held_by_operator.contains(dn), "{dn} was started although an operator stopped it");
        assert!(!self.removals.contains(dn), "{dn} was started although it was to leave the tree");
        if let Some(parent) = Self::parent_dn(dn) {
            let parent = &self.entries[parent];
            assert!(!parent.canceled, "{dn} was started below a canceled context");
        }
        assert!(generation > 0);
        if let Some(known) = self.entries.get(dn) {
            assert!(!self.waits_for_barrier(known), "{dn} was started before its group has ended");
            assert!(!self.waits_for_earlier(known), "{dn} was started before those before it are ready");
        }
        if !self.entries.contains_key(dn) {
            self.add_expected_entry(dn, RunnableState::Waiting);
        }
        let known = self.entries.get_mut(dn).expect("just added");
        known.key = Some(key);
        (known.canceled, known.canceled_alone) = (false, false);
        self.tasks.push(SimulatedTask { dn: Arc::clone(dn), key, canceled: false, aborted: false });
    }

    fn add_expected_entry(&mut self, dn: &Arc<str>, state: RunnableState) {
        let (settings, group) = self.pending_children.get(&**dn).expect("what starts was added").clone();
        self.entries.insert(Arc::clone(dn), ExpectedEntry::new(state, settings, group));
    }

    pub(super) fn on_event(&mut self, dn: &Arc<str>, change: &RunnableChange) {
        if let RunnableChange::Stopped = change
            && !self.entries.contains_key(dn)
        {
            // Stopped from the start: an operator had stopped it before its parent's restart.
            return self.add_expected_entry(dn, RunnableState::Stopped);
        }
        if let RunnableChange::Scheduled { delay: TreeTime::ZERO } = change
            && !self.entries.contains_key(dn)
        {
            // It waits from the start, for a member before it.
            return self.add_expected_entry(dn, RunnableState::Waiting);
        }
        let now = self.now;
        // Unknown where the same call has also removed the entry.
        let statuses = self.fsm.entry_statuses();
        let failures = statuses.into_iter().find(|status| status.dn == dn).map(|status| status.failures);
        self.check_cause(dn, change);
        let known =
            self.entries.get_mut(dn).unwrap_or_else(|| panic!("{dn} is reported and unknown: {change}"));
        match change {
            RunnableChange::Scheduled { delay } => known.check_scheduled(dn, *delay, failures, now),
            RunnableChange::Exited { state, exit } => self.check_exit(dn, *state, exit, failures),
            RunnableChange::Removed => return self.check_removed(dn),
            _ => known.check_change(dn, change, now),
        }
        let known = self.entries.get_mut(dn).expect("looked up above");
        if matches!(change, RunnableChange::NotReady { .. }) && known.has_been_stable(now) {
            self.failures.insert(Arc::clone(dn), 0);
        }
        if let Some(state) = change.new_state() {
            known.state = state;
            if state == RunnableState::Stopped {
                known.canceled = false;
            }
        }
    }

    /// Checks that what a cancellation names as its cause permits it.
    fn check_cause(&self, dn: &str, change: &RunnableChange) {
        let RunnableChange::Canceling { cause } = change else { return };
        match cause {
            CancelCause::Shutdown => self.check_stop_order(dn),
            CancelCause::Sibling(failed) => self.check_sibling(dn, failed),
            CancelCause::RestartLimit(child) => {
                self.entries[child].check_exceeds_limit(child, RestartLimitAction::FailParent, self.now);
            }
            _ => {}
        }
    }

    /// Checks an exit, and that it is reported with how its process exited.
    fn check_exit(&mut self, dn: &Arc<str>, state: RunnableState, exit: &ExitReason, failures: Option<u32>) {
        let known = self.entries.get_mut(dn).expect("looked up by the caller");
        let of_run = known.key.filter(|key| key.incarnation.is_multiple_of(2)).map(exit_of_process);
        match exit {
            ExitReason::Canceled { process } if known.state.is_running() => {
                assert_eq!(*process, of_run, "{dn} was stopped, and its process exited otherwise");
            }
            ExitReason::Canceled { process } => assert_eq!(*process, None, "{dn} has not run"),
            ExitReason::Failed { error, process: None } if error == "failed" => {
                assert_eq!(of_run, None, "{dn} lost the exit of its process");
            }
            ExitReason::Failed { process: Some(process), .. } | ExitReason::Killed { process, .. } => {
                assert_eq!(Some(process), of_run.as_ref(), "{dn} has the exit of another run's process");
            }
            _ => {}
        }
        let expected = self.failures.entry(Arc::clone(dn)).or_default();
        known.check_exited(dn, state, exit, self.now, expected);
        assert_eq!(failures.unwrap_or(*expected), *expected, "{dn} counts its failures wrong");
        if state == RunnableState::Dead {
            self.add_barrier(dn);
        }
    }

    fn check_removed(&mut self, dn: &Arc<str>) {
        let before = self.entries[dn].state;
        assert!(!before.is_running(), "{dn} was removed while {before}");
        assert_eq!(self.tasks_within(dn).count(), 0, "{dn} was removed with running tasks");
        self.entries.remove(dn);
        if self.removals.remove(dn) {
            self.failures.remove(dn);
        }
    }

    /// The members that share the fate of a failed one have to end before any of it starts.
    fn add_barrier(&mut self, dn: &str) {
        let failed = &self.entries[dn];
        let parent_live = Self::parent_dn(dn).is_some_and(|parent| !self.entries[parent].canceled);
        if self.shutting_down || failed.canceled_alone || !parent_live {
            return;
        }
        let (group, first_rank) = (failed.group.number, failed.group.first_rank());
        let members = self
            .entries
            .iter()
            .filter(|(_, known)| known.group.number == group && known.group.rank >= first_rank);
        let keys = members.flat_map(|(member, _)| self.tasks_within(member)).map(|task| task.key).collect();
        self.barriers.push(Barrier { group, first_rank, keys });
    }

    /// Returns whether runs that have to end before this entry starts still exist.
    fn waits_for_barrier(&self, known: &ExpectedEntry) -> bool {
        let held = self
            .barriers
            .iter()
            .filter(|barrier| barrier.group == known.group.number && known.group.rank >= barrier.first_rank);
        held.flat_map(|barrier| &barrier.keys).any(|key| self.tasks.iter().any(|task| task.key == *key))
    }

    /// Returns whether a member before this one, in a group whose members start in order, is neither ready nor done.
    fn waits_for_earlier(&self, known: &ExpectedEntry) -> bool {
        let is_before = |other: &&ExpectedEntry| {
            other.group.number == known.group.number && other.group.rank < known.group.rank
        };
        known.group.policy == GroupPolicy::RestForOne
            && self.entries.values().filter(is_before).any(|other| match other.state {
                RunnableState::Ready => other.ending_since.is_some(),
                state => state != RunnableState::Done || other.canceled,
            })
    }

    /// A failure cancels only those members that share its fate.
    fn check_sibling(&self, dn: &str, failed: &str) {
        let (canceled, failed) = (&self.entries[dn].group, &self.entries[failed].group);
        let shares = canceled.number == failed.number && canceled.rank >= failed.first_rank();
        assert!(shares, "{dn} was canceled by the failure of another fate");
    }

    /// Children stop before their parent, and dependents before what they depend on.
    fn check_stop_order(&self, dn: &str) {
        assert_eq!(self.running_below(dn).count(), 0, "{dn} was stopped before what runs below it");
        let dependent = self.running_dependent(dn);
        assert!(!self.is_ordered || dependent.is_none(), "{dn} was stopped before {dependent:?}");
    }

    /// During a shutdown, what waits for nothing is stopping.
    fn check_stops_at_once(&self) {
        for task in self.tasks.iter().filter(|task| !task.canceled) {
            let waits =
                self.running_below(&task.dn).next().is_some() || self.running_dependent(&task.dn).is_some();
            assert!(waits, "{} waits for nothing and is not stopping", task.dn);
        }
    }

    /// The tasks below an entry that the shutdown has not given up on.
    fn running_below<'a>(&'a self, dn: &'a str) -> impl Iterator<Item = &'a SimulatedTask> {
        let running = self.tasks_within(dn).filter(move |task| &*task.dn != dn);
        running.filter(|task| !self.expected_stragglers.contains(&task.dn))
    }

    /// A running entry that stops before this one, or before an ancestor of it.
    fn running_dependent(&self, dn: &str) -> Option<&Arc<str>> {
        let is_within = |dn: &str, top: &str| {
            dn.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let runs = |dependent: &str| {
            self.tasks_within(dependent).any(|task| !self.expected_stragglers.contains(&task.dn))
        };
        let stops_before = |dependent: &str, known: &ExpectedEntry| {
            known.settings.stop_before.iter().any(|later| {
                is_within(dn, later) && !is_within(dependent, later) && !is_within(later, dependent)
            })
        };
        let found = self.entries.iter().find(|(other, known)| stops_before(other, known) && runs(other));
        found.map(|(other, _)| other)
    }

    /// Checks what must hold between any two operations.
    pub(super) fn check_invariants(&self) {
        for dn in &self.removals {
            let running = self.tasks_within(dn).count() > 0;
            assert!(running || self.shutting_down, "{dn} has ended and did not leave the tree");
        }
        for slot in (0..).zip(&self.fsm.slots).filter_map(|(slot, entry)| entry.is_some().then_some(slot)) {
            self.fsm.check_order(slot);
        }
        let statuses = self.fsm.entry_statuses();
        assert_eq!(statuses.len(), self.entries.len(), "the events do not match the entries");
        for status in &statuses {
            let dn = &**status.dn;
            let known = &self.entries[dn];
            assert_eq!(status.state, known.state, "{dn}: the events do not match its state");
            let task = self.tasks.iter().find(|task| known.key == Some(task.key));
            let runs = task.is_some() && !self.expected_stragglers.contains(dn);
            assert_eq!(
                status.state.is_running(),
                runs,
                "{dn} is {} and its task exists: {runs}",
                status.state
            );
            if runs {
                let is_ready = known.signaled_ready && !known.is_withheld;
                assert_eq!(status.state == RunnableState::Ready, is_ready, "{dn}");
            }
            if let WaitReason::Backoff(until) = status.waiting_for {
                assert!(until > self.now, "{dn} is due and was not started");
                assert!(self.fsm.next_deadline().is_some_and(|at| at <= until), "no timer will start {dn}");
            } else if status.state == RunnableState::Waiting {
                let waits = self.waits_for_barrier(known) || self.waits_for_earlier(known);
                assert!(waits, "{dn} waits without a timer");
            }
            self.check_restarted(dn, known);
        }
        for key in self.barriers.iter().flat_map(|barrier| &barrier.keys) {
            let running = self.tasks.iter().find(|task| task.key == *key);
            assert!(running.is_none_or(|task| task.canceled), "{running:?} outlives a failure of its group");
        }
        if self.shutting_down && self.is_ordered {
            self.check_stops_at_once();
        }
        for task in &self.tasks {
            if let Some(parent) = Self::parent_dn(&task.dn) {
                let parent = &self.entries[parent];
                assert!(
                    !parent.canceled || task.canceled,
                    "{} keeps running below a canceled context",
                    task.dn
                );
            }
        }
    }

    /// Checks that everything that can restart has restarted.
    fn check_restarted(&self, dn: &str, known: &ExpectedEntry) {
        let parent_live = Self::parent_dn(dn).is_none_or(|parent| !self.entries[parent].canceled);
        let wants = matches!(known.state, RunnableState::Dead | RunnableState::Canceled)
            || (known.state == RunnableState::Done && known.canceled);
        let due = wants && parent_live && known.settings.policy.restart != RestartPolicy::Never;
        let due = due && !known.stays_dead;
        if due && !self.shutting_down && !self.waits_for_barrier(known) {
            assert_ne!(self.tasks_within(dn).count(), 0, "{dn} is {} and it is not restarted", known.state);
        }
    }
}
