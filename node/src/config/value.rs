//! Values that several tables have.

use std::fmt;
use std::time::Duration;

use jiff::SignedDuration;
use serde::de::{Deserializer, Error, Visitor};

/// A duration: a number and its unit, `"500ms"`, `"1.5s"`, `"2m"`, `"1h"`.
pub(crate) fn deserialize_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_str(DurationVisitor)
}

/// The same for an optional key.
pub(crate) fn deserialize_optional_duration<'de, D: Deserializer<'de>>(
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

/// Text in jiff's friendly format, without units longer than an hour.
fn parse_duration(text: &str) -> Option<Duration> {
    // jiff also reads negative durations, which `Duration` rejects.
    Duration::try_from(text.parse::<SignedDuration>().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_needs_its_unit() {
        for (text, millis) in [
            ("500ms", Some(500)),
            ("1.5s", Some(1500)),
            ("2 m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("1h 30m", Some(5_400_000)),
        ]
        .into_iter()
        .chain(["", "10", "s", "-1s", "1 day", "1..5s", "ms", "1e3s"].map(|text| (text, None)))
        {
            assert_eq!(parse_duration(text), millis.map(Duration::from_millis), "{text:?}");
        }
    }
}
