//! Values of a `[[service]]`.

use std::fmt;
use std::time::Duration;

use nodekeel_supervisor::Backoff;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// When a service is ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadinessConfig {
    /// `"started"`: when it runs.
    #[default]
    Started,
    /// `"notify"`: when it reports readiness to `NOTIFY_SOCKET` (sd_notify).
    Notify,
    /// `"exit"`: when it has exited with 0; a one-shot step, not a daemon.
    Exit,
    /// `{ probe = [..], timeout = ".." }`: when a command exits with 0.
    Probe {
        /// The probe's program and its arguments.
        command: Vec<String>,
        /// How long the probe is repeated before the incarnation has failed.
        timeout: Duration,
    },
}

/// When a service restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RestartPolicy {
    /// After every exit.
    Always,
    /// After a failure; exit code 0 completes it.
    OnFailure,
    /// Never.
    Never,
}

/// Delay between restarts: `initial` × `factor`^n, at most `max`, plus or minus the share `jitter`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BackoffConfig {
    /// The first delay.
    #[serde(deserialize_with = "deserialize_duration")]
    pub initial: Duration,
    /// Factor of each further failure.
    pub factor: f64,
    /// The longest delay.
    #[serde(deserialize_with = "deserialize_duration")]
    pub max: Duration,
    /// Random share that is added or subtracted.
    pub jitter: f64,
}

impl BackoffConfig {
    /// The same for the supervisor.
    pub(crate) fn to_backoff(self) -> Backoff {
        let Self { initial, factor, max, jitter } = self;
        Backoff { initial, factor, max, jitter }
    }
}

impl Default for BackoffConfig {
    fn default() -> Self {
        let Backoff { initial, factor, max, jitter, .. } = Backoff::default();
        Self { initial, factor, max, jitter }
    }
}

/// `restart_limit`: how often a service restarts after failures before it stays dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartLimitConfig {
    /// Restarts within the period.
    pub restarts: u32,
    /// The period.
    #[serde(deserialize_with = "deserialize_duration")]
    pub period: Duration,
}

impl<'de> Deserialize<'de> for ReadinessConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadinessVisitor)
    }
}

struct ReadinessVisitor;

impl<'de> Visitor<'de> for ReadinessVisitor {
    type Value = ReadinessConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#""started", "notify", "exit" or { probe = ["command", ..], timeout = "60s" }"#)
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<ReadinessConfig, E> {
        match word {
            "started" => Ok(ReadinessConfig::Started),
            "notify" => Ok(ReadinessConfig::Notify),
            "exit" => Ok(ReadinessConfig::Exit),
            other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ReadinessConfig, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            probe: Vec<String>,
            #[serde(default = "probe_timeout", deserialize_with = "deserialize_duration")]
            timeout: Duration,
        }
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        Ok(ReadinessConfig::Probe { command: table.probe, timeout: table.timeout })
    }
}

fn probe_timeout() -> Duration {
    Duration::from_secs(60)
}

/// A duration: a number and its unit, `"500ms"`, `"1.5s"`, `"2m"`, `"1h"`.
pub(super) fn deserialize_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_str(DurationVisitor)
}

/// The same for an optional key.
pub(super) fn deserialize_optional_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    deserialize_duration(deserializer).map(Some)
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"a duration with its unit in quotes, like "500ms", "10s", "2m" or "1h""#)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse_duration(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let seconds = match unit.trim_start() {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_needs_its_unit() {
        for (text, millis) in
            [("500ms", Some(500)), ("1.5s", Some(1500)), ("2 m", Some(120_000)), ("1h", Some(3_600_000))]
                .into_iter()
                .chain(["", "10", "s", "-1s", "1 day", "1..5s", "ms", "1e3s"].map(|text| (text, None)))
        {
            assert_eq!(parse_duration(text), millis.map(Duration::from_millis), "{text:?}");
        }
    }
}
