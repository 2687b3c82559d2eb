//! The way down: groups in the reverse of the order in which they were added, children before their parent.

use std::sync::Arc;

use super::{Action, Key, Machine, ROOT_SLOT, Time};
use crate::event::{Cause, Change};
use crate::state::{Exit, State};

/// How far a node's turn in a shutdown has come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stopping {
    /// How many of its groups, from the first, have not been stopped.
    groups: usize,
    /// The last of these has been told to stop.
    told: bool,
}

/// A shutdown under way.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// Who did not stop in time, and how long they were waited for.
    stragglers: Vec<(Arc<str>, Time)>,
    finished: bool,
}

impl Machine {
    /// Begins to stop everything; nothing is started any more. Says [`Action::Finished`] when all has ended.
    pub(crate) fn shut_down(&mut self, now: Time) {
        if self.shutdown.is_some() {
            return;
        }
        self.shutdown = Some(Progress::default());
        for slot in 0..u32::try_from(self.slots.len()).expect("a tree has less than 2^32 nodes") {
            let Some(node) = &self.slots[slot as usize] else { continue };
            let overdue = node.phase.is_running() && node.cancelled && node.timer.is_none();
            if node.phase == State::Waiting {
                self.cancel(slot, &Cause::Shutdown, now);
            } else if overdue {
                // Its first time to stop is over without effect; it gets a last one.
                self.arm(slot, now, node.settings.stop_within);
            }
        }
        self.advance_shutdown(ROOT_SLOT, now);
    }

    /// Whether a shutdown has begun.
    pub(crate) fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// Who did not stop in time, in the order in which they were given up on.
    pub(crate) fn stragglers(&self) -> &[(Arc<str>, Time)] {
        self.shutdown.as_ref().map_or(&[], |progress| &progress.stragglers)
    }

    /// An exit may have been the last that an ancestor's turn waited for.
    pub(super) fn advance_shutdown_above(&mut self, slot: u32, now: Time) {
        if self.shutdown.is_none() {
            return;
        }
        let mut slot = slot;
        while self.node(slot).live == 0
            && let Some(parent) = self.node(slot).parent
        {
            slot = parent;
        }
        if self.node(slot).stopping.is_some() {
            self.advance_shutdown(slot, now);
        }
    }

    /// It is the node's turn: stops the last of its groups that still runs, or the node itself where none does.
    fn advance_shutdown(&mut self, slot: u32, now: Time) {
        let node = self.node(slot);
        let mut stopping = node.stopping.unwrap_or(Stopping { groups: node.groups.len(), told: false });
        while let Some(last) = stopping.groups.checked_sub(1) {
            let group = &self.node(slot).groups[last];
            if group.live > 0 {
                let members = if stopping.told { vec![] } else { group.members.clone() };
                self.node_mut(slot).stopping = Some(Stopping { told: true, ..stopping });
                return self.stop_members(&members, now);
            }
            stopping = Stopping { groups: last, told: false };
        }
        self.node_mut(slot).stopping = Some(stopping);
        if self.node(slot).phase.is_running() {
            self.cancel(slot, &Cause::Shutdown, now);
        } else if slot == ROOT_SLOT
            && let Some(progress) = &mut self.shutdown
            && !progress.finished
        {
            progress.finished = true;
            self.actions.push(Action::Finished);
        }
    }

    /// Members of a group have no order among themselves, so they are stopped at the same time.
    fn stop_members(&mut self, members: &[u32], now: Time) {
        for member in members {
            if self.node(*member).live > 0 && !self.node(*member).cancelled {
                self.advance_shutdown(*member, now);
            }
        }
    }

    /// A cancelled run has not ended within its time.
    pub(super) fn straggle(&mut self, slot: u32, now: Time) {
        let node = self.node(slot);
        let (key, dn, after) =
            (Key { slot, incarnation: node.incarnation }, node.dn.clone(), node.settings.stop_within);
        self.report(slot, Change::Straggling { after });
        self.actions.push(Action::Abort(key));
        if let Some(progress) = &mut self.shutdown {
            progress.stragglers.push((dn, after));
            // Nobody can tell whether its task ever gets to an await, and the way down goes on.
            self.leave(slot, State::Dead, Exit::Aborted, now);
        }
    }
}
