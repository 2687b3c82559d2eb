//! What the renderings share.

use std::fmt::Write;
use std::time::SystemTime;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::text::is_unsafe_to_show;
use crate::{Body, Dropped, Entry, Leveled, Value};

/// Date and time in UTC; what is beyond the year 9999 is shown as 1970.
pub(super) fn utc(time: SystemTime) -> DateTime {
    TimeZone::UTC.to_datetime(Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The letter that says of what kind an entry is.
pub(super) fn letter(body: &Body) -> char {
    match body {
        Body::Leveled(leveled) => leveled.level.letter(),
        Body::Raw(_) => 'R',
        Body::Dropped(_) => '-',
    }
}

/// What an entry says in words, fields and marks included; it may have several lines.
pub(super) fn words(entry: &Entry) -> String {
    match &entry.body {
        Body::Leveled(leveled) => message(leveled),
        Body::Raw(raw) if raw.original_bytes.is_some() => escape(&raw.text) + "...",
        Body::Raw(raw) => escape(&raw.text),
        Body::Dropped(dropped) => gap(dropped),
    }
}

fn message(leveled: &Leveled) -> String {
    let mut text = escape_lines(&leveled.message);
    for field in &leveled.fields {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(&escape(&field.name));
        text.push('=');
        push_value(&mut text, &field.value);
    }
    if leveled.original_bytes.is_some() {
        text.push_str("...");
    }
    text
}

fn gap(dropped: &Dropped) -> String {
    let entries = if dropped.count == 1 { "entry" } else { "entries" };
    let at_most = if dropped.exact { "" } else { "at most " };
    format!("{at_most}{} {entries} dropped here", dropped.count)
}

/// A value, quoted if it would not end at the next space otherwise.
fn push_value(text: &mut String, value: &Value) {
    let value = value.to_string();
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c == '"' || c == '=') {
        let _ = write!(text, "{:?}", escape(&value).replace("\\n", "\n"));
    } else {
        text.push_str(&escape(&value));
    }
}

/// Escapes everything that is not a character to look at.
pub(super) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe_to_show(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// The same, but newlines stay.
fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape).collect::<Vec<_>>().join("\n")
}
