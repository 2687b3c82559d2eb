//! logfmt, the format of containerd.

use std::time::SystemTime;

use super::time::parse_zoned_time;
use crate::{FieldValue, Level, LogField, LogMessage};

/// Parses `time="2026-11-21T11:26:16.7Z" level=info msg="text" key=value`, as logrus writes it. The level and
/// the message are required; all keys but these three become fields, in order. Quoted values follow Go's
/// syntax.
///
/// *Source:* github.com/sirupsen/logrus text_formatter.go; Go's `strconv.Quote`.
pub fn logfmt_line(line: &str, _now: SystemTime) -> Option<LogMessage> {
    let (mut level, mut time, mut text, mut fields) = (None, None, None, Vec::new());
    let mut rest = line.trim_start_matches(' ');
    while !rest.is_empty() {
        let (name, value, after) = take_pair(rest)?;
        rest = after.trim_start_matches(' ');
        match name {
            // Of repeated keys the first counts, and the others become fields: nothing is lost.
            "level" if level.is_none() => level = Some(self::parse_level(&value)?),
            "time" if time.is_none() => time = Some(parse_zoned_time(&value)?),
            "msg" if text.is_none() => text = Some(value),
            _ => fields.push(LogField { name: name.to_owned(), value: FieldValue::Text(value) }),
        }
    }
    Some(LogMessage { time, fields, ..LogMessage::without_position(level?, text?) })
}

fn parse_level(name: &str) -> Option<Level> {
    match name {
        "panic" => Some(Level::Fatal),
        name => name.parse().ok(),
    }
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
