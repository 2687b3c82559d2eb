//! What the tree looks like from outside.

use std::collections::VecDeque;
use std::sync::Arc;

use super::node::Past;
use super::{Machine, ROOT_SLOT, Time};
use crate::state::{State, WaitingFor};

/// How many running descendants a status names.
const NAMED_DESCENDANTS: usize = 5;

/// One node in the tree's own time.
#[derive(Debug)]
pub(crate) struct Status<'a> {
    pub(crate) dn: &'a Arc<str>,
    pub(crate) state: State,
    pub(crate) since: Time,
    pub(crate) generation: u64,
    pub(crate) failures: u32,
    pub(crate) exits: &'a VecDeque<Past>,
    pub(crate) waiting_for: WaitingFor<Time>,
}

impl Machine {
    /// All nodes, each parent before its children, children in the order in which they were added.
    pub(crate) fn statuses(&self) -> Vec<Status<'_>> {
        let mut statuses = Vec::with_capacity(self.slots.len() - self.free.len());
        let mut open = vec![ROOT_SLOT];
        while let Some(slot) = open.pop() {
            statuses.push(self.status(slot));
            open.extend(self.node(slot).children().rev());
        }
        statuses
    }

    /// The state of the node with this DN.
    pub(crate) fn state_of(&self, dn: &str) -> Option<State> {
        self.find(dn).map(|slot| self.node(slot).phase)
    }

    fn status(&self, slot: u32) -> Status<'_> {
        let node = self.node(slot);
        Status {
            dn: &node.dn,
            state: node.phase,
            since: node.since,
            generation: node.generation,
            failures: node.failures,
            exits: &node.exits,
            waiting_for: self.waiting_for(slot),
        }
    }

    fn waiting_for(&self, slot: u32) -> WaitingFor<Time> {
        let node = self.node(slot);
        match node.phase {
            State::Waiting => WaitingFor::Backoff(node.timer.unwrap_or(node.since)),
            State::Stopped => WaitingFor::Operator,
            State::New | State::Ready if node.cancelled => WaitingFor::Return,
            State::New => node.dependency.clone().map_or(WaitingFor::ReadySignal, WaitingFor::Dependency),
            State::Ready => WaitingFor::Nothing,
            _ if !node.cancelled => WaitingFor::Nothing,
            _ if node.live > 0 => WaitingFor::Descendants(self.running_below(slot)),
            _ if node.parent.is_some_and(|parent| self.node(parent).cancelled) => WaitingFor::Parent,
            _ => WaitingFor::Nothing,
        }
    }

    /// The first few nodes below `slot` that run; subtrees in which none does are not looked into.
    fn running_below(&self, slot: u32) -> Vec<Arc<str>> {
        let mut running = Vec::new();
        let mut open: Vec<u32> = self.node(slot).children().collect();
        while let Some(slot) = open.pop()
            && running.len() < NAMED_DESCENDANTS
        {
            let node = self.node(slot);
            if node.live > 0 {
                if node.phase.is_running() {
                    running.push(node.dn.clone());
                }
                open.extend(node.children());
            }
        }
        running
    }
}
