//! The next start after an exit: when it is due, after which delay, and the start itself.

use std::sync::Arc;

use super::entry::EndingMembers;
use super::{RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::policy::{RestartLimit, RestartLimitAction, RestartPolicy};
use crate::state::{ExitReason, RunnableState};

impl TreeFsm {
    /// Restarts what an exit or a cancellation at `slot` has made ready: one entry, or all members that ended
    /// together with it.
    pub(super) fn restart_if_settled(&mut self, slot: u32, now: TreeTime) {
        if self.shutdown.is_some() {
            return;
        }
        // Walk up to the topmost canceled entry: only that one can restart, and its restart rebuilds all below it.
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
        // The exit of its last task comes here again.
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
        // Members that end together start only after all of them have ended: the last exit comes here again and
        // releases all. Then the failed ones still wait for their backoff.
        if self.waits_for_group(top) {
            return;
        }
        match self.release_ended_members(top) {
            Some(members) => self.restart_ended(&members, now),
            None => self.restart_ended(&[top], now),
        }
    }

    /// Returns whether this entry must not start yet, because members that end together with it are still running.
    pub(super) fn waits_for_group(&self, slot: u32) -> bool {
        self.ending_members(slot).is_some_and(|ending| ending.live > 0)
    }

    /// The members that have ended together with this one, from now on free to start. `None`: it alone.
    pub(super) fn release_ended_members(&mut self, slot: u32) -> Option<Vec<u32>> {
        let ending = self.ending_members(slot)?;
        let entry = self.entry(slot);
        let (parent, index) = (entry.parent?, entry.group);
        let group = self.entry_mut(parent).group_mut(index);
        group.ending = None;
        Some(group.members_within(ending.first_rank, group.end_rank()).collect())
    }

    /// Restarts those of the ended entries that may restart. One that exceeds its restart limit fails their parent,
    /// or stays dead.
    pub(super) fn restart_ended(&mut self, slots: &[u32], now: TreeTime) {
        // All limits before any start: a parent that fails cancels what has just started.
        for &slot in slots {
            if self.restarts_after_failure(slot)
                && let Some(limit) = self.entry_mut(slot).exceeds_restart_limit(now)
            {
                match limit.action {
                    RestartLimitAction::FailParent => return self.fail_parent(slot, limit, now),
                    RestartLimitAction::StayDead => {
                        let entry = self.entry_mut(slot);
                        entry.stays_dead = true;
                        // The next start is an operator's, and counts anew.
                        entry.restarts.clear();
                        self.report_change(slot, RunnableChange::LimitExceeded { limit });
                    }
                }
            }
        }
        // Each with its own delay: a canceled member starts now, unless those before it in a rest-for-one group have to be
        // ready first.
        for &slot in slots {
            let entry = self.entry(slot);
            match entry.state {
                // Its backoff has expired while it waited for the group.
                RunnableState::Waiting if entry.timer.is_none() => self.start_after_group(slot, now),
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
            // It was done, with its children running: no task of it will report the exit.
            self.enter_exited(parent, RunnableState::Dead, exit, now);
            self.restart_if_settled(parent, now);
        }
    }

    /// Starts a new incarnation of an entry whose whole subtree has exited, after its backoff.
    fn schedule_restart(&mut self, slot: u32, now: TreeTime) {
        // The delay: none after a cancellation, the backoff after a failure.
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
        if delay.is_zero() {
            self.start_after_group(slot, now);
        } else {
            // `fire_timers` continues.
            self.arm_timer(slot, now, delay);
        }
    }

    /// Clears everything that belongs to the previous incarnation, except the histories of its children. From now on
    /// its contexts are stale.
    fn reset_incarnation(&mut self, slot: u32) {
        self.disarm_timer(slot);
        let incarnation = self.allocate_incarnation();
        let entry = self.entry_mut(slot);
        entry.incarnation = incarnation;
        entry.canceled = false;
        entry.canceled_alone = false;
        entry.ending_since = None;
        entry.signaled_done = false;
        entry.stays_dead = false;
        entry.forced_exit = None;
        entry.process_exit = None;
        entry.forced_kill = None;
        entry.dependency = None;
        // The generation, the failures, the restarts and the exits of this entry remain: they count across runs.
        entry.remove_groups();
        self.entry_mut(slot).former_children = self.remove_children(slot);
    }

    pub(super) fn enter_waiting(&mut self, slot: u32, delay: TreeTime, now: TreeTime) {
        self.entry_mut(slot).enter_state(RunnableState::Waiting, now);
        self.report_change(slot, RunnableChange::Scheduled { delay });
    }

    /// Starts an entry, or lets it wait for the members of its group that are ending, or that come before it.
    pub(super) fn start_after_group(&mut self, slot: u32, now: TreeTime) {
        if !self.waits_for_group(slot) && self.unready_member_before(slot).is_none() {
            return self.start_run(slot, now);
        }
        // Without a timer it is waiting for the group, see `restart_ended` and `start_members_after`.
        self.disarm_timer(slot);
        if self.entry(slot).state == RunnableState::Stopped {
            self.enter_waiting(slot, TreeTime::ZERO, now);
        }
    }

    /// The member before this one, in a group whose members start in order, that is neither ready nor done.
    pub(super) fn unready_member_before(&self, slot: u32) -> Option<u32> {
        let entry = self.entry(slot);
        self.entry(entry.parent?).group(entry.group).last_unready_before(entry.rank)
    }

    /// Starts the members of a group from a rank on that have waited for those before them, and for nothing else.
    pub(super) fn start_members_after(&mut self, parent: u32, group: u32, rank: u32, now: TreeTime) {
        if self.shutdown.is_none()
            && let Some(next) = self.entry(parent).group(group).first_unready_from(rank)
            && self.entry(next).state == RunnableState::Waiting
            && self.entry(next).timer.is_none()
        {
            self.start_after_group(next, now);
        }
    }

    /// Starts an entry's runnable. Its parent must be live, and nothing may exist below it.
    pub(super) fn start_run(&mut self, slot: u32, now: TreeTime) {
        self.disarm_timer(slot);
        let entry = self.entry_mut(slot);
        debug_assert!(!entry.canceled && entry.live_tasks == 0 && entry.groups().is_empty());
        entry.generation += 1;
        entry.restart_requested = false;
        entry.not_ready_reason = None;
        (entry.signaled_ready, entry.withheld) = (false, None);
        entry.enter_state(RunnableState::New, now);
        let start = TreeAction::StartRun {
            key: RunKey { slot, incarnation: entry.incarnation },
            dn: entry.dn.clone(),
            generation: entry.generation,
        };
        self.adjust_live_counts(slot, 1);
        self.actions.push(start);
        self.report_change(slot, RunnableChange::Started);
    }

    /// Marks an entry without running tasks as stopped, until an operator starts it.
    pub(super) fn mark_stopped(&mut self, slot: u32, now: TreeTime) {
        self.disarm_timer(slot);
        self.entry_mut(slot).enter_state(RunnableState::Stopped, now);
        self.report_change(slot, RunnableChange::Stopped);
    }

    fn wants_restart(&self, slot: u32) -> bool {
        let entry = self.entry(slot);
        let cut_short =
            // Also one that is done and was canceled later: its children have ended, and only a new run adds them.
            matches!(entry.state, RunnableState::Dead | RunnableState::Canceled) || entry.canceled;
        cut_short && entry.settings.policy.restart != RestartPolicy::Never && !entry.stays_dead
    }

    /// Returns whether it restarts because it has failed, and not by an operator's request.
    fn restarts_after_failure(&self, slot: u32) -> bool {
        let entry = self.entry(slot);
        entry.state == RunnableState::Dead && !entry.restart_requested && self.wants_restart(slot)
    }

    pub(super) fn parent_is_canceled(&self, slot: u32) -> bool {
        self.entry(slot).parent.is_some_and(|parent| self.entry(parent).canceled)
    }

    /// The members of its group that are ending together, if it is one of them.
    pub(super) fn ending_members(&self, slot: u32) -> Option<EndingMembers> {
        let entry = self.entry(slot);
        self.entry(entry.parent?).group(entry.group).ending.filter(|ending| entry.rank >= ending.first_rank)
    }
}
