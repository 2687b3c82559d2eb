//! JSON, one object on each line.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value as Json;

use super::LineContext;
use super::level_word::{level_of_number, level_of_python_number, level_of_word};
use super::time::{can_be_stored, parse_time_or_number, time_of_number};
use crate::text::strip_colors;
use crate::{FieldValue, Level, LogField, LogMessage};

pub(super) const LEVEL_KEYS: &[&str] = &["level", "severity", "levelname", "log.level", "@level", "lvl"];
/// The numbers of Python's logging, under the names of its records and of structlog.
const PYTHON_LEVEL_KEYS: &[&str] = &["levelno", "level_number"];
pub(super) const MESSAGE_KEYS: &[&str] = &["msg", "message", "@message", "event"];
pub(super) const TIME_KEYS: &[&str] = &["ts", "time", "timestamp", "@timestamp", "asctime"];

/// Parses a JSON object as programs log it: with a level as in [`leveled_json_line`], or as Kubernetes does, which has
/// none.
///
/// Kubernetes writes `ts` in milliseconds since 1970, `caller`, `msg`, and, except for errors, the verbosity
/// `v`: without `v`, the level is [`Level::Error`], and with it [`Level::Info`], also for warnings. A verbosity of 0
/// is dropped.
///
/// *Source:* k8s.io/component-base/logs/json/json.go.
pub fn json_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    leveled_json_line(line, context).or_else(|| kubernetes_line(line))
}

/// Parses a JSON object with a level and a message, under the keys of zap, zerolog, logrus, slog, pino, and of the
/// formatters of Python and Java; all other keys become fields, in their order. Lists and objects become JSON text.
///
/// A level is a word of any of these programs, or a number of syslog, pino, slog or Java. A time is a text or a number
/// since 1970, in seconds, milliseconds, microseconds or nanoseconds. What is none stays a field, like a position that is
/// none: then the message has [`Level::Warn`], so that a level which nobody knows hides nothing, or claims no time. Words
/// count before numbers, which fields of the program itself can have under the same keys. The `record` of loguru is
/// read as the object.
///
/// Of what is no JSON, as Python's `NaN`, an object that is too deep, or a line that was cut, each value that can't be read
/// stays a text.
pub fn leveled_json_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let mut object = JsonObject::parse(line)?;
    object.flatten_record();
    let level = object.take_level();
    if level.is_none() {
        object.find(LEVEL_KEYS)?;
    }
    let text = match object.find(MESSAGE_KEYS).map(|key| object.0.remove(key).1) {
        Some(Json::String(text)) => text,
        Some(other) => other.to_string(),
        // As programs of go-kit write it: all is in the fields.
        None => String::new(),
    };
    let mut message = LogMessage::without_position(level.unwrap_or(Level::Warn), text.trim_end_matches('\n'));
    message.claimed_time = object
        .take_first(TIME_KEYS, |value| match value {
            Json::String(text) => parse_time_or_number(text, context),
            other => parse_time_or_number(other.get("repr")?.as_str()?, context),
        })
        .or_else(|| object.take_first(TIME_KEYS, |value| time_of_number(value.as_number()?)));
    Some(object.into_message(message))
}

fn kubernetes_line(line: &str) -> Option<LogMessage> {
    let mut object = JsonObject::parse(line)?;
    let time = object.take_with(&["ts"], |millis| time_of_millis(millis.as_f64()?))?;
    let text = object.take_with(&["msg"], |text| Some(text.as_str()?.trim_end_matches('\n').to_owned()))?;
    let level = if object.find(&["v"]).is_some() { Level::Info } else { Level::Error };
    object.take_with(&["v"], |verbosity| (verbosity.as_u64()? == 0).then_some(()));
    let message = LogMessage { claimed_time: Some(time), ..LogMessage::without_position(level, text) };
    Some(object.into_message(message))
}

/// To a microsecond: a float has no more digits for a present time.
fn time_of_millis(millis: f64) -> Option<SystemTime> {
    let micros = Duration::try_from_secs_f64((millis * 1000.0).round()).ok()?.as_secs();
    UNIX_EPOCH.checked_add(Duration::from_micros(micros)).filter(can_be_stored)
}

/// The level of a word or a number; zap colors it on request.
pub(super) fn level_of_text(text: &str) -> Option<Level> {
    let text = strip_colors(text);
    let text = text.trim();
    level_of_word(text).or_else(|| level_of_number(text.parse().ok()?))
}

/// The pairs of an object in their order, with those whose key occurs again.
struct JsonObject(Vec<(String, Json)>);

impl JsonObject {
    fn parse(line: &str) -> Option<JsonObject> {
        // Most lines that are no objects cost no parser.
        let inside = line.strip_prefix('{')?;
        Some(serde_json::from_str(line).unwrap_or_else(|_| JsonObject(split_pairs(inside))))
    }

    /// Puts the pairs of loguru's `record` in its place. Its text stays: it has the traceback.
    fn flatten_record(&mut self) {
        if let Some(at) = self.find(&["record"])
            && let Json::Object(record) = self.value(at)
            && record.contains_key("level")
        {
            let pairs: Vec<_> = record.clone().into_iter().collect();
            self.0.splice(at..=at, pairs);
        }
    }

    fn take_level(&mut self) -> Option<Level> {
        let number = |value: &Json| match value {
            Json::String(text) => level_of_text(text),
            other => level_of_number(other.as_f64()?),
        };
        let python = |value: &Json| Some(level_of_python_number(value.as_u64()?.try_into().ok()?));
        self.take_first(LEVEL_KEYS, |value| {
            // loguru's level is an object.
            level_of_word(strip_colors(value.get("name").unwrap_or(value).as_str()?).trim())
        })
        .or_else(|| self.take_first(PYTHON_LEVEL_KEYS, python))
        .or_else(|| self.take_first(LEVEL_KEYS, number))
    }

    /// Takes the first value of these keys, in their order, that can be read; the others stay.
    fn take_first<T>(&mut self, keys: &[&str], read: impl Fn(&Json) -> Option<T>) -> Option<T> {
        keys.iter().find_map(|key| {
            let mut pairs = self.0.iter().enumerate().filter(|(_, (name, _))| name == key);
            let (at, value) = pairs.find_map(|(at, (_, value))| Some((at, read(value)?)))?;
            self.0.remove(at);
            Some(value)
        })
    }

    /// The place of the first of these keys that is there.
    fn find(&self, keys: &[&str]) -> Option<usize> {
        keys.iter().find_map(|key| self.0.iter().position(|(name, _)| name == key))
    }

    fn value(&self, at: usize) -> &Json {
        &self.0[at].1
    }

    /// Takes the value of the first of these keys that is there, if it can be read; otherwise it stays.
    fn take_with<T>(&mut self, keys: &[&str], read: impl FnOnce(&Json) -> Option<T>) -> Option<T> {
        let at = self.find(keys)?;
        let value = read(self.value(at))?;
        self.0.remove(at);
        Some(value)
    }

    /// The message with its position, `caller` (zap, zerolog) or `source` (slog), and the other pairs as fields.
    fn into_message(mut self, mut message: LogMessage) -> LogMessage {
        let position = self.take_with(&["caller", "source"], |value| match value {
            Json::String(text) => {
                let (file, line) = text.rsplit_once(':')?;
                Some((file.to_owned(), line.parse().ok()?))
            }
            other => {
                Some((other.get("file")?.as_str()?.to_owned(), other.get("line")?.as_u64()?.try_into().ok()?))
            }
        });
        (message.file, message.line) = position.unwrap_or_default();
        message.fields =
            self.0.into_iter().map(|(name, value)| LogField { name, value: value.into() }).collect();
        message
    }
}

/// Splits the pairs of an object that is no JSON, up to where it can't be read.
fn split_pairs(mut text: &str) -> Vec<(String, Json)> {
    let mut pairs = Vec::new();
    while let Some(name) = text.trim_start().strip_prefix('"') {
        let (name, rest) = name.split_at(string_length(name));
        let Some(rest) = rest.strip_prefix('"').and_then(|rest| rest.trim_start().strip_prefix(':')) else {
            break;
        };
        let (value, rest) = rest.split_at(value_length(rest));
        let value = value.trim();
        let value = serde_json::from_str(value).unwrap_or_else(|_| Json::String(value.to_owned()));
        pairs.push((name.to_owned(), value));
        text = rest.strip_prefix(',').unwrap_or_default();
    }
    pairs
}

/// The length of the value at the start, up to the comma or the bracket after it.
fn value_length(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0);
    while let Some(&byte) = text.as_bytes().get(at) {
        match byte {
            b'"' => at += 1 + string_length(&text[at + 1..]),
            b'{' | b'[' => depth += 1,
            b',' | b'}' if depth == 0 => break,
            b'}' | b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    at.min(text.len())
}

/// The length of a string up to its closing quote.
fn string_length(text: &str) -> usize {
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => return at,
            b'\\' => _ = bytes.next(),
            _ => {}
        }
    }
    text.len()
}

impl<'de> Deserialize<'de> for JsonObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<JsonObject, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = JsonObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonObject, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(JsonObject(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

impl From<Json> for FieldValue {
    fn from(value: Json) -> FieldValue {
        match value {
            Json::String(text) => FieldValue::Text(text),
            Json::Bool(value) => FieldValue::Bool(value),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => FieldValue::Uint(value),
                (None, Some(value)) => FieldValue::Int(value),
                (None, None) => FieldValue::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            other => FieldValue::Text(other.to_string()),
        }
    }
}
