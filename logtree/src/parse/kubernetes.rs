//! Kubernetes' JSON, the format of its programs with `--logging-format=json`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value as Json};

use super::zap::{take_position, zap_line};
use crate::{Level, LogField, LogMessage};

/// Parses a JSON object: of zap, which has a level, or of Kubernetes, which has none.
///
/// Kubernetes writes `ts` in milliseconds since 1970, `caller`, `msg`, and, except for errors, the verbosity
/// `v`: without `v`, the level is [`Level::Error`], and with it [`Level::Info`], also for warnings. All other keys
/// become fields, sorted by key, and so does a verbosity above 0.
///
/// *Source:* k8s.io/component-base/logs/json/json.go.
pub fn json_line(line: &str, now: SystemTime) -> Option<LogMessage> {
    zap_line(line, now).or_else(|| kubernetes_line(line))
}

fn kubernetes_line(line: &str) -> Option<LogMessage> {
    if !line.starts_with('{') {
        return None;
    }
    let mut object: Map<String, Json> = serde_json::from_str(line).ok()?;
    // It is zap's, and `zap_line` has rejected it.
    if object.contains_key("level") {
        return None;
    }
    let millis = object.remove("ts")?.as_f64()?;
    let Json::String(text) = object.remove("msg")? else { return None };
    let verbosity = object.get("v").map(Json::as_u64);
    if verbosity == Some(Some(0)) {
        object.remove("v");
    }
    let level = if verbosity.is_some() { Level::Info } else { Level::Error };
    let mut message = LogMessage::without_position(level, text.trim_end_matches('\n'));
    message.time = Some(UNIX_EPOCH.checked_add(duration_of_millis(millis)?)?);
    take_position(&mut object, &mut message)?;
    message.fields = object.into_iter().map(|(name, value)| LogField { name, value: value.into() }).collect();
    Some(message)
}

/// To a microsecond: a float has no more digits for a present time.
fn duration_of_millis(millis: f64) -> Option<Duration> {
    let micros = Duration::try_from_secs_f64((millis * 1000.0).round()).ok()?.as_secs();
    Some(Duration::from_micros(micros))
}
