//! How runs end, and what follows: shared fate, waiting for the subtree, backoff, the next start.

use std::sync::Arc;

use super::node::{Heirs, History, NameUse, Past};
use super::{Action, Key, Machine, Time};
use crate::event::{Cause, Change};
use crate::policy::Restart;
use crate::process::ProcessExit;
use crate::state::{Exit, State};

/// How many records a node keeps of children that its runs no longer add. An operator's hold is kept beyond that.
const MAX_HEIRS: usize = 1024;

/// How a runnable's task ended, as its driver saw it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ended {
    /// It returned `Ok`.
    Ok,
    /// It returned an error that says it was cancelled.
    Cancelled,
    /// Anything else.
    Failed(Exit),
}

impl Machine {
    /// A runnable has returned, and its helpers still run: a run that has failed takes them along.
    pub(crate) fn returned(&mut self, now: Time, key: Key, ended: Ended) {
        if let Some(slot) = self.running(key)
            && let (State::Dead, exit) = self.judge(slot, ended)
        {
            self.doom(now, key, exit);
        }
    }

    /// A run has begun to end by itself: cleaning up is not working.
    pub(crate) fn ending(&mut self, now: Time, key: Key) {
        if let Some(slot) = self.running(key) {
            self.node_mut(slot).ending_since.get_or_insert(now);
        }
    }

    /// A run's child process has ended: what the run returns may say no more than that it has.
    pub(crate) fn process_ended(&mut self, key: Key, exit: Arc<ProcessExit>) {
        if let Some(slot) = self.running(key) {
            self.node_mut(slot).process = Some(exit);
        }
    }

    /// A run and its helpers are over.
    pub(crate) fn exited(&mut self, now: Time, key: Key, ended: Ended) {
        let Some(slot) = self.running(key) else {
            // A task that was given up on in a shutdown, and ended after all.
            return;
        };
        let (state, exit) = self.judge(slot, ended);
        self.leave(slot, state, exit, now);
    }

    /// Which state a run's end means.
    fn judge(&mut self, slot: u32, ended: Ended) -> (State, Exit) {
        let node = self.node_mut(slot);
        if let Some(doom) = &node.doom {
            return (State::Dead, (**doom).clone());
        }
        match ended {
            Ended::Ok if node.signalled_done => (State::Done, Exit::Done),
            Ended::Ok if node.cancelled => (State::Dead, node.returned()),
            Ended::Ok if node.settings.policy.restart != Restart::Always => (State::Done, Exit::Done),
            Ended::Ok => (State::Dead, node.returned()),
            Ended::Cancelled if node.cancelled => (State::Canceled, Exit::Cancelled),
            Ended::Cancelled => {
                let error = "returned Cancelled although its context was live".to_owned();
                (State::Dead, Exit::Failed { error, process: None })
            }
            Ended::Failed(exit) => (State::Dead, exit),
        }
    }

    /// Takes a node out of the running ones, and lets the tree react.
    pub(super) fn leave(&mut self, slot: u32, state: State, exit: Exit, now: Time) {
        self.disarm(slot);
        let node = self.node_mut(slot);
        let worked_until = node.ending_since.unwrap_or(now);
        let was_stable = node.phase == State::Ready
            && worked_until.saturating_sub(node.since) >= node.settings.policy.stable_after;
        if was_stable || state == State::Done {
            node.failures = 0;
        }
        if state == State::Dead {
            node.failures = node.failures.saturating_add(1);
        }
        node.dependency = None;
        node.enter(state, now);
        node.remember(Past { at: now, generation: node.generation, state, exit: exit.clone() });
        self.report(slot, Change::Exited { state, exit });
        if state == State::Dead {
            self.spread(slot, now);
        }
        self.adjust_live(slot, -1);
        // Below a cancelled parent it is an ancestor's turn, which takes all members of the group along.
        let siblings = if state == State::Dead && !self.parent_is_cancelled(slot) {
            self.siblings(slot)
        } else {
            vec![]
        };
        self.settle(slot, now);
        for sibling in siblings {
            self.settle(sibling, now);
        }
        self.advance_shutdown_above(slot, now);
    }

    /// A death takes its own subtree along, and those who share its fate, unless an operator has asked for it.
    fn spread(&mut self, slot: u32, now: Time) {
        self.cancel(slot, &Cause::Own, now);
        let cause = Cause::Sibling(self.node(slot).dn.clone());
        if self.shutdown.is_none() && !self.node(slot).told_to {
            for sibling in self.siblings(slot) {
                // One that waits for its own backoff has failed by itself and runs nothing that could be taken down:
                // it keeps its delay, or a group of two failing members would restart each other without any.
                if !matches!(self.node(sibling).phase, State::Waiting | State::Stopped) {
                    self.cancel(sibling, &cause, now);
                }
            }
        }
    }

    /// The other members of its group.
    fn siblings(&self, slot: u32) -> Vec<u32> {
        let node = self.node(slot);
        let Some(parent) = node.parent else { return Vec::new() };
        let members = &self.node(parent).groups[node.group as usize].members;
        members.iter().copied().filter(|member| *member != slot).collect()
    }

    /// Cancels a node's context and all those below it, topmost first. What only waits for its start never will.
    pub(super) fn cancel(&mut self, slot: u32, cause: &Cause, now: Time) {
        let node = self.node_mut(slot);
        if node.cancelled {
            return;
        }
        node.cancelled = true;
        node.told_to = *cause == Cause::Operator;
        node.ending_since.get_or_insert(now);
        let (phase, key) = (node.phase, Key { slot, incarnation: node.incarnation });
        let stop_within = node.settings.stop_within;
        let below = match cause {
            Cause::Shutdown => Cause::Shutdown,
            _ => Cause::Ancestor(node.dn.clone()),
        };
        match phase {
            State::Stopped => {}
            State::Waiting => {
                self.disarm(slot);
                self.node_mut(slot).enter(State::Canceled, now);
                self.report(slot, Change::Exited { state: State::Canceled, exit: Exit::Cancelled });
            }
            _ => self.actions.push(Action::Cancel(key)),
        }
        if phase.is_running() {
            self.arm(slot, now, stop_within);
            self.report(slot, Change::Cancelling { cause: cause.clone() });
        }
        let children: Vec<u32> = self.node(slot).children().collect();
        for child in children {
            self.cancel(child, &below, now);
        }
    }

    /// Restarts what an exit or a cancellation at `slot` has made ready for it, if anything.
    pub(super) fn settle(&mut self, slot: u32, now: Time) {
        if self.shutdown.is_some() {
            return;
        }
        let mut top = slot;
        while self.parent_is_cancelled(top)
            && let Some(parent) = self.node(top).parent
        {
            top = parent;
        }
        let node = self.node(top);
        if node.live > 0 || matches!(node.phase, State::Waiting | State::Stopped) {
            return;
        }
        if node.held {
            self.reset(top);
            self.park(top, now);
        } else if node.again || self.wants_restart(top) {
            self.restart(top, now);
        }
    }

    pub(super) fn parent_is_cancelled(&self, slot: u32) -> bool {
        self.node(slot).parent.is_some_and(|parent| self.node(parent).cancelled)
    }

    fn wants_restart(&self, slot: u32) -> bool {
        let node = self.node(slot);
        let cut_short = matches!(node.phase, State::Dead | State::Canceled) || node.cancelled;
        cut_short && node.settings.policy.restart != Restart::Never
    }

    /// Begins a new incarnation of a node whose whole subtree has exited.
    pub(super) fn restart(&mut self, slot: u32, now: Time) {
        let chance = self.chance();
        let node = self.node(slot);
        let dead = node.phase == State::Dead && !node.again;
        let delay = if dead { node.settings.policy.backoff.delay(node.failures, chance) } else { Time::ZERO };
        self.reset(slot);
        self.node_mut(slot).enter(State::Waiting, now);
        self.report(slot, Change::Scheduled { delay });
        match delay.is_zero() {
            true => self.start(slot, now),
            false => self.arm(slot, now, delay),
        }
    }

    /// A held node of which nothing runs stays so until an operator says otherwise.
    pub(super) fn park(&mut self, slot: u32, now: Time) {
        self.disarm(slot);
        self.node_mut(slot).enter(State::Stopped, now);
        self.report(slot, Change::Stopped);
    }

    /// Forgets everything that belonged to the incarnation before, but for what its children may inherit.
    fn reset(&mut self, slot: u32) {
        self.disarm(slot);
        let incarnation = self.incarnation();
        let node = self.node_mut(slot);
        node.incarnation = incarnation;
        node.cancelled = false;
        node.told_to = false;
        node.ending_since = None;
        node.signalled_done = false;
        node.doom = None;
        node.process = None;
        node.dependency = None;
        node.groups.clear();
        self.node_mut(slot).former = self.bury_children(slot);
    }

    /// Removes a node's children, and theirs, the last added first; what remains is their history. A run that ended
    /// before it had added all of them leaves what is known of the others to the next one.
    fn bury_children(&mut self, slot: u32) -> Heirs {
        let node = self.node_mut(slot);
        let names = std::mem::take(&mut node.names);
        let mut heirs = std::mem::take(&mut node.former);
        if heirs.len() > MAX_HEIRS {
            heirs.retain(|_, history| history.held);
        }
        let mut children: Vec<u32> = names
            .into_values()
            .filter_map(|name| match name {
                NameUse::Child(slot) => Some(slot),
                NameUse::SubSpan => None,
            })
            .collect();
        children.sort_unstable_by_key(|slot| self.node(*slot).incarnation);
        for child in children.into_iter().rev() {
            let name = self.node(child).name().into();
            heirs.insert(name, self.remove(child));
        }
        heirs
    }

    fn remove(&mut self, slot: u32) -> History {
        self.disarm(slot);
        let children = self.bury_children(slot);
        self.report(slot, Change::Removed);
        self.actions.push(Action::Forget { slot });
        self.free.push(slot);
        let node = self.slots[slot as usize].take().expect("a slot that is referred to is in use");
        debug_assert_eq!(node.live, 0);
        History {
            generation: node.generation,
            failures: node.failures,
            exits: node.exits,
            held: node.held,
            children,
        }
    }

    /// Counts a task in or out, up to the root.
    pub(super) fn adjust_live(&mut self, slot: u32, by: i32) {
        let mut next = Some(slot);
        while let Some(slot) = next {
            let node = self.node_mut(slot);
            let before = node.live;
            node.live = before.checked_add_signed(by).expect("a task is counted in before it is counted out");
            let (after, group) = (node.live, node.group as usize);
            next = node.parent;
            if let Some(parent) = next
                && (before == 0) != (after == 0)
            {
                let group = &mut self.node_mut(parent).groups[group];
                group.live =
                    group.live.checked_add_signed(by.signum()).expect("a member is counted in before out");
            }
        }
    }
}
