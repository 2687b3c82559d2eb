//! zap's JSON, which etcd writes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value as Json};

use super::zoned_time;
use crate::{Field, Level, Message, Value};

/// Parses a JSON object as [zap](https://github.com/uber-go/zap) writes it: level, time, caller and message under their
/// usual keys (`level`, `ts` or `time`, `caller`, `msg` or `message`), everything else a field, by key. Lists and
/// objects become JSON text. The level and the message must be there.
pub fn zap(line: &str, _now: SystemTime) -> Option<Message> {
    if !line.starts_with('{') {
        return None;
    }
    let mut object: Map<String, Json> = serde_json::from_str(line).ok()?;
    let level = level(object.get("level")?.as_str()?);
    let Json::String(text) = take(&mut object, ["msg", "message"])? else { return None };
    object.remove("level");
    let mut message = Message::without_position(level, text);
    if let Some(time) = take(&mut object, ["ts", "time"]) {
        message.time = Some(self::time(&time)?);
    }
    if let Some((file, line)) = object.get("caller").and_then(Json::as_str).and_then(|at| at.rsplit_once(':'))
    {
        (message.line, message.file) = (line.parse().ok()?, file.to_owned());
        object.remove("caller");
    }
    message.fields = object.into_iter().map(|(name, value)| Field { name, value: value.into() }).collect();
    Some(message)
}

fn take(object: &mut Map<String, Json>, names: [&str; 2]) -> Option<Json> {
    names.into_iter().find_map(|name| object.remove(name))
}

fn level(name: &str) -> Level {
    match name.to_ascii_lowercase().as_str() {
        "debug" => Level::Debug,
        "warn" => Level::Warn,
        "error" | "dpanic" => Level::Error,
        "panic" | "fatal" => Level::Fatal,
        _ => Level::Info,
    }
}

/// zap writes a time as text or as seconds since 1970.
fn time(value: &Json) -> Option<SystemTime> {
    match value {
        Json::String(text) => zoned_time(text),
        number => UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(number.as_f64()?).ok()?),
    }
}

impl From<Json> for Value {
    fn from(value: Json) -> Value {
        match value {
            Json::String(text) => Value::Text(text),
            Json::Bool(value) => Value::Bool(value),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => Value::Uint(value),
                (None, Some(value)) => Value::Int(value),
                (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            other => Value::Text(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<Message> {
        zap(line, UNIX_EPOCH)
    }

    /// Reference case 16: three levels, the fields by key.
    #[test]
    fn levels_times_positions_and_fields_are_read() {
        for (name, level) in [("info", Level::Info), ("warn", Level::Warn), ("error", Level::Error)] {
            let message = parse(&format!(
                r#"{{"level":"{name}","ts":"2026-11-21T11:26:12.708+0100","caller":"embed/etcd.go:117","msg":"up","b":[1,"x"],"a":1.5}}"#
            ))
            .unwrap();
            assert_eq!((message.level, message.text.as_str()), (level, "up"));
            assert_eq!((message.file.as_str(), message.line), ("embed/etcd.go", 117));
            assert_eq!(message.time, zoned_time("2026-11-21T10:26:12.708Z"));
            let fields: Vec<_> = message.fields.iter().map(|f| format!("{}={}", f.name, f.value)).collect();
            assert_eq!(fields, ["a=1.5", r#"b=[1,"x"]"#]);
        }
    }

    #[test]
    fn seconds_are_a_time_too() {
        let message = parse(r#"{"level":"info","ts":1.5,"msg":"x"}"#).unwrap();
        assert_eq!(message.time, Some(UNIX_EPOCH + Duration::from_millis(1500)));
    }

    #[test]
    fn what_is_not_zap_is_refused() {
        for line in
            ["", "{", "[]", "{}", r#"{"level":"info"}"#, r#"{"msg":"x"}"#, r#"{"level":"info","msg":1}"#]
        {
            assert_eq!(parse(line), None, "{line}");
        }
        assert_eq!(parse(r#"{"level":"info","ts":-1e300,"msg":"x"}"#), None);
    }
}
