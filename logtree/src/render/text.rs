//! Functions that the renderings share.

use std::fmt::Write;
use std::time::SystemTime;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::text::is_unprintable;
use crate::{DroppedEntries, EntryBody, FieldValue, LeveledEntry, LogEntry};

/// Date and time in UTC; times after the year 9999 are shown as 1970.
pub(super) fn utc_time(time: SystemTime) -> DateTime {
    TimeZone::UTC.to_datetime(Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The letter for the level or kind of an entry.
pub(super) fn kind_letter(body: &EntryBody) -> char {
    match body {
        EntryBody::Leveled(leveled) => leveled.level.letter(),
        EntryBody::Raw(_) => 'R',
        EntryBody::Dropped(_) => '-',
    }
}

/// The text of an entry, including fields and marks; it may have several lines.
pub(super) fn entry_text(entry: &LogEntry) -> String {
    match &entry.body {
        EntryBody::Leveled(leveled) => message_text(leveled),
        EntryBody::Raw(raw) if raw.original_bytes.is_some() => escape_unprintable(&raw.text) + "...",
        EntryBody::Raw(raw) => escape_unprintable(&raw.text),
        EntryBody::Dropped(dropped) => dropped_text(dropped),
    }
}

fn message_text(leveled: &LeveledEntry) -> String {
    let mut text = escape_lines(&leveled.message);
    for field in &leveled.fields {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(&escape_unprintable(&field.name));
        text.push('=');
        push_quoted(&mut text, &field.value);
    }
    if leveled.original_bytes.is_some() {
        text.push_str("...");
    }
    text
}

fn dropped_text(dropped: &DroppedEntries) -> String {
    let entries = if dropped.count == 1 { "entry" } else { "entries" };
    let at_most = if dropped.exact { "" } else { "at most " };
    format!("{at_most}{} {entries} dropped here", dropped.count)
}

/// Appends a value, quoted if it would be ambiguous otherwise.
fn push_quoted(text: &mut String, value: &FieldValue) {
    let value = value.to_string();
    if value.is_empty() || value.contains(|c: char| c.is_whitespace() || c == '"' || c == '=') {
        // The quotes escape newlines again, so their first escape is taken back.
        let _ = write!(text, "{:?}", escape_unprintable(&value).replace("\\n", "\n"));
    } else {
        text.push_str(&escape_unprintable(&value));
    }
}

pub(super) fn escape_unprintable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// Escapes unprintable characters except newlines.
fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape_unprintable).collect::<Vec<_>>().join("\n")
}
