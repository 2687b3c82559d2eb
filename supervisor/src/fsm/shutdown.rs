//! The shutdown: stops groups in the reverse order of their addition, and children before their parent.

use std::sync::Arc;

use super::{ROOT_SLOT, RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::state::{ExitReason, RunnableState};

/// The progress of stopping one entry during a shutdown.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopProgress {
    /// How many of its groups, from the first, have not been stopped.
    remaining_groups: usize,
    /// The last of these groups has been canceled.
    group_canceled: bool,
}

/// The progress of a shutdown.
#[derive(Debug, Default)]
pub(super) struct ShutdownProgress {
    /// The runnables that did not stop in time, and how long the shutdown waited for each.
    stragglers: Vec<(Arc<str>, TreeTime)>,
    finished: bool,
}

impl TreeFsm {
    /// Starts to stop everything, and starts nothing any more. Emits [`TreeAction::ShutdownComplete`] at the
    /// end.
    pub(crate) fn shut_down(&mut self, now: TreeTime) {
        if self.shutdown.is_some() {
            return;
        }
        self.shutdown = Some(ShutdownProgress::default());
        for slot in 0..u32::try_from(self.slots.len()).expect("a tree has less than 2^32 entries") {
            let Some(entry) = &self.slots[slot as usize] else { continue };
            let overdue = entry.state.is_running() && entry.canceled && entry.timer.is_none();
            if entry.state == RunnableState::Waiting {
                self.cancel_subtree(slot, &CancelCause::Shutdown, now);
            } else if overdue {
                // Its first stop timeout has expired without effect; it gets a last one.
                self.arm_timer(slot, now, entry.settings.stop_timeout);
            }
        }
        self.advance_shutdown(ROOT_SLOT, now);
    }

    /// Whether a shutdown has started.
    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// The runnables that did not stop in time, in the order of their timeouts.
    pub(crate) fn stragglers(&self) -> &[(Arc<str>, TreeTime)] {
        self.shutdown.as_ref().map_or(&[], |progress| &progress.stragglers)
    }

    /// Continues the shutdown of an ancestor that waits for this exit.
    pub(super) fn advance_shutdown_above(&mut self, slot: u32, now: TreeTime) {
        if self.shutdown.is_none() {
            return;
        }
        let mut slot = slot;
        while self.entry(slot).live_tasks == 0
            && let Some(parent) = self.entry(slot).parent
        {
            slot = parent;
        }
        if self.entry(slot).stop_progress.is_some() {
            self.advance_shutdown(slot, now);
        }
    }

    /// Continues to stop an entry: stops the last of its groups that is still running, or else the entry
    /// itself.
    fn advance_shutdown(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry(slot);
        let mut stopping = entry
            .stop_progress
            .unwrap_or(StopProgress { remaining_groups: entry.groups.len(), group_canceled: false });
        while let Some(last) = stopping.remaining_groups.checked_sub(1) {
            let group = &self.entry(slot).groups[last];
            if group.live_members > 0 {
                let members = if stopping.group_canceled { vec![] } else { group.members.clone() };
                self.entry_mut(slot).stop_progress = Some(StopProgress { group_canceled: true, ..stopping });
                return self.stop_members(&members, now);
            }
            stopping = StopProgress { remaining_groups: last, group_canceled: false };
        }
        self.entry_mut(slot).stop_progress = Some(stopping);
        if self.entry(slot).state.is_running() {
            self.cancel_subtree(slot, &CancelCause::Shutdown, now);
        } else if slot == ROOT_SLOT
            && let Some(progress) = &mut self.shutdown
            && !progress.finished
        {
            progress.finished = true;
            self.actions.push(TreeAction::ShutdownComplete);
        }
    }

    /// Stops the members of a group at the same time: they have no order among themselves.
    fn stop_members(&mut self, members: &[u32], now: TreeTime) {
        for member in members {
            if self.entry(*member).live_tasks > 0 && !self.entry(*member).canceled {
                self.advance_shutdown(*member, now);
            }
        }
    }

    /// Aborts a canceled run that has not ended within its stop timeout.
    pub(super) fn abort_straggler(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry(slot);
        let (key, dn, after) =
            (RunKey { slot, incarnation: entry.incarnation }, entry.dn.clone(), entry.settings.stop_timeout);
        self.report_change(slot, RunnableChange::Straggling { after });
        self.actions.push(TreeAction::AbortRun(key));
        if let Some(progress) = &mut self.shutdown {
            progress.stragglers.push((dn, after));
            // Its task may never reach an await, so the shutdown continues without it.
            self.finish_run(slot, RunnableState::Dead, ExitReason::Aborted, now);
        }
    }
}
