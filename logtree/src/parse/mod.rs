//! Lines of known formats into leveled messages.
//!
//! Each takes a line without its terminator and what time it is, and gives none for a line it does not fully
//! understand. Times without a zone are taken as UTC.

mod capnslog;
mod klog;
mod kmsg;
mod logfmt;
mod zap;

pub use capnslog::capnslog;
pub use klog::klog;
pub use kmsg::{KmsgRecord, kmsg};
pub use logfmt::logfmt;
pub use zap::zap;

use std::time::SystemTime;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use crate::Message;

/// What makes a message of a line, or nothing if the line is not of its format.
pub type Parser = fn(line: &str, now: SystemTime) -> Option<Message>;

/// Lines of etcd: [`zap`] JSON, else the older text of [`capnslog`].
pub fn etcd(line: &str, now: SystemTime) -> Option<Message> {
    zap(line, now).or_else(|| capnslog(line, now))
}

/// The time a text with a zone says (RFC 3339 and the like).
fn zoned_time(text: &str) -> Option<SystemTime> {
    text.parse::<Timestamp>().ok().map(SystemTime::from)
}

fn utc_time(civil: DateTime) -> Option<SystemTime> {
    TimeZone::UTC.to_timestamp(civil).ok().map(SystemTime::from)
}

/// Takes a number of exactly `N` digits off the front.
fn digits<const N: usize>(text: &str) -> Option<(i16, &str)> {
    let (number, rest) = text.split_at_checked(N)?;
    let all_digits = number.bytes().all(|byte| byte.is_ascii_digit());
    Some((number.parse().ok().filter(|_| all_digits)?, rest))
}

/// Takes `hh:mm:ss` with a fraction of any length, or none, off the front; digits beyond nanoseconds are dropped.
fn clock(text: &str) -> Option<(jiff::civil::Time, &str)> {
    let (hour, rest) = digits::<2>(text)?;
    let (minute, rest) = digits::<2>(rest.strip_prefix(':')?)?;
    let (second, rest) = digits::<2>(rest.strip_prefix(':')?)?;
    let (nanos, rest) = match rest.strip_prefix('.') {
        None => (0, rest),
        Some(fraction) => {
            let length = fraction.bytes().take_while(u8::is_ascii_digit).count();
            let (digits, rest) = fraction.split_at(length);
            let nanos = format!("{:0<9.9}", digits).parse().ok().filter(|_| length > 0)?;
            (nanos, rest)
        }
    };
    let small = |number: i16| i8::try_from(number).ok();
    Some((jiff::civil::Time::new(small(hour)?, small(minute)?, small(second)?, nanos).ok()?, rest))
}
