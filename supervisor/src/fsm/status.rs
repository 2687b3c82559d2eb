//! The status of the tree.

use std::sync::Arc;

use super::entry::PastExit;
use super::{ROOT_SLOT, TreeFsm, TreeTime};
use crate::state::{RunnableState, WaitReason};

/// The number of running descendants or members of a group that a status names.
const MAX_NAMED_RUNNABLES: usize = 5;

/// The status of one entry, in the tree's time.
#[derive(Debug)]
pub(crate) struct EntryStatus<'a> {
    pub(crate) dn: &'a Arc<str>,
    pub(crate) state: RunnableState,
    pub(crate) since: TreeTime,
    pub(crate) generation: u64,
    pub(crate) failures: u32,
    /// The time of the first of them, if there are any.
    pub(crate) failing_since: TreeTime,
    /// When its readiness clears its failures, if it stays ready.
    pub(crate) failures_clear_at: Option<TreeTime>,
    pub(crate) exits: &'a [PastExit],
    pub(crate) waiting_for: WaitReason<TreeTime>,
    /// The reason for which others withhold the readiness that it has signaled.
    pub(crate) withheld: Option<&'a Arc<str>>,
}

impl TreeFsm {
    /// All entries, each parent before its children, children in the order of their addition.
    pub(crate) fn entry_statuses(&self) -> Vec<EntryStatus<'_>> {
        let mut statuses = Vec::with_capacity(self.slots.len() - self.free_slots.len());
        let mut open = vec![ROOT_SLOT];
        while let Some(slot) = open.pop() {
            let entry = self.entry(slot);
            statuses.push(EntryStatus {
                dn: &entry.dn,
                state: entry.state,
                since: entry.since,
                generation: entry.generation,
                failures: entry.failures,
                failing_since: entry.failing_since,
                failures_clear_at: entry.failures_clear_at(),
                exits: &entry.exits,
                waiting_for: self.wait_reason(slot),
                withheld: entry
                    .withheld
                    .as_ref()
                    .filter(|_| entry.signaled_ready && entry.state.is_running()),
            });
            // In reverse, because `open` is a stack: the first child is next.
            open.extend(entry.child_slots().rev());
        }
        statuses
    }

    /// Returns whether the entry with this DN is ready or done; `None` without such an entry.
    pub(crate) fn readiness_of(&self, dn: &str) -> Option<bool> {
        Some(self.entry(self.find_slot(dn)?).is_ready_or_done())
    }

    fn wait_reason(&self, slot: u32) -> WaitReason<TreeTime> {
        let entry = self.entry(slot);
        match entry.state {
            RunnableState::Waiting => match entry.timer {
                Some(until) => WaitReason::Backoff(until),
                // `start_after_group` has taken its timer.
                None => match self.unready_member_before(slot) {
                    Some(before) if !self.waits_for_group(slot) => {
                        WaitReason::Dependency(self.entry(before).dn.clone())
                    }
                    _ => WaitReason::GroupMembers(self.running_members(slot)),
                },
            },
            RunnableState::Stopped => WaitReason::OperatorStart,
            RunnableState::New | RunnableState::Ready if entry.canceled => WaitReason::RunnableReturn,
            RunnableState::New => match (&entry.not_ready_reason, &entry.dependency) {
                _ if entry.signaled_ready => WaitReason::Condition(
                    entry.withheld.clone().expect("nothing else keeps it from being ready"),
                ),
                (Some(reason), _) => WaitReason::Condition(Arc::clone(reason)),
                (None, Some(dn)) => WaitReason::Dependency(Arc::clone(dn)),
                (None, None) => WaitReason::ReadySignal,
            },
            RunnableState::Ready => WaitReason::Nothing,
            // It is done: a dead or canceled one has a canceled context.
            _ if !entry.canceled => WaitReason::Nothing,
            _ if entry.live_tasks > 0 => WaitReason::Descendants(self.running_descendants(slot)),
            _ if entry.parent.is_some_and(|parent| self.entry(parent).canceled) => WaitReason::ParentRestart,
            _ if self.waits_for_group(slot) => WaitReason::GroupMembers(self.running_members(slot)),
            _ => WaitReason::Nothing,
        }
    }

    /// The first few members of its group that end together with it and are still running.
    fn running_members(&self, slot: u32) -> Vec<Arc<str>> {
        let entry = self.entry(slot);
        let (Some(parent), Some(ending)) = (entry.parent, self.ending_members(slot)) else {
            return Vec::new();
        };
        let group = self.entry(parent).group(entry.group);
        let members = group.members_within(ending.first_rank, group.end_rank());
        let running = members.map(|member| self.entry(member)).filter(|member| member.live_tasks > 0);
        running.take(MAX_NAMED_RUNNABLES).map(|member| member.dn.clone()).collect()
    }

    /// The first few running entries below `slot`. It skips subtrees without running tasks.
    fn running_descendants(&self, slot: u32) -> Vec<Arc<str>> {
        let mut running = Vec::new();
        let mut open: Vec<u32> = self.entry(slot).child_slots().collect();
        while let Some(slot) = open.pop()
            && running.len() < MAX_NAMED_RUNNABLES
        {
            let entry = self.entry(slot);
            if entry.live_tasks > 0 {
                if entry.state.is_running() {
                    running.push(entry.dn.clone());
                }
                open.extend(entry.child_slots());
            }
        }
        running
    }
}
