//! What follows from an assessment: the readiness of runnables, the age of conditions, and what is new.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::clock::{ClockWatch, WALL_CLOCK};
use super::ledger::{ConditionChange, ConditionLedger};
use super::{Assessment, HealthCondition, NODE_PART};

/// Remembers what earlier assessments have found. Assessments may overlap: of those that have been applied, the one that
/// began last counts.
#[derive(Debug, Default)]
pub(crate) struct HealthMonitor {
    begun: AtomicU64,
    state: Mutex<MonitorState>,
}

#[derive(Debug, Default)]
struct MonitorState {
    /// The turn of the assessment that was applied last.
    applied: u64,
    ledger: ConditionLedger,
    clock: ClockWatch,
}

/// The place of an assessment among the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn(u64);

/// A readiness to withhold, or to give back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadinessChange {
    pub(crate) dn: Arc<str>,
    pub(crate) reason: Option<Arc<str>>,
}

/// What is to be done after an assessment.
#[derive(Debug, Default)]
pub(crate) struct Consequences {
    pub(crate) readiness: Vec<ReadinessChange>,
    pub(crate) changes: Vec<ConditionChange>,
}

impl HealthMonitor {
    /// Begins an assessment.
    pub(crate) fn begin(&self) -> Turn {
        Turn(self.begun.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Notes what an assessment has found, and sets the age and the count of its conditions.
    pub(crate) fn apply(&self, turn: Turn, assessment: &mut Assessment) -> Consequences {
        let now = Instant::now();
        let state = &mut *self.lock();
        let Assessment { conditions, readiness } = assessment;
        if turn.0 < state.applied {
            state.ledger.describe(conditions);
            return Consequences::default();
        }
        state.applied = turn.0;
        if state.clock.look(now) {
            state.ledger.begin_again(NODE_PART, WALL_CLOCK);
        }
        conditions.extend(state.clock.condition(now));
        let changes = state.ledger.note(now, conditions);
        Consequences { readiness: std::mem::take(readiness), changes }
    }

    fn lock(&self) -> MutexGuard<'_, MonitorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The readiness that follows from what the parts say of their runnables. A runnable whose own state is a problem already
/// is not withheld: a crash loop would never end.
pub(super) fn readiness_changes(
    tree: &[RunnableReadiness],
    of_parts: &[HealthCondition],
) -> Vec<ReadinessChange> {
    let change = |runnable: &RunnableReadiness| {
        let found = of_parts.iter().find(|found| found.is_problem() && *found.object == *runnable.dn);
        let reason = found.filter(|_| runnable.is_healthy).map(|found| Arc::from(found.problem.as_str()));
        let is_changed = runnable.withheld.as_deref() != reason.as_deref();
        is_changed.then(|| ReadinessChange { dn: Arc::clone(&runnable.dn), reason })
    };
    tree.iter().filter_map(change).collect()
}

/// A runnable, as far as its readiness goes.
#[derive(Debug, Clone)]
pub(crate) struct RunnableReadiness {
    pub(crate) dn: Arc<str>,
    /// By its own signals and exits alone.
    pub(crate) is_healthy: bool,
    /// The reason for which its readiness is withheld at present.
    pub(crate) withheld: Option<Arc<str>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runnable(is_healthy: bool, withheld: Option<&str>) -> RunnableReadiness {
        RunnableReadiness { dn: "root.fan".into(), is_healthy, withheld: withheld.map(Arc::from) }
    }

    /// The reasons that are set, of a part that reports this problem of its runnable.
    fn reasons(of: RunnableReadiness, problem: Option<&str>) -> Vec<Option<String>> {
        let mut found = vec![
            HealthCondition::problem("fan 1", "does not turn"),
            HealthCondition::warning("root.fan", "is loud"),
        ];
        found.extend(problem.map(|problem| HealthCondition::problem("root.fan", problem)));
        let changes = readiness_changes(&[of], &found);
        changes.into_iter().map(|change| change.reason.as_deref().map(str::to_owned)).collect()
    }

    #[test]
    fn a_runnable_is_not_ready_while_its_part_has_a_problem_with_it() {
        assert_eq!(reasons(runnable(true, None), None), []);
        assert_eq!(reasons(runnable(true, None), Some("hangs")), [Some("hangs".to_owned())]);
        assert_eq!(reasons(runnable(true, Some("hangs")), Some("hangs")), []);
        assert_eq!(reasons(runnable(true, Some("hangs")), Some("is gone")), [Some("is gone".to_owned())]);
        assert_eq!(reasons(runnable(true, Some("hangs")), None), [None]);
    }

    #[test]
    fn a_crash_loop_is_not_kept_from_becoming_stable() {
        assert_eq!(reasons(runnable(false, None), Some("crash-loops")), []);
        assert_eq!(reasons(runnable(false, Some("hangs")), Some("crash-loops")), [None]);
    }

    #[test]
    fn an_assessment_that_began_before_the_last_one_changes_nothing() {
        let monitor = HealthMonitor::default();
        let (early, late) = (monitor.begin(), monitor.begin());
        let assess = |turn, problems: &[&str]| {
            let problem = |object: &&str| HealthCondition::problem(*object, "is loud");
            let conditions = problems.iter().map(problem).collect();
            let mut assessment = Assessment { conditions, readiness: Vec::new() };
            let consequences = monitor.apply(turn, &mut assessment);
            (
                consequences.changes.len(),
                assessment.conditions.iter().map(|found| found.count).collect::<Vec<_>>(),
            )
        };
        assert_eq!(assess(late, &["fan 1"]), (1, vec![1]));
        assert_eq!(assess(early, &["fan 1", "fan 2"]), (0, vec![1, 0]));
        assert_eq!(assess(monitor.begin(), &["fan 1"]), (0, vec![1]));
    }
}
