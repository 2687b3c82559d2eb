//! capnslog, the format of etcd before zap, still the default of etcd 3.4.

use std::time::SystemTime;

use jiff::civil::{Date, DateTime};

use super::time::{take_clock_time, take_digits, utc_system_time};
use super::zap::zap_line;
use crate::{Level, LogMessage};

/// Parses a line of etcd: [`zap_line`] JSON, or the older text of [`capnslog_line`].
pub fn etcd_line(line: &str, now: SystemTime) -> Option<LogMessage> {
    zap_line(line, now).or_else(|| capnslog_line(line, now))
}

/// Parses a line of capnslog, `2026-11-21 11:26:08.703131 I | embed: text`, or of etcd's raft library,
/// `raft2026/11/21 11:26:08 INFO: text`. The package before the colon becomes the field `package`.
///
/// *Source:* github.com/coreos/pkg capnslog/formatters.go; etcd's raft/logger.go with Go's `log` package.
pub fn capnslog_line(line: &str, _now: SystemTime) -> Option<LogMessage> {
    match line.strip_prefix("raft") {
        Some(rest) => {
            let (time, rest) = take_timestamp(rest, '/')?;
            let (level, text) = rest.split_once(": ")?;
            let level = match level {
                "DEBUG" => Level::Debug,
                "INFO" => Level::Info,
                "WARN" => Level::Warn,
                "ERROR" => Level::Error,
                "PANIC" | "FATAL" => Level::Fatal,
                _ => return None,
            };
            Some(build_message(level, time, "raft", text))
        }
        None => {
            let (time, rest) = take_timestamp(line, '-')?;
            let (level, rest) = rest.split_once(" | ")?;
            let level = match level {
                "T" => Level::Trace,
                "D" => Level::Debug,
                // N is notice, and C below is critical.
                "I" | "N" => Level::Info,
                "W" => Level::Warn,
                "E" => Level::Error,
                "C" => Level::Fatal,
                _ => return None,
            };
            let (package, text) = rest.split_once(": ").unwrap_or(("", rest));
            Some(build_message(level, time, package, text))
        }
    }
}

fn build_message(level: Level, time: SystemTime, package: &str, text: &str) -> LogMessage {
    let message = LogMessage { time: Some(time), ..LogMessage::without_position(level, text) };
    if package.is_empty() { message } else { message.with_field("package", package) }
}

/// Splits a date, a time of day and the space after it off the front.
fn take_timestamp(text: &str, separator: char) -> Option<(SystemTime, &str)> {
    let (year, rest) = take_digits::<4>(text)?;
    let (month, rest) = take_digits::<2>(rest.strip_prefix(separator)?)?;
    let (day, rest) = take_digits::<2>(rest.strip_prefix(separator)?)?;
    let (clock, rest) = take_clock_time(rest.strip_prefix(' ')?)?;
    let date = Date::new(year, i8::try_from(month).ok()?, i8::try_from(day).ok()?).ok()?;
    Some((utc_system_time(DateTime::from_parts(date, clock))?, rest.strip_prefix(' ')?))
}
