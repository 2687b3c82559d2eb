//! capnslog, the format of etcd before zap, still the default of etcd 3.4.

use std::time::SystemTime;

use jiff::civil::{Date, DateTime};

use super::LineContext;
use super::json::leveled_json_line;
use super::level_word::level_of_word;
use super::time::{take_clock_time, take_digits};
use crate::{Level, LogMessage};

/// Parses a line of etcd: [`leveled_json_line`], or the older text of [`capnslog_line`].
pub fn etcd_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    leveled_json_line(line, context).or_else(|| capnslog_line(line, context))
}

/// Parses a line of capnslog, `2026-11-21 11:26:08.703131 I | embed: text`, or of etcd's raft library,
/// `raft2026/11/21 11:26:08 INFO: text`. The package before the colon becomes the field `package`.
/// The time is in the zone of the context.
///
/// *Source:* github.com/coreos/pkg capnslog/formatters.go; etcd's raft/logger.go with Go's `log` package.
pub fn capnslog_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    match line.strip_prefix("raft") {
        Some(rest) => {
            let (time, rest) = take_timestamp(rest, '/', context)?;
            let (level, text) = rest.split_once(": ")?;
            Some(build_message(level_of_word(level)?, time, "raft", text))
        }
        None => {
            let (time, rest) = take_timestamp(line, '-', context)?;
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

fn build_message(level: Level, time: Option<SystemTime>, package: &str, text: &str) -> LogMessage {
    let message = LogMessage { claimed_time: time, ..LogMessage::without_position(level, text) };
    if package.is_empty() { message } else { message.with_field("package", package) }
}

/// Splits a date, a time of day and the space after it off the front. No time if there is no such date.
fn take_timestamp<'a>(
    text: &'a str,
    separator: char,
    context: &LineContext,
) -> Option<(Option<SystemTime>, &'a str)> {
    let (year, rest) = take_digits::<4>(text)?;
    let (month, rest) = take_digits::<2>(rest.strip_prefix(separator)?)?;
    let (day, rest) = take_digits::<2>(rest.strip_prefix(separator)?)?;
    let (clock, rest) = take_clock_time(rest.strip_prefix(' ')?)?;
    let date = Date::new(year, i8::try_from(month).ok()?, i8::try_from(day).ok()?).ok();
    let time = date.zip(clock).and_then(|(date, clock)| {
        context.zone.go_time(DateTime::from_parts(date, clock), context.received_at)
    });
    Some((time, rest.strip_prefix(' ')?))
}
