//! klog, the log format of Kubernetes.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;

use super::{take_clock_time, take_digits, utc_system_time};
use crate::{Level, LogMessage};

const HOUR: Duration = Duration::from_secs(60 * 60);

/// Parses a line of [klog](https://github.com/kubernetes/klog): `I1121 11:26:08.703131   12345 file.go:123]
/// text`.
///
/// The format has no year: it is the latest year that puts the line at most an hour after `now`. The previous
/// year is used only for lines of the last 48 hours, as around New Year. The process id is dropped.
///
/// *Source:* klog's `Format` comment in klog.go.
pub fn klog_line(line: &str, now: SystemTime) -> Option<LogMessage> {
    let level = match line.get(..1)? {
        "I" => Level::Info,
        "W" => Level::Warn,
        "E" => Level::Error,
        "F" => Level::Fatal,
        _ => return None,
    };
    let (month, rest) = take_digits::<2>(&line[1..])?;
    let (day, rest) = take_digits::<2>(rest)?;
    let (clock, rest) = take_clock_time(take_spaces(rest)?)?;
    let rest = take_spaces(rest)?;
    let (pid, rest) = rest.split_once(' ')?;
    if pid.is_empty() || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (position, text) = rest.trim_start_matches(' ').split_once(']')?;
    let (file, position) = position.split_once(':')?;
    let text = text.strip_prefix(' ')?.trim_start_matches(' ');
    if file.is_empty() || text.is_empty() {
        return None;
    }
    Some(LogMessage {
        time: Some(resolve_year(month, day, clock, now)?),
        file: file.to_owned(),
        line: position.parse().ok()?,
        ..LogMessage::without_position(level, text)
    })
}

/// Strips at least one space off the front.
fn take_spaces(text: &str) -> Option<&str> {
    Some(text.strip_prefix(' ')?.trim_start_matches(' '))
}

fn resolve_year(month: i16, day: i16, clock: Time, now: SystemTime) -> Option<SystemTime> {
    let this_year = TimeZone::UTC.to_datetime(Timestamp::try_from(now).ok()?).year();
    let (month, day) = (i8::try_from(month).ok()?, i8::try_from(day).ok()?);
    let in_year = |year: i16| {
        let date = jiff::civil::Date::new(year, month, day).ok()?;
        utc_system_time(DateTime::from_parts(date, clock)).filter(|&time| time <= now + HOUR)
    };
    let recent = |time: &SystemTime| now.duration_since(*time).is_ok_and(|age| age <= 48 * HOUR);
    in_year(this_year + 1).or_else(|| in_year(this_year)).or_else(|| in_year(this_year - 1).filter(recent))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SystemTime {
        super::super::parse_zoned_time(text).unwrap()
    }

    fn time_of(line: &str, now: &str) -> Option<SystemTime> {
        klog_line(line, at(now))?.time
    }

    const NOON: &str = "2026-11-21T12:00:00Z";

    /// Reference case 14: valid, free text, empty, far future, New Year, unknown severity, invalid hour, no
    /// fraction.
    #[test]
    fn klog_lines_parse_and_malformed_lines_do_not() {
        let good =
            klog_line("E1121 11:26:08.703131   12345 reflector.go:127] list failed: timeout", at(NOON))
                .unwrap();
        assert_eq!(good.level, Level::Error);
        assert_eq!((good.file.as_str(), good.line), ("reflector.go", 127));
        assert_eq!(good.text, "list failed: timeout");
        assert_eq!(good.time, Some(at("2026-11-21T11:26:08.703131Z")));

        for line in [
            "just some text",
            "",
            "D1121 11:26:08.703131 1 a.go:1] severity",
            "I1121 25:26:08.703131 1 a.go:1] hour",
            "I1121 11:26:08. 1 a.go:1] empty fraction",
            "I1121 11:26:08.7 1 a.go:1] ",
            "I1121 11:26:08.7 x a.go:1] pid",
            "I1121 11:26:08.7 1 a:b:1] file",
        ] {
            assert_eq!(klog_line(line, at(NOON)), None, "{line}");
        }
        assert_eq!(time_of("I1224 00:00:00.000000 1 a.go:1] x", "2021-03-01T00:00:00Z"), None);
        let new_year = time_of("I1231 23:59:43.123456 1 a.go:1] x", "2000-01-01T00:00:01Z");
        assert_eq!(new_year, Some(at("1999-12-31T23:59:43.123456Z")));
        let no_fraction = time_of("I1121 11:26:08 1 a.go:1] x", NOON);
        assert_eq!(no_fraction, Some(at("2026-11-21T11:26:08Z")));
    }

    #[test]
    fn fractions_of_any_length_parse() {
        for (fraction, nanos) in [("5", 500_000_000), ("000000001", 1), ("1234567899999", 123_456_789)] {
            let time = time_of(&format!("I1121 11:26:08.{fraction} 1 a.go:1] x"), NOON).unwrap();
            assert_eq!(time, at("2026-11-21T11:26:08Z") + Duration::from_nanos(nanos));
        }
    }

    #[test]
    fn a_leap_day_parses_in_its_year_and_just_after() {
        let line = "I0229 23:30:00.000000 1 a.go:1] x";
        assert_eq!(time_of(line, "2024-02-29T23:31:00Z"), Some(at("2024-02-29T23:30:00Z")));
        assert_eq!(time_of(line, "2024-12-31T00:00:00Z"), Some(at("2024-02-29T23:30:00Z")));
        assert_eq!(time_of(line, "2026-01-01T00:00:00Z"), None);
    }

    #[test]
    fn a_clock_slightly_ahead_of_ours_at_new_year_is_next_year() {
        let time = time_of("I0101 00:00:05.0 1 a.go:1] x", "2026-12-31T23:59:58Z");
        assert_eq!(time, Some(at("2027-01-01T00:00:05Z")));
    }
}
