//! Parsers of known log formats into leveled messages.
//!
//! Each takes a line without its terminator, and when it was received, and returns `None` for a line that is not in its
//! format. A field that is doubtful costs itself and nothing else: a message whose time makes no sense keeps its level.
//! A new format is a file here, and a variant of [`LogFormat`].

mod capnslog;
mod context;
mod failure;
mod java_heading;
mod json;
mod klog;
mod kmsg;
mod level_prefix;
mod level_word;
mod logfmt;
#[cfg(test)]
mod table_test;
mod time;

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::LogMessage;

pub(crate) use failure::names_exception;
pub(crate) use java_heading::java_heading;

pub use capnslog::{capnslog_line, etcd_line};
pub use context::{LineContext, LogZone, UnknownZone};
pub use failure::failure_line;
pub use json::{json_line, leveled_json_line};
pub use klog::klog_line;
pub use kmsg::{KmsgRecord, kmsg_record};
pub use level_prefix::level_prefix_line;
pub use logfmt::logfmt_line;

/// A function that parses a line into a message; `None` if the line is not in its format.
pub type LineParser = fn(line: &str, context: &LineContext) -> Option<LogMessage>;

/// The format of a program's log.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum LogFormat {
    /// Lines without a known format: they stay raw.
    #[default]
    Text,
    /// klog's text, the default of Kubernetes: [`klog_line`]. Lines that it rejects continue the message before
    /// them.
    Klog,
    /// JSON objects, of Kubernetes, zap and others: [`json_line`].
    Json,
    /// logfmt, the format of containerd: [`logfmt_line`].
    Logfmt,
    /// Text that starts with the level, of CoreDNS, Python, Java and others: [`level_prefix_line`]. Lines that it rejects
    /// continue the message before them.
    LevelPrefix,
    /// etcd's formats, of which the operator need not know which one it writes: [`etcd_line`].
    Etcd,
    /// Another format. Lines that the parser rejects stay raw.
    Custom(LineParser),
}

impl PartialEq for LogFormat {
    /// Two custom formats are equal if their parsers have one address.
    fn eq(&self, other: &LogFormat) -> bool {
        match (self, other) {
            (LogFormat::Custom(one), LogFormat::Custom(other)) => std::ptr::fn_addr_eq(*one, *other),
            (one, other) => one.as_str() == other.as_str(),
        }
    }
}

impl LogFormat {
    /// All formats that have a name.
    pub const ALL: [LogFormat; 6] = [
        LogFormat::Text,
        LogFormat::Klog,
        LogFormat::Json,
        LogFormat::Logfmt,
        LogFormat::LevelPrefix,
        LogFormat::Etcd,
    ];

    /// The name in lower case, as in `Display`.
    pub const fn as_str(self) -> &'static str {
        match self {
            LogFormat::Text => "text",
            LogFormat::Klog => "klog",
            LogFormat::Json => "json",
            LogFormat::Logfmt => "logfmt",
            LogFormat::LevelPrefix => "level-prefix",
            LogFormat::Etcd => "etcd",
            LogFormat::Custom(_) => "custom",
        }
    }

    /// The parser of its lines; `None` for text.
    pub fn line_parser(self) -> Option<LineParser> {
        match self {
            LogFormat::Text => None,
            LogFormat::Klog => Some(klog_line),
            LogFormat::Json => Some(json_line),
            LogFormat::Logfmt => Some(logfmt_line),
            LogFormat::LevelPrefix => Some(level_prefix_line),
            LogFormat::Etcd => Some(etcd_line),
            LogFormat::Custom(parser) => Some(parser),
        }
    }

    /// Returns whether a message can have more than one line. Such a line has the level and the position of the message,
    /// if it comes within a second of the line before it, and ten of the first. A crash has more lines in each format but
    /// text and custom ones.
    pub const fn has_continuation_lines(self) -> bool {
        matches!(self, LogFormat::Klog | LogFormat::LevelPrefix)
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The text is not the name of a format.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown log format {0:?}; known: {known}", known = LogFormat::ALL.map(LogFormat::as_str).join(", "))]
pub struct ParseFormatError(pub String);

impl FromStr for LogFormat {
    type Err = ParseFormatError;

    fn from_str(text: &str) -> Result<LogFormat, ParseFormatError> {
        let known = LogFormat::ALL.into_iter().find(|format| format.as_str() == text);
        known.ok_or_else(|| ParseFormatError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_is_known_by_its_name() {
        for format in LogFormat::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        let text = "unknown log format \"xml\"; known: text, klog, json, logfmt, level-prefix, etcd";
        assert_eq!("xml".parse::<LogFormat>().unwrap_err().to_string(), text);
    }
}
