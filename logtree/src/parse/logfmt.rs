//! logfmt, the format of containerd.

use std::borrow::Cow;

use super::LineContext;
use super::json::{LEVEL_KEYS, MESSAGE_KEYS, TIME_KEYS, level_of_text};
use super::time::parse_time_or_number;
use crate::{FieldValue, Level, LogField, LogMessage};

/// Parses `time="2026-11-21T11:26:16.7Z" level=info msg="text" key=value`, as logrus and slog write it, or go-kit,
/// which has `ts` and no message. The level is required; all other keys become fields, in order, and so do a time that
/// is none and an unknown level, with which the message has [`Level::Warn`]. Quoted values follow Go's syntax. What is
/// no pair, as a name with a space that logrus does not quote, or a value that was cut, stays in the text.
///
/// *Source:* github.com/sirupsen/logrus text_formatter.go; Go's `strconv.Quote`.
pub fn logfmt_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let (mut level, mut time, mut text, mut fields) = (None, None, None, Vec::new());
    let (mut has_level, mut others) = (false, Vec::new());
    let line = line.trim_start_matches(' ');
    let mut rest = line;
    while !rest.is_empty() {
        let Some((name, value, after)) = take_pair(rest) else {
            // A line of prose does not start with a pair.
            if rest.len() == line.len() {
                return None;
            }
            let end = rest.find(' ').unwrap_or(rest.len());
            others.push(&rest[..end]);
            rest = rest[end..].trim_start_matches(' ');
            continue;
        };
        rest = after.trim_start_matches(' ');
        // Of repeated keys the first counts, and the others become fields: nothing is lost.
        let is_read = match &*name {
            key if level.is_none() && LEVEL_KEYS.contains(&key) => {
                (has_level, level) = (true, level_of_text(&value));
                level.is_some()
            }
            key if time.is_none() && TIME_KEYS.contains(&key) => {
                time = parse_time_or_number(&value, context);
                time.is_some()
            }
            key if text.is_none() && MESSAGE_KEYS.contains(&key) => {
                text = Some(value.clone());
                true
            }
            _ => false,
        };
        if !is_read {
            fields.push(LogField { name: name.into_owned(), value: FieldValue::Text(value) });
        }
    }
    if !has_level {
        return None;
    }
    let text = text.into_iter().chain(others.into_iter().map(str::to_owned)).collect::<Vec<_>>().join(" ");
    let message = LogMessage::without_position(level.unwrap_or(Level::Warn), text);
    Some(LogMessage { claimed_time: time, fields, ..message })
}

/// Splits `name=value` off the front; slog quotes some names.
fn take_pair(text: &str) -> Option<(Cow<'_, str>, String, &str)> {
    let (name, rest) = match text.strip_prefix('"') {
        Some(quoted) => {
            let (name, rest) = take_quoted(quoted)?;
            (Cow::Owned(name), rest)
        }
        // Not further than the word: a text of many words is read once.
        None => {
            let (name, rest) = text.split_at(text.find(['=', ' ', '"'])?);
            if name.is_empty() {
                return None;
            }
            (Cow::Borrowed(name), rest)
        }
    };
    let rest = rest.strip_prefix('=')?;
    match rest.strip_prefix('"') {
        Some(quoted) => {
            let (value, rest) = take_quoted(quoted)?;
            (rest.is_empty() || rest.starts_with(' ')).then_some((name, value, rest))
        }
        None => {
            let (value, rest) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
            Some((name, value.to_owned(), rest))
        }
    }
}

/// Parses a value up to the closing quote, in Go's syntax.
pub(super) fn take_quoted(text: &str) -> Option<(String, &str)> {
    // Escapes may encode single bytes, so the value is collected as bytes.
    let mut value = Vec::new();
    let mut rest = text;
    loop {
        let at = rest.find(['"', '\\'])?;
        value.extend_from_slice(&rest.as_bytes()[..at]);
        let special = rest[at..].starts_with('"');
        rest = &rest[at + 1..];
        if special {
            return Some((String::from_utf8_lossy(&value).into_owned(), rest));
        }
        rest = take_escape(rest, &mut value)?;
    }
}

/// Parses the escape after a backslash.
fn take_escape<'a>(text: &'a str, value: &mut Vec<u8>) -> Option<&'a str> {
    let kind = text.chars().next()?;
    let rest = &text[kind.len_utf8()..];
    let simple = match kind {
        'a' => 7,
        'b' => 8,
        't' => b'\t',
        'n' => b'\n',
        'v' => 11,
        'f' => 12,
        'r' => b'\r',
        '"' | '\\' | '\'' => kind as u8,
        'x' | 'u' | 'U' => return take_code_point(kind, rest, value),
        _ => return None,
    };
    value.push(simple);
    Some(rest)
}

/// Parses the digits of a byte or of a code point.
fn take_code_point<'a>(kind: char, text: &'a str, value: &mut Vec<u8>) -> Option<&'a str> {
    let length = match kind {
        'x' => 2,
        'u' => 4,
        _ => 8,
    };
    let (digits, rest) = text.split_at_checked(length)?;
    let number = u32::from_str_radix(digits, 16).ok()?;
    match u8::try_from(number) {
        // `\x` is a byte of the text, `\u` and `\U` are characters.
        Ok(byte) if kind == 'x' => value.push(byte),
        _ => value.extend_from_slice(char::from_u32(number)?.encode_utf8(&mut [0; 4]).as_bytes()),
    }
    Some(rest)
}
