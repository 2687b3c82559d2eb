//! When the agent acts on which condition.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

use super::AgentConfig;
use super::plan::{ClusterCondition, NodeProblem};
use crate::node_lease::LEASE_DURATION;

/// Maximum delay of a retry, and before a claim's node is deselected again.
const MAX_DELAY: Duration = Duration::from_secs(300);

/// Minimum delay before a claim's node is deselected again, also without a grace period.
const MIN_REPEAT_DELAY: Duration = Duration::from_secs(1);

/// The delays after consecutive failures.
const RETRIES: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: MAX_DELAY, jitter: 0.0 };

/// The end of acting on a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ActionOutcome {
    /// The condition needs nothing more while it lasts.
    Done,
    /// The node was deselected: the scheduler may select it again.
    Deselected,
    /// Failed, or an object has changed: again later, if the condition still holds.
    Retry,
}

/// The conditions that hold, and when each is due.
#[derive(Debug)]
pub(super) struct Agenda {
    delays: AgentConfig,
    items: BTreeMap<ClusterCondition, AgendaItem>,
    /// The number of times that a node of each pending claim was deselected, by the claim's UID.
    deselections: HashMap<String, u32>,
}

#[derive(Debug)]
struct AgendaItem {
    /// `None`: never, because the action is done.
    due: Option<Instant>,
    failures: u32,
}

impl Agenda {
    pub(super) fn new(config: &AgentConfig) -> Self {
        Self { delays: config.clone(), items: BTreeMap::new(), deselections: HashMap::new() }
    }

    /// Starts the delays of new conditions, and forgets those that have ended. `is_pending` decides whether a
    /// claim, by its UID, still has no volume.
    pub(super) fn update(
        &mut self,
        conditions: BTreeSet<ClusterCondition>,
        is_pending: impl Fn(&str) -> bool,
        now: Instant,
    ) {
        self.items.retain(|condition, _| conditions.contains(condition));
        self.deselections.retain(|uid, _| is_pending(uid));
        for condition in conditions {
            let delay = self.delay(&condition);
            // A delay that the clock can't represent is never over.
            let new = || AgendaItem { due: delay.and_then(|delay| now.checked_add(delay)), failures: 0 };
            self.items.entry(condition).or_insert_with(new);
        }
    }

    /// Starts the delays again, except of conditions that are done, after the objects were outdated for some time.
    pub(super) fn restart_delays(&mut self, now: Instant) {
        // Taken out, because `delay` borrows the agenda.
        let mut items = std::mem::take(&mut self.items);
        for (condition, item) in items.iter_mut().filter(|(_, item)| item.due.is_some()) {
            item.due = self.delay(condition).and_then(|delay| now.checked_add(delay));
        }
        self.items = items;
    }

    /// The time for which a condition must last; `None` if nothing is done about it.
    fn delay(&self, condition: &ClusterCondition) -> Option<Duration> {
        let AgentConfig { grace_period, node_gone_after, remove_after, .. } = &self.delays;
        match condition {
            // It has lasted for the duration of the Lease already.
            ClusterCondition::Unresponsive { .. } => Some(grace_period.saturating_sub(LEASE_DURATION)),
            ClusterCondition::UnusableNode { claim, problem, .. } => {
                let grace_period = match problem {
                    NodeProblem::LeaseExpired => &grace_period.saturating_sub(LEASE_DURATION),
                    _ => grace_period,
                };
                let count = self.deselections.get(&claim.uid).copied().unwrap_or_default();
                // The scheduler may select the same node at once: without a delay, both would write in a loop.
                let first = if count == 0 { *grace_period } else { (*grace_period).max(MIN_REPEAT_DELAY) };
                let doubled = first.saturating_mul(1_u32.checked_shl(count).unwrap_or(u32::MAX));
                // A grace period holds even if it is longer than the longest delay.
                Some(doubled.min(MAX_DELAY).max(*grace_period))
            }
            ClusterCondition::UnservedClaim { .. } | ClusterCondition::StuckPod { .. } => Some(*grace_period),
            ClusterCondition::NodeGone { .. } => Some(*node_gone_after),
            ClusterCondition::Removable { .. } => remove_after.map(|delay| delay.max(*node_gone_after)),
        }
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.items.values().filter_map(|item| item.due).min()
    }

    pub(super) fn due_conditions(&self, now: Instant) -> Vec<ClusterCondition> {
        let is_due = |item: &AgendaItem| item.due.is_some_and(|due| due <= now);
        self.items.iter().filter(|(_, item)| is_due(item)).map(|(condition, _)| condition.clone()).collect()
    }

    pub(super) fn record_outcome(
        &mut self,
        condition: &ClusterCondition,
        outcome: ActionOutcome,
        now: Instant,
    ) {
        if outcome == ActionOutcome::Deselected
            && let ClusterCondition::UnusableNode { claim, .. } = condition
        {
            let count = self.deselections.entry(claim.uid.clone()).or_default();
            *count = count.saturating_add(1);
        }
        let delay = self.delay(condition);
        let Some(item) = self.items.get_mut(condition) else { return };
        let delay = match outcome {
            ActionOutcome::Done => None,
            ActionOutcome::Deselected => delay,
            ActionOutcome::Retry => {
                item.failures = item.failures.saturating_add(1);
                Some(RETRIES.jittered_delay(item.failures, 0.0))
            }
        };
        item.due = delay.and_then(|delay| now.checked_add(delay));
    }

    /// The conditions that have lasted for their delay.
    pub(super) fn reached_conditions(&self, now: Instant) -> impl Iterator<Item = &ClusterCondition> {
        let is_reached = move |item: &AgendaItem| item.failures > 0 || item.due.is_none_or(|due| due <= now);
        self.items.iter().filter(move |(_, item)| is_reached(item)).map(|(condition, _)| condition)
    }
}
