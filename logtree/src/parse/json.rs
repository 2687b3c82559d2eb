//! JSON, one object on each line.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value as Json;

use super::LineContext;
use super::level_word::{level_of_number, level_of_word};
use super::time::{parse_time, time_of_number};
use crate::{FieldValue, Level, LogField, LogMessage};

const LEVEL_KEYS: &[&str] = &["level", "severity", "levelname", "log.level", "@level", "lvl"];
const MESSAGE_KEYS: &[&str] = &["msg", "message", "@message", "event"];
const TIME_KEYS: &[&str] = &["ts", "time", "timestamp", "@timestamp", "asctime"];

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
/// A level is a word of any of these programs, or a number of syslog or pino. A time is a text or a number since 1970,
/// in seconds, milliseconds, microseconds or nanoseconds. What is none stays a field, like a position that is none:
/// then the message has [`Level::Warn`], so that a level which nobody knows hides nothing, or claims no time.
pub fn leveled_json_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let mut object = JsonObject::parse(line)?;
    let level_key = object.find(LEVEL_KEYS)?;
    let level = match object.value(level_key) {
        Json::String(word) => level_of_word(word),
        number => number.as_u64().and_then(level_of_number),
    };
    if level.is_some() {
        object.0.remove(level_key);
    }
    let text = match object.find(MESSAGE_KEYS).map(|key| object.0.remove(key).1) {
        Some(Json::String(text)) => text,
        Some(other) => other.to_string(),
        // As programs of go-kit write it: all is in the fields.
        None => String::new(),
    };
    let mut message = LogMessage::without_position(level.unwrap_or(Level::Warn), text.trim_end_matches('\n'));
    message.claimed_time = object.take_with(TIME_KEYS, |value| match value {
        Json::String(text) => parse_time(text, &context.zone),
        Json::Number(number) => time_of_number(number),
        _ => None,
    });
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
    UNIX_EPOCH.checked_add(Duration::from_micros(micros))
}

/// The pairs of an object in their order, with those whose key occurs again.
struct JsonObject(Vec<(String, Json)>);

impl JsonObject {
    fn parse(line: &str) -> Option<JsonObject> {
        // Most lines that are no objects cost no parser.
        line.starts_with('{').then(|| serde_json::from_str(line).ok())?
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
