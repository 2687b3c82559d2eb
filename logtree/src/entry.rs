//! Entries of the log store, as a reader returns them, and messages on their way into it.

use std::fmt;
use std::panic::Location;
use std::time::SystemTime;

use crate::{Dn, Level};

/// One entry of the log store. Plain data: a client can build it from the wire and render it.
#[derive(Clone, Debug, PartialEq)]
pub struct LogEntry {
    /// Sequence number in the total order of the store, from 1; unique within the store.
    /// An [`EntryBody::Dropped`] has the number of the newest entry it stands for.
    pub seq: u64,
    /// The name it is stored under.
    pub dn: Dn,
    /// When the store received it, to the nanosecond, by the wall clock of the read: the store counts from boot, so a
    /// step of the clock moves the times of all entries, and never their order.
    pub time: SystemTime,
    /// The content.
    pub body: EntryBody,
}

/// The content of a [`LogEntry`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum EntryBody {
    /// A message with a level.
    Leveled(LeveledEntry),
    /// A line of output that no parser accepted, or without a parser.
    Raw(RawLine),
    /// Entries that were dropped before this reader reached them.
    Dropped(DroppedEntries),
}

/// A message with a level, from `tracing`, from [`LogStore::append_message`](crate::LogStore::append_message)
/// or parsed from output.
#[derive(Clone, Debug, PartialEq)]
pub struct LeveledEntry {
    /// The level.
    pub level: Level,
    /// When it happened, as the line or the caller claims; `None` without a claim. Nothing depends on it: a writer's
    /// clock and time zone can be wrong.
    pub claimed_time: Option<SystemTime>,
    /// Source file, empty if unknown. Files of dependencies start at their crate's directory.
    pub file: String,
    /// Line in `file`, 0 if unknown.
    pub line: u32,
    /// The text, without leading and trailing newlines; inner newlines stay and make a message of several
    /// lines.
    pub message: String,
    /// All other fields, in their original order.
    pub fields: Vec<LogField>,
    /// The output it was parsed from; `None` for other messages.
    pub origin: Option<StreamOrigin>,
    /// `Some(n)`: it was cut from `n` bytes to fit
    /// [`LogLimits::message_bytes`](crate::LogLimits::message_bytes).
    pub original_bytes: Option<u64>,
}

/// An unparsed line of output, as valid UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawLine {
    /// The output that it comes from.
    pub origin: StreamOrigin,
    /// The line without its terminator (`\n` or `\r\n`).
    pub text: String,
    /// `Some(n)`: the line was cut from `n` bytes at [`LogLimits::line_bytes`](crate::LogLimits::line_bytes).
    pub original_bytes: Option<u64>,
    /// The line was not UTF-8; U+FFFD replaces invalid bytes in `text`, which may then be longer than the
    /// input.
    pub lossy: bool,
}

/// Entries that were dropped before this reader reached them, at their place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DroppedEntries {
    /// The number of dropped entries that match the reader's query.
    pub count: u64,
    /// False if `count` is only an upper bound: a reader that resumes by number may have seen some of them
    /// already.
    pub exact: bool,
}

/// The output stream, and the start of the program, that a line comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct StreamOrigin {
    /// Name of the stream: `stdout`, `stderr`, `raw`, the name of a FIFO.
    pub stream: String,
    /// Number of the program's start, counted from 1; 0 if unknown.
    pub generation: u64,
}

/// One field of a message.
#[derive(Clone, Debug, PartialEq)]
pub struct LogField {
    /// The name.
    pub name: String,
    /// The value.
    pub value: FieldValue,
}

/// The value of a [`LogField`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum FieldValue {
    /// Text, or a value of another type.
    Text(String),
    /// A signed number.
    Int(i64),
    /// An unsigned number.
    Uint(u64),
    /// A number with a fraction.
    Float(f64),
    /// A boolean.
    Bool(bool),
}

impl fmt::Display for FieldValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldValue::Text(value) => value.fmt(f),
            FieldValue::Int(value) => value.fmt(f),
            FieldValue::Uint(value) => value.fmt(f),
            FieldValue::Float(value) => value.fmt(f),
            FieldValue::Bool(value) => value.fmt(f),
        }
    }
}

impl From<&str> for FieldValue {
    fn from(value: &str) -> FieldValue {
        FieldValue::Text(value.to_owned())
    }
}

impl From<String> for FieldValue {
    fn from(value: String) -> FieldValue {
        FieldValue::Text(value)
    }
}

impl From<i64> for FieldValue {
    fn from(value: i64) -> FieldValue {
        FieldValue::Int(value)
    }
}

impl From<u64> for FieldValue {
    fn from(value: u64) -> FieldValue {
        FieldValue::Uint(value)
    }
}

impl From<f64> for FieldValue {
    fn from(value: f64) -> FieldValue {
        FieldValue::Float(value)
    }
}

impl From<bool> for FieldValue {
    fn from(value: bool) -> FieldValue {
        FieldValue::Bool(value)
    }
}

/// A leveled message on its way into the log store: the result of a parser, or an event that a caller
/// appends.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LogMessage {
    /// The level.
    pub level: Level,
    /// When it happened, if that is known. The entry keeps it beside the time at which it is stored.
    pub claimed_time: Option<SystemTime>,
    /// Source file, empty if unknown.
    pub file: String,
    /// Line in `file`, 0 if unknown.
    pub line: u32,
    /// The text; leading and trailing newlines are dropped when it is stored.
    pub text: String,
    /// All other fields.
    pub fields: Vec<LogField>,
}

impl LogMessage {
    /// A message with the source position of the caller. A function that is
    /// `#[track_caller]` too passes on the position of its caller.
    #[track_caller]
    pub fn new(level: Level, text: impl Into<String>) -> LogMessage {
        let at = Location::caller();
        LogMessage {
            file: at.file().to_owned(),
            line: at.line(),
            ..LogMessage::without_position(level, text)
        }
    }

    pub(crate) fn without_position(level: Level, text: impl Into<String>) -> LogMessage {
        LogMessage {
            level,
            claimed_time: None,
            file: String::new(),
            line: 0,
            text: text.into(),
            fields: Vec::new(),
        }
    }

    /// Adds a field.
    pub fn with_field(mut self, name: impl Into<String>, value: impl Into<FieldValue>) -> LogMessage {
        self.fields.push(LogField { name: name.into(), value: value.into() });
        self
    }
}
