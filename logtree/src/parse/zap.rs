//! zap's JSON, the format of etcd.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value as Json};

use super::parse_zoned_time;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_line(line: &str) -> Option<LogMessage> {
        zap_line(line, UNIX_EPOCH)
    }

    /// Reference case 16: three levels, the fields by key.
    #[test]
    fn levels_times_positions_and_fields_are_parsed() {
        for (name, level) in [("info", Level::Info), ("warn", Level::Warn), ("error", Level::Error)] {
            let message = parse_line(&format!(
                r#"{{"level":"{name}","ts":"2026-11-21T11:26:12.708+0100","caller":"embed/etcd.go:117","msg":"up","b":[1,"x"],"a":1.5}}"#
            ))
            .unwrap();
            assert_eq!((message.level, message.text.as_str()), (level, "up"));
            assert_eq!((message.file.as_str(), message.line), ("embed/etcd.go", 117));
            assert_eq!(message.time, parse_zoned_time("2026-11-21T10:26:12.708Z"));
            let fields: Vec<_> = message.fields.iter().map(|f| format!("{}={}", f.name, f.value)).collect();
            assert_eq!(fields, ["a=1.5", r#"b=[1,"x"]"#]);
        }
    }

    #[test]
    fn numeric_timestamps_are_parsed() {
        let message = parse_line(r#"{"level":"info","ts":1.5,"msg":"x"}"#).unwrap();
        assert_eq!(message.time, Some(UNIX_EPOCH + Duration::from_millis(1500)));
    }

    #[test]
    fn lines_that_are_not_zap_are_rejected() {
        for line in
            ["", "{", "[]", "{}", r#"{"level":"info"}"#, r#"{"msg":"x"}"#, r#"{"level":"info","msg":1}"#]
        {
            assert_eq!(parse_line(line), None, "{line}");
        }
        assert_eq!(parse_line(r#"{"level":"info","ts":-1e300,"msg":"x"}"#), None);
    }
}
