//! The tree as a pure state machine: calls in, [`TreeAction`]s and events out.
//!
//! It has no tasks, no clock, and only seeded randomness. Its driver passes the current time, performs the
//! actions and reports exits. A test can therefore drive it through any order of events.
//!
//! A runnable's context is live until it is *canceled*, and a canceled runnable's descendants are canceled as
//! well. Below a live runnable, only the topmost canceled one can restart, once its whole subtree has exited.
//! One walk up from an exited runnable finds it, and a count of running tasks per subtree shows whether it is
//! due. The cost of an exit is therefore proportional to the depth of the tree, not to its size.
//!
//! Three things are separate: *fate* (`group`: which members end with a failed one), *restart* (`lifecycle`: when
//! an ended runnable starts again) and *order* (`shutdown`: what stops before what).

mod control;
mod entry;
#[cfg(test)]
mod exploration_test;
mod group;
mod lifecycle;
mod lifecycle_signals;
mod membership;
mod shutdown;
#[cfg(test)]
mod simulation_test;
mod status;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use control::ControlError;
use entry::RunnableHistory;
use entry::TreeEntry;
pub(crate) use entry::{PastExit, RunnableSettings};
pub(crate) use lifecycle::RunOutcome;
pub use lifecycle_signals::{AddChildError, LifecycleSignalError};
pub use membership::Removal;
pub(crate) use status::EntryStatus;

use crate::event::RunnableChange;
use crate::name::ROOT;

/// A point in time, as the duration since the start of the tree.
pub(crate) type TreeTime = Duration;

/// The key of one incarnation of one runnable, which a context holds. It never refers to another incarnation,
/// even when slots are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RunKey {
    pub(crate) slot: u32,
    pub(crate) incarnation: u64,
}

/// What the driver has to do, in this order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TreeAction {
    /// Start the slot's runnable with a new context that has this key.
    StartRun { key: RunKey, dn: Arc<str>, generation: u64 },
    /// Cancel the context.
    CancelRun(RunKey),
    /// Drop the task at its next await: it ignored its cancellation.
    AbortRun(RunKey),
    /// The slot is free: drop its runnable.
    DropRunnable { slot: u32 },
    /// Publish an event.
    EmitEvent { dn: Arc<str>, generation: u64, change: RunnableChange },
    /// The shutdown is complete.
    ShutdownComplete,
}

/// The state machine of a tree.
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

/// A hundred years: clocks can still add it to the current time.
const MAX_DELAY: TreeTime = Duration::from_secs(100 * 365 * 24 * 3600);

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
        let mut root = TreeEntry::new(ROOT.into(), None, (0, 0), settings, now, RunnableHistory::default());
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
            self.disarm_timer(slot);
            match self.entry(slot).state.is_running() {
                true => self.abort_straggler(slot, now),
                false => self.start_after_group(slot, now),
            }
        }
    }

    /// Whether nothing is running and nothing will start by itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.entry(ROOT_SLOT).live_tasks == 0 && self.timers.is_empty()
    }

    /// How the root exited last.
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

    /// Sets the slot's timer to `delay` from now. Caps the delay at [`MAX_DELAY`].
    fn arm_timer(&mut self, slot: u32, now: TreeTime, delay: TreeTime) {
        self.disarm_timer(slot);
        let at = now.saturating_add(delay.min(MAX_DELAY));
        self.entry_mut(slot).timer = Some(at);
        self.timers.insert((at, slot));
    }

    fn disarm_timer(&mut self, slot: u32) {
        if let Some(at) = self.entry_mut(slot).timer.take() {
            self.timers.remove(&(at, slot));
        }
    }

    fn report_change(&mut self, slot: u32, change: RunnableChange) {
        let entry = self.entry(slot);
        let event = TreeAction::EmitEvent { dn: entry.dn.clone(), generation: entry.generation, change };
        self.actions.push(event);
    }

    /// A random number in `[0, 1)`, by SplitMix64, whose only state is a counter.
    fn random_fraction(&mut self) -> f64 {
        self.random_state = self.random_state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random_state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
