//! Text whose lines start with their level, perhaps after their time.

use std::time::SystemTime;

use super::LineContext;
use super::failure::names_exception;
use super::level_word::{level_of_python_number, level_of_severity, level_of_word};
use super::time::parse_time;
use crate::{Level, LogMessage};

/// The longest time at the start of a line, `2026-11-21T11:26:16.759613664+01:00`.
const MAX_TIME_BYTES: usize = 35;
/// The level is one of so many first words.
const MAX_WORDS: usize = 8;
/// Levels of less than a warning that a text has in capitals for other reasons.
const PROSE: [&str; 8] = ["CONFIG", "FINE", "FINER", "FINEST", "NOTICE", "SUCCESS", "VERBOSE", "SILLY"];

/// Parses a line that names its level near its start: `[ERROR] plugin/errors: text` (CoreDNS), `ERROR:root:text` and
/// `2026-11-21 11:26:08,703 - app - ERROR - text` (Python), `SEVERE: text` (java.util.logging), `11:26:08 [main] WARN
/// a.B - text` (logback), `error: text`, `<3>text` (sd-daemon(3)).
///
/// The level is one of the first eight words: in capitals (one that is rare as a level only at the start or after a time), in brackets, or, as the first word, before a colon. The text
/// of the message is the rest of the line after the time, and after the level if nothing is between the two. A line of a
/// stack trace has no level of its own below [`Level::Error`].
pub fn level_prefix_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    if let Some((severity, text)) = line.strip_prefix('<').and_then(|rest| rest.split_once('>'))
        && let Some(priority) = severity.parse::<u8>().ok().filter(|&priority| priority < 24 * 8)
        && let Some(level) = level_of_severity(u64::from(priority % 8))
    {
        // With a facility, as logger(1) prints it.
        return Some(LogMessage::without_position(level, text));
    }
    if let Some(heading) = &context.heading
        && let Some((word, text)) = line.split_once(": ").filter(|(word, _)| !word.contains(' '))
    {
        // A level of the program's own has a name that nobody knows.
        let (level, text) = level_of_word(word).map_or((Level::Warn, line), |level| (level, text));
        let message = LogMessage { claimed_time: heading.time, ..LogMessage::without_position(level, text) };
        return Some(message.with_field("source", heading.source.as_str()));
    }
    let (claimed_time, rest) = split_time(line, context);
    let (level, end, is_first) = find_level(rest, claimed_time.is_some())?;
    // A line of a stack trace has such words too, and its message is not less important for them.
    let is_inner = || line.starts_with("  ") || line.starts_with('\t') || names_exception(line);
    if level < Level::Error && is_inner() {
        return None;
    }
    if !is_first {
        return Some(LogMessage { claimed_time, ..LogMessage::without_position(level, rest) });
    }
    let text = rest[end..].trim_start_matches([']', '>', ')', ':', ' ', '\t', '-', '|']);
    // The time can be after the level.
    let (claimed_time, text) =
        if claimed_time.is_some() { (claimed_time, text) } else { split_time(text, context) };
    Some(LogMessage { claimed_time, ..LogMessage::without_position(level, text) })
}

/// Splits a time off the front, also in brackets, with what separates it from the rest.
fn split_time<'a>(line: &'a str, context: &LineContext) -> (Option<SystemTime>, &'a str) {
    let opened = line.strip_prefix('[').unwrap_or(line);
    if !opened.starts_with(|c: char| c.is_ascii_digit()) {
        return (None, line);
    }
    // Digits, `Z`, `UTC`, `GMT` and what is between them: to find that another start is no time costs more.
    let is_of_time = |&(_, c): &(usize, char)| c.is_ascii_digit() || "-/:.,+TZUCGM ]|\t".contains(c);
    let is_end = |&(at, c): &(usize, char)| match c {
        _ if !opened[..at].ends_with(|last: char| last.is_ascii_alphanumeric()) => false,
        ' ' | ']' | '\t' | '|' => true,
        // Not within the time of day.
        ':' | ',' => opened[at + 1..].starts_with(|next: char| !next.is_ascii_digit()),
        _ => false,
    };
    // The longest start that is a time: a date and a time can have a space between them.
    let ends: Vec<_> = opened
        .char_indices()
        .take(MAX_TIME_BYTES + 1)
        .take_while(is_of_time)
        .filter(is_end)
        .map(|(at, _)| at)
        .collect();
    let found = ends.into_iter().rev().find_map(|end| Some((parse_time(&opened[..end], context)?, end)));
    match found {
        Some((time, end)) => {
            (Some(time), opened[end..].trim_start_matches([']', ' ', '\t', '-', '|', ':', ',']))
        }
        None => (None, line),
    }
}

/// The level, where its word ends, and whether only opening brackets are before it.
fn find_level(text: &str, is_after_time: bool) -> Option<(Level, usize, bool)> {
    if let Some(number) = text.strip_prefix("Level ") {
        // Python's name of a level that has none.
        let length = number.bytes().take_while(u8::is_ascii_digit).count();
        if let Ok(level) = number[..length].parse() {
            return Some((level_of_python_number(level), text.len() - number.len() + length, true));
        }
    }
    let is_after_time = is_after_time || text.starts_with(|c: char| c == '[' || c.is_ascii_digit());
    let is_separator = |c: char| c.is_whitespace() || ":[]<>()|,=".contains(c);
    let mut at = 0;
    for number in 0..MAX_WORDS {
        let start = at + text[at..].find(|c| !is_separator(c))?;
        at = start + text[start..].find(is_separator).unwrap_or(text.len() - start);
        // celery writes `ERROR/MainProcess`, structlog `[error    ]`.
        let word = text[start..at].split_once('/').map_or(&text[start..at], |(level, _)| level);
        let after = text[at..].trim_start_matches(' ').chars().next();
        let before = text[..start].chars().next_back();
        let is_bracketed =
            before.is_some_and(|c| "[<(".contains(c)) && after.is_some_and(|c| "]>)".contains(c));
        // `DEBUG=1` is a variable, and `CONFIG` a level only where a level is written.
        let is_capital = word.bytes().all(|byte| byte.is_ascii_uppercase())
            && after != Some('=')
            && (number == 0 || is_after_time || !PROSE.contains(&word));
        let is_marked = is_capital || is_bracketed || (number == 0 && after == Some(':'));
        if let Some(level) = level_of_word(word).filter(|_| is_marked) {
            return Some((level, at, number == 0));
        }
    }
    None
}
