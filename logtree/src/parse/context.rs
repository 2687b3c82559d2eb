//! What a parser knows of a line beside its text.

use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use thiserror::Error;

use super::java_heading::JavaHeading;
use super::time::can_be_stored;

/// The zone of a program that has no `TZ`.
const MACHINE_ZONE: &str = "/etc/localtime";
/// A clock can be so much ahead of the one that a line is received by, after a step.
const AHEAD: Duration = Duration::from_secs(60);

/// What a [`LineParser`](super::LineParser) knows of a line beside its text.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LineContext {
    /// When the line was received.
    pub received_at: SystemTime,
    /// The zone of the times in the line that name none.
    pub zone: LogZone,
    /// The line before this one, of a message of java.util.logging.
    pub(crate) heading: Option<JavaHeading>,
}

impl LineContext {
    /// A line received at this time, of a program whose zone is UTC.
    pub fn new(received_at: SystemTime) -> LineContext {
        LineContext { received_at, zone: LogZone::default(), heading: None }
    }

    /// Sets the zone.
    pub fn zone(mut self, zone: LogZone) -> LineContext {
        self.zone = zone;
        self
    }
}

/// The time zone in which a program writes the times of its log. The default is UTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogZone {
    zone: TimeZone,
    /// It is a rule, as `JST-9`, and not the name of a zone.
    is_rule: bool,
}

/// The text names no time zone that this machine knows; use the name of a file in `/usr/share/zoneinfo`, or a rule as
/// `CET-1CEST,M3.5.0,M10.5.0/3`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "unknown time zone {0:?}: use a name from /usr/share/zoneinfo, such as Asia/Tokyo, or a rule, such as JST-9"
)]
pub struct UnknownZone(pub String);

impl LogZone {
    fn named(zone: TimeZone) -> LogZone {
        LogZone { zone, is_rule: false }
    }

    /// The zone of a program with this value of its variable `TZ`; without the variable, that of the machine
    /// (`/etc/localtime`). UTC, as for the program itself, if the machine does not know the zone.
    pub fn of_program(tz: Option<&str>) -> LogZone {
        match tz {
            Some(tz) => tz.parse().unwrap_or_default(),
            None => read_zone(Path::new(MACHINE_ZONE)).unwrap_or_default(),
        }
    }

    /// The time of a date and a time of day, none if a clock that is put forward has skipped it. Where a clock that is
    /// put back shows it twice, it is the last one that is not after the receipt.
    pub(super) fn system_time(&self, civil: DateTime, received_at: SystemTime) -> Option<SystemTime> {
        let ambiguous = self.zone.to_ambiguous_timestamp(civil);
        if let AmbiguousOffset::Gap { .. } = ambiguous.offset() {
            return None;
        }
        let later = SystemTime::from(ambiguous.later().ok()?);
        let time = if later > received_at + AHEAD { ambiguous.earlier().ok()?.into() } else { later };
        Some(time).filter(can_be_stored)
    }

    /// As [`LogZone::system_time`], of a program that may be one in Go, which is in UTC if `TZ` is a rule: then it is the
    /// later of the two times that is not after the receipt.
    ///
    /// *Source:* Go's time/zoneinfo_unix.go.
    pub(super) fn go_time(&self, civil: DateTime, received_at: SystemTime) -> Option<SystemTime> {
        let time = self.system_time(civil, received_at);
        if !self.is_rule {
            return time;
        }
        let is_past = |time: &SystemTime| *time <= received_at + AHEAD;
        let utc = LogZone::default().system_time(civil, received_at).filter(is_past);
        utc.max(time.filter(is_past)).or(time)
    }

    pub(super) fn year_at(&self, time: SystemTime) -> Option<i16> {
        Some(self.zone.to_datetime(time.try_into().ok()?).year())
    }
}

impl Default for LogZone {
    fn default() -> LogZone {
        LogZone::named(TimeZone::UTC)
    }
}

impl FromStr for LogZone {
    type Err = UnknownZone;

    /// Reads a value of `TZ`: a name, a path, or a rule; empty is UTC.
    ///
    /// *Source:* tzset(3).
    fn from_str(text: &str) -> Result<LogZone, UnknownZone> {
        let name = text.strip_prefix(':').unwrap_or(text);
        let unknown = || UnknownZone(text.to_owned());
        match name {
            "" => Ok(LogZone::default()),
            path if path.starts_with('/') => read_zone(Path::new(path)).ok_or_else(unknown),
            name => {
                // A program looks for a file, so that `asia/tokyo` is none.
                match TimeZone::get(name).ok().filter(|zone| zone.iana_name() == Some(name)) {
                    Some(zone) => Ok(LogZone::named(zone)),
                    None => {
                        let zone = TimeZone::posix(name).map_err(|_| unknown())?;
                        Ok(LogZone { zone, is_rule: true })
                    }
                }
            }
        }
    }
}

fn read_zone(path: &Path) -> Option<LogZone> {
    let data = std::fs::read(path).ok()?;
    TimeZone::tzif("", &data).ok().map(LogZone::named)
}
