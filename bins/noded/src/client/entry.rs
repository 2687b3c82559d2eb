//! From the control API's log entries to those of logtree, which knows how to render them.

use std::time::SystemTime;

use nodekeel_logtree::{Body, Dn, Dropped, Entry, Field, Level, Leveled, Origin, Raw, Value};
use thiserror::Error;

use crate::v1;

/// A log entry makes no sense: the node is of another version.
#[derive(Debug, Error)]
#[error("log entry {seq} has no {what}: noded and its client are of different versions")]
pub struct EntryError {
    seq: u64,
    what: &'static str,
}

impl TryFrom<v1::LogEntry> for Entry {
    type Error = EntryError;

    fn try_from(entry: v1::LogEntry) -> Result<Self, EntryError> {
        let missing = |what| EntryError { seq: entry.seq, what };
        Ok(Self {
            seq: entry.seq,
            dn: entry.dn.parse::<Dn>().map_err(|_| missing("valid dn"))?,
            time: entry.time.and_then(|time| SystemTime::try_from(time).ok()).ok_or(missing("valid time"))?,
            body: match entry.body.ok_or(missing("known body"))? {
                v1::log_entry::Body::Leveled(body) => {
                    let level = level_from_wire(body.level()).ok_or(missing("level"))?;
                    Body::Leveled(leveled(level, body))
                }
                v1::log_entry::Body::Raw(body) => Body::Raw(raw(body)),
                v1::log_entry::Body::Dropped(v1::Dropped { count, exact }) => {
                    Body::Dropped(Dropped { count, exact })
                }
            },
        })
    }
}

fn leveled(level: Level, body: v1::Leveled) -> Leveled {
    Leveled {
        level,
        file: body.file,
        line: body.line,
        message: body.message,
        fields: body.fields.into_iter().filter_map(field).collect(),
        origin: body.origin.map(origin),
        original_bytes: body.original_bytes,
    }
}

fn raw(body: v1::Raw) -> Raw {
    Raw {
        origin: origin(body.origin.unwrap_or_default()),
        text: body.text,
        original_bytes: body.original_bytes,
        lossy: body.lossy,
    }
}

fn origin(origin: v1::Origin) -> Origin {
    Origin { stream: origin.stream, generation: origin.generation }
}

fn field(field: v1::Field) -> Option<Field> {
    use v1::field::Value as Wire;
    let value = match field.value? {
        Wire::Text(text) => Value::Text(text),
        Wire::Int(int) => Value::Int(int),
        Wire::Uint(uint) => Value::Uint(uint),
        Wire::Float(float) => Value::Float(float),
        Wire::Bool(bool) => Value::Bool(bool),
    };
    Some(Field { name: field.name, value })
}

/// A level as the control API calls it.
pub fn level_to_wire(level: Level) -> v1::Level {
    match level {
        Level::Trace => v1::Level::Trace,
        Level::Debug => v1::Level::Debug,
        Level::Info => v1::Level::Info,
        Level::Warn => v1::Level::Warning,
        Level::Error => v1::Level::Error,
        Level::Fatal => v1::Level::Fatal,
    }
}

/// The level of the control API's name for it, if that says one.
pub fn level_from_wire(level: v1::Level) -> Option<Level> {
    Some(match level {
        v1::Level::Unspecified => return None,
        v1::Level::Trace => Level::Trace,
        v1::Level::Debug => Level::Debug,
        v1::Level::Info => Level::Info,
        v1::Level::Warning => Level::Warn,
        v1::Level::Error => Level::Error,
        v1::Level::Fatal => Level::Fatal,
    })
}
