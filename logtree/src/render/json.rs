//! For programs.

use std::fmt::Write;

use super::text::utc;
use crate::{Body, Entry, Origin, Value};

/// The entry as one JSON object, on one line. Keys, in this order; those in brackets only if there is something to say:
///
/// - all: `seq` (number), `time` (RFC 3339, UTC, to the nanosecond), `dn` (empty for the root), `kind`
/// - `kind: "leveled"`: `level` (`trace debug info warn error fatal`), `[file, line]`, `message`,
///   `[fields]` (an object: texts, numbers, booleans; numbers JSON has no word for are texts), `[stream, generation]`,
///   `[original_bytes]` (it was cut)
/// - `kind: "raw"`: `stream`, `generation`, `text`, `[original_bytes]` (it was cut), `[lossy: true]` (it was not UTF-8)
/// - `kind: "dropped"`: `count`, `exact` (false: at most so many)
pub fn json(entry: &Entry) -> String {
    let mut object = Object::default();
    object.put("seq", entry.seq);
    object.put("time", quote(&format!("{:.9}Z", utc(entry.time))));
    object.put("dn", quote(entry.dn.as_str()));
    match &entry.body {
        Body::Leveled(leveled) => {
            object.put("kind", "\"leveled\"");
            object.put("level", quote(leveled.level.as_str()));
            if !leveled.file.is_empty() {
                object.put("file", quote(&leveled.file));
                object.put("line", leveled.line);
            }
            object.put("message", quote(&leveled.message));
            if !leveled.fields.is_empty() {
                let mut fields = Object::default();
                for field in &leveled.fields {
                    fields.put(&field.name, value(&field.value));
                }
                object.put("fields", fields.end());
            }
            object.put_origin(leveled.origin.as_ref());
            object.put_some("original_bytes", leveled.original_bytes);
        }
        Body::Raw(raw) => {
            object.put("kind", "\"raw\"");
            object.put_origin(Some(&raw.origin));
            object.put("text", quote(&raw.text));
            object.put_some("original_bytes", raw.original_bytes);
            object.put_some("lossy", raw.lossy.then_some(true));
        }
        Body::Dropped(dropped) => {
            object.put("kind", "\"dropped\"");
            object.put("count", dropped.count);
            object.put("exact", dropped.exact);
        }
    }
    object.end()
}

/// An object being written; its values are JSON already.
#[derive(Default)]
struct Object(String);

impl Object {
    fn put(&mut self, name: &str, value: impl std::fmt::Display) {
        let before = if self.0.is_empty() { '{' } else { ',' };
        let _ = write!(self.0, "{before}{}:{value}", quote(name));
    }

    fn put_some(&mut self, name: &str, value: Option<impl std::fmt::Display>) {
        if let Some(value) = value {
            self.put(name, value);
        }
    }

    fn put_origin(&mut self, origin: Option<&Origin>) {
        if let Some(origin) = origin {
            self.put("stream", quote(&origin.stream));
            self.put("generation", origin.generation);
        }
    }

    fn end(self) -> String {
        self.0 + "}"
    }
}

fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn value(value: &Value) -> String {
    match value {
        Value::Text(text) => quote(text),
        Value::Float(float) if !float.is_finite() => quote(&float.to_string()),
        other => other.to_string(),
    }
}
