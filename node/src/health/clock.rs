//! The synchronization of the clock: certificates and tokens are only valid at the right time.

use std::time::{Duration, Instant};

use nix::sys::time::TimeValLike as _;
use nix::time::{ClockId, clock_gettime};
use nodekeel_supervisor::wall_clock_time;

use super::{HealthCondition, NODE_PART};
use crate::sys;

/// The steps that count: a clock that is slewed, as by NTP, moves by less between two assessments.
const MIN_STEP: i128 = NANOS_PER_SECOND;

/// The object of a condition about a step.
pub(super) const WALL_CLOCK: &str = "wall clock";

const NANOS_PER_SECOND: i128 = 1_000_000_000;

/// The time for which a step stays a warning.
const STEP_SHOWN: Duration = Duration::from_secs(3600);

/// Notices that somebody has set the wall clock.
#[derive(Debug, Default)]
pub(super) struct ClockWatch {
    /// The wall clock minus the time since boot, in nanoseconds, at the last look.
    offset: Option<i128>,
    last_step: Option<ClockStep>,
}

#[derive(Debug, Clone, Copy)]
struct ClockStep {
    seconds: i128,
    noticed: Instant,
}

impl ClockWatch {
    /// Compares the wall clock with the time since boot. Returns whether it has been set since the last look.
    pub(super) fn look(&mut self, now: Instant) -> bool {
        let nanos = |clock| clock_gettime(clock).map(|time| i128::from(time.num_nanoseconds()));
        match (nanos(ClockId::CLOCK_REALTIME), nanos(ClockId::CLOCK_BOOTTIME)) {
            (Ok(wall), Ok(boot)) => self.compare(wall - boot, now),
            _ => false,
        }
    }

    fn compare(&mut self, offset: i128, now: Instant) -> bool {
        let step = self.offset.map_or(0, |before| offset - before);
        self.offset = Some(offset);
        let is_step = step.abs() >= MIN_STEP;
        if is_step {
            // The two clocks are not read in the same instant.
            let seconds = (step + step.signum() * NANOS_PER_SECOND / 2) / NANOS_PER_SECOND;
            self.last_step = Some(ClockStep { seconds, noticed: now });
        }
        is_step
    }

    /// The warning about the last step, for an hour.
    pub(super) fn condition(&self, now: Instant) -> Option<HealthCondition> {
        let ClockStep { seconds, noticed } =
            self.last_step.filter(|step| now.duration_since(step.noticed) < STEP_SHOWN)?;
        let direction = if seconds < 0 { "back" } else { "forward" };
        let by = seconds.abs();
        let units = [(24 * 3600, "d"), (3600, "h"), (60, "min"), (1, "s")];
        let (length, unit) = units.into_iter().find(|(length, _)| by >= *length).unwrap_or((1, "s"));
        let problem = format!("was set {direction} by {} {unit}", by / length);
        let hint = "nothing, if that was meant: times before it are shown as the clock is set now";
        let condition = HealthCondition::warning(WALL_CLOCK, problem).hint(hint);
        Some(HealthCondition {
            part: NODE_PART.to_owned(),
            ..condition.since(Some(wall_clock_time(noticed)))
        })
    }
}

/// Returns whether the kernel's clock is synchronized; `None` if the kernel does not report it.
pub(super) fn is_synchronized() -> Option<bool> {
    sys::read_clock_status().ok().map(|status| status & nix::libc::STA_UNSYNC == 0)
}

/// A machine whose clock nothing synchronizes can still do its work.
pub(super) fn clock_condition(is_synchronized: Option<bool>) -> Vec<HealthCondition> {
    match is_synchronized {
        Some(false) => vec![
            HealthCondition::warning("clock", "is not synchronized: nothing sets it by NTP or PTP").hint(
                "run chronyd or systemd-timesyncd; `timedatectl` or `chronyc tracking` shows its state",
            ),
        ],
        // An unknown state is no warning: a sandbox may forbid the call.
        Some(true) | None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_not_synchronized_is_a_warning() {
        assert_eq!(clock_condition(Some(true)), []);
        assert_eq!(clock_condition(None), []);
        let [warning] = &clock_condition(Some(false))[..] else { panic!("one") };
        assert_eq!(warning.to_string(), "clock: is not synchronized: nothing sets it by NTP or PTP");
    }

    #[test]
    fn a_step_is_a_warning_for_an_hour_and_a_slew_is_none() {
        let start = Instant::now();
        let mut watch = ClockWatch::default();
        let mut look = |after: u64, offset: i128| {
            let now = start + Duration::from_secs(after);
            watch.compare(offset * NANOS_PER_SECOND / 10, now);
            watch.condition(now).map(|found| found.problem)
        };
        assert_eq!(look(0, 1_000_000), None);
        assert_eq!(look(5, 1_000_009), None, "0.9 s");
        assert_eq!(look(10, 1_000_009 - 36_010), Some("was set back by 1 h".to_owned()));
        assert_eq!(look(3609, 1_000_009 - 36_010), Some("was set back by 1 h".to_owned()));
        assert_eq!(look(3610, 1_000_009 - 36_010), None);
        assert_eq!(look(3615, 1_000_009), Some("was set forward by 1 h".to_owned()));
    }

    #[test]
    fn the_kernel_says_whether_the_clock_is_synchronized() {
        assert!(is_synchronized().is_some());
    }
}
