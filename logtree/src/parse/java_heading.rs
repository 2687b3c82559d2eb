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
    let mut end = 0;
    let words = line.split_inclusive([' ', '\u{202f}']).take(5).map(|word| {
        end += word.len();
        word.trim_end_matches([' ', '\u{202f}'])
    });
    let words: Vec<_> = words.collect();
    // Most lines cost no more than this.
    if !matches!(words.last(), Some(&("AM" | "PM"))) {
        return None;
    }
    let time = DateTime::strptime("%b %d, %Y %I:%M:%S %p", words.join(" ")).ok()?;
    let time = context.zone.system_time(time, context.received_at);
    Some(JavaHeading { time, source: line[end..].to_owned() })
}
