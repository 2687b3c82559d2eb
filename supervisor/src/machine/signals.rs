//! What a runnable says: new children, sub-spans, ready, done.

use std::collections::HashSet;
use std::sync::Arc;

use thiserror::Error;

use super::node::{Group, NameUse, Node, Settings};
use super::{Action, Key, Machine, Time};
use crate::event::{Cause, Change};
use crate::name::{NameError, child_dn};
use crate::runnable::Cancelled;
use crate::state::{Exit, State};

/// Why children can't be added.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// One of the names can't be had. None of the group was added.
    #[error(transparent)]
    Name(NameError),
    /// Children are added before [`ready`](crate::Context::ready), and the runnable has signalled it.
    #[error("{dn} has signalled ready: children are added before that")]
    AlreadyReady {
        /// The parent's DN.
        dn: String,
    },
    /// The context is cancelled: what was started now would be started for nothing.
    #[error("no children are added any more")]
    Cancelled(#[source] Cancelled),
}

/// Why a signal was wrong. The runnable that gave it is cancelled and ends as failed, but for [`Stale`](Self::Stale) and [`Foreign`](Self::Foreign).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SignalError {
    /// The context is stale: the run that it belongs to has ended. Nothing happens.
    #[error("the context is stale: its run has ended")]
    Stale,
    /// Another runnable than the context's gave the signal. Nothing happens to the context's.
    #[error("only {dn} itself signals for {dn}")]
    Foreign {
        /// The DN of the context.
        dn: String,
    },
    /// Ready was signalled before.
    #[error("{dn} signalled ready twice")]
    ReadyTwice {
        /// The DN of the context.
        dn: String,
    },
    /// Done before ready.
    #[error("{dn} signalled done before ready")]
    DoneBeforeReady {
        /// The DN of the context.
        dn: String,
    },
    /// Done was signalled before.
    #[error("{dn} signalled done twice")]
    DoneTwice {
        /// The DN of the context.
        dn: String,
    },
}

impl Machine {
    /// Adds a group of children below a runnable that is not ready yet, and starts them. Returns their slots in order,
    /// or an error and adds none.
    pub(crate) fn spawn(
        &mut self,
        now: Time,
        parent: Key,
        children: &[(&str, Settings)],
    ) -> Result<Vec<u32>, SpawnError> {
        let slot = self.spawnable(parent)?;
        let dns = self.free_dns(slot, children).map_err(SpawnError::Name)?;
        let group = u32::try_from(self.node(slot).groups.len()).expect("fewer groups than nodes");
        let mut members = Vec::with_capacity(children.len());
        for ((name, settings), dn) in children.iter().zip(dns) {
            let history = self.node_mut(slot).former.remove(*name).unwrap_or_default();
            let mut child = Node::new(dn, Some(slot), group, *settings, now, history);
            child.incarnation = self.incarnation();
            let child = self.insert(child);
            self.node_mut(slot).names.insert((*name).into(), NameUse::Child(child));
            members.push(child);
        }
        self.node_mut(slot).groups.push(Group { members: members.clone(), live: 0 });
        for member in &members {
            match self.node(*member).held {
                true => self.park(*member, now),
                false => self.start(*member, now),
            }
        }
        Ok(members)
    }

    fn spawnable(&self, key: Key) -> Result<u32, SpawnError> {
        let slot = self.resolve(key).ok_or(SpawnError::Name(NameError::Stale))?;
        let node = self.node(slot);
        match node.phase {
            State::New if node.cancelled || self.is_shutting_down() => Err(SpawnError::Cancelled(Cancelled)),
            State::New => Ok(slot),
            State::Ready => Err(SpawnError::AlreadyReady { dn: node.dn.to_string() }),
            _ => Err(SpawnError::Name(NameError::Stale)),
        }
    }

    /// The DNs of the children, where all their names are valid and free.
    fn free_dns(&self, parent: u32, children: &[(&str, Settings)]) -> Result<Vec<Arc<str>>, NameError> {
        let node = self.node(parent);
        let mut seen = HashSet::with_capacity(children.len());
        let dns = children.iter().map(|(name, _)| {
            let dn = child_dn(&node.dn, name)?;
            if node.names.contains_key(*name) || !seen.insert(*name) {
                return Err(NameError::Taken { name: (*name).to_owned(), parent: node.dn.to_string() });
            }
            Ok(Arc::from(dn))
        });
        dns.collect()
    }

    /// Reserves a name for a sub-span of a running node, until the node's next start. The same name again is fine.
    pub(crate) fn sub_span(&mut self, key: Key, name: &str) -> Result<String, NameError> {
        let slot = self.running(key).ok_or(NameError::Stale)?;
        let node = self.node_mut(slot);
        let dn = child_dn(&node.dn, name)?;
        match node.names.insert(name.into(), NameUse::SubSpan) {
            Some(child @ NameUse::Child(_)) => {
                node.names.insert(name.into(), child);
                Err(NameError::Taken { name: name.to_owned(), parent: node.dn.to_string() })
            }
            _ => Ok(dn),
        }
    }

    /// The runnable is ready.
    pub(crate) fn ready(&mut self, now: Time, key: Key) -> Result<(), SignalError> {
        let slot = self.running(key).ok_or(SignalError::Stale)?;
        let node = self.node(slot);
        if node.phase == State::Ready {
            let error = SignalError::ReadyTwice { dn: node.dn.to_string() };
            return Err(self.misused(slot, error, now));
        }
        self.node_mut(slot).enter(State::Ready, now);
        self.report(slot, Change::Ready);
        Ok(())
    }

    /// The runnable has done its work, and will return.
    pub(crate) fn done(&mut self, now: Time, key: Key) -> Result<(), SignalError> {
        let slot = self.running(key).ok_or(SignalError::Stale)?;
        let node = self.node_mut(slot);
        let dn = node.dn.to_string();
        let error = match (node.phase, node.signalled_done) {
            (State::Ready, false) => {
                node.signalled_done = true;
                return Ok(());
            }
            (State::Ready, true) => SignalError::DoneTwice { dn },
            _ => SignalError::DoneBeforeReady { dn },
        };
        Err(self.misused(slot, error, now))
    }

    /// Notes that the runnable waits for another one, for the status.
    pub(crate) fn set_dependency(&mut self, key: Key, dependency: Option<Arc<str>>) {
        if let Some(slot) = self.resolve(key) {
            self.node_mut(slot).dependency = dependency;
        }
    }

    /// A running node is going to have ended as `exit`, whatever it returns: it is cancelled.
    pub(crate) fn doom(&mut self, now: Time, key: Key, exit: Exit) {
        if let Some(slot) = self.running(key) {
            self.node_mut(slot).doom.get_or_insert_with(|| Box::new(exit));
            self.cancel(slot, &Cause::Own, now);
        }
    }

    /// The slot of a key whose run has not ended.
    pub(super) fn running(&self, key: Key) -> Option<u32> {
        self.resolve(key).filter(|slot| self.node(*slot).phase.is_running())
    }

    fn misused(&mut self, slot: u32, error: SignalError, now: Time) -> SignalError {
        let doom = || Box::new(Exit::Misused { error: error.to_string() });
        self.node_mut(slot).doom.get_or_insert_with(doom);
        self.cancel(slot, &Cause::Own, now);
        error
    }

    /// Starts a node's runnable. Its parent is live, nothing below it exists.
    pub(super) fn start(&mut self, slot: u32, now: Time) {
        self.disarm(slot);
        let node = self.node_mut(slot);
        debug_assert!(!node.cancelled && node.live == 0 && node.groups.is_empty());
        node.generation += 1;
        node.again = false;
        node.enter(State::New, now);
        let start = Action::Start {
            key: Key { slot, incarnation: node.incarnation },
            dn: node.dn.clone(),
            generation: node.generation,
        };
        self.adjust_live(slot, 1);
        self.actions.push(start);
        self.report(slot, Change::Started);
    }
}
