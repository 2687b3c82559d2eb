//! The tree as a pure state machine: calls in, [`Action`]s and events out.
//!
//! It knows no tasks, no clock and no randomness but a seeded one: whoever drives it says what time it is, starts and
//! cancels what it is told to, and reports what ended. So it can be driven through any order of events in a test.
//!
//! A node's context is live until it is *cancelled*, and a cancelled node's descendants are cancelled as well. So below a
//! live node the only thing that can be restarted is the topmost cancelled one, once its whole subtree has exited: one
//! walk up from whatever just exited finds it, and a count of running tasks per subtree tells whether it is due. An exit
//! therefore costs as much as the tree is deep, however large it is.

mod control;
mod lifecycle;
mod node;
mod shutdown;
mod signals;
#[cfg(test)]
mod simulation_test;
mod status;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub use control::ControlError;
pub(crate) use lifecycle::Ended;
use node::History;
use node::Node;
pub(crate) use node::{Past, Settings};
pub use signals::{SignalError, SpawnError};
pub(crate) use status::Status;

use crate::event::Change;
use crate::name::ROOT;

/// A point in time, counted from the tree's beginning.
pub(crate) type Time = Duration;

/// One incarnation of one node: what a context holds. It never means another one, however slots are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) slot: u32,
    pub(crate) incarnation: u64,
}

/// What the driver has to do, in this order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Start the slot's runnable with a fresh context under this key.
    Start { key: Key, dn: Arc<str>, generation: u64 },
    /// Cancel the context.
    Cancel(Key),
    /// Drop the task at its next await: it did not heed its cancellation.
    Abort(Key),
    /// The slot is free: drop its runnable.
    Forget { slot: u32 },
    /// Report it.
    Event { dn: Arc<str>, generation: u64, change: Change },
    /// The shutdown is complete.
    Finished,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Machine {
    /// Slot 0 is the root.
    slots: Vec<Option<Node>>,
    free: Vec<u32>,
    next_incarnation: u64,
    /// When which slot has something due: its start, or the end of its time to stop.
    timers: BTreeSet<(Time, u32)>,
    actions: Vec<Action>,
    random: u64,
    shutdown: Option<shutdown::Progress>,
}

const ROOT_SLOT: u32 = 0;

/// A hundred years: clocks can still count from now to then.
const NEVER: Time = Duration::from_secs(100 * 365 * 24 * 3600);

impl Machine {
    /// A tree of a root that is about to run.
    pub(crate) fn new(now: Time, settings: Settings, seed: u64) -> Self {
        let mut machine = Self {
            slots: Vec::new(),
            free: Vec::new(),
            next_incarnation: 0,
            timers: BTreeSet::new(),
            actions: Vec::new(),
            random: seed,
            shutdown: None,
        };
        let mut root = Node::new(ROOT.into(), None, 0, settings, now, History::default());
        root.incarnation = machine.incarnation();
        let slot = machine.insert(root);
        debug_assert_eq!(slot, ROOT_SLOT);
        machine.start(slot, now);
        machine
    }

    /// What is to be done since the last call, oldest first.
    pub(crate) fn drain_actions(&mut self) -> std::vec::Drain<'_, Action> {
        self.actions.drain(..)
    }

    /// When [`tick`](Self::tick) is due next.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Does what has come due.
    pub(crate) fn tick(&mut self, now: Time) {
        while let Some(&(at, slot)) = self.timers.first()
            && at <= now
        {
            self.disarm(slot);
            match self.node(slot).phase.is_running() {
                true => self.straggle(slot, now),
                false => self.start(slot, now),
            }
        }
    }

    fn node(&self, slot: u32) -> &Node {
        self.slots[slot as usize].as_ref().expect("a slot that is referred to is in use")
    }

    fn node_mut(&mut self, slot: u32) -> &mut Node {
        self.slots[slot as usize].as_mut().expect("a slot that is referred to is in use")
    }

    /// The slot of a key, unless the incarnation is over.
    fn resolve(&self, key: Key) -> Option<u32> {
        let node = self.slots.get(key.slot as usize)?.as_ref()?;
        (node.incarnation == key.incarnation).then_some(key.slot)
    }

    fn insert(&mut self, node: Node) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(node);
                slot
            }
            None => {
                self.slots.push(Some(node));
                u32::try_from(self.slots.len() - 1).expect("a tree has less than 2^32 nodes")
            }
        }
    }

    fn incarnation(&mut self) -> u64 {
        self.next_incarnation += 1;
        self.next_incarnation
    }

    /// Has the slot looked at after `delay`. What is further away than anybody lives is as good as never.
    fn arm(&mut self, slot: u32, now: Time, delay: Time) {
        self.disarm(slot);
        let at = now.saturating_add(delay.min(NEVER));
        self.node_mut(slot).timer = Some(at);
        self.timers.insert((at, slot));
    }

    fn disarm(&mut self, slot: u32) {
        if let Some(at) = self.node_mut(slot).timer.take() {
            self.timers.remove(&(at, slot));
        }
    }

    fn report(&mut self, slot: u32, change: Change) {
        let node = self.node(slot);
        let event = Action::Event { dn: node.dn.clone(), generation: node.generation, change };
        self.actions.push(event);
    }

    /// A number in `[0, 1)`: SplitMix64, which needs no more than a counter.
    fn chance(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
