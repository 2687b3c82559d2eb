//! JSON for programs.

use std::collections::HashMap;
use std::fmt::Write;
use std::time::SystemTime;

use super::text::utc_time;
use crate::text::is_unprintable;
use crate::{EntryBody, FieldValue, LogEntry, LogField, StreamOrigin};

/// Renders the entry as one JSON object, on one line. Keys, in this order; those in brackets are optional:
///
/// - all: `seq` (number), `time` (RFC 3339, UTC, to the nanosecond), `dn` (empty for the root), `kind`
/// - `kind: "leveled"`: `level` (`trace debug info warn error fatal`), `[claimed_time]` (of the line; `time` is that
///   of its receipt), `[file, line]`, `message`, `[fields]`
///   (an object: texts, numbers, booleans; numbers that JSON can't represent are texts; the values of a
///   repeated name are a list), `[stream, generation]`, `[original_bytes]` (it was cut)
/// - `kind: "raw"`: `stream`, `generation`, `text`, `[original_bytes]` (it was cut), `[lossy: true]` (it was
///   not UTF-8)
/// - `kind: "dropped"`: `count`, `exact` (false: `count` is an upper bound)
pub fn json_object(entry: &LogEntry) -> String {
    let mut object = JsonObject::default();
    object.put_value("seq", entry.seq);
    object.put_value("time", json_time(entry.time));
    object.put_value("dn", json_string(entry.dn.as_str()));
    match &entry.body {
        EntryBody::Leveled(leveled) => {
            object.put_value("kind", "\"leveled\"");
            object.put_value("level", json_string(leveled.level.as_str()));
            if let Some(time) = leveled.claimed_time {
                object.put_value("claimed_time", json_time(time));
            }
            if !leveled.file.is_empty() {
                object.put_value("file", json_string(&leveled.file));
                object.put_value("line", leveled.line);
            }
            object.put_value("message", json_string(&leveled.message));
            if !leveled.fields.is_empty() {
                object.put_value("fields", fields_object(&leveled.fields));
            }
            object.put_origin(leveled.origin.as_ref());
            object.put_optional("original_bytes", leveled.original_bytes);
        }
        EntryBody::Raw(raw) => {
            object.put_value("kind", "\"raw\"");
            object.put_origin(Some(&raw.origin));
            object.put_value("text", json_string(&raw.text));
            object.put_optional("original_bytes", raw.original_bytes);
            object.put_optional("lossy", raw.lossy.then_some(true));
        }
        EntryBody::Dropped(dropped) => {
            object.put_value("kind", "\"dropped\"");
            object.put_value("count", dropped.count);
            object.put_value("exact", dropped.exact);
        }
    }
    object.finish()
}

/// A JSON object under construction; its values are already JSON.
#[derive(Default)]
struct JsonObject(String);

impl JsonObject {
    fn put_value(&mut self, name: &str, value: impl std::fmt::Display) {
        let before = if self.0.is_empty() { '{' } else { ',' };
        // Writing into a `String` can't fail.
        let _ = write!(self.0, "{before}{}:{value}", json_string(name));
    }

    fn put_optional(&mut self, name: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.put_value(name, value);
        }
    }

    fn put_origin(&mut self, origin: Option<&StreamOrigin>) {
        if let Some(origin) = origin {
            self.put_value("stream", json_string(&origin.stream));
            self.put_value("generation", origin.generation);
        }
    }

    fn finish(self) -> String {
        self.0 + "}"
    }
}

/// An object with each name once, at its first place.
fn fields_object(fields: &[LogField]) -> String {
    let mut by_name: Vec<(&str, Vec<String>)> = Vec::with_capacity(fields.len());
    let mut places = HashMap::with_capacity(fields.len());
    for field in fields {
        let place = *places.entry(field.name.as_str()).or_insert_with(|| {
            by_name.push((&field.name, Vec::new()));
            by_name.len() - 1
        });
        by_name[place].1.push(json_value(&field.value));
    }
    let mut object = JsonObject::default();
    for (name, values) in by_name {
        match &values[..] {
            [value] => object.put_value(name, value),
            values => object.put_value(name, format!("[{}]", values.join(","))),
        }
    }
    object.finish()
}

fn json_time(time: SystemTime) -> String {
    json_string(&format!("{:.9}Z", utc_time(time)))
}

fn json_string(text: &str) -> String {
    printable_json(serde_json::Value::from(text).to_string())
}

/// Escapes in JSON what could control a terminal or reorder its text: the JSON means the same, and is as safe to
/// print as the other renderings. JSON itself requires escapes only for the control characters of ASCII.
pub fn printable_json(json: String) -> String {
    if !json.contains(is_unprintable) {
        return json;
    }
    let mut safe = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        // Such characters occur only in strings, and none of them needs two escapes.
        if is_unprintable(c) && c != '\n' {
            let _ = write!(safe, "\\u{:04x}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    safe
}

fn json_value(value: &FieldValue) -> String {
    match value {
        FieldValue::Text(text) => json_string(text),
        // JSON has neither infinity nor NaN.
        FieldValue::Float(float) if !float.is_finite() => json_string(&float.to_string()),
        other => other.to_string(),
    }
}
