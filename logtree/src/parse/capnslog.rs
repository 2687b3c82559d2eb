//! capnslog, which etcd wrote before zap and 3.4 still writes by default.

use std::time::SystemTime;

use jiff::civil::{Date, DateTime};

use super::{clock, digits, utc_time};
use crate::{Level, Message};

/// Parses a line of capnslog, `2026-11-21 11:26:08.703131 I | embed: text`, or of the raft library beside it,
/// `raft2026/11/21 11:26:08 INFO: text`. The package before the colon becomes the field `package`.
///
/// *Source:* github.com/coreos/pkg capnslog/formatters.go; etcd's raft/logger.go with Go's `log` package.
pub fn capnslog(line: &str, _now: SystemTime) -> Option<Message> {
    match line.strip_prefix("raft") {
        Some(rest) => {
            let (time, rest) = date_and_clock(rest, '/')?;
            let (level, text) = rest.split_once(": ")?;
            let level = match level {
                "DEBUG" => Level::Debug,
                "INFO" => Level::Info,
                "WARN" => Level::Warn,
                "ERROR" => Level::Error,
                "PANIC" | "FATAL" => Level::Fatal,
                _ => return None,
            };
            Some(message(level, time, "raft", text))
        }
        None => {
            let (time, rest) = date_and_clock(line, '-')?;
            let (level, rest) = rest.split_once(" | ")?;
            let level = match level {
                "T" => Level::Trace,
                "D" => Level::Debug,
                "I" | "N" => Level::Info,
                "W" => Level::Warn,
                "E" => Level::Error,
                "C" => Level::Fatal,
                _ => return None,
            };
            let (package, text) = rest.split_once(": ").unwrap_or(("", rest));
            Some(message(level, time, package, text))
        }
    }
}

fn message(level: Level, time: SystemTime, package: &str, text: &str) -> Message {
    let message = Message { time: Some(time), ..Message::without_position(level, text) };
    if package.is_empty() { message } else { message.field("package", package) }
}

/// Takes a date, a clock time and the space after it off the front.
fn date_and_clock(text: &str, separator: char) -> Option<(SystemTime, &str)> {
    let (year, rest) = digits::<4>(text)?;
    let (month, rest) = digits::<2>(rest.strip_prefix(separator)?)?;
    let (day, rest) = digits::<2>(rest.strip_prefix(separator)?)?;
    let (clock, rest) = clock(rest.strip_prefix(' ')?)?;
    let date = Date::new(year, i8::try_from(month).ok()?, i8::try_from(day).ok()?).ok()?;
    Some((utc_time(DateTime::from_parts(date, clock))?, rest.strip_prefix(' ')?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::zoned_time;

    fn parse(line: &str) -> Option<Message> {
        capnslog(line, SystemTime::UNIX_EPOCH)
    }

    #[test]
    fn both_formats_of_the_older_etcd_parse() {
        let message =
            parse("2026-11-21 11:26:09.110541 N | etcdserver/membership: set the version to 3.4").unwrap();
        assert_eq!((message.level, message.text.as_str()), (Level::Info, "set the version to 3.4"));
        assert_eq!(message.time, zoned_time("2026-11-21T11:26:09.110541Z"));
        assert_eq!(message.fields[0].value, "etcdserver/membership".into());

        let message =
            parse("raft2026/11/21 11:26:08 INFO: raft.node: 2e elected leader 2e at term 2").unwrap();
        assert_eq!(
            (message.level, message.text.as_str()),
            (Level::Info, "raft.node: 2e elected leader 2e at term 2")
        );
        assert_eq!(message.time, zoned_time("2026-11-21T11:26:08Z"));
    }

    #[test]
    fn anything_else_is_refused() {
        for line in
            ["", "raft", "2026-11-21 11:26:09", "2026-13-21 11:26:09.1 I | a: b", "2026-11-21 11:26:09 X | a"]
        {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
