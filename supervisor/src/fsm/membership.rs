//! Changes of a running tree on request: a child more below a runnable that is ready already, a child less.

use std::sync::Arc;

use super::control::ControlError;
use super::entry::{RunnableSettings, TreeEntry};
use super::group::ChildGroup;
use super::lifecycle::MAX_CHILD_HISTORIES;
use super::{ROOT_SLOT, RunKey, TreeFsm, TreeTime};
use crate::event::CancelCause;
use crate::policy::GroupPolicy;
use crate::state::RunnableState;

/// Why a runnable is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Removal {
    /// A child of its name will be added in its place: it stays stopped if an operator has stopped this one.
    ForReplacement,
    /// It is no longer wanted.
    ForGood,
}

impl TreeFsm {
    /// Adds a child as a separate group below a running runnable, and starts it. Returns its slot.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing was added.
    pub(crate) fn add_child(
        &mut self,
        now: TreeTime,
        parent: &str,
        child: (&str, Arc<RunnableSettings>),
    ) -> Result<u32, ControlError> {
        let slot = self.controllable_slot(parent)?;
        let entry = self.entry(slot);
        if entry.canceled || !entry.state.is_running() {
            return Err(ControlError::ParentNotRunning { dn: format!("{parent}.{}", child.0) });
        }
        let dns = self.child_dns(slot, std::slice::from_ref(&child)).map_err(ControlError::Name)?;
        // A removed child leaves its group, and its place in the order, to the next one.
        let groups = &mut self.entry_mut(slot).groups;
        let group = groups.iter().position(|group| group.members.is_empty()).unwrap_or_else(|| {
            groups.push(ChildGroup { policy: GroupPolicy::OneForAll, members: Vec::new(), ending: None });
            groups.len() - 1
        });
        let members = self.insert_members(now, (slot, group), &[child], dns);
        Ok(members[0])
    }

    /// Stops a subtree, and removes it from the tree when it has ended, also across a restart of its parent. Until
    /// then the key refers to it.
    ///
    /// # Errors
    /// See [`ControlError`].
    pub(crate) fn remove_runnable(
        &mut self,
        now: TreeTime,
        dn: &str,
        removal: Removal,
    ) -> Result<RunKey, ControlError> {
        let slot = self.controllable_slot(dn)?;
        if slot == ROOT_SLOT {
            return Err(ControlError::RootNotControllable);
        }
        let entry = self.entry_mut(slot);
        entry.removal_requested = true;
        entry.held_by_operator &= removal == Removal::ForReplacement;
        let key = RunKey { slot, incarnation: entry.incarnation };
        match entry.state {
            RunnableState::Stopped | RunnableState::Waiting => self.remove_child(slot),
            _ => {
                self.cancel_subtree(slot, &CancelCause::Operator, now);
                self.restart_if_settled(slot, now);
            }
        }
        Ok(key)
    }

    /// Whether the entry of this key has left the tree.
    pub(crate) fn is_removed(&self, key: RunKey) -> bool {
        self.resolve_key(key).is_none()
    }

    /// Removes an entry whose subtree has ended. If members of its group waited for that, they restart.
    pub(super) fn remove_settled(&mut self, slot: u32, now: TreeTime) {
        let released = match self.waits_for_group(slot) {
            true => Vec::new(),
            false => self.release_ended_members(slot).unwrap_or_default(),
        };
        self.remove_child(slot);
        let others: Vec<u32> = released.into_iter().filter(|member| *member != slot).collect();
        self.restart_ended(&others, now);
    }

    /// Removes an entry without running tasks. Its parent keeps its history for a child of the same name.
    pub(super) fn remove_child(&mut self, slot: u32) {
        let TreeEntry { parent: Some(parent), group, rank, .. } = *self.entry(slot) else { return };
        let name: Box<str> = self.entry(slot).local_name().into();
        let history = self.remove_entry(slot);
        let entry = self.entry_mut(parent);
        entry.names.remove(&*name);
        if entry.former_children.len() >= MAX_CHILD_HISTORIES {
            entry.former_children.retain(|_, history| history.held_by_operator);
        }
        entry.former_children.insert(name, history);
        let group = &mut entry.groups[group as usize];
        group.members.remove(rank as usize);
        if let Some(ending) = group.ending.as_mut().filter(|ending| rank < ending.first_rank) {
            ending.first_rank -= 1;
        }
        let later: Vec<u32> = group.members[rank as usize..].to_vec();
        for member in later {
            self.entry_mut(member).rank -= 1;
        }
    }
}
