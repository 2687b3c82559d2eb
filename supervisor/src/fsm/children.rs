//! Children: added by a run or on request, removed on request or with their parent's run.

use std::collections::HashSet;
use std::sync::Arc;

use thiserror::Error;

use super::control::ControlError;
use super::entry::{
    ChildGroup, ChildHistories, LocalName, NameOwner, RunnableHistory, RunnableSettings, TreeEntry,
};
use super::{ROOT_SLOT, RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::failure::CanceledError;
use crate::name::{DependencyError, NameError, child_dn};
use crate::policy::GroupPolicy;
use crate::state::RunnableState;

/// The number of histories that an entry keeps of children that its runs no longer add. Operators' stops are kept
/// beyond that.
const MAX_CHILD_HISTORIES: usize = 1024;

/// The reason why adding children failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddChildError {
    /// A name is invalid or in use. None of the group was added.
    #[error(transparent)]
    Name(NameError),
    /// A child can't depend on a runnable that it names. None of the group was added.
    #[error(transparent)]
    Dependency(#[from] DependencyError),
    /// The context is canceled, so the children would never run.
    #[error("can't add child runnables: their parent is stopping")]
    Canceled(#[source] CanceledError),
}

/// The reason why a runnable is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Removal {
    /// A child of its name will be added in its place: it stays stopped if an operator has stopped this one.
    ForReplacement,
    /// The child is no longer wanted.
    ForGood,
}

#[derive(Debug, Clone)]
pub(crate) struct NewChild<'a> {
    pub(crate) name: &'a str,
    pub(crate) settings: Arc<RunnableSettings>,
}

impl TreeFsm {
    /// Adds a group of children below a run, and starts them. Returns their slots in order.
    pub(crate) fn add_group(
        &mut self,
        now: TreeTime,
        parent: RunKey,
        policy: GroupPolicy,
        children: &[NewChild<'_>],
    ) -> Result<Vec<u32>, AddChildError> {
        let slot = self.resolve_key(parent).ok_or(AddChildError::Name(NameError::StaleContext))?;
        let entry = self.entry(slot);
        match entry.state {
            RunnableState::New | RunnableState::Ready if entry.canceled || self.is_shutting_down() => {
                return Err(AddChildError::Canceled(CanceledError));
            }
            RunnableState::New | RunnableState::Ready => {}
            // The run has exited. Its key stays valid until the next run.
            _ => return Err(AddChildError::Name(NameError::StaleContext)),
        }
        // All names are checked before the first change: a rejected group leaves nothing behind.
        let dns = self.child_dns(slot, children).map_err(AddChildError::Name)?;
        Ok(self.insert_members(now, slot, policy, children, dns))
    }

    /// Adds a child as a separate group below a running runnable, and starts it. Returns its slot.
    pub(crate) fn add_child(
        &mut self,
        now: TreeTime,
        parent: &str,
        child: NewChild<'_>,
    ) -> Result<u32, ControlError> {
        let slot = self.controllable_slot(parent)?;
        let entry = self.entry(slot);
        if entry.canceled || !entry.state.is_running() {
            return Err(ControlError::ParentNotRunning { dn: format!("{parent}.{}", child.name) });
        }
        let dns = self.child_dns(slot, std::slice::from_ref(&child)).map_err(ControlError::Name)?;
        let members = self.insert_members(now, slot, GroupPolicy::OneForAll, &[child], dns);
        Ok(members[0])
    }

    /// Adds a group, and starts its members. Returns their slots in order.
    fn insert_members(
        &mut self,
        now: TreeTime,
        parent: u32,
        policy: GroupPolicy,
        children: &[NewChild<'_>],
        dns: Vec<Arc<str>>,
    ) -> Vec<u32> {
        let mut members = Vec::with_capacity(children.len());
        for (rank, (child, dn)) in (0..).zip(children.iter().zip(dns)) {
            // A child of the same name may have run below an earlier incarnation: it continues its generations,
            // its failures and an operator's stop.
            let history = self.entry_mut(parent).former_children.remove(child.name).unwrap_or_default();
            let local_name = LocalName::of_dn(Arc::clone(&dn));
            let mut entry = TreeEntry::new(dn, Arc::clone(&child.settings), now, history);
            entry.parent = Some(parent);
            entry.rank = rank;
            entry.starts_in_order = policy == GroupPolicy::RestForOne;
            entry.incarnation = self.allocate_incarnation();
            let child = self.insert_entry(entry);
            self.entry_mut(parent).names.insert(local_name, NameOwner::Child(child));
            members.push(child);
        }
        // A group whose members have all left leaves its place in the order of the children to the next one: a parent
        // that adds and removes children all the time has as many groups as it ever had at once.
        let group = self.entry_mut(parent).add_group(ChildGroup::new(policy, &members));
        members.iter().for_each(|member| self.entry_mut(*member).group = group);
        // The whole group is in the tree before its first member starts.
        for &member in &members {
            if self.entry(member).held_by_operator {
                self.mark_stopped(member, now);
            } else if self.unready_member_before(member).is_none() {
                self.start_run(member, now);
            } else {
                self.enter_waiting(member, TreeTime::ZERO, now);
            }
        }
        members
    }

    /// The DNs of the children, if all their names are valid and free.
    fn child_dns(&self, parent: u32, children: &[NewChild<'_>]) -> Result<Vec<Arc<str>>, NameError> {
        let entry = self.entry(parent);
        let mut seen = HashSet::new();
        let dns = children.iter().map(|NewChild { name, .. }| {
            let dn = child_dn(&entry.dn, name)?;
            if entry.names.contains_key(*name) || children.len() > 1 && !seen.insert(*name) {
                let parent = entry.dn.to_string();
                return Err(NameError::AlreadyInUse { name: (*name).to_owned(), parent });
            }
            Ok(Arc::from(dn))
        });
        dns.collect()
    }

    /// Reserves a name for a sub-span of a running runnable, until the runnable's next start. Repeating it is
    /// allowed.
    pub(crate) fn reserve_sub_span(&mut self, key: RunKey, name: &str) -> Result<String, NameError> {
        let slot = self.running_slot(key).ok_or(NameError::StaleContext)?;
        let entry = self.entry_mut(slot);
        let dn = child_dn(&entry.dn, name)?;
        match entry.names.get(name) {
            Some(NameOwner::Child(_)) => {
                Err(NameError::AlreadyInUse { name: name.to_owned(), parent: entry.dn.to_string() })
            }
            Some(NameOwner::SubSpan) => Ok(dn),
            None => {
                entry.names.insert(LocalName::of_dn(dn.as_str().into()), NameOwner::SubSpan);
                Ok(dn)
            }
        }
    }

    /// Stops a subtree, and removes it from the tree when it has ended, also across a restart of its parent. Until
    /// then the key refers to it.
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
        // After a removal for good, a later child of this name starts, although this one was stopped.
        entry.held_by_operator &= removal == Removal::ForReplacement;
        let key = RunKey { slot, incarnation: entry.incarnation };
        match entry.state {
            // No task of it exists, so no exit would remove it later.
            RunnableState::Stopped | RunnableState::Waiting => {
                let TreeEntry { parent, group, rank, .. } = *self.entry(slot);
                self.remove_child(slot);
                let parent = parent.expect("it is not the root");
                self.start_members_after(parent, group, rank, now);
            }
            _ => {
                // `restart_if_settled` removes it, in this call or after the exit of its last task.
                self.cancel_subtree(slot, &CancelCause::Operator, now);
                self.restart_if_settled(slot, now);
            }
        }
        Ok(key)
    }

    /// Removes an entry whose subtree has ended. If members of its group waited for that, they restart.
    pub(super) fn remove_settled(&mut self, slot: u32, now: TreeTime) {
        // Before the removal: the members are found by the entry's place in its group.
        let mut released = Vec::new();
        if !self.waits_for_group(slot) {
            released = self.release_ended_members(slot).unwrap_or_default();
        }
        let TreeEntry { parent: Some(parent), group, rank, .. } = *self.entry(slot) else { return };
        let parent = RunKey { slot: parent, incarnation: self.entry(parent).incarnation };
        self.remove_child(slot);
        let others: Vec<u32> = released.into_iter().filter(|member| *member != slot).collect();
        self.restart_ended(&others, now);
        // One of them may have exceeded its restart limit, so that the parent has ended, and the group with it.
        if let Some(parent) = self.resolve_key(parent) {
            self.start_members_after(parent, group, rank, now);
        }
    }

    /// Removes an entry without running tasks. Its parent keeps its generation and an operator's stop for a child of the
    /// same name: how often and why another definition has failed says nothing about that one.
    pub(super) fn remove_child(&mut self, slot: u32) {
        let TreeEntry { parent: Some(parent), group, rank, .. } = *self.entry(slot) else { return };
        let name: Box<str> = self.entry(slot).local_name().into();
        let history = RunnableHistory { failures: 0, exits: Vec::new(), ..self.remove_entry(slot) };
        let entry = self.entry_mut(parent);
        entry.names.remove(&*name);
        // Names that never come back would take more and more memory. Only an operator's stop must not be lost. They are
        // searched at each power of two: operators may have stopped most of them.
        let histories = entry.former_children.len();
        if histories >= MAX_CHILD_HISTORIES && histories.is_power_of_two() {
            entry.former_children.retain(|_, history| history.held_by_operator);
        }
        entry.former_children.insert(name, history);
        entry.remove_member(group, rank);
    }

    /// Removes an entry's descendants, the last added first, and returns their histories. If the run ended
    /// before it had added all its children, the histories of the missing ones are kept for the next run.
    pub(super) fn remove_children(&mut self, slot: u32) -> ChildHistories {
        let entry = self.entry_mut(slot);
        let names = std::mem::take(&mut entry.names);
        let mut histories = std::mem::take(&mut entry.former_children);
        if histories.len() > MAX_CHILD_HISTORIES {
            histories.retain(|_, history| history.held_by_operator);
        }
        let mut children: Vec<u32> = names
            .into_values()
            .filter_map(|name| match name {
                NameOwner::Child(slot) => Some(slot),
                NameOwner::SubSpan => None,
            })
            .collect();
        children.sort_unstable_by_key(|slot| self.entry(*slot).incarnation);
        for child in children.into_iter().rev() {
            let name = self.entry(child).local_name().into();
            histories.insert(name, self.remove_entry(child));
        }
        histories
    }

    fn remove_entry(&mut self, slot: u32) -> RunnableHistory {
        self.disarm_timer(slot);
        let children = self.remove_children(slot);
        // After the children: in the events, too, no child outlives its parent.
        self.report_change(slot, RunnableChange::Removed);
        self.actions.push(TreeAction::DropRunnable { slot });
        self.free_slots.push(slot);
        let entry = self.slots[slot as usize].take().expect("a referenced slot is in use");
        debug_assert_eq!(entry.live_tasks, 0);
        RunnableHistory {
            generation: entry.generation,
            failures: entry.failures,
            failing_since: entry.failing_since,
            exits: entry.exits,
            held_by_operator: entry.held_by_operator,
            children,
        }
    }
}
