//! What an operator may ask of a node.

use thiserror::Error;

use super::{Machine, ROOT_SLOT, Time};
use crate::event::Cause;
use crate::name::ROOT;
use crate::state::State;

use super::node::NameUse;

/// Why an operator's wish can't be granted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No node has this DN.
    #[error("no runnable is called {dn:?}")]
    UnknownDn {
        /// The DN as it was given.
        dn: String,
    },
    /// The root can't be held: shut the supervisor down instead.
    #[error("root can't be stopped by itself: shut the supervisor down")]
    Root,
    /// The node's parent has ended or is being restarted; it will add the child again, or not.
    #[error("{dn} can't be started: its parent is not running")]
    ParentEnded {
        /// The DN of the node.
        dn: String,
    },
    /// The supervisor is being shut down.
    #[error("the supervisor is being shut down")]
    ShuttingDown,
}

impl Machine {
    /// Holds a node: stops its subtree, and keeps it so until [`start_held`](Self::start_held), across restarts of its
    /// parent. What is held already stays so.
    pub(crate) fn hold(&mut self, now: Time, dn: &str) -> Result<(), ControlError> {
        let slot = self.controllable(dn)?;
        if slot == ROOT_SLOT {
            return Err(ControlError::Root);
        }
        let node = self.node_mut(slot);
        node.held = true;
        node.again = false;
        match node.phase {
            State::Stopped => {}
            State::Waiting => self.park(slot, now),
            _ => {
                self.cancel(slot, &Cause::Operator, now);
                self.settle(slot, now);
            }
        }
        Ok(())
    }

    /// Ends a hold, or a backoff, or the rest of a runnable that has ended; what runs already stays as it is.
    pub(crate) fn start_held(&mut self, now: Time, dn: &str) -> Result<(), ControlError> {
        let slot = self.startable(dn)?;
        let node = self.node_mut(slot);
        let was_held = std::mem::take(&mut node.held);
        match node.phase {
            State::New | State::Ready if was_held => node.again = true,
            State::New | State::Ready => {}
            // Its work is done and its children run: there is nothing to start.
            State::Done if node.live > 0 && !node.cancelled => {}
            _ => self.start_again(slot, now),
        }
        Ok(())
    }

    /// Stops a node's subtree and starts it again at once, whatever its policy and its backoff.
    pub(crate) fn restart_now(&mut self, now: Time, dn: &str) -> Result<(), ControlError> {
        let slot = self.startable(dn)?;
        self.node_mut(slot).held = false;
        self.start_again(slot, now);
        Ok(())
    }

    fn start_again(&mut self, slot: u32, now: Time) {
        if matches!(self.node(slot).phase, State::Waiting | State::Stopped) {
            self.start(slot, now);
        } else {
            self.node_mut(slot).again = true;
            self.cancel(slot, &Cause::Operator, now);
            self.settle(slot, now);
        }
    }

    /// The slot of the node with this DN.
    pub(super) fn find(&self, dn: &str) -> Option<u32> {
        let mut names = dn.split('.');
        let root = names.next().filter(|name| *name == ROOT).map(|_| ROOT_SLOT)?;
        names.try_fold(root, |slot, name| match self.node(slot).names.get(name) {
            Some(NameUse::Child(child)) => Some(*child),
            _ => None,
        })
    }

    fn startable(&self, dn: &str) -> Result<u32, ControlError> {
        let slot = self.controllable(dn)?;
        match self.parent_is_cancelled(slot) {
            true => Err(ControlError::ParentEnded { dn: dn.to_owned() }),
            false => Ok(slot),
        }
    }

    fn controllable(&self, dn: &str) -> Result<u32, ControlError> {
        if self.is_shutting_down() {
            return Err(ControlError::ShuttingDown);
        }
        self.find(dn).ok_or_else(|| ControlError::UnknownDn { dn: dn.to_owned() })
    }
}
