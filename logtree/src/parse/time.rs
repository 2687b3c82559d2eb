//! The times in log lines.

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Parses a time with a zone (RFC 3339 and similar formats).
pub(super) fn parse_zoned_time(text: &str) -> Option<SystemTime> {
    text.parse::<Timestamp>().ok().map(SystemTime::from)
}

pub(super) fn utc_system_time(civil: DateTime) -> Option<SystemTime> {
    TimeZone::UTC.to_timestamp(civil).ok().map(SystemTime::from)
}

/// Splits a number of exactly `N` digits off the front.
pub(super) fn take_digits<const N: usize>(text: &str) -> Option<(i16, &str)> {
    let (number, rest) = text.split_at_checked(N)?;
    let all_digits = number.bytes().all(|byte| byte.is_ascii_digit());
    Some((number.parse().ok().filter(|_| all_digits)?, rest))
}

/// Splits `hh:mm:ss`, with an optional fraction of any length, off the front; digits beyond nanoseconds are
/// dropped.
pub(super) fn take_clock_time(text: &str) -> Option<(jiff::civil::Time, &str)> {
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
    Some((jiff::civil::Time::new(small(hour)?, small(minute)?, small(second)?, nanos).ok()?, rest))
}
