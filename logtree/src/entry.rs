//! One record of the journal, as a reader gets it.

use std::fmt;
use std::panic::Location;
use std::time::SystemTime;

use crate::{Dn, Level};

/// One record of the journal. Plain data: a client can build it from the wire and render it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Place in the journal's total order, from 1; no two entries of a journal share one.
    /// A [`Body::Dropped`] has the number of the newest entry it stands for.
    pub seq: u64,
    /// The name it was filed under.
    pub dn: Dn,
    /// When it was written, to the nanosecond; for parsed output the time the line itself gives.
    pub time: SystemTime,
    /// What it says.
    pub body: Body,
}

/// What an [`Entry`] says.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Body {
    /// A message with a level.
    Leveled(Leveled),
    /// A line of output nobody could parse, or was asked to.
    Raw(Raw),
    /// Entries that were dropped before this reader came to them.
    Dropped(Dropped),
}

/// A message with a level, from `tracing`, from [`Journal::append`](crate::Journal::append) or parsed from output.
#[derive(Clone, Debug, PartialEq)]
pub struct Leveled {
    /// How much it matters.
    pub level: Level,
    /// Source file, empty if not known. Files of dependencies start at their crate's directory.
    pub file: String,
    /// Line in `file`, 0 if not known.
    pub line: u32,
    /// The text, without newlines at its ends; inner newlines stay and make a message of several lines.
    pub message: String,
    /// Everything else that was given, in the order it was given.
    pub fields: Vec<Field>,
    /// The output it was parsed from, if it was.
    pub origin: Option<Origin>,
    /// `Some(n)`: it was cut to fit [`Limits::message_bytes`](crate::Limits::message_bytes), from `n` bytes.
    pub original_bytes: Option<u64>,
}

/// A line of output as it came, made safe to show as UTF-8.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raw {
    /// The output it is from.
    pub origin: Origin,
    /// The line without its terminator (`\n` or `\r\n`).
    pub text: String,
    /// `Some(n)`: the line was cut at [`Limits::line_bytes`](crate::Limits::line_bytes), from `n` bytes.
    pub original_bytes: Option<u64>,
    /// The line was not UTF-8; what was not is U+FFFD in `text` (which may then be longer than the input).
    pub lossy: bool,
}

/// Entries that were dropped before this reader came to them, at the place where they would have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// How many, counting only those the reader's query would have shown.
    pub count: u64,
    /// False if `count` is only an upper bound: a reader that resumes by number may have seen some of them before.
    pub exact: bool,
}

/// Which output of which start of a program a line is from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Name of the stream: `stdout`, `stderr`, `raw`, the name of a FIFO.
    pub stream: String,
    /// Which start of the program, counted from 1; 0 if not known.
    pub generation: u64,
}

/// One named value of a message.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: Value,
}

/// The value of a [`Field`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Text, or anything that has no type of its own here.
    Text(String),
    /// A signed number.
    Int(i64),
    /// An unsigned number.
    Uint(u64),
    /// A number with a fraction.
    Float(f64),
    /// Yes or no.
    Bool(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(value) => value.fmt(f),
            Value::Int(value) => value.fmt(f),
            Value::Uint(value) => value.fmt(f),
            Value::Float(value) => value.fmt(f),
            Value::Bool(value) => value.fmt(f),
        }
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Value {
        Value::Text(value)
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Int(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Value {
        Value::Uint(value)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Float(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

/// A leveled message on its way into the journal: what a parser makes of a line, or a caller of an event elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// How much it matters.
    pub level: Level,
    /// When it was said; none means now.
    pub time: Option<SystemTime>,
    /// Source file, empty if not known.
    pub file: String,
    /// Line in `file`, 0 if not known.
    pub line: u32,
    /// The text; newlines at its ends are dropped when it is stored.
    pub text: String,
    /// Everything else.
    pub fields: Vec<Field>,
}

impl Message {
    /// A message said now, from the source position of the caller. A function that passes its own caller's message
    /// on and is `#[track_caller]` too is not named: its caller is.
    #[track_caller]
    pub fn new(level: Level, text: impl Into<String>) -> Message {
        let at = Location::caller();
        Message { file: at.file().to_owned(), line: at.line(), ..Message::without_position(level, text) }
    }

    pub(crate) fn without_position(level: Level, text: impl Into<String>) -> Message {
        Message { level, time: None, file: String::new(), line: 0, text: text.into(), fields: Vec::new() }
    }

    /// Adds a named value.
    pub fn field(mut self, name: impl Into<String>, value: impl Into<Value>) -> Message {
        self.fields.push(Field { name: name.into(), value: value.into() });
        self
    }
}
