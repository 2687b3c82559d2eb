//! Text whose lines start with their level, perhaps after their time.

use std::time::SystemTime;

use super::level_word::{level_of_severity, level_of_word};
use super::time::parse_time;
use super::{LineContext, LogZone};
use crate::{Level, LogMessage};

/// The longest time at the start of a line, `2026-11-21T11:26:16.759613664+01:00`.
const MAX_TIME_BYTES: usize = 35;
/// The level is one of so many first words.
const MAX_WORDS: usize = 8;
/// The first lines of an exception that nothing has caught, in Python and Java.
const TRACEBACKS: [&str; 2] = ["Traceback (most recent call last):", "Exception in thread \""];

/// Parses a line that names its level near its start: `[ERROR] plugin/errors: text` (CoreDNS), `ERROR:root:text` and
/// `2026-11-21 11:26:08,703 - app - ERROR - text` (Python), `SEVERE: text` (java.util.logging), `11:26:08 [main] WARN
/// a.B - text` (logback), `error: text`, `<3>text` (sd-daemon(3)).
///
/// The level is one of the first eight words: in capitals, in brackets, or, as the first word, before a colon. The text
/// of the message is the rest of the line after the time, and after the level if nothing is between the two.
pub fn level_prefix_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    if TRACEBACKS.iter().any(|start| line.starts_with(start)) {
        return Some(LogMessage::without_position(Level::Error, line));
    }
    if let Some((severity, text)) = line.strip_prefix('<').and_then(|rest| rest.split_once('>'))
        && let Some(level) = severity.parse().ok().and_then(level_of_severity)
    {
        return Some(LogMessage::without_position(level, text));
    }
    let (claimed_time, rest) = split_time(line, &context.zone);
    let (level, end, is_first) = find_level(rest)?;
    let text =
        if is_first { rest[end..].trim_start_matches([']', '>', ')', ':', ' ', '-', '|']) } else { rest };
    Some(LogMessage { claimed_time, ..LogMessage::without_position(level, text) })
}

/// Splits a time off the front, also in brackets, with what separates it from the rest.
fn split_time<'a>(line: &'a str, zone: &LogZone) -> (Option<SystemTime>, &'a str) {
    let opened = line.strip_prefix('[').unwrap_or(line);
    if !opened.starts_with(|c: char| c.is_ascii_digit()) {
        return (None, line);
    }
    let is_end = |&(at, c): &(usize, char)| at <= MAX_TIME_BYTES && (c == ' ' || c == ']');
    // The longest start that is a time: a date and a time can have a space between them.
    let ends: Vec<_> =
        opened.char_indices().take(MAX_TIME_BYTES + 1).filter(is_end).map(|(at, _)| at).collect();
    let found = ends.into_iter().rev().find_map(|end| Some((parse_time(&opened[..end], zone)?, end)));
    match found {
        Some((time, end)) => (Some(time), opened[end..].trim_start_matches([']', ' ', '-', '|'])),
        None => (None, line),
    }
}

/// The level, where its word ends, and whether only opening brackets are before it.
fn find_level(text: &str) -> Option<(Level, usize, bool)> {
    let is_separator = |c: char| c.is_whitespace() || ":[]<>()|,=".contains(c);
    let mut at = 0;
    for number in 0..MAX_WORDS {
        let start = at + text[at..].find(|c| !is_separator(c))?;
        at = start + text[start..].find(is_separator).unwrap_or(text.len() - start);
        let (word, after) = (&text[start..at], text[at..].chars().next());
        let before = text[..start].chars().next_back();
        let is_bracketed =
            before.is_some_and(|c| "[<(".contains(c)) && after.is_some_and(|c| "]>)".contains(c));
        let is_marked = word.bytes().all(|byte| byte.is_ascii_uppercase())
            || is_bracketed
            || (number == 0 && after == Some(':'));
        if let Some(level) = level_of_word(word).filter(|_| is_marked) {
            return Some((level, at, number == 0));
        }
    }
    None
}
