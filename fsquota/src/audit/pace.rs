//! Limits how fast a tree is walked.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

/// Pauses that are shorter than this are taken together.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// Limits the entries per second. A walk that was slow does not catch up.
pub(super) struct WalkPace {
    /// The time between two entries.
    step: Option<Duration>,
    due: Instant,
}

impl WalkPace {
    pub(super) fn new(entries_per_second: Option<NonZeroU32>) -> Self {
        let step = entries_per_second.map(|rate| Duration::from_secs(1) / rate.get());
        Self { step, due: Instant::now() }
    }

    /// Waits until the next entry is due.
    #[expect(clippy::disallowed_methods, reason = "the walk blocks its thread")]
    pub(super) fn wait(&mut self) {
        if let Some(step) = self.step {
            let pause = self.advance(step, Instant::now());
            if pause >= SHORTEST_PAUSE {
                std::thread::sleep(pause);
            }
        }
    }

    /// The pause before an entry that is visited now.
    fn advance(&mut self, step: Duration, now: Instant) -> Duration {
        let pause = self.due.saturating_duration_since(now);
        self.due = self.due.max(now) + step;
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In virtual time, with pauses that are taken together as `wait` does.
    #[test]
    fn a_walk_never_inspects_more_entries_than_its_rate() {
        for rate in [1, 30, 1000, 1_000_000] {
            let mut pace = WalkPace::new(NonZeroU32::new(rate));
            let (start, step) = (pace.due, pace.step.unwrap());
            let mut now = start;
            for entry in 0..5_000_u32 {
                let pause = pace.advance(step, now);
                now += if pause >= SHORTEST_PAUSE { pause } else { Duration::ZERO };
                assert!(now + SHORTEST_PAUSE >= start + step * entry, "{entry} at {rate}/s");
            }
            // After a slow entry it does not catch up.
            now += Duration::from_secs(3600);
            pace.advance(step, now);
            assert_eq!(pace.advance(step, now), step);
        }
    }
}
