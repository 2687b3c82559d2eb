//! The clock of the entries: it counts from boot, so that a step of the wall clock changes how times are shown, and
//! nothing else.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

/// A smaller difference is drift, or the time between two readings: a time that is read twice stays the same.
const STEP_NANOS: u64 = 10_000_000;

/// Nanoseconds from boot to 1970, negated: what is added to a time since boot.
static WALL_OFFSET: AtomicI64 = AtomicI64::new(0);

/// Nanoseconds since boot, sleep included.
pub(crate) fn now_nanos() -> i64 {
    // The clock is a third of an append, and the coarse one would be a few nanoseconds; but its tick is 4 ms
    // (CONFIG_HZ=250): a line would seem to be older than what caused it under another name.
    clock_nanos(ClockId::CLOCK_BOOTTIME)
}

/// Follows the steps of the wall clock. A reader does it before it reads.
pub(crate) fn follow_wall_clock() {
    let offset = clock_nanos(ClockId::CLOCK_REALTIME).saturating_sub(now_nanos());
    if offset.abs_diff(WALL_OFFSET.load(Ordering::Relaxed)) > STEP_NANOS {
        WALL_OFFSET.store(offset, Ordering::Relaxed);
    }
}

/// The wall clock's time of a time since boot.
pub(crate) fn wall_time(nanos: i64) -> SystemTime {
    time_from_nanos(nanos.saturating_add(WALL_OFFSET.load(Ordering::Relaxed)))
}

fn clock_nanos(clock: ClockId) -> i64 {
    // Linux has had both clocks since 2.6.39, and the vDSO reads them.
    let now = clock_gettime(clock).expect("the kernel has this clock");
    now.tv_sec().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec())
}

/// Nanoseconds since 1970, clamped if `time` is outside of the years 1677 to 2262.
pub(crate) fn unix_nanos(time: SystemTime) -> i64 {
    let (sign, distance) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (1, after),
        Err(before) => (-1, before.duration()),
    };
    let seconds = i64::try_from(distance.as_secs()).unwrap_or(i64::MAX);
    sign * seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(distance.subsec_nanos()))
}

/// The inverse of [`unix_nanos`].
pub(crate) fn time_from_nanos(nanos: i64) -> SystemTime {
    let distance = Duration::from_nanos(nanos.unsigned_abs());
    if nanos < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_out_of_range_survive() {
        let time = UNIX_EPOCH - Duration::from_millis(1);
        assert_eq!(time_from_nanos(unix_nanos(time)), time);
        assert_eq!(unix_nanos(UNIX_EPOCH + Duration::from_secs(1 << 40)), i64::MAX);
    }

    #[test]
    fn a_time_since_boot_is_shown_by_the_wall_clock() {
        follow_wall_clock();
        let difference = |time: SystemTime| match time.duration_since(SystemTime::now()) {
            Ok(after) => after,
            Err(before) => before.duration(),
        };
        assert!(difference(wall_time(now_nanos())) < Duration::from_secs(1));
    }
}
