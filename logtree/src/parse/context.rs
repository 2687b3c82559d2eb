//! What a parser knows of a line beside its text.

use std::path::Path;
use std::str::FromStr;
use std::time::SystemTime;

use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use thiserror::Error;

/// The zone of a program that has no `TZ`.
const MACHINE_ZONE: &str = "/etc/localtime";

/// What a [`LineParser`](super::LineParser) knows of a line beside its text.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LineContext {
    /// When the line was received.
    pub received_at: SystemTime,
    /// The zone of the times in the line that name none.
    pub zone: LogZone,
}

impl LineContext {
    /// A line received at this time, of a program whose zone is UTC.
    pub fn new(received_at: SystemTime) -> LineContext {
        LineContext { received_at, zone: LogZone::default() }
    }

    /// Sets the zone.
    pub fn zone(mut self, zone: LogZone) -> LineContext {
        self.zone = zone;
        self
    }
}

/// The time zone in which a program writes the times of its log. The default is UTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogZone(TimeZone);

/// The text names no time zone that this machine knows; use the name of a file in `/usr/share/zoneinfo`, or a rule as
/// `CET-1CEST,M3.5.0,M10.5.0/3`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "unknown time zone {0:?}: use a name from /usr/share/zoneinfo, such as Asia/Tokyo, or a rule, such as JST-9"
)]
pub struct UnknownZone(pub String);

impl LogZone {
    /// The zone of a program with this value of its variable `TZ`; without the variable, that of the machine
    /// (`/etc/localtime`). UTC, as for the program itself, if the machine does not know the zone.
    pub fn of_program(tz: Option<&str>) -> LogZone {
        match tz {
            Some(tz) => tz.parse().unwrap_or_default(),
            None => read_zone(Path::new(MACHINE_ZONE)).unwrap_or_default(),
        }
    }

    pub(super) fn system_time(&self, civil: DateTime) -> Option<SystemTime> {
        self.0.to_timestamp(civil).ok().map(SystemTime::from)
    }

    pub(super) fn year_at(&self, time: SystemTime) -> Option<i16> {
        Some(self.0.to_datetime(time.try_into().ok()?).year())
    }
}

impl Default for LogZone {
    fn default() -> LogZone {
        LogZone(TimeZone::UTC)
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
                let zone = TimeZone::get(name).or_else(|_| TimeZone::posix(name));
                zone.map(LogZone).map_err(|_| unknown())
            }
        }
    }
}

fn read_zone(path: &Path) -> Option<LogZone> {
    let data = std::fs::read(path).ok()?;
    TimeZone::tzif("", &data).ok().map(LogZone)
}
