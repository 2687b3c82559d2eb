//! Converts log entries of the control API to those of logtree, which can render them.

use std::time::SystemTime;

use nodekeel_logtree::{
    Dn, DroppedEntries, EntryBody, FieldValue, Level, LeveledEntry, LogEntry, LogField, RawLine, StreamOrigin,
};
use thiserror::Error;

use crate::program_name::program_name;
use crate::v1;

/// A log entry is invalid: the node has another version than this client. Use the nodectl of the node's
/// release.
#[derive(Debug, Error)]
#[error("invalid log entry {seq}: missing {what}; {} and its client have different versions", program_name())]
pub struct InvalidLogEntry {
    seq: u64,
    what: &'static str,
}

impl TryFrom<v1::LogEntry> for LogEntry {
    type Error = InvalidLogEntry;

    fn try_from(entry: v1::LogEntry) -> Result<Self, InvalidLogEntry> {
        let missing = |what| InvalidLogEntry { seq: entry.seq, what };
        Ok(Self {
            seq: entry.seq,
            dn: entry.dn.parse::<Dn>().map_err(|_| missing("valid dn"))?,
            time: entry.time.and_then(|time| SystemTime::try_from(time).ok()).ok_or(missing("valid time"))?,
            // A newer node may send bodies or levels that this client does not know: prost then leaves the field
            // unset.
            body: match entry.body.ok_or(missing("known body"))? {
                v1::log_entry::Body::Leveled(body) => {
                    let level = level_from_wire(body.level()).ok_or(missing("level"))?;
                    EntryBody::Leveled(leveled_from_wire(level, body))
                }
                v1::log_entry::Body::Raw(body) => EntryBody::Raw(raw_from_wire(body)),
                v1::log_entry::Body::Dropped(v1::Dropped { count, exact }) => {
                    EntryBody::Dropped(DroppedEntries { count, exact })
                }
            },
        })
    }
}

fn leveled_from_wire(level: Level, body: v1::Leveled) -> LeveledEntry {
    LeveledEntry {
        level,
        claimed_time: body.claimed_time.and_then(|time| SystemTime::try_from(time).ok()),
        file: body.file,
        line: body.line,
        message: body.message,
        // A field of an unknown kind is left out. The entry is still worth showing without it.
        fields: body.fields.into_iter().filter_map(field_from_wire).collect(),
        origin: body.origin.map(origin_from_wire),
        original_bytes: body.original_bytes,
    }
}

fn raw_from_wire(body: v1::Raw) -> RawLine {
    RawLine {
        origin: origin_from_wire(body.origin.unwrap_or_default()),
        text: body.text,
        original_bytes: body.original_bytes,
        lossy: body.lossy,
    }
}

fn origin_from_wire(origin: v1::Origin) -> StreamOrigin {
    StreamOrigin { stream: origin.stream, generation: origin.generation }
}

fn field_from_wire(field: v1::Field) -> Option<LogField> {
    use v1::field::Value as Wire;
    let value = match field.value? {
        Wire::Text(text) => FieldValue::Text(text),
        Wire::Int(int) => FieldValue::Int(int),
        Wire::Uint(uint) => FieldValue::Uint(uint),
        Wire::Float(float) => FieldValue::Float(float),
        Wire::Bool(bool) => FieldValue::Bool(bool),
    };
    Some(LogField { name: field.name, value })
}

/// Converts a level to the control API's enum.
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

/// Converts a level of the control API; `None` if it is unspecified.
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
