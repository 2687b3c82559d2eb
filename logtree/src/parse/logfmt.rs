//! logfmt, the format of containerd.

use super::LineContext;
use super::level_word::level_of_word;
use super::time::parse_time;
use crate::{FieldValue, Level, LogField, LogMessage};

/// Parses `time="2026-11-21T11:26:16.7Z" level=info msg="text" key=value`, as logrus and slog write it, or go-kit,
/// which has `ts` and no message. The level is required; all other keys become fields, in order, and so do a time that
/// is none and an unknown level, with which the message has [`Level::Warn`]. Quoted values follow Go's syntax.
///
/// *Source:* github.com/sirupsen/logrus text_formatter.go; Go's `strconv.Quote`.
pub fn logfmt_line(line: &str, context: &LineContext) -> Option<LogMessage> {
    let (mut level, mut time, mut text, mut fields) = (None, None, None, Vec::new());
    let mut has_level = false;
    let mut rest = line.trim_start_matches(' ');
    while !rest.is_empty() {
        let (name, value, after) = take_pair(rest)?;
        rest = after.trim_start_matches(' ');
        // Of repeated keys the first counts, and the others become fields: nothing is lost.
        let is_read = match name {
            "level" | "lvl" if !has_level => {
                (has_level, level) = (true, level_of_word(&value));
                level.is_some()
            }
            "time" | "ts" if time.is_none() => {
                time = parse_time(&value, &context.zone);
                time.is_some()
            }
            "msg" if text.is_none() => {
                text = Some(value.clone());
                true
            }
            _ => false,
        };
        if !is_read {
            fields.push(LogField { name: name.to_owned(), value: FieldValue::Text(value) });
        }
    }
    let message = LogMessage::without_position(level.unwrap_or(Level::Warn), text.unwrap_or_default());
    has_level.then_some(LogMessage { claimed_time: time, fields, ..message })
}

/// Splits `name=value` off the front.
fn take_pair(text: &str) -> Option<(&str, String, &str)> {
    let (name, rest) = text.split_once('=')?;
    if name.is_empty() || name.contains([' ', '"']) {
        return None;
    }
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
