//! klog, the log format of Kubernetes.

use std::time::{Duration, SystemTime};

use jiff::civil::{DateTime, Time};

use serde_json::Value as Json;

use super::LineContext;
use super::logfmt::take_quoted;
use super::time::{parse_time_or_number, take_clock_time, take_digits};
use crate::{FieldValue, Level, LogField, LogMessage};

const HOUR: Duration = Duration::from_secs(60 * 60);

/// Parses a line of [klog](https://github.com/kubernetes/klog): `I1121 11:26:08.703131   12345 file.go:123]
/// text`. The text of a structured message, `"text" key="value" other=[1,2]`, becomes the message and its fields. So do
/// lines of glog and Abseil, in C++: `I20261121` with the year, or, before the zone is known, `I0000 00:00:` with the
/// seconds since 1970.
///
/// The time is in the zone of the context, and has no year: it is the latest year that puts the line at most an hour
/// after its receipt. The previous year is used only for lines of the last 48 hours, as around New Year. Otherwise
/// the zone is wrong, or the clock, and the message claims no time. The process id is dropped.
///
/// *Source:* klog's `Format` comment in klog.go, and internal/serialize/keyvalues.go.
pub fn klog_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let level = match line.get(..1)? {
        "I" => Level::Info,
        "W" => Level::Warn,
        "E" => Level::Error,
        "F" => Level::Fatal,
        _ => return None,
    };
    let (date, rest) = line[1..].split_once(' ')?;
    let rest = rest.trim_start_matches(' ');
    let (year, date) = if date.len() == "20261121".len() {
        let (year, date) = take_digits::<4>(date)?;
        (Some(year), date)
    } else {
        (None, date)
    };
    let (month, day) = take_digits::<2>(date)?;
    let (day, "") = take_digits::<2>(day)? else { return None };
    let (claimed_time, rest) = match take_unix_time(date, rest, context) {
        Some(unix) => unix,
        None => {
            let (clock, rest) = take_clock_time(rest)?;
            (clock.and_then(|clock| resolve_year(year, month, day, clock, context)), rest)
        }
    };
    // klog pads the process id with spaces to seven columns.
    let rest = take_spaces(rest)?;
    let (pid, rest) = rest.split_once(' ')?;
    if pid.is_empty() || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (position, text) = rest.trim_start_matches(' ').split_once(']')?;
    let (file, position) = position.split_once(':')?;
    let text = text.strip_prefix(' ')?.trim_start_matches(' ');
    if file.is_empty() {
        return None;
    }
    let (text, fields) = split_fields(text).unwrap_or_else(|| (text.to_owned(), Vec::new()));
    Some(LogMessage {
        claimed_time,
        file: file.to_owned(),
        line: position.parse().ok()?,
        fields,
        ..LogMessage::without_position(level, text)
    })
}

/// Splits a structured message. `None` if it is not one.
fn split_fields(text: &str) -> Option<(String, Vec<LogField>)> {
    let (message, mut rest) = take_quoted(text.strip_prefix('"')?)?;
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let (name, after) = rest.strip_prefix(' ')?.split_once('=')?;
        if name.is_empty() || name.contains([' ', '"']) {
            return None;
        }
        let (value, after) = take_value(after)?;
        fields.push(LogField { name: name.to_owned(), value: FieldValue::Text(value) });
        rest = after;
    }
    Some((message, fields))
}

/// Splits a value off the front: quoted, JSON, or a word. `<` starts one on the lines that follow.
fn take_value(text: &str) -> Option<(String, &str)> {
    if let Some(quoted) = text.strip_prefix('"') {
        return take_quoted(quoted);
    }
    let length = if text.starts_with(['{', '[']) {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Json>();
        values.next()?.ok()?;
        // JSON may contain spaces: it ends where its parser has stopped.
        values.byte_offset()
    } else {
        text.find(' ').unwrap_or(text.len())
    };
    let (value, rest) = text.split_at(length);
    Some((value.to_owned(), rest))
}

/// Strips at least one space off the front.
fn take_spaces(text: &str) -> Option<&str> {
    Some(text.strip_prefix(' ')?.trim_start_matches(' '))
}

/// Splits the time of Abseil off the front.
///
/// *Source:* abseil-cpp's absl/log/internal/log_format.cc.
fn take_unix_time<'a>(
    date: &str,
    rest: &'a str,
    context: &LineContext,
) -> Option<(Option<SystemTime>, &'a str)> {
    let rest = rest.strip_prefix("00:00:").filter(|_| date == "0000")?;
    let (seconds, after) = rest.split_at(rest.find(' ')?);
    Some((parse_time_or_number(seconds, context), after))
}

fn resolve_year(
    year: Option<i16>,
    month: i16,
    day: i16,
    clock: Time,
    context: &LineContext,
) -> Option<SystemTime> {
    let (now, zone) = (context.received_at, &context.zone);
    let this_year = zone.year_at(now)?;
    let (month, day) = (i8::try_from(month).ok()?, i8::try_from(day).ok()?);
    let in_year = |year: i16| {
        let date = jiff::civil::Date::new(year, month, day).ok()?;
        zone.go_time(DateTime::from_parts(date, clock), now).filter(|&time| time <= now + HOUR)
    };
    if let Some(year) = year {
        return in_year(year);
    }
    let recent = |time: &SystemTime| now.duration_since(*time).is_ok_and(|age| age <= 48 * HOUR);
    // The next year is possible in the last hour of this one, if the clock of the writer is ahead.
    in_year(this_year + 1).or_else(|| in_year(this_year)).or_else(|| in_year(this_year - 1).filter(recent))
}
