//! zap's JSON, the format of etcd.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value as Json};

use super::time::parse_zoned_time;
use crate::{FieldValue, Level, LogField, LogMessage};

/// Parses a JSON object as [zap](https://github.com/uber-go/zap) writes it: level, time, caller and message
/// under their usual keys (`level`, `ts` or `time`, `caller`, `msg` or `message`); all other keys become
/// fields, sorted by key. Lists and objects become JSON text. The level and the message are required.
pub fn zap_line(line: &str, _now: SystemTime) -> Option<LogMessage> {
    if !line.starts_with('{') {
        return None;
    }
    let mut object: Map<String, Json> = serde_json::from_str(line).ok()?;
    let level = parse_level(object.get("level")?.as_str()?);
    let Json::String(text) = take_key(&mut object, ["msg", "message"])? else { return None };
    object.remove("level");
    let mut message = LogMessage::without_position(level, text);
    if let Some(time) = take_key(&mut object, ["ts", "time"]) {
        message.time = Some(self::parse_time(&time)?);
    }
    take_position(&mut object, &mut message)?;
    message.fields = object.into_iter().map(|(name, value)| LogField { name, value: value.into() }).collect();
    Some(message)
}

/// Moves `caller`, a file and a line, into the message. `None` if its line is not a number.
pub(super) fn take_position(object: &mut Map<String, Json>, message: &mut LogMessage) -> Option<()> {
    if let Some((file, line)) = object.get("caller").and_then(Json::as_str).and_then(|at| at.rsplit_once(':'))
    {
        (message.line, message.file) = (line.parse().ok()?, file.to_owned());
        object.remove("caller");
    }
    Some(())
}

fn take_key(object: &mut Map<String, Json>, names: [&str; 2]) -> Option<Json> {
    names.into_iter().find_map(|name| object.remove(name))
}

fn parse_level(name: &str) -> Level {
    match name.to_ascii_lowercase().as_str() {
        "debug" => Level::Debug,
        "warn" => Level::Warn,
        // At `dpanic`, zap panics only in development.
        "error" | "dpanic" => Level::Error,
        "panic" | "fatal" => Level::Fatal,
        _ => Level::Info,
    }
}

/// Parses zap's time, a text or seconds since 1970.
fn parse_time(value: &Json) -> Option<SystemTime> {
    match value {
        Json::String(text) => parse_zoned_time(text),
        number => UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(number.as_f64()?).ok()?),
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
