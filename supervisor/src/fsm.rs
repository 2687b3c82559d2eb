//! The tree as a pure state machine: calls in, [`TreeAction`]s and events out.
//!
//! It has no tasks, no clock, and only seeded randomness. Its driver passes the current time, performs the
//! actions and reports exits. A test can therefore drive it through any order of events.
//!
//! A runnable's context is live until it is *canceled*, and a canceled runnable's descendants are canceled as
//! well. Below a live runnable, only the topmost canceled one can restart, once its whole subtree has exited.
//! One walk up from an exited runnable finds it, and a count of running tasks per subtree shows whether it is
//! due. Finding what may restart therefore costs the depth of the tree, not its size; a failure also costs what ends
//! with it.
//!
//! # An exit, step by step
//! **Exit** (`exit.rs`). The driver reports the end of a task:
//! 1. `handle_exit` ignores a run that the tree has given up on.
//! 2. `classify_exit` decides the state (done, canceled, dead) and the reason to record. A canceled run that returns
//!    an error other than `CanceledError` has failed.
//! 3. `finish_run` performs the steps 4 to 8 for that state.
//!
//! **Fate** (`exit.rs`). The tree decides who ends together with it:
//! 4. `enter_exited` counts the failure, after it has forgotten those before a run that was ready for `stable_after`;
//!    it records the exit and emits the event. After a failure, `cancel_subtree` cancels all its descendants and
//!    `end_members_with` those members of its group that the group's policy names and that are not in backoff or
//!    stopped; not after an operator's cancellation, nor below a canceled parent.
//!    The driver passes each [`TreeAction::CancelRun`] to its run; a process answers it in `process/run.rs`
//!    (`end_processes`). Each running one gets a stop timeout; a later `fire_timers` aborts it (`abort_straggler`,
//!    in `shutdown.rs`).
//! 5. `adjust_live_counts` takes the task off the counts of all its ancestors, and its subtree, if that has ended,
//!    off the count for which its group waits.
//!
//! **Wait** (`restart.rs`). The tree looks for the topmost entry that this exit has completed, and for the members
//! that ended with it:
//! 6. `restart_if_settled` walks up to the topmost canceled entry. It stops there while the subtree has running
//!    tasks, or while members that end together with it do (`waits_for_group`): the last exit among
//!    them comes to this step again, from its own entry. Then `release_ended_members` lets all of them go on. What an
//!    operator has asked for is done here: the entry is removed, or marked as stopped.
//! 7. `restart_ended` applies the restart limits first. An entry that exceeds its limit stays dead, or
//!    `fail_parent` makes its parent fail: a running parent is canceled, and comes to step 1 when it has returned;
//!    one that is done goes to steps 4 and 6 at once. Each other entry that its policy restarts goes to
//!    `schedule_restart`.
//! 8. `schedule_restart` computes the backoff of a failed entry. `reset_incarnation` removes its children, keeps
//!    their histories and makes its contexts stale; `enter_waiting` announces the delay; `arm_timer` sets the
//!    deadline. Without a delay, step 10 follows at once.
//!
//! **Start** (`restart.rs`). The driver (`run_timers`) calls `fire_timers` at the deadline:
//! 9. `fire_timers` calls `start_after_group`: a member that is among those that have begun to end together since
//!    step 8 waits for them, without a timer, until step 7 of another exit starts it. A member of a rest-for-one group
//!    also waits while one before it is neither ready nor done (`unready_member_before`), until that one is, or has left
//!    the tree (`start_members_after`).
//! 10. `start_run` counts the task and emits [`TreeAction::StartRun`]. The runnable adds its children anew
//!     (`children.rs`), and each of them gets its history back (generation, failures, exits, an
//!     operator's stop), but neither its backoff nor what its limit has counted; in a rest-for-one group they start in
//!     order, as in step 9. The driver spawns `task::run_incarnation`; for a
//!     process, `process/run.rs` goes on (`run_once`, `RunningProcess::start`).
//!
//! In a shutdown (`shutdown.rs`), no group ends in step 4, and steps 6 to 10 do nothing. Instead, `advance_shutdown_above` stops what the exited
//! runnable held up.

mod children;
mod control;
mod entry;
mod exit;
#[cfg(test)]
mod exploration_test;
mod restart;
mod shutdown;
mod signals;
#[cfg(test)]
mod simulation_test;
mod status;

use std::collections::BTreeSet;
use std::sync::Arc;

pub(crate) use children::NewChild;
pub use children::{AddChildError, Removal};
pub use control::ControlError;
pub(crate) use entry::{PastExit, RunnableSettings, TreeTime};
use entry::{RunnableHistory, TreeEntry};
pub(crate) use exit::RunOutcome;
pub use signals::LifecycleSignalError;
pub(crate) use status::EntryStatus;

use crate::event::RunnableChange;
use crate::name::ROOT;

/// The key of one incarnation of one runnable, which a context holds. It never refers to another incarnation,
/// even when slots are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RunKey {
    pub(crate) slot: u32,
    pub(crate) incarnation: u64,
}

/// A task for the driver, which performs them in their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TreeAction {
    /// Start the slot's runnable with a new context that has this key.
    StartRun { key: RunKey, dn: Arc<str>, generation: u64 },
    /// Resolve `canceled` of the run's context, and cancel its tokens.
    CancelRun(RunKey),
    /// Drop the task at its next await: it ignored its cancellation.
    AbortRun(RunKey),
    /// The slot is free: drop its runnable.
    DropRunnable { slot: u32 },
    /// Number this change, and pass it to the hook and the log.
    EmitEvent { dn: Arc<str>, generation: u64, change: RunnableChange },
    /// Nothing is left to wait for: drop all runnables, and end the events.
    ShutdownComplete,
}

#[derive(Debug, Clone)]
pub(crate) struct TreeFsm {
    /// Slot 0 is the root.
    slots: Vec<Option<TreeEntry>>,
    free_slots: Vec<u32>,
    next_incarnation: u64,
    /// The deadlines of slots: a start, or a stop timeout.
    timers: BTreeSet<(TreeTime, u32)>,
    actions: Vec<TreeAction>,
    random_state: u64,
    shutdown: Option<shutdown::ShutdownProgress>,
}

const ROOT_SLOT: u32 = 0;

impl TreeFsm {
    /// A tree whose root is about to start.
    pub(crate) fn new(now: TreeTime, settings: Arc<RunnableSettings>, seed: u64) -> Self {
        let mut fsm = Self {
            slots: Vec::new(),
            free_slots: Vec::new(),
            next_incarnation: 0,
            timers: BTreeSet::new(),
            actions: Vec::new(),
            random_state: seed,
            shutdown: None,
        };
        let mut root = TreeEntry::new(ROOT.into(), settings, now, RunnableHistory::default());
        root.incarnation = fsm.allocate_incarnation();
        let slot = fsm.insert_entry(root);
        debug_assert_eq!(slot, ROOT_SLOT);
        fsm.start_run(slot, now);
        fsm
    }

    /// Exchanges the actions since the last call, oldest first, for an empty vector.
    pub(crate) fn swap_actions(&mut self, empty: &mut Vec<TreeAction>) {
        debug_assert!(empty.is_empty());
        std::mem::swap(&mut self.actions, empty);
    }

    /// The actions since the last call, oldest first.
    #[cfg(test)]
    pub(crate) fn drain_actions(&mut self) -> std::vec::Drain<'_, TreeAction> {
        self.actions.drain(..)
    }

    /// The next time at which [`fire_timers`](Self::fire_timers) is due.
    pub(crate) fn next_deadline(&self) -> Option<TreeTime> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Performs everything that is due.
    pub(crate) fn fire_timers(&mut self, now: TreeTime) {
        while let Some(&(at, slot)) = self.timers.first()
            && at <= now
        {
            // An aborted run keeps no timer: `begin_shutdown` recognizes it by that.
            self.disarm_timer(slot);
            // The timer of a running entry is its stop timeout, that of a waiting one its backoff.
            if self.entry(slot).state.is_running() {
                self.abort_straggler(slot, now);
            } else {
                self.start_after_group(slot, now);
            }
        }
    }

    /// Returns whether nothing is running and nothing will start by itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.entry(ROOT_SLOT).live_tasks == 0 && self.timers.is_empty()
    }

    pub(crate) fn root_exit(&self) -> Option<&PastExit> {
        self.entry(ROOT_SLOT).exits.last()
    }

    fn entry(&self, slot: u32) -> &TreeEntry {
        self.slots[slot as usize].as_ref().expect("a referenced slot is in use")
    }

    fn entry_mut(&mut self, slot: u32) -> &mut TreeEntry {
        self.slots[slot as usize].as_mut().expect("a referenced slot is in use")
    }

    /// The slot of a key, unless the incarnation has ended.
    fn resolve_key(&self, key: RunKey) -> Option<u32> {
        let entry = self.slots.get(key.slot as usize)?.as_ref()?;
        (entry.incarnation == key.incarnation).then_some(key.slot)
    }

    fn insert_entry(&mut self, entry: TreeEntry) -> u32 {
        match self.free_slots.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(entry);
                slot
            }
            None => {
                self.slots.push(Some(entry));
                u32::try_from(self.slots.len() - 1).expect("a tree has less than 2^32 entries")
            }
        }
    }

    fn allocate_incarnation(&mut self) -> u64 {
        self.next_incarnation += 1;
        self.next_incarnation
    }

    /// Sets the slot's timer to `delay` from now. Caps the delay at [`entry::MAX_DELAY`].
    fn arm_timer(&mut self, slot: u32, now: TreeTime, delay: TreeTime) {
        self.disarm_timer(slot);
        let at = now.saturating_add(delay.min(entry::MAX_DELAY));
        self.entry_mut(slot).timer = Some(at);
        self.timers.insert((at, slot));
    }

    fn disarm_timer(&mut self, slot: u32) {
        if let Some(at) = self.entry_mut(slot).timer.take() {
            self.timers.remove(&(at, slot));
        }
    }

    fn report_change(&mut self, slot: u32, change: RunnableChange) {
        self.note_readiness(slot);
        let entry = self.entry(slot);
        let event = TreeAction::EmitEvent { dn: entry.dn.clone(), generation: entry.generation, change };
        self.actions.push(event);
    }

    /// Tells the group of an entry whether that is ready, after each change that can make a difference.
    fn note_readiness(&mut self, slot: u32) {
        let entry = self.entry(slot);
        if !entry.starts_in_order {
            return;
        }
        let (parent, group, rank) = (entry.parent, entry.group, entry.rank);
        let is_ready_or_done = entry.is_ready_or_done();
        // The groups of a parent that restarts are gone before its children.
        if let Some(parent) = parent
            && let Some(group) = self.entry_mut(parent).find_group_mut(group)
        {
            group.set_readiness(rank, is_ready_or_done);
        }
    }

    /// A random number in `[0, 1)`, by SplitMix64, whose only state is a counter.
    fn random_fraction(&mut self) -> f64 {
        self.random_state = self.random_state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random_state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        // 53 bits: as many as an f64 represents exactly.
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
