//! The shutdown: children stop before their parent, dependents before what they depend on, and everything else
//! at the same time.

use std::collections::HashMap;
use std::sync::Arc;

use super::entry::TreeEntry;
use super::{ROOT_SLOT, RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::state::{ExitReason, RunnableState};

/// The progress of a shutdown. No entry is added or removed during it, so slots identify entries.
#[derive(Debug, Clone, Default)]
pub(super) struct ShutdownProgress {
    /// The number of running subtrees that stop before an entry's subtree, by its slot. Only for those with any.
    dependents: HashMap<u32, u32>,
    /// The slots of the subtrees that stop after an entry's subtree, by its slot.
    stop_before: HashMap<u32, Vec<u32>>,
    /// The runnables that did not stop in time, and how long the shutdown waited for each.
    stragglers: Vec<(Arc<str>, TreeTime)>,
    finished: bool,
}

impl TreeFsm {
    /// Starts nothing any more, from now on. [`stop_all`](Self::stop_all) follows. Returns false if a shutdown has
    /// started before.
    pub(crate) fn begin_shutdown(&mut self, now: TreeTime) -> bool {
        if self.shutdown.is_some() {
            return false;
        }
        self.shutdown = Some(ShutdownProgress::default());
        for slot in 0..u32::try_from(self.slots.len()).expect("a tree has less than 2^32 entries") {
            let Some(entry) = &self.slots[slot as usize] else { continue };
            let overdue = entry.state.is_running() && entry.canceled && entry.timer.is_none();
            // Nothing runs in an entry that waits, so its exit is reported now.
            if entry.state == RunnableState::Waiting {
                self.cancel_subtree(slot, &CancelCause::Shutdown, now);
            } else if overdue {
                // Its first stop timeout has expired without effect; it gets a last one.
                self.arm_timer(slot, now, entry.settings.stop_timeout);
            }
        }
        self.shutdown = Some(self.collect_stop_order());
        true
    }

    /// Starts to stop everything, in its order. Emits [`TreeAction::ShutdownComplete`] at the end.
    pub(crate) fn stop_all(&mut self, now: TreeTime) {
        self.stop_subtree(ROOT_SLOT, now);
        self.finish_shutdown(now);
    }

    /// The slots that are not running, with their DNs: in a shutdown, they never start again.
    pub(crate) fn idle_slots(&self) -> impl Iterator<Item = (u32, Arc<str>)> + '_ {
        let is_idle = |entry: &&TreeEntry| !entry.state.is_running();
        let slots = (0..).zip(&self.slots);
        slots.filter_map(move |(slot, entry)| Some((slot, Arc::clone(&entry.as_ref().filter(is_idle)?.dn))))
    }

    /// The driver has given up on a runnable that is not running.
    pub(crate) fn add_straggler(&mut self, dn: Arc<str>, waited: TreeTime) {
        if let Some(progress) = &mut self.shutdown {
            progress.stragglers.push((dn, waited));
        }
    }

    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// The slot of a run that is ending, or that the shutdown has given up, if it will not start again.
    pub(crate) fn slot_of_last_run(&self, key: RunKey) -> Option<u32> {
        self.resolve_key(key).filter(|_| self.is_shutting_down())
    }

    /// The runnables that did not stop in time, in the order of their timeouts.
    pub(crate) fn stragglers(&self) -> &[(Arc<str>, TreeTime)] {
        self.shutdown.as_ref().map_or(&[], |progress| &progress.stragglers)
    }

    /// The order in which the running subtrees stop, in addition to that of children and parents. A runnable that stops
    /// before an ancestor does so anyway, and none can stop before what runs below it.
    fn collect_stop_order(&self) -> ShutdownProgress {
        let mut progress = ShutdownProgress::default();
        for (slot, entry) in (0..).zip(&self.slots) {
            let Some(entry) = entry.as_ref().filter(|entry| entry.live_tasks > 0) else { continue };
            for dn in &entry.settings.stop_before {
                if let Some(later) = self.find_slot(dn)
                    && !self.is_within(slot, later)
                    && !self.is_within(later, slot)
                {
                    *progress.dependents.entry(later).or_default() += 1;
                    progress.stop_before.entry(slot).or_default().push(later);
                }
            }
        }
        progress
    }

    /// Returns whether an entry is in the subtree of another one, or is that one.
    fn is_within(&self, slot: u32, top: u32) -> bool {
        std::iter::successors(Some(slot), |slot| self.entry(*slot).parent).any(|slot| slot == top)
    }

    /// Continues the shutdown after an exit: what waited for the subtrees that have ended now stops.
    pub(super) fn advance_shutdown_above(&mut self, slot: u32, now: TreeTime) {
        if self.shutdown.is_none() {
            return;
        }
        let mut next = Some(slot);
        while let Some(slot) = next
            && self.entry(slot).live_tasks == 0
        {
            // Stop those for which this subtree was the last to wait. One whose parent has not been reached yet
            // stops with that.
            let Some(progress) = &mut self.shutdown else { return };
            for later in progress.stop_before.remove(&slot).unwrap_or_default() {
                let Some(progress) = &mut self.shutdown else { return };
                let Some(dependents) = progress.dependents.get_mut(&later) else { continue };
                *dependents -= 1;
                if *dependents == 0 {
                    progress.dependents.remove(&later);
                    if self.entry(later).parent.is_some_and(|parent| self.entry(parent).stop_requested) {
                        self.stop_subtree(later, now);
                    }
                }
            }
            next = self.entry(slot).parent;
        }
        if let Some(slot) = next {
            self.stop_without_children(slot, now);
        }
        self.finish_shutdown(now);
    }

    /// Stops everything in a subtree that waits for nothing else. The rest follows when that has ended.
    fn stop_subtree(&mut self, slot: u32, now: TreeTime) {
        self.entry_mut(slot).stop_requested = true;
        let children: Vec<u32> = self.entry(slot).child_slots().collect();
        for child in children {
            let dependents = self.shutdown.as_ref().and_then(|progress| progress.dependents.get(&child));
            if self.entry(child).live_tasks > 0 && dependents.is_none() {
                self.stop_subtree(child, now);
            }
        }
        self.stop_without_children(slot, now);
    }

    /// Stops a runnable that is to stop, once nothing is running below it.
    fn stop_without_children(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry(slot);
        // The one live task is its own: all descendants have exited.
        if entry.stop_requested && entry.state.is_running() && entry.live_tasks == 1 {
            self.cancel_subtree(slot, &CancelCause::Shutdown, now);
        }
    }

    /// Completes the shutdown when nothing is running. When nothing is stopping either, the dependencies are
    /// circular, and the rest stops without them.
    fn finish_shutdown(&mut self, now: TreeTime) {
        let root = self.entry(ROOT_SLOT);
        let (has_ended, is_stopping) = (root.live_tasks == 0, root.stop_requested);
        let Some(progress) = self.shutdown.as_mut().filter(|progress| !progress.finished) else { return };
        if has_ended {
            progress.finished = true;
            self.actions.push(TreeAction::ShutdownComplete);
        } else if is_stopping && self.timers.is_empty() {
            // Each run that is stopping has a timer.
            progress.dependents.clear();
            self.stop_subtree(ROOT_SLOT, now);
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
