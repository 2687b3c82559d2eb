//! Converts values of the libraries to messages of the control API.

use std::time::SystemTime;

use nodekeel_logtree::{EntryBody, FieldValue, LeveledEntry, LogEntry, LogField, RawLine, StreamOrigin};
use nodekeel_supervisor::process::{ProcessHandle, Signal};
use nodekeel_supervisor::{
    ExitReason, ExitRecord, RunnableChange, RunnableState, RunnableStatus, WaitReason, wall_clock_time,
};
use prost_types::Timestamp;

use crate::client::level_to_wire;
use crate::event_history::{NodeEvent, NodeEventKind};
use crate::health::{self, ConditionChange, ConditionChangeKind, ConditionSeverity, HealthCondition};
use crate::kernel_kills::KernelKills;
use crate::v1;

pub(crate) fn timestamp(at: SystemTime) -> Option<Timestamp> {
    Some(Timestamp::from(at))
}

fn state_to_wire(state: RunnableState) -> v1::State {
    match state {
        RunnableState::Waiting => v1::State::Waiting,
        RunnableState::New => v1::State::New,
        RunnableState::Ready => v1::State::Ready,
        RunnableState::Done => v1::State::Done,
        RunnableState::Dead => v1::State::Dead,
        RunnableState::Canceled => v1::State::Canceled,
        RunnableState::Stopped => v1::State::Stopped,
        _ => v1::State::Unspecified,
    }
}

pub(crate) fn node_to_wire(status: &RunnableStatus, kills: &KernelKills) -> v1::Node {
    let reason = match &status.waiting_for {
        // One that waits for its own readiness, as etcd's, waits for nothing else.
        WaitReason::Dependency(dn) if *dn == status.dn => &WaitReason::ReadySignal,
        reason => reason,
    };
    let (waiting_for, waiting_on) = waiting_to_wire(reason);
    let condition = match reason {
        WaitReason::Condition(clause) => clause.to_string(),
        _ => String::new(),
    };
    let backoff_until = match status.waiting_for {
        WaitReason::Backoff(until) => timestamp(until),
        _ => None,
    };
    v1::Node {
        dn: status.dn.to_string(),
        state: state_to_wire(status.state).into(),
        since: timestamp(status.since),
        generation: status.generation,
        restarts: status.restart_count(),
        failures: status.failures,
        failing_since: status.failing_since.and_then(timestamp),
        waiting_for,
        waiting_on,
        exits: status.exits.iter().map(|exit| exit_to_wire(exit, kills)).collect(),
        backoff_until,
        condition,
        ..v1::Node::default()
    }
}

/// The node with the running process of a service.
pub(crate) fn with_process(node: v1::Node, handle: &ProcessHandle) -> v1::Node {
    v1::Node {
        pid: handle.pid(),
        process_since: handle.running_since().and_then(timestamp),
        probe_problem: handle.probe_problem().map(|problem| problem.to_string()).unwrap_or_default(),
        ..node
    }
}

/// Describes why a runnable is not ready, and names the DNs that it waits for.
fn waiting_to_wire(reason: &WaitReason) -> (String, Vec<String>) {
    match reason {
        WaitReason::Nothing => (String::new(), Vec::new()),
        WaitReason::Dependency(dn) => (reason.to_string(), vec![dn.to_string()]),
        WaitReason::Descendants(dns) | WaitReason::GroupMembers(dns) => {
            (reason.to_string(), dns.iter().map(ToString::to_string).collect())
        }
        WaitReason::Backoff(until) => {
            // The text is for people. Programs use `backoff_until`.
            let left = until.duration_since(SystemTime::now()).unwrap_or_default();
            (format!("{reason}, {:.1} s more", left.as_secs_f64()), Vec::new())
        }
        other => (other.to_string(), Vec::new()),
    }
}

fn exit_to_wire(record: &ExitRecord, kills: &KernelKills) -> v1::Exit {
    let process = match &record.exit {
        ExitReason::Failed { process, .. } | ExitReason::Canceled { process } => process.as_deref(),
        ExitReason::Killed { process, .. } => Some(&**process),
        _ => None,
    };
    // The last lines explain a failure; of a planned stop, the log has them.
    let explained = process.filter(|_| !matches!(record.exit, ExitReason::Canceled { .. }));
    // The cgroup of a service reports only what noded limits; the kernel's log names every kill.
    let kill = explained.and_then(|exit| kills.find(exit, record.at));
    v1::Exit {
        at: timestamp(record.at),
        generation: record.generation,
        state: state_to_wire(record.state).into(),
        reason: match kill {
            Some(kill) => format!("{}: {kill}", record.exit),
            None => record.exit.to_string(),
        },
        code: process.and_then(|exit| exit.code),
        signal: process.and_then(|exit| exit.signal).map(Signal::as_number),
        output: explained.map(|exit| exit.tail.clone()).unwrap_or_default(),
        out_of_memory: kill.is_some() || process.is_some_and(|exit| exit.oom_kill.is_some()),
    }
}

pub(crate) fn health_to_wire(conditions: Vec<HealthCondition>) -> v1::HealthResponse {
    use v1::health_condition::Severity;
    let healthy = health::is_healthy(&conditions);
    let wire = |condition: HealthCondition| v1::HealthCondition {
        severity: match condition.severity {
            ConditionSeverity::Problem => Severity::Problem.into(),
            ConditionSeverity::Warning => Severity::Warning.into(),
        },
        part: condition.part,
        object: condition.object,
        problem: condition.problem,
        since: condition.since.and_then(timestamp),
        count: condition.count,
        waiting_for: condition.waiting_for,
        hint: condition.hint,
    };
    v1::HealthResponse { healthy, conditions: conditions.into_iter().map(wire).collect() }
}

pub(crate) fn event_to_wire(event: &NodeEvent) -> v1::Event {
    let wire = v1::Event {
        seq: event.seq,
        at: timestamp(wall_clock_time(event.at)),
        dn: event.dn.to_string(),
        generation: event.generation,
        ..v1::Event::default()
    };
    match &event.kind {
        NodeEventKind::Change(change) => v1::Event {
            change: change_name(change).into(),
            state: change.new_state().map_or(v1::State::Unspecified, state_to_wire).into(),
            detail: change.to_string(),
            ..wire
        },
        NodeEventKind::Condition(ConditionChange { kind, text, .. }) => v1::Event {
            change: match kind {
                ConditionChangeKind::Begun => "condition".into(),
                ConditionChangeKind::Ended => "condition-ended".into(),
            },
            detail: match kind {
                ConditionChangeKind::Begun => text.clone(),
                ConditionChangeKind::Ended => format!("no longer: {text}"),
            },
            ..wire
        },
        NodeEventKind::Request { action, caller } => v1::Event {
            change: "requested".into(),
            detail: match caller {
                Some(caller) => format!("{action} requested by {caller}"),
                None => format!("{action} requested by an unknown caller"),
            },
            action: action.to_string(),
            caller: caller.as_ref().map(v1::Caller::from),
            ..wire
        },
    }
}

fn change_name(change: &RunnableChange) -> &'static str {
    match change {
        RunnableChange::Scheduled { .. } => "scheduled",
        RunnableChange::Started => "started",
        RunnableChange::Ready => "ready",
        RunnableChange::NotReady { .. } => "not-ready",
        RunnableChange::Canceling { .. } => "canceling",
        RunnableChange::Straggling { .. } => "straggling",
        RunnableChange::Adopted { .. } => "adopted",
        RunnableChange::LeftoverEnded { .. } => "leftover-ended",
        RunnableChange::Killed { .. } => "killed",
        RunnableChange::Exited { .. } => "exited",
        RunnableChange::LimitExceeded { .. } => "limit-exceeded",
        RunnableChange::Stopped => "stopped",
        RunnableChange::Removed => "removed",
        _ => "other",
    }
}

pub(crate) fn entry_to_wire(entry: LogEntry) -> v1::LogEntry {
    let body = match entry.body {
        EntryBody::Leveled(leveled) => Some(v1::log_entry::Body::Leveled(leveled_to_wire(leveled))),
        EntryBody::Raw(raw) => Some(v1::log_entry::Body::Raw(raw_to_wire(raw))),
        EntryBody::Dropped(dropped) => {
            Some(v1::log_entry::Body::Dropped(v1::Dropped { count: dropped.count, exact: dropped.exact }))
        }
        _ => None,
    };
    v1::LogEntry { seq: entry.seq, dn: entry.dn.to_string(), time: timestamp(entry.time), body }
}

fn leveled_to_wire(leveled: LeveledEntry) -> v1::Leveled {
    v1::Leveled {
        level: level_to_wire(leveled.level).into(),
        claimed_time: leveled.claimed_time.and_then(timestamp),
        message: leveled.message,
        file: leveled.file,
        line: leveled.line,
        fields: leveled.fields.into_iter().map(field_to_wire).collect(),
        origin: leveled.origin.map(origin_to_wire),
        original_bytes: leveled.original_bytes,
    }
}

fn raw_to_wire(raw: RawLine) -> v1::Raw {
    v1::Raw {
        origin: Some(origin_to_wire(raw.origin)),
        text: raw.text,
        original_bytes: raw.original_bytes,
        lossy: raw.lossy,
    }
}

fn origin_to_wire(origin: StreamOrigin) -> v1::Origin {
    v1::Origin { stream: origin.stream, generation: origin.generation }
}

fn field_to_wire(field: LogField) -> v1::Field {
    use v1::field::Value as Wire;
    let value = match field.value {
        FieldValue::Text(text) => Wire::Text(text),
        FieldValue::Int(int) => Wire::Int(int),
        FieldValue::Uint(uint) => Wire::Uint(uint),
        FieldValue::Float(float) => Wire::Float(float),
        FieldValue::Bool(bool) => Wire::Bool(bool),
        other => Wire::Text(other.to_string()),
    };
    v1::Field { name: field.name, value: Some(value) }
}
