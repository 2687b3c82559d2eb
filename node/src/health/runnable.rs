//! The health that the tree itself knows: runnables that are not ready, in a crash loop, or fail now and then.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;

use super::{HealthCondition, NODE_PART};
use crate::v1::{Exit, Node, State};

/// The time for which failures of a runnable that has recovered stay a warning.
const RECENT: Duration = Duration::from_secs(3600);

/// The number of failures within [`RECENT`] that is a warning.
const RECENT_FAILURES: usize = 3;

/// The condition of a runnable; `None` if it is healthy.
pub(super) fn runnable_condition(node: &Node, now: SystemTime) -> Option<HealthCondition> {
    let condition = if !node.is_healthy() {
        problem(node)
    } else if !node.probe_problem.is_empty() {
        unasked(node)
    } else {
        recent_failures(node, now)?
    };
    let part = node.dn.split('.').nth(1).unwrap_or(NODE_PART).to_owned();
    Some(HealthCondition { part, ..condition })
}

fn problem(node: &Node) -> HealthCondition {
    let (problem, hint) = describe(node);
    // It exists since its first failure, and not since the current incarnation.
    let since = node.failing_since.or(node.since);
    // The text of the problem contains the condition already.
    let waiting_for = if node.condition.is_empty() { node.waiting_for.as_str() } else { "" };
    HealthCondition::problem(node.dn.as_str(), problem)
        .since(since.and_then(to_system_time))
        .waiting_for(waiting_for)
        .hint(hint)
}

/// The problem, and what to type.
fn describe(node: &Node) -> (String, String) {
    let dn = &node.dn;
    let status = format!("`nodectl status {dn}`");
    let reason = last_failure(node).map(|exit| format!(": {}", exit.reason)).unwrap_or_default();
    match node.state() {
        // First, since a runnable in a crash loop is in one of the states below between two failures.
        _ if node.is_crash_looping() => {
            let problem =
                format!("crash-loops: {} consecutive failures, the last one{reason}", node.failures);
            (problem, failure_hint(node, &status))
        }
        State::New | State::Waiting if node.failures > 0 => {
            (format!("has failed, and is not ready again{reason}"), failure_hint(node, &status))
        }
        State::New if !node.probe_problem.is_empty() => {
            (format!("is not ready: {}", node.probe_problem), SHORTAGE_HINT.to_owned())
        }
        State::New if !node.condition.is_empty() => (format!("is not ready: {}", node.condition), status),
        State::New => ("is not ready".to_owned(), not_ready_hint(node, status)),
        State::Waiting => ("is not running".to_owned(), not_ready_hint(node, status)),
        State::Dead => {
            let hint = format!("{}, then `nodectl restart {dn}`", failure_hint(node, &status));
            (format!("has failed, and is not restarted{reason}"), hint)
        }
        State::Canceled => ("was stopped together with its parent or group".to_owned(), status),
        State::Stopped => ("was stopped by an operator".to_owned(), format!("`nodectl start {dn}`")),
        // Healthy runnables do not get here: this is a state that this version does not know.
        State::Ready | State::Done | State::Skipped | State::Unspecified => {
            ("is in an unknown state".to_owned(), status)
        }
    }
}

/// Points at the awaited runnable, which knows more.
fn not_ready_hint(node: &Node, status: String) -> String {
    // A runnable that waits for itself waits for its own readiness.
    match node.waiting_on.first().filter(|awaited| **awaited != node.dn) {
        Some(awaited) => format!("`nodectl status {awaited}`"),
        None => status,
    }
}

fn failure_hint(node: &Node, status: &str) -> String {
    match last_failure(node) {
        Some(exit) if exit.out_of_memory && exit.reason.contains("its limit is") => {
            format!("raise its limits.memory_max in the configuration; {status}")
        }
        Some(exit) if exit.out_of_memory => {
            format!("`nodectl logs root.kernel --grep oom` names whose memory ran out; {status}")
        }
        _ => status.to_owned(),
    }
}

/// The remedy where the host had nothing left for a probe.
const SHORTAGE_HINT: &str =
    "free processes, open files or memory: `ps -eo user,pid,nlwp,rss,args --sort -rss`";

/// The warning about a runnable that may be well or not.
fn unasked(node: &Node) -> HealthCondition {
    let problem = format!("may be well or not: {}", node.probe_problem);
    HealthCondition::warning(node.dn.as_str(), problem).hint(SHORTAGE_HINT)
}

/// The warning about a runnable that is ready again after a failure, or fails again and again, and is ready for long enough
/// in between to count as stable.
fn recent_failures(node: &Node, now: SystemTime) -> Option<HealthCondition> {
    let is_recent = |exit: &&Exit| {
        let at = exit.at.and_then(to_system_time);
        at.is_some_and(|at| now.duration_since(at).is_ok_and(|ago| ago <= RECENT))
    };
    let failures: Vec<_> = failures(node).filter(is_recent).collect();
    let last = failures.last()?;
    // A single kill for memory is a warning, too: the limit is too low, and the next kill is likely.
    if failures.len() < RECENT_FAILURES && !last.out_of_memory && node.failures == 0 {
        return None;
    }
    let count = match failures.len() {
        1 => "once".to_owned(),
        count => format!("{count} times"),
    };
    let problem = format!("has failed {count} within an hour, the last time: {}", last.reason);
    let hint = failure_hint(node, &format!("`nodectl status {}`", node.dn));
    let since = failures.first().and_then(|exit| exit.at).and_then(to_system_time);
    Some(HealthCondition::warning(node.dn.as_str(), problem).since(since).hint(hint))
}

fn failures(node: &Node) -> impl DoubleEndedIterator<Item = &Exit> {
    node.exits.iter().filter(|exit| exit.state() == State::Dead)
}

fn last_failure(node: &Node) -> Option<&Exit> {
    failures(node).next_back()
}

fn to_system_time(time: Timestamp) -> Option<SystemTime> {
    time.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::super::ConditionSeverity;
    use super::*;

    const NOW: u64 = 1_000_000;

    fn time(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn node(state: State) -> Node {
        Node {
            dn: "root.service.a".into(),
            state: state.into(),
            since: Some(time(NOW - 5).into()),
            ..Node::default()
        }
    }

    fn exit(ago: u64, reason: &str) -> Exit {
        let at = Some(time(NOW - ago).into());
        Exit { at, state: State::Dead.into(), reason: reason.into(), ..Exit::default() }
    }

    #[track_caller]
    fn condition(node: Node) -> HealthCondition {
        runnable_condition(&node, time(NOW)).expect("a condition")
    }

    #[test]
    fn a_crash_loop_says_how_often_since_when_and_why() {
        let exits = vec![exit(900, "an older failure"), exit(30, "exited with code 2"), exit(9, "code 3")];
        let waiting_for = "its backoff, 2.0 s more".to_owned();
        let failing_since = Some(time(NOW - 300).into());
        let found =
            condition(Node { failures: 2, failing_since, exits, waiting_for, ..node(State::Waiting) });
        assert_eq!(
            found,
            HealthCondition {
                part: "service".into(),
                severity: ConditionSeverity::Problem,
                object: "root.service.a".into(),
                problem: "crash-loops: 2 consecutive failures, the last one: code 3".into(),
                since: Some(time(NOW - 300)),
                count: 0,
                waiting_for: "its backoff, 2.0 s more".into(),
                hint: "`nodectl status root.service.a`".into(),
            }
        );
    }

    #[test]
    fn each_state_that_is_not_healthy_says_what_to_type() {
        let memory =
            Exit { out_of_memory: true, ..exit(9, "killed by SIGKILL: out of memory, its limit is 64 MiB") };
        let elsewhere = Exit {
            out_of_memory: true,
            ..exit(9, "killed by SIGKILL: out of memory, by the limit of a cgroup")
        };
        let dependency = Node {
            waiting_for: "root.etcd to become ready".into(),
            waiting_on: vec!["root.etcd".into()],
            ..node(State::New)
        };
        let clause = "waits for a majority: 1 of 3 members reachable";
        let with_clause = Node { condition: clause.into(), waiting_for: clause.into(), ..node(State::New) };
        for (node, problem, waiting_for, hint) in [
            (dependency, "is not ready", "root.etcd to become ready", "`nodectl status root.etcd`"),
            (with_clause, &*format!("is not ready: {clause}"), "", "`nodectl status root.service.a`"),
            (
                Node { exits: vec![exit(9, "code 3")], ..node(State::Dead) },
                "has failed, and is not restarted: code 3",
                "",
                "`nodectl status root.service.a`, then `nodectl restart root.service.a`",
            ),
            (
                Node { exits: vec![memory], failures: 1, ..node(State::Waiting) },
                "has failed, and is not ready again: killed by SIGKILL: out of memory, its limit is 64 MiB",
                "",
                "raise its limits.memory_max in the configuration; `nodectl status root.service.a`",
            ),
            (
                Node { exits: vec![elsewhere], failures: 1, ..node(State::Waiting) },
                "has failed, and is not ready again: killed by SIGKILL: out of memory, by the limit of a cgroup",
                "",
                "`nodectl logs root.kernel --grep oom` names whose memory ran out; `nodectl status root.service.a`",
            ),
            (node(State::Stopped), "was stopped by an operator", "", "`nodectl start root.service.a`"),
            (
                node(State::Canceled),
                "was stopped together with its parent or group",
                "",
                "`nodectl status root.service.a`",
            ),
        ] {
            let found = condition(node);
            let shown = (found.problem.as_str(), found.waiting_for.as_str(), found.hint.as_str());
            assert_eq!(shown, (problem, waiting_for, hint));
            assert_eq!(found.severity, ConditionSeverity::Problem);
        }
    }

    #[test]
    fn a_stable_runnable_that_fails_again_and_again_or_for_its_memory_is_a_warning_for_an_hour() {
        let ready = |exits: Vec<Exit>| runnable_condition(&Node { exits, ..node(State::Ready) }, time(NOW));
        assert_eq!(ready(vec![exit(3000, "a"), exit(2000, "b")]), None);
        assert_eq!(ready(vec![exit(4000, "a"), exit(2000, "b"), exit(1000, "c")]), None);
        let found = ready(vec![exit(3000, "a"), exit(2000, "b"), exit(1000, "c")]).expect("a warning");
        assert_eq!(found.to_string(), "root.service.a: has failed 3 times within an hour, the last time: c");
        assert_eq!((found.severity, found.since), (ConditionSeverity::Warning, Some(time(NOW - 3000))));
        let found = ready(vec![Exit { out_of_memory: true, ..exit(3600, "memory") }]).expect("a warning");
        assert_eq!(found.problem, "has failed once within an hour, the last time: memory");
        assert_eq!(ready(vec![Exit { out_of_memory: true, ..exit(3601, "memory") }]), None);
        let recovered = Node { failures: 1, exits: vec![exit(9, "a")], ..node(State::Ready) };
        let found = runnable_condition(&recovered, time(NOW)).expect("a warning");
        assert_eq!(found.to_string(), "root.service.a: has failed once within an hour, the last time: a");
        assert_eq!(found.severity, ConditionSeverity::Warning, "one failure is no crash loop");
        let canceled = Exit { state: State::Canceled.into(), ..exit(1, "canceled") };
        assert_eq!(ready(vec![canceled.clone(), canceled.clone(), canceled]), None);
    }
}
