//! klog, the log format of Kubernetes.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;

use serde_json::Value as Json;

use super::logfmt::take_quoted;
use super::{take_clock_time, take_digits, utc_system_time};
use crate::{FieldValue, Level, LogField, LogMessage};

const HOUR: Duration = Duration::from_secs(60 * 60);

/// How the first line of a crash of a Go program begins: a panic, an error of the runtime, or a signal that ends it with a
/// dump of its goroutines, as the SIGABRT of a watchdog.
///
/// *Source:* Go's runtime/panic.go; runtime/sigtab_linux_generic.go, the signals with `_SigThrow` or `_SigPanic`.
const GO_CRASHES: [&str; 11] = [
    "panic: ",
    "fatal error: ",
    "SIGQUIT: quit",
    "SIGILL: illegal instruction",
    "SIGTRAP: trace trap",
    "SIGABRT: abort",
    "SIGBUS: bus error",
    "SIGFPE: floating-point exception",
    "SIGSEGV: segmentation violation",
    "SIGSTKFLT: stack fault",
    "SIGSYS: bad system call",
];

/// Parses a line of [klog](https://github.com/kubernetes/klog): `I1121 11:26:08.703131   12345 file.go:123]
/// text`. The text of a structured message, `"text" key="value" other=[1,2]`, becomes the message and its fields. The
/// first line of a crash of a Go program is a separate message, at [`Level::Fatal`].
///
/// The format has no year: it is the latest year that puts the line at most an hour after `now`. The previous
/// year is used only for lines of the last 48 hours, as around New Year. The process id is dropped.
///
/// *Source:* klog's `Format` comment in klog.go, and internal/serialize/keyvalues.go.
pub fn klog_line(line: &str, now: SystemTime) -> Option<LogMessage> {
    if GO_CRASHES.iter().any(|start| line.starts_with(start)) {
        return Some(LogMessage::without_position(Level::Fatal, line));
    }
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
    let (text, fields) = split_fields(text).unwrap_or_else(|| (text.to_owned(), Vec::new()));
    Some(LogMessage {
        time: Some(resolve_year(month, day, clock, now)?),
        file: file.to_owned(),
        line: position.parse().ok()?,
        fields,
        ..LogMessage::without_position(level, text)
    })
}

/// Splits a structured message. `None` if it is not one.
fn split_fields(text: &str) -> Option<(String, Vec<LogField>)> {
    let (message, mut rest) = take_quoted(text.strip_prefix('"')?)?;
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let (name, after) = rest.strip_prefix(' ')?.split_once('=')?;
        if name.is_empty() || name.contains([' ', '"']) {
            return None;
        }
        let (value, after) = take_value(after)?;
        fields.push(LogField { name: name.to_owned(), value: FieldValue::Text(value) });
        rest = after;
    }
    Some((message, fields))
}

/// Splits a value off the front: quoted, JSON, or a word. `<` starts one on the lines that follow.
fn take_value(text: &str) -> Option<(String, &str)> {
    if let Some(quoted) = text.strip_prefix('"') {
        return take_quoted(quoted);
    }
    let length = if text.starts_with(['{', '[']) {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Json>();
        values.next()?.ok()?;
        values.byte_offset()
    } else {
        text.find(' ').unwrap_or(text.len())
    };
    let (value, rest) = text.split_at(length);
    Some((value.to_owned(), rest))
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
    fn a_structured_message_has_fields() {
        let parse = |text: &str| {
            let message = klog_line(&format!("I1121 11:26:08.703131 1 a.go:1] {text}"), at(NOON)).unwrap();
            let fields: Vec<_> = message.fields.iter().map(|f| format!("{}={}", f.name, f.value)).collect();
            (message.text, fields.join("|"))
        };
        let split = |text: &str, fields: &str| (text.to_owned(), fields.to_owned());
        for (text, fields) in [
            (
                r#""Pod \"a\" failed" pod="kube-system/a" err="no \"x\"" attempt=3"#,
                r#"pod=kube-system/a|err=no "x"|attempt=3"#,
            ),
            (
                r#""Pod \"a\" failed" gates={"A":"b c"} list=["a b"] none=<nil>"#,
                r#"gates={"A":"b c"}|list=["a b"]|none=<nil>"#,
            ),
            (r#""Pod \"a\" failed" err=<"#, "err=<"),
            (r#""Pod \"a\" failed""#, ""),
        ] {
            assert_eq!(parse(text), split(r#"Pod "a" failed"#, fields), "{text}");
        }
        for text in ["FLAG: --a=\"b\"", "\"x\" and more", "\"x\" a=b  c=d", "\"x\" a={b", "\"open", "x a=b"] {
            assert_eq!(parse(text), split(text, ""), "it has no structure");
        }
    }

    #[test]
    fn a_crash_of_a_go_program_is_fatal() {
        for line in [
            "panic: runtime error: index out of range [1] with length 1",
            "fatal error: all goroutines are asleep - deadlock!",
            // As the watchdog of its supervisor aborts it.
            "SIGABRT: abort",
        ] {
            let message = klog_line(line, at(NOON)).unwrap();
            assert_eq!((message.level, message.text.as_str(), message.time), (Level::Fatal, line, None));
        }
        assert_eq!(klog_line("SIGTERM: terminated", at(NOON)), None, "it ends no Go program with a dump");
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
