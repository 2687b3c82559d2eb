//! From the libraries' values to the control API's messages.

use std::time::SystemTime;

use nodekeel_logtree::{Body, Entry, Field, Leveled, Origin, Raw, Value};
use nodekeel_supervisor::process::Signal;
use nodekeel_supervisor::{Change, Event, Exit, ExitRecord, NodeStatus, State, WaitingFor};
use prost_types::Timestamp;

use crate::client::level_to_wire;
use crate::v1;

pub(crate) fn time(at: SystemTime) -> Option<Timestamp> {
    Some(Timestamp::from(at))
}

fn state(state: State) -> v1::State {
    match state {
        State::Waiting => v1::State::Waiting,
        State::New => v1::State::New,
        State::Ready => v1::State::Ready,
        State::Done => v1::State::Done,
        State::Dead => v1::State::Dead,
        State::Canceled => v1::State::Canceled,
        State::Stopped => v1::State::Stopped,
        _ => v1::State::Unspecified,
    }
}

pub(crate) fn node(status: &NodeStatus) -> v1::Node {
    let (waiting_for, waiting_on) = waiting(&status.waiting_for);
    v1::Node {
        dn: status.dn.to_string(),
        state: state(status.state).into(),
        since: time(status.since),
        generation: status.generation,
        restarts: status.restarts(),
        failures: status.failures,
        waiting_for,
        waiting_on,
        exits: status.exits.iter().map(exit).collect(),
    }
}

/// Why a node is not ready, in words, and the DNs that it waits for.
fn waiting(reason: &WaitingFor) -> (String, Vec<String>) {
    match reason {
        WaitingFor::Nothing => (String::new(), Vec::new()),
        WaitingFor::Dependency(dn) => (reason.to_string(), vec![dn.to_string()]),
        WaitingFor::Descendants(dns) => (reason.to_string(), dns.iter().map(ToString::to_string).collect()),
        WaitingFor::Backoff(until) => {
            let left = until.duration_since(SystemTime::now()).unwrap_or_default();
            (format!("{reason}, {:.1} s more", left.as_secs_f64()), Vec::new())
        }
        other => (other.to_string(), Vec::new()),
    }
}

fn exit(record: &ExitRecord) -> v1::Exit {
    let process = match &record.exit {
        Exit::Failed { process, .. } => process.as_deref(),
        _ => None,
    };
    v1::Exit {
        at: time(record.at),
        generation: record.generation,
        state: state(record.state).into(),
        reason: record.exit.to_string(),
        code: process.and_then(|exit| exit.code),
        signal: process.and_then(|exit| exit.signal).map(Signal::number),
        output: process.map(|exit| exit.tail.clone()).unwrap_or_default(),
    }
}

pub(crate) fn event(event: &Event) -> v1::Event {
    let change = match &event.change {
        Change::Scheduled { .. } => "scheduled",
        Change::Started => "started",
        Change::Ready => "ready",
        Change::Cancelling { .. } => "cancelling",
        Change::Straggling { .. } => "straggling",
        Change::Exited { .. } => "exited",
        Change::Stopped => "stopped",
        Change::Removed => "removed",
        _ => "other",
    };
    v1::Event {
        seq: event.seq,
        at: time(event.at),
        dn: event.dn.to_string(),
        generation: event.generation,
        change: change.into(),
        state: event.change.state().map_or(v1::State::Unspecified, state).into(),
        detail: event.change.to_string(),
    }
}

pub(crate) fn entry(entry: Entry) -> v1::LogEntry {
    let body = match entry.body {
        Body::Leveled(leveled) => Some(v1::log_entry::Body::Leveled(leveled_body(leveled))),
        Body::Raw(raw) => Some(v1::log_entry::Body::Raw(raw_body(raw))),
        Body::Dropped(dropped) => {
            Some(v1::log_entry::Body::Dropped(v1::Dropped { count: dropped.count, exact: dropped.exact }))
        }
        _ => None,
    };
    v1::LogEntry { seq: entry.seq, dn: entry.dn.to_string(), time: time(entry.time), body }
}

fn leveled_body(leveled: Leveled) -> v1::Leveled {
    v1::Leveled {
        level: level_to_wire(leveled.level).into(),
        message: leveled.message,
        file: leveled.file,
        line: leveled.line,
        fields: leveled.fields.into_iter().map(field).collect(),
        origin: leveled.origin.map(origin),
        original_bytes: leveled.original_bytes,
    }
}

fn raw_body(raw: Raw) -> v1::Raw {
    v1::Raw {
        origin: Some(origin(raw.origin)),
        text: raw.text,
        original_bytes: raw.original_bytes,
        lossy: raw.lossy,
    }
}

fn origin(origin: Origin) -> v1::Origin {
    v1::Origin { stream: origin.stream, generation: origin.generation }
}

fn field(field: Field) -> v1::Field {
    use v1::field::Value as Wire;
    let value = match field.value {
        Value::Text(text) => Wire::Text(text),
        Value::Int(int) => Wire::Int(int),
        Value::Uint(uint) => Wire::Uint(uint),
        Value::Float(float) => Wire::Float(float),
        Value::Bool(bool) => Wire::Bool(bool),
        other => Wire::Text(other.to_string()),
    };
    v1::Field { name: field.name, value: Some(value) }
}
