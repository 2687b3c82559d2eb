//! The shared fate of a group: which members end with a failed one, and when they may start again.
//!
//! The members that end together are those from one rank on. While any of them has a running task in its
//! subtree, none of them starts. The last exit releases them all at once. A failure among members that are
//! already ending changes nothing, so that the cost of any number of simultaneous failures is proportional to
//! the size of the group.

use super::{TreeFsm, TreeTime};
use crate::event::CancelCause;
use crate::policy::GroupPolicy;
use crate::state::RunnableState;

/// Children that were added together.
#[derive(Debug, Clone)]
pub(super) struct ChildGroup {
    pub(super) policy: GroupPolicy,
    pub(super) members: Vec<u32>,
    /// The members that are ending together.
    pub(super) ending: Option<EndingMembers>,
}

/// The members of a group that are ending together: those from a rank on.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndingMembers {
    pub(super) first_rank: u32,
    /// How many of them have running tasks in their subtree.
    pub(super) live: u32,
}

impl TreeFsm {
    /// Ends the members that share the fate of a failed one.
    pub(super) fn end_members_with(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry(slot);
        let Some(parent) = entry.parent else { return };
        let (index, rank, cause) = (entry.group as usize, entry.rank, CancelCause::Sibling(entry.dn.clone()));
        let group = &self.entry(parent).groups[index];
        let first_rank = match group.policy {
            GroupPolicy::OneForOne => return,
            GroupPolicy::OneForAll => 0,
            GroupPolicy::RestForOne => rank,
        };
        let until = group.ending.map_or(group.members.len(), |ending| ending.first_rank as usize);
        if group.members.len() < 2 || first_rank as usize >= until {
            return;
        }
        let added = group.members[first_rank as usize..until].to_vec();
        let already_live = group.ending.map_or(0, |ending| ending.live);
        let live = added.iter().filter(|member| self.entry(**member).live_tasks > 0).count();
        let live = already_live + u32::try_from(live).expect("fewer members than slots");
        self.entry_mut(parent).groups[index].ending = Some(EndingMembers { first_rank, live });
        for member in added {
            // A member in backoff has ended, and keeps its delay: otherwise two failing members would restart
            // each other without any delay.
            let has_ended =
                matches!(self.entry(member).state, RunnableState::Waiting | RunnableState::Stopped);
            if member != slot && !has_ended {
                self.cancel_subtree(member, &cause, now);
            }
        }
    }

    /// Whether this entry must not start yet, because members that end together with it are still running.
    pub(super) fn waits_for_group(&self, slot: u32) -> bool {
        self.ending_members(slot).is_some_and(|ending| ending.live > 0)
    }

    /// The members that have ended together with this one, from now on free to start. `None`: it alone.
    pub(super) fn release_ended_members(&mut self, slot: u32) -> Option<Vec<u32>> {
        let ending = self.ending_members(slot)?;
        let entry = self.entry(slot);
        let (parent, index) = (entry.parent?, entry.group as usize);
        let group = &mut self.entry_mut(parent).groups[index];
        group.ending = None;
        Some(group.members[ending.first_rank as usize..].to_vec())
    }

    /// Starts an entry, or lets it wait for the members of its group that are ending.
    pub(super) fn start_after_group(&mut self, slot: u32, now: TreeTime) {
        if !self.waits_for_group(slot) {
            return self.start_run(slot, now);
        }
        self.disarm_timer(slot);
        if self.entry(slot).state == RunnableState::Stopped {
            self.enter_waiting(slot, TreeTime::ZERO, now);
        }
    }

    /// The running tasks of a member's subtree have exited.
    pub(super) fn count_ended_member(&mut self, parent: u32, group: u32, rank: u32) {
        if let Some(ending) = &mut self.entry_mut(parent).groups[group as usize].ending
            && rank >= ending.first_rank
        {
            ending.live = ending.live.checked_sub(1).expect("each member ends once");
        }
    }

    /// The other members that are ending together with this one and have running tasks.
    pub(super) fn live_members_ending_with(&self, slot: u32) -> impl Iterator<Item = u32> + '_ {
        let group =
            self.entry(slot).parent.map(|parent| &self.entry(parent).groups[self.entry(slot).group as usize]);
        let first_rank = self.ending_members(slot).map_or(usize::MAX, |ending| ending.first_rank as usize);
        let members = group.into_iter().flat_map(move |group| group.members.iter().skip(first_rank).copied());
        members.filter(|member| self.entry(*member).live_tasks > 0)
    }

    fn ending_members(&self, slot: u32) -> Option<EndingMembers> {
        let entry = self.entry(slot);
        let group = &self.entry(entry.parent?).groups[entry.group as usize];
        group.ending.filter(|ending| entry.rank >= ending.first_rank)
    }
}
