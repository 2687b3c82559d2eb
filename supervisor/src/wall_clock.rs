//! The wall clock's time of moments that are kept by the monotonic clock: a step of the wall clock changes how they are
//! shown, and nothing else.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// A smaller difference is drift, or the time between two readings: a moment that is shown twice has one time.
const STEP: Duration = Duration::from_millis(10);

/// One moment by both clocks.
static SAME_MOMENT: Mutex<Option<(Instant, SystemTime)>> = Mutex::new(None);

/// The time that the wall clock, as it is set now, gives to a moment. Keep the moment, and call this whenever you show
/// or write it.
#[must_use]
pub fn wall_clock_time(moment: Instant) -> SystemTime {
    // By tokio's clock, which a test may have paused.
    let now = tokio::time::Instant::now().into_std();
    let wall_now = read_wall_clock(now);
    let mut known = SAME_MOMENT.lock().unwrap_or_else(PoisonError::into_inner);
    let same = follow_step(*known, (now, wall_now));
    *known = Some(same);
    time_at(same, moment).unwrap_or(wall_now)
}

#[cfg(not(test))]
fn read_wall_clock(_: Instant) -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
use steps_test::read_wall_clock;

/// What both clocks show, unless the wall clock has run with the other one since they were read before.
fn follow_step(known: Option<(Instant, SystemTime)>, now: (Instant, SystemTime)) -> (Instant, SystemTime) {
    let has_stepped = |known| time_at(known, now.0).is_none_or(|at| distance(at, now.1) > STEP);
    known.filter(|known| !has_stepped(*known)).unwrap_or(now)
}

fn time_at((moment, wall): (Instant, SystemTime), other: Instant) -> Option<SystemTime> {
    match other.checked_duration_since(moment) {
        Some(later) => wall.checked_add(later),
        None => wall.checked_sub(moment - other),
    }
}

fn distance(one: SystemTime, other: SystemTime) -> Duration {
    one.duration_since(other).unwrap_or_else(|error| error.duration())
}

#[cfg(test)]
mod steps_test;

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_moment_is_shown_by_the_wall_clock() {
        let shown = wall_clock_time(Instant::now());
        assert!(distance(shown, SystemTime::now()) < HOUR);
    }

    #[test]
    fn a_step_moves_the_times_of_all_moments_and_drift_moves_none() {
        let (start, wall) = (Instant::now(), SystemTime::now());
        let known = follow_step(None, (start, wall));
        let now = start + HOUR;
        assert_eq!(follow_step(Some(known), (now, wall + HOUR + STEP)), known);
        for (stepped, moved) in [(wall + 26_280 * HOUR, 26_279), (wall - 719 * HOUR, -720)] {
            let same = follow_step(Some(known), (now, stepped));
            for (moment, hours) in [(start, 0), (now, 1), (start - HOUR, -1)] {
                let hours: i32 = hours + moved;
                let by = HOUR * hours.unsigned_abs();
                let expected = if hours < 0 { wall - by } else { wall + by };
                assert_eq!(time_at(same, moment), Some(expected));
            }
        }
    }
}
