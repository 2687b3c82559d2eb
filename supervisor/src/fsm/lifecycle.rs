//! The end of a run and its consequences: waiting for the subtree, backoff, escalation, the next start.

use std::sync::Arc;

use super::entry::{ChildHistories, NameOwner, PastExit, RunnableHistory};
use super::{RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::policy::{RestartLimit, RestartLimitAction, RestartPolicy};
use crate::process::{AdoptedProcess, ForcedKill, ProcessExit};
use crate::state::{ExitReason, RunnableState};

/// How many histories an entry keeps of children that its runs no longer add. Operators' stops are kept
/// beyond that.
pub(super) const MAX_CHILD_HISTORIES: usize = 1024;

/// How a runnable's task ended, as the driver reports it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RunOutcome {
    /// It returned `Ok`.
    Ok,
    /// It returned an error that contains a `CanceledError`.
    Canceled,
    /// It failed.
    Failed(ExitReason),
}

impl TreeFsm {
    /// A runnable has returned while its helpers are still running: a failure cancels them.
    pub(crate) fn handle_return(&mut self, now: TreeTime, key: RunKey, outcome: RunOutcome) {
        if let Some(slot) = self.running_slot(key)
            && let (RunnableState::Dead, exit) = self.classify_exit(slot, outcome)
        {
            self.fail_run(now, key, exit);
        }
    }

    /// A run has started to end by itself: the time of cleaning up does not count as stable.
    pub(crate) fn mark_ending(&mut self, now: TreeTime, key: RunKey) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).ending_since.get_or_insert(now);
        }
    }

    /// A run's child process has exited. What the run returns may not say how.
    pub(crate) fn record_process_exit(&mut self, key: RunKey, exit: Arc<ProcessExit>) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).process_exit = Some(exit);
        }
    }

    /// The processes of a run did not stop in time, and are being killed.
    pub(crate) fn report_kill(&mut self, key: RunKey, kill: ForcedKill) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).forced_kill = Some(Box::new(kill));
            self.report_change(slot, RunnableChange::Killed { kill });
        }
    }

    /// A run has adopted a process.
    pub(crate) fn report_adoption(&mut self, key: RunKey, process: AdoptedProcess) {
        if let Some(slot) = self.running_slot(key) {
            self.report_change(slot, RunnableChange::Adopted { process });
        }
    }

    /// A run and its helpers have ended.
    pub(crate) fn handle_exit(&mut self, now: TreeTime, key: RunKey, outcome: RunOutcome) {
        let Some(slot) = self.running_slot(key) else {
            // A shutdown had given up on the task, and it ended after all.
            return;
        };
        let (state, exit) = self.classify_exit(slot, outcome);
        self.finish_run(slot, state, exit, now);
    }

    /// The state and the exit that a run's outcome leads to.
    fn classify_exit(&self, slot: u32, outcome: RunOutcome) -> (RunnableState, ExitReason) {
        let entry = self.entry(slot);
        if let Some(exit) = &entry.forced_exit {
            return (RunnableState::Dead, (**exit).clone());
        }
        match outcome {
            RunOutcome::Ok if entry.signaled_done => (RunnableState::Done, ExitReason::Done),
            RunOutcome::Ok if entry.canceled => (RunnableState::Dead, entry.exit_after_return()),
            RunOutcome::Ok if entry.settings.policy.restart != RestartPolicy::Always => {
                (RunnableState::Done, ExitReason::Done)
            }
            RunOutcome::Ok => (RunnableState::Dead, entry.exit_after_return()),
            RunOutcome::Canceled if entry.canceled => {
                (RunnableState::Canceled, entry.exit_after_cancellation())
            }
            RunOutcome::Canceled => {
                let error = "returned CanceledError although its context was live".to_owned();
                (RunnableState::Dead, ExitReason::Failed { error, process: None })
            }
            RunOutcome::Failed(exit) => (RunnableState::Dead, entry.exit_after_failure(exit)),
        }
    }

    /// Marks an entry as no longer running, and lets the tree react.
    pub(super) fn finish_run(&mut self, slot: u32, state: RunnableState, exit: ExitReason, now: TreeTime) {
        self.disarm_timer(slot);
        self.enter_exited(slot, state, exit, now);
        self.adjust_live_counts(slot, -1);
        self.restart_if_settled(slot, now);
        self.advance_shutdown_above(slot, now);
    }

    /// Enters the state after an exit. A failure cancels the subtree and ends the members of the group that
    /// share its fate, unless an operator requested the exit.
    fn enter_exited(&mut self, slot: u32, state: RunnableState, exit: ExitReason, now: TreeTime) {
        let entry = self.entry_mut(slot);
        let worked_until = entry.ending_since.unwrap_or(now);
        entry.clear_failures_if_stable(worked_until);
        if state == RunnableState::Done {
            entry.failures = 0;
        }
        if state == RunnableState::Dead {
            entry.failures = entry.failures.saturating_add(1);
        }
        entry.dependency = None;
        entry.enter_state(state, now);
        entry.record_exit(PastExit { at: now, generation: entry.generation, state, exit: exit.clone() });
        self.report_change(slot, RunnableChange::Exited { state, exit });
        if state == RunnableState::Dead {
            self.cancel_subtree(slot, &CancelCause::OwnFailure, now);
            // Below a canceled parent, an ancestor restarts, and with it all members of the group.
            let ends_alone = self.entry(slot).canceled_by_operator || self.parent_is_canceled(slot);
            if self.shutdown.is_none() && !ends_alone {
                self.end_members_with(slot, now);
            }
        }
    }

    /// Cancels an entry's context and those of its descendants, topmost first. An entry in backoff never
    /// starts.
    pub(super) fn cancel_subtree(&mut self, slot: u32, cause: &CancelCause, now: TreeTime) {
        let entry = self.entry_mut(slot);
        if entry.canceled {
            return;
        }
        entry.canceled = true;
        entry.canceled_by_operator = *cause == CancelCause::Operator;
        entry.ending_since.get_or_insert(now);
        let (state, key) = (entry.state, RunKey { slot, incarnation: entry.incarnation });
        let stop_timeout = entry.settings.stop_timeout;
        let below = match cause {
            CancelCause::Shutdown => CancelCause::Shutdown,
            _ => CancelCause::Ancestor(entry.dn.clone()),
        };
        match state {
            RunnableState::Stopped => {}
            RunnableState::Waiting => {
                self.disarm_timer(slot);
                self.entry_mut(slot).enter_state(RunnableState::Canceled, now);
                let exit = ExitReason::Canceled { process: None };
                self.report_change(slot, RunnableChange::Exited { state: RunnableState::Canceled, exit });
            }
            _ => self.actions.push(TreeAction::CancelRun(key)),
        }
        if state.is_running() {
            self.arm_timer(slot, now, stop_timeout);
            self.report_change(slot, RunnableChange::Canceling { cause: cause.clone() });
        }
        let children: Vec<u32> = self.entry(slot).child_slots().collect();
        for child in children {
            self.cancel_subtree(child, &below, now);
        }
    }

    /// Restarts the entry that an exit or a cancellation at `slot` has made ready to restart, if any.
    pub(super) fn restart_if_settled(&mut self, slot: u32, now: TreeTime) {
        if self.shutdown.is_some() {
            return;
        }
        let mut top = slot;
        while self.parent_is_canceled(top)
            && let Some(parent) = self.entry(top).parent
        {
            // It leaves now: the parent may not restart.
            if self.entry(top).removal_requested && self.entry(top).live_tasks == 0 {
                self.remove_child(top);
            }
            top = parent;
        }
        let entry = self.entry(top);
        if entry.live_tasks > 0 {
            return;
        }
        if entry.removal_requested {
            return self.remove_settled(top, now);
        }
        let has_exited = !matches!(entry.state, RunnableState::Waiting | RunnableState::Stopped);
        if entry.held_by_operator && has_exited {
            self.reset_incarnation(top);
            self.mark_stopped(top, now);
        }
        if self.waits_for_group(top) {
            return;
        }
        match self.release_ended_members(top) {
            Some(members) => self.restart_ended(&members, now),
            None => self.restart_ended(&[top], now),
        }
    }

    /// Restarts those of the ended entries that may restart. One that exceeds its restart limit fails their parent, or stays
    /// dead.
    pub(super) fn restart_ended(&mut self, slots: &[u32], now: TreeTime) {
        for &slot in slots {
            if self.restarts_after_failure(slot)
                && let Some(limit) = self.entry_mut(slot).exceeds_restart_limit(now)
            {
                match limit.action {
                    RestartLimitAction::FailParent => return self.fail_parent(slot, limit, now),
                    RestartLimitAction::StayDead => self.stay_dead(slot, limit),
                }
            }
        }
        for &slot in slots {
            let entry = self.entry(slot);
            match entry.state {
                RunnableState::Waiting if entry.timer.is_none() => self.start_run(slot, now),
                RunnableState::Waiting | RunnableState::Stopped => {}
                _ if entry.restart_requested || self.wants_restart(slot) => self.schedule_restart(slot, now),
                _ => {}
            }
        }
    }

    /// A child exceeds its restart limit: its parent fails, as if by itself. Without a parent, it stays dead.
    fn fail_parent(&mut self, child: u32, limit: RestartLimit, now: TreeTime) {
        let dn = Arc::clone(&self.entry(child).dn);
        let Some(parent) = self.entry(child).parent else { return };
        let exit = ExitReason::RestartLimit { child: Arc::clone(&dn), limit };
        let is_running = self.entry(parent).state.is_running();
        if is_running {
            self.entry_mut(parent).forced_exit.get_or_insert_with(|| Box::new(exit.clone()));
        }
        self.cancel_subtree(parent, &CancelCause::RestartLimit(dn), now);
        if !is_running {
            // It was done, with its children running.
            self.enter_exited(parent, RunnableState::Dead, exit, now);
            self.restart_if_settled(parent, now);
        }
    }

    /// An entry exceeds its restart limit, and does not restart by itself any more.
    fn stay_dead(&mut self, slot: u32, limit: RestartLimit) {
        let entry = self.entry_mut(slot);
        entry.stays_dead = true;
        entry.restarts.clear();
        self.report_change(slot, RunnableChange::LimitExceeded { limit });
    }

    pub(super) fn parent_is_canceled(&self, slot: u32) -> bool {
        self.entry(slot).parent.is_some_and(|parent| self.entry(parent).canceled)
    }

    fn wants_restart(&self, slot: u32) -> bool {
        let entry = self.entry(slot);
        let cut_short =
            matches!(entry.state, RunnableState::Dead | RunnableState::Canceled) || entry.canceled;
        cut_short && entry.settings.policy.restart != RestartPolicy::Never && !entry.stays_dead
    }

    /// Whether it restarts because it has failed, and not by an operator's request.
    fn restarts_after_failure(&self, slot: u32) -> bool {
        let entry = self.entry(slot);
        entry.state == RunnableState::Dead && !entry.restart_requested && self.wants_restart(slot)
    }

    /// Starts a new incarnation of an entry whose whole subtree has exited, after its backoff.
    fn schedule_restart(&mut self, slot: u32, now: TreeTime) {
        let chance = self.random_fraction();
        let has_failed = self.restarts_after_failure(slot);
        let entry = self.entry_mut(slot);
        let mut delay = TreeTime::ZERO;
        if has_failed {
            delay = entry.settings.policy.backoff.jittered_delay(entry.failures, chance);
            if entry.settings.policy.restart_limit.is_some() {
                entry.restarts.push(now);
            }
        }
        self.reset_incarnation(slot);
        self.enter_waiting(slot, delay, now);
        match delay.is_zero() {
            true => self.start_run(slot, now),
            false => self.arm_timer(slot, now, delay),
        }
    }

    pub(super) fn enter_waiting(&mut self, slot: u32, delay: TreeTime, now: TreeTime) {
        self.entry_mut(slot).enter_state(RunnableState::Waiting, now);
        self.report_change(slot, RunnableChange::Scheduled { delay });
    }

    /// Marks an entry without running tasks as stopped, until an operator starts it.
    pub(super) fn mark_stopped(&mut self, slot: u32, now: TreeTime) {
        self.disarm_timer(slot);
        self.entry_mut(slot).enter_state(RunnableState::Stopped, now);
        self.report_change(slot, RunnableChange::Stopped);
    }

    /// Clears everything that belongs to the previous incarnation, except the histories of its children.
    fn reset_incarnation(&mut self, slot: u32) {
        self.disarm_timer(slot);
        let incarnation = self.allocate_incarnation();
        let entry = self.entry_mut(slot);
        entry.incarnation = incarnation;
        entry.canceled = false;
        entry.canceled_by_operator = false;
        entry.ending_since = None;
        entry.signaled_done = false;
        entry.stays_dead = false;
        entry.forced_exit = None;
        entry.process_exit = None;
        entry.forced_kill = None;
        entry.dependency = None;
        entry.groups.clear();
        self.entry_mut(slot).former_children = self.remove_children(slot);
    }

    /// Removes an entry's descendants, the last added first, and returns their histories. If the run ended
    /// before it had added all its children, the histories of the missing ones are kept for the next run.
    fn remove_children(&mut self, slot: u32) -> ChildHistories {
        let entry = self.entry_mut(slot);
        let names = std::mem::take(&mut entry.names);
        let mut histories = std::mem::take(&mut entry.former_children);
        if histories.len() > MAX_CHILD_HISTORIES {
            histories.retain(|_, history| history.held_by_operator);
        }
        let mut children: Vec<u32> = names
            .into_values()
            .filter_map(|name| match name {
                NameOwner::Child(slot) => Some(slot),
                NameOwner::SubSpan => None,
            })
            .collect();
        children.sort_unstable_by_key(|slot| self.entry(*slot).incarnation);
        for child in children.into_iter().rev() {
            let name = self.entry(child).local_name().into();
            histories.insert(name, self.remove_entry(child));
        }
        histories
    }

    pub(super) fn remove_entry(&mut self, slot: u32) -> RunnableHistory {
        self.disarm_timer(slot);
        let children = self.remove_children(slot);
        self.report_change(slot, RunnableChange::Removed);
        self.actions.push(TreeAction::DropRunnable { slot });
        self.free_slots.push(slot);
        let entry = self.slots[slot as usize].take().expect("a referenced slot is in use");
        debug_assert_eq!(entry.live_tasks, 0);
        RunnableHistory {
            generation: entry.generation,
            failures: entry.failures,
            exits: entry.exits,
            held_by_operator: entry.held_by_operator,
            children,
        }
    }

    /// Adds `by` to the task counts from the slot up to the root.
    pub(super) fn adjust_live_counts(&mut self, slot: u32, by: i32) {
        let mut next = Some(slot);
        while let Some(slot) = next {
            let entry = self.entry_mut(slot);
            entry.live_tasks =
                entry.live_tasks.checked_add_signed(by).expect("a task is added before it is removed");
            let (after, group, rank) = (entry.live_tasks, entry.group, entry.rank);
            next = entry.parent;
            if let Some(parent) = next
                && after == 0
            {
                self.count_ended_member(parent, group, rank);
            }
        }
    }
}
