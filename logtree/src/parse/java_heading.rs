//! The line that java.util.logging writes before a message.

use std::time::SystemTime;

use jiff::civil::DateTime;

use super::LineContext;

/// What the line before a message tells of it.
#[derive(Clone, Debug)]
pub(crate) struct JavaHeading {
    pub(crate) time: Option<SystemTime>,
    /// The class and the method, or the name of the logger.
    pub(crate) source: String,
}

/// Parses the first line of a message of java.util.logging, `Nov 28, 2026 7:38:52 AM a.B main`; the level and the text are
/// on the next one. The locale of a program without `LANG` is English.
///
/// *Source:* java.util.logging.SimpleFormatter; JEP 252, by which newer ones write U+202F before the half of the day.
pub(crate) fn java_heading(line: &str, context: &LineContext) -> Option<JavaHeading> {
    let mut words = line.splitn(6, [' ', '\u{202f}']);
    // Most lines cost no more than this.
    let (half, source) = (words.nth(4)?, words.next()?);
    if !matches!(half, "AM" | "PM") {
        return None;
    }
    let date = line[..line.len() - source.len()].trim_end().replace('\u{202f}', " ");
    let time = DateTime::strptime("%b %d, %Y %I:%M:%S %p", date).ok()?;
    let time = context.zone.system_time(time, context.received_at);
    Some(JavaHeading { time, source: source.to_owned() })
}
