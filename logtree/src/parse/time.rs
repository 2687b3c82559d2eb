//! The times in log lines.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::civil::{DateTime, Time};
use serde_json::Number;

use super::LineContext;
use crate::clock::{time_from_nanos, unix_nanos};

/// Parses a date and a time, as RFC 3339 and in similar formats; without a zone, in that of the program.
pub(super) fn parse_time(text: &str, context: &LineContext) -> Option<SystemTime> {
    // A date alone is no time: it would claim midnight.
    if !text.contains([':', 'T']) {
        return None;
    }
    // Go's `log` and nginx write slashes.
    let text = match text.as_bytes() {
        [_, _, _, _, b'/', _, _, b'/', ..] => Cow::Owned(text.replacen('/', "-", 2)),
        _ => Cow::Borrowed(text),
    };
    // Some write a space before the offset. A number after a time, as in `-12 degrees`, is none.
    let joined = match text.rsplit_once(' ') {
        Some((time, "UTC" | "GMT" | "Z")) => Cow::Owned(format!("{time}Z")),
        Some((time, offset)) if offset.starts_with(['+', '-']) && offset.len() >= "+0000".len() => {
            Cow::Owned(format!("{time}{offset}"))
        }
        _ => Cow::Borrowed(&*text),
    };
    match joined.parse::<Timestamp>() {
        Ok(time) => Some(time.into()).filter(can_be_stored),
        Err(_) => context.zone.system_time(text.parse::<DateTime>().ok()?, context.received_at),
    }
}

/// Parses a time as [`parse_time`], or the digits of [`time_of_number`].
pub(super) fn parse_time_or_number(text: &str, context: &LineContext) -> Option<SystemTime> {
    parse_time(text, context).or_else(|| time_of_number(&text.parse().ok()?))
}

/// An entry has a time between 1677 and 2262. One that claims another, as Go's zero time, claims none.
pub(super) fn can_be_stored(time: &SystemTime) -> bool {
    time_from_nanos(unix_nanos(*time)) == *time
}

/// The time of a number since 1970: seconds, milliseconds, microseconds or nanoseconds, by its size. Each unit reaches
/// from 1973 (from 1970, seconds) to 5138.
pub(super) fn time_of_number(number: &Number) -> Option<SystemTime> {
    let size = number.as_f64().filter(|size| *size >= 0.0)?;
    let units_of_second = match size {
        ..1e11 => 1,
        ..1e14 => 1_000,
        ..1e17 => 1_000_000,
        _ => 1_000_000_000,
    };
    let distance = match number.as_u64() {
        Some(units) => {
            let nanos = units % units_of_second * (1_000_000_000 / units_of_second);
            Duration::new(units / units_of_second, u32::try_from(nanos).ok()?)
        }
        // To a microsecond: a float has no more digits for a present time.
        None => {
            let micros = (size / units_of_second as f64 * 1e6).round();
            Duration::from_micros(if micros < 1e18 { micros as u64 } else { return None })
        }
    };
    UNIX_EPOCH.checked_add(distance).filter(can_be_stored)
}

/// Splits a number of exactly `N` digits off the front.
pub(super) fn take_digits<const N: usize>(text: &str) -> Option<(i16, &str)> {
    let (number, rest) = text.split_at_checked(N)?;
    let all_digits = number.bytes().all(|byte| byte.is_ascii_digit());
    Some((number.parse().ok().filter(|_| all_digits)?, rest))
}

/// Splits `hh:mm:ss`, with an optional fraction of any length, off the front; digits beyond nanoseconds are
/// dropped. A leap second is the one before it, as in [`parse_time`]; there is no time if its digits are none.
pub(super) fn take_clock_time(text: &str) -> Option<(Option<Time>, &str)> {
    let (hour, rest) = take_digits::<2>(text)?;
    let (minute, rest) = take_digits::<2>(rest.strip_prefix(':')?)?;
    let (second, rest) = take_digits::<2>(rest.strip_prefix(':')?)?;
    let (nanos, rest) = match rest.strip_prefix('.') {
        None => (0, rest),
        Some(fraction) => {
            let length = fraction.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, rest) = fraction.split_at(length);
            // Filled up or cut to nine digits.
            let nanos = format!("{:0<9.9}", digits).parse().ok().filter(|_| length > 0)?;
            (nanos, rest)
        }
    };
    let small = |number: i16| i8::try_from(number).ok();
    let second = if second == 60 { 59 } else { second };
    Some((Time::new(small(hour)?, small(minute)?, small(second)?, nanos).ok(), rest))
}
