//! The record of one runnable in the tree.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::policy::{ChildPolicy, GroupPolicy, RestartLimit};
use crate::process_exit::{ForcedKill, ProcessExit};
use crate::state::{ExitReason, MAX_EXITS, RunnableState};

/// A point in time, as the duration since the start of the tree.
pub(crate) type TreeTime = Duration;

/// A hundred years: clocks can still add it to the current time.
pub(super) const MAX_DELAY: TreeTime = Duration::from_secs(100 * 365 * 24 * 3600);

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RunnableSettings {
    pub(crate) policy: ChildPolicy,
    pub(crate) stop_timeout: Duration,
    /// The DNs of the runnables that a shutdown stops after this one.
    pub(crate) stop_before: Vec<Arc<str>>,
}

/// One past exit, in the tree's time.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PastExit {
    pub(crate) at: TreeTime,
    pub(crate) generation: u64,
    pub(crate) state: RunnableState,
    pub(crate) exit: ExitReason,
}

/// The state that the tree keeps of a DN after its entry is removed, for the entry that replaces it after a
/// restart of the parent.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunnableHistory {
    pub(super) generation: u64,
    pub(super) failures: u32,
    /// The time of the first of them, if there are any.
    pub(super) failing_since: TreeTime,
    pub(super) exits: Vec<PastExit>,
    pub(super) held_by_operator: bool,
    pub(super) children: ChildHistories,
}

/// The histories of children by name. Few runnables have any, and an empty `BTreeMap` is small.
pub(super) type ChildHistories = BTreeMap<Box<str>, RunnableHistory>;

/// The last component of a DN, by which an entry finds its children. It shares the DN's memory with the child.
#[derive(Debug, Clone)]
pub(super) struct LocalName(Arc<str>);

impl LocalName {
    pub(super) fn of_dn(dn: Arc<str>) -> Self {
        Self(dn)
    }

    fn as_str(&self) -> &str {
        local_name(&self.0)
    }
}

impl Borrow<str> for LocalName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl PartialEq for LocalName {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for LocalName {}

impl PartialOrd for LocalName {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LocalName {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

/// The search for a name compares some of them: a loop over their few bytes is several times as fast as `rsplit`.
fn local_name(dn: &str) -> &str {
    let start = dn.bytes().rposition(|byte| byte == b'.').map_or(0, |dot| dot + 1);
    &dn[start..]
}

/// The owner of a name below an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameOwner {
    Child(u32),
    SubSpan,
}

/// The groups of an entry's children.
#[derive(Debug, Clone, Default)]
struct ChildGroups {
    groups: Vec<ChildGroup>,
    /// The indices of those without a member, which the next groups replace.
    empty: Vec<u32>,
}

/// The ranks of the members that are neither ready nor done.
#[derive(Debug, Clone)]
struct StartOrder {
    unready: BTreeSet<u32>,
}

/// Children that were added together.
#[derive(Debug, Clone)]
pub(super) struct ChildGroup {
    pub(super) policy: GroupPolicy,
    /// By rank. A member that has left leaves its place empty, so that the ranks of the others stay.
    members: Box<[Option<u32>]>,
    /// The number of those that are there.
    present: u32,
    /// Only in a group whose members start in order.
    order: Option<Box<StartOrder>>,
    /// The members that are ending together.
    pub(super) ending: Option<EndingMembers>,
}

impl ChildGroup {
    pub(super) fn new(policy: GroupPolicy, members: &[u32]) -> Self {
        let present = u32::try_from(members.len()).expect("fewer members than slots");
        let order = (policy == GroupPolicy::RestForOne)
            .then(|| Box::new(StartOrder { unready: (0..present).collect() }));
        Self { policy, members: members.iter().copied().map(Some).collect(), present, order, ending: None }
    }

    pub(super) fn len(&self) -> usize {
        self.present as usize
    }

    /// The rank after the last one.
    pub(super) fn end_rank(&self) -> u32 {
        u32::try_from(self.members.len()).expect("fewer members than slots")
    }

    /// Its members in the order of their ranks.
    pub(super) fn members(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.members_within(0, self.end_rank())
    }

    /// Those with a rank in `[first, end)`.
    pub(super) fn members_within(&self, first: u32, end: u32) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.members[first as usize..end as usize].iter().copied().flatten()
    }

    /// The last member before this rank that is neither ready nor done; none where members start in any order.
    pub(super) fn last_unready_before(&self, rank: u32) -> Option<u32> {
        let rank = *self.order.as_ref()?.unready.range(..rank).next_back()?;
        self.members[rank as usize]
    }

    /// The first member from this rank on that is neither ready nor done; none where members start in any order.
    pub(super) fn first_unready_from(&self, rank: u32) -> Option<u32> {
        let rank = *self.order.as_ref()?.unready.range(rank..).next()?;
        self.members[rank as usize]
    }

    pub(super) fn set_readiness(&mut self, rank: u32, is_ready_or_done: bool) {
        match &mut self.order {
            Some(order) if is_ready_or_done => _ = order.unready.remove(&rank),
            Some(order) => _ = order.unready.insert(rank),
            None => {}
        }
    }

    /// A member leaves. Returns whether it was the last one.
    pub(super) fn remove(&mut self, rank: u32) -> bool {
        self.members[rank as usize] = None;
        self.set_readiness(rank, true);
        self.present -= 1;
        self.present == 0
    }
}

/// The members of a group that are ending together: those from a rank on.
#[derive(Debug, Clone, Copy)]
pub(super) struct EndingMembers {
    pub(super) first_rank: u32,
    /// The number of them that have running tasks in their subtree.
    pub(super) live: u32,
}

/// The entry of one runnable in the tree. Most runnables have no children and have never exited: the fields for
/// children and exits take little memory while they are empty.
#[derive(Debug, Clone)]
pub(super) struct TreeEntry {
    pub(super) dn: Arc<str>,
    pub(super) parent: Option<u32>,
    /// The index in the parent's groups.
    pub(super) group: u32,
    /// The index in the group.
    pub(super) rank: u32,
    /// The members of its group start in order.
    pub(super) starts_in_order: bool,
    /// Shared with all that have the supervisor's defaults.
    pub(super) settings: Arc<RunnableSettings>,
    pub(super) incarnation: u64,
    /// The number of starts of this DN.
    pub(super) generation: u64,
    pub(super) state: RunnableState,
    pub(super) since: TreeTime,
    /// The time at which it was canceled, or started to end by itself: since then it no longer counts as working.
    pub(super) ending_since: Option<TreeTime>,
    /// The context is canceled, and so are its descendants'.
    pub(super) canceled: bool,
    /// The reason why it can't do its work at present, in its own words.
    pub(super) not_ready_reason: Option<Arc<str>>,
    /// It has signaled ready, and not taken it back.
    pub(super) signaled_ready: bool,
    /// The reason for which others withhold its readiness.
    pub(super) withheld: Option<Arc<str>>,
    pub(super) signaled_done: bool,
    /// The exit to record, regardless of the result of its runnable.
    pub(super) forced_exit: Option<Box<ExitReason>>,
    /// The exit of this run's child process. `classify_exit` adds it to the reason: an error of the run has it only as
    /// text.
    pub(super) process_exit: Option<Arc<ProcessExit>>,
    /// The kill that this run's stop needed.
    pub(super) forced_kill: Option<Box<ForcedKill>>,
    /// An operator has stopped it.
    pub(super) held_by_operator: bool,
    /// Its run was canceled to stop or to start anew by itself: its group keeps running, however the run ends.
    pub(super) canceled_alone: bool,
    /// The runnable has exceeded its restart limit.
    pub(super) stays_dead: bool,
    /// The runnable leaves the tree when its subtree has ended.
    pub(super) removal_requested: bool,
    /// A restart was requested, at once and regardless of its policy.
    pub(super) restart_requested: bool,
    /// The DN for which its runnable waits by `wait_ready`.
    pub(super) dependency: Option<Arc<str>>,
    pub(super) names: BTreeMap<LocalName, NameOwner>,
    /// Most runnables have no children.
    groups: Option<Box<ChildGroups>>,
    /// The number of entries of its subtree, including itself, that have a task.
    pub(super) live_tasks: u32,
    pub(super) failures: u32,
    /// The time of the first of them, if there are any.
    pub(super) failing_since: TreeTime,
    /// When it restarted after failures, as far as its restart limit counts them.
    pub(super) restarts: Vec<TreeTime>,
    /// At most [`MAX_EXITS`], oldest first.
    pub(super) exits: Vec<PastExit>,
    /// The histories of the children of earlier incarnations.
    pub(super) former_children: ChildHistories,
    pub(super) timer: Option<TreeTime>,
    /// The shutdown has reached its subtree.
    pub(super) stop_requested: bool,
}

impl TreeEntry {
    /// An entry without a place in the tree and an incarnation: the caller gives it both.
    pub(super) fn new(
        dn: Arc<str>,
        settings: Arc<RunnableSettings>,
        now: TreeTime,
        history: RunnableHistory,
    ) -> Self {
        Self {
            dn,
            parent: None,
            group: 0,
            rank: 0,
            starts_in_order: false,
            settings,
            incarnation: 0,
            generation: history.generation,
            state: RunnableState::Waiting,
            since: now,
            ending_since: None,
            canceled: false,
            not_ready_reason: None,
            signaled_ready: false,
            withheld: None,
            signaled_done: false,
            forced_exit: None,
            process_exit: None,
            forced_kill: None,
            held_by_operator: history.held_by_operator,
            canceled_alone: false,
            stays_dead: false,
            removal_requested: false,
            restart_requested: false,
            dependency: None,
            names: BTreeMap::new(),
            groups: None,
            live_tasks: 0,
            failures: history.failures,
            failing_since: history.failing_since,
            restarts: Vec::new(),
            exits: history.exits,
            former_children: history.children,
            timer: None,
            stop_requested: false,
        }
    }

    /// Returns whether it does its work, or has done it. A run that is ending is not ready, although it may signal it.
    pub(super) fn is_ready_or_done(&self) -> bool {
        match self.state {
            RunnableState::Ready => self.ending_since.is_none(),
            state => state == RunnableState::Done && !self.canceled,
        }
    }

    pub(super) fn local_name(&self) -> &str {
        local_name(&self.dn)
    }

    /// Clears the failures of an entry that was ready for long enough, until `worked_until`.
    pub(super) fn clear_failures_if_stable(&mut self, worked_until: TreeTime) {
        if self.failures_clear_at().is_some_and(|at| at <= worked_until) {
            self.failures = 0;
        }
    }

    /// When its readiness clears its failures, if it stays ready.
    pub(super) fn failures_clear_at(&self) -> Option<TreeTime> {
        let counts = self.state == RunnableState::Ready && self.failures > 0;
        counts.then(|| self.since + self.settings.policy.stable_after.min(MAX_DELAY))
    }

    pub(super) fn enter_state(&mut self, state: RunnableState, now: TreeTime) {
        self.state = state;
        self.since = now;
    }

    /// The exit of a run that returned `Ok` although it should keep running.
    pub(super) fn exit_after_return(&self) -> ExitReason {
        match &self.process_exit {
            Some(exit) => {
                // The process has exited with code 0 although it should have kept running.
                ExitReason::Failed { error: format!("{exit} by itself"), process: Some(exit.clone()) }
            }
            None => ExitReason::ReturnedWithoutDone,
        }
    }

    /// The exit of a run that failed, with the exit of its child process.
    pub(super) fn exit_after_failure(&self, exit: ExitReason) -> ExitReason {
        match exit {
            ExitReason::Failed { error, .. } => {
                ExitReason::Failed { error, process: self.process_exit.clone() }
            }
            exit => exit,
        }
    }

    /// The restart limit that another restart after a failure would exceed. Forgets the restarts that the
    /// limit no longer counts.
    pub(super) fn exceeds_restart_limit(&mut self, now: TreeTime) -> Option<RestartLimit> {
        let limit = self.settings.policy.restart_limit?;
        self.restarts.retain(|at| now.saturating_sub(*at) < limit.period);
        (self.restarts.len() >= limit.restarts as usize).then_some(limit)
    }

    /// The exit of a run that ended as requested.
    pub(super) fn exit_after_cancellation(&self) -> ExitReason {
        match (&self.forced_kill, &self.process_exit) {
            (Some(kill), Some(process)) => ExitReason::Killed { kill: **kill, process: Arc::clone(process) },
            (_, process) => ExitReason::Canceled { process: process.clone() },
        }
    }

    pub(super) fn record_exit(&mut self, past_exit: PastExit) {
        if self.exits.len() == MAX_EXITS {
            self.exits.remove(0);
        }
        self.exits.push(past_exit);
    }

    /// Adds a group, in the place of an empty one if there is any. Returns its index.
    pub(super) fn add_group(&mut self, group: ChildGroup) -> u32 {
        let ChildGroups { groups, empty } = &mut **self.groups.get_or_insert_default();
        match empty.pop() {
            Some(index) => {
                groups[index as usize] = group;
                index
            }
            None => {
                groups.push(group);
                u32::try_from(groups.len() - 1).expect("fewer groups than entries")
            }
        }
    }

    pub(super) fn group(&self, index: u32) -> &ChildGroup {
        let groups = self.groups.as_ref().expect("a child has a group");
        &groups.groups[index as usize]
    }

    pub(super) fn group_mut(&mut self, index: u32) -> &mut ChildGroup {
        self.find_group_mut(index).expect("a child has a group")
    }

    /// `None` if the groups have been removed, and the children are about to be.
    pub(super) fn find_group_mut(&mut self, index: u32) -> Option<&mut ChildGroup> {
        self.groups.as_mut()?.groups.get_mut(index as usize)
    }

    /// A member leaves its group.
    pub(super) fn remove_member(&mut self, group: u32, rank: u32) {
        let ChildGroups { groups, empty } = &mut **self.groups.as_mut().expect("a child has a group");
        if groups[group as usize].remove(rank) {
            empty.push(group);
        }
    }

    pub(super) fn remove_groups(&mut self) {
        self.groups = None;
    }

    pub(super) fn groups(&self) -> &[ChildGroup] {
        self.groups.as_ref().map_or(&[], |groups| &groups.groups)
    }

    /// The slots of its children, in the order of their groups.
    pub(super) fn child_slots(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.groups().iter().flat_map(ChildGroup::members)
    }
}
