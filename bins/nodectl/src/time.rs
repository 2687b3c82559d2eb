//! Formats times and durations.

use std::time::{Duration, SystemTime};

/// A time in UTC with milliseconds, `2026-11-21T11:23:42.746Z` (RFC 3339).
pub(crate) fn format_rfc3339(time: SystemTime) -> String {
    let time = jiff::Timestamp::try_from(time).unwrap_or_default();
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

/// A duration in its two largest units: `45s`, `3m12s`, `5h20m`, `2d3h`.
pub(crate) fn format_duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// A duration as an operator types it: `30s`, `5m`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = text.parse::<jiff::SignedDuration>().ok().and_then(|time| Duration::try_from(time).ok());
    duration.ok_or_else(|| "use a duration like 30s or 5m".to_owned())
}

/// The duration since a time.
pub(crate) fn format_age(time: SystemTime) -> String {
    format_duration(SystemTime::now().duration_since(time).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn rfc3339_dates_match_the_calendar() {
        let millis = UNIX_EPOCH + Duration::from_micros(1_795_260_222_746_999);
        assert_eq!(format_rfc3339(millis), "2026-11-21T11:23:42.746Z");
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(format_rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn durations_show_two_units() {
        let text = |seconds| format_duration(Duration::from_secs(seconds));
        assert_eq!([text(59), text(192), text(19_200), text(183_600)], ["59s", "3m12s", "5h20m", "2d3h"]);
    }
}
