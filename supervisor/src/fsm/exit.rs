//! The end of a run: its exit, and all that ends with it.

use std::sync::Arc;

use super::entry::{EndingMembers, PastExit, TreeEntry};
use super::{RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::policy::{GroupPolicy, RestartPolicy};
use crate::process_exit::{AdoptedProcess, ForcedKill, ProcessExit};
use crate::state::{ExitReason, RunnableState};

/// The end of a runnable's task, as the driver reports it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RunOutcome {
    /// The runnable returned `Ok`.
    Ok,
    /// The runnable returned an error that contains a `CanceledError`.
    Canceled,
    Failed(ExitReason),
}

impl TreeFsm {
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
        // An invalid signal, a helper's panic or a child's restart limit has failed the run before it returned.
        if let Some(exit) = &entry.forced_exit {
            return (RunnableState::Dead, (**exit).clone());
        }
        match outcome {
            RunOutcome::Ok if entry.signaled_done => (RunnableState::Done, ExitReason::Done),
            // The end that was asked for, as with a `CanceledError`.
            RunOutcome::Ok if entry.canceled => (RunnableState::Canceled, entry.exit_after_cancellation()),
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

    /// Marks an entry as no longer running, and lets the tree react: fate, then restart, then the next stop of a
    /// shutdown.
    pub(super) fn finish_run(&mut self, slot: u32, state: RunnableState, exit: ExitReason, now: TreeTime) {
        // The stop timeout, if it was canceled.
        self.disarm_timer(slot);
        // Before the count: the members that end with it must be counted as ending while it still counts as live.
        self.enter_exited(slot, state, exit, now);
        self.adjust_live_counts(slot, -1);
        let TreeEntry { parent, group, rank, .. } = *self.entry(slot);
        if let Some(parent) = parent.filter(|_| state == RunnableState::Done) {
            self.start_members_after(parent, group, rank, now);
        }
        // At most one of the two does something: nothing restarts in a shutdown.
        self.restart_if_settled(slot, now);
        self.advance_shutdown_above(slot, now);
    }

    /// Enters the state after an exit. A failure cancels the subtree and ends the members of the group that
    /// share its fate, unless an operator requested the exit.
    pub(super) fn enter_exited(&mut self, slot: u32, state: RunnableState, exit: ExitReason, now: TreeTime) {
        // Failures: the time of cleaning up does not count as ready.
        let entry = self.entry_mut(slot);
        let worked_until = entry.ending_since.unwrap_or(now);
        entry.clear_failures_if_stable(worked_until);
        if state == RunnableState::Done {
            entry.failures = 0;
        }
        if state == RunnableState::Dead {
            if entry.failures == 0 {
                entry.failing_since = now;
            }
            entry.failures = entry.failures.saturating_add(1);
        }
        // State, history and event.
        entry.dependency = None;
        entry.enter_state(state, now);
        entry.record_exit(PastExit { at: now, generation: entry.generation, state, exit: exit.clone() });
        self.report_change(slot, RunnableChange::Exited { state, exit });
        // Fate: a failure takes its subtree and its group with it.
        if state == RunnableState::Dead {
            self.cancel_subtree(slot, &CancelCause::OwnFailure, now);
            // Below a canceled parent, an ancestor restarts, and with it all members of the group.
            let ends_alone = self.entry(slot).canceled_alone || self.parent_is_canceled(slot);
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
        entry.canceled_alone = matches!(cause, CancelCause::Operator | CancelCause::Dependency(_));
        entry.ending_since.get_or_insert(now);
        self.note_readiness(slot);
        let entry = self.entry(slot);
        let (state, key) = (entry.state, RunKey { slot, incarnation: entry.incarnation });
        let stop_timeout = entry.settings.stop_timeout;
        let below = match cause {
            CancelCause::Shutdown => CancelCause::Shutdown,
            _ => CancelCause::Ancestor(entry.dn.clone()),
        };
        match state {
            RunnableState::Stopped => {}
            // Nothing is running that could report an exit, so it is reported here.
            RunnableState::Waiting => {
                self.disarm_timer(slot);
                self.entry_mut(slot).enter_state(RunnableState::Canceled, now);
                let exit = ExitReason::Canceled { process: None };
                self.report_change(slot, RunnableChange::Exited { state: RunnableState::Canceled, exit });
            }
            // Also one that has exited: a library may still hold its token.
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

    /// Ends the members of a group that share the fate of a failed one: those from a rank on.
    ///
    /// While any of them has a running task in its subtree, none of them starts; the last exit releases them all.
    /// A failure among members that are already ending changes nothing, so the cost of any number of simultaneous
    /// failures is proportional to the size of the group.
    pub(super) fn end_members_with(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry(slot);
        let Some(parent) = entry.parent else { return };
        let (index, rank, cause) = (entry.group, entry.rank, CancelCause::Sibling(entry.dn.clone()));
        let group = self.entry(parent).group(index);
        let first_rank = match group.policy {
            GroupPolicy::OneForOne => return,
            GroupPolicy::OneForAll => 0,
            GroupPolicy::RestForOne => rank,
        };
        // Members from the earlier failure's rank on are ending already: only those before it are added.
        let end_rank = group.ending.map_or(group.end_rank(), |ending| ending.first_rank);
        if group.len() < 2 || first_rank >= end_rank {
            return;
        }
        let added: Vec<u32> = group.members_within(first_rank, end_rank).collect();
        let already_live = group.ending.map_or(0, |ending| ending.live);
        let live = added.iter().filter(|member| self.entry(**member).live_tasks > 0).count();
        let live = already_live + u32::try_from(live).expect("fewer members than slots");
        self.entry_mut(parent).group_mut(index).ending = Some(EndingMembers { first_rank, live });
        for member in added {
            // A member in backoff has ended, and keeps its delay: otherwise two failing members would restart
            // each other without any delay.
            let has_ended =
                matches!(self.entry(member).state, RunnableState::Waiting | RunnableState::Stopped);
            if member != slot && !has_ended {
                self.cancel_subtree(member, &cause, now);
            }
        }
    }

    /// Adds `by` to the task counts from the slot up to the root. A member whose subtree has ended is one fewer for
    /// which its group waits.
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
                && let Some(ending) = &mut self.entry_mut(parent).group_mut(group).ending
                && rank >= ending.first_rank
            {
                ending.live = ending.live.checked_sub(1).expect("each member ends once");
            }
        }
    }

    /// A runnable has returned while its helpers are still running: a failure cancels them.
    pub(crate) fn handle_return(&mut self, now: TreeTime, key: RunKey, outcome: RunOutcome) {
        if let Some(slot) = self.running_slot(key)
            && let (RunnableState::Dead, exit) = self.classify_exit(slot, outcome)
        {
            self.fail_run(now, key, exit);
        }
    }

    /// Makes a running run end as `exit`, regardless of the result of its runnable, and cancels it.
    pub(crate) fn fail_run(&mut self, now: TreeTime, key: RunKey, exit: ExitReason) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).forced_exit.get_or_insert_with(|| Box::new(exit));
            self.cancel_subtree(slot, &CancelCause::OwnFailure, now);
        }
    }

    /// A run has started to end by itself: the time of cleaning up does not count as stable.
    pub(crate) fn mark_ending(&mut self, now: TreeTime, key: RunKey) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).ending_since.get_or_insert(now);
            self.note_readiness(slot);
        }
    }

    /// A run's child process has exited. The result of the run may not tell how.
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

    /// The slot of a key, if its run is still running.
    pub(super) fn running_slot(&self, key: RunKey) -> Option<u32> {
        self.resolve_key(key).filter(|slot| self.entry(*slot).state.is_running())
    }
}
