//! How often something may happen that anyone who reaches the port can bring about.

use std::time::{Duration, Instant};

/// A number at once, and then one in each period.
#[derive(Debug)]
pub(super) struct RateLimit {
    period: Duration,
    burst: u32,
    /// How many may come at once.
    tokens: u32,
    /// The time up to which tokens were added.
    filled: Instant,
    refused: u64,
}

/// Calls of strangers are admitted, and recorded, this often at most: anyone who reaches the port can make them, and each is a
/// read of the cluster's store.
const STRANGERS_PERIOD: Duration = Duration::from_millis(50);
/// Those that are admitted at once after a quiet time.
const STRANGERS_BURST: u32 = 100;

impl RateLimit {
    pub(super) fn of_strangers(now: Instant) -> Self {
        Self::new(STRANGERS_PERIOD, STRANGERS_BURST, now)
    }

    pub(super) fn new(period: Duration, burst: u32, now: Instant) -> Self {
        Self { period, burst, tokens: burst, filled: now, refused: 0 }
    }

    /// If this one may be: the number of those before it that might not.
    pub(super) fn next(&mut self, now: Instant) -> Option<u64> {
        let periods = now.saturating_duration_since(self.filled).as_nanos() / self.period.as_nanos();
        let periods = u32::try_from(periods).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(periods).min(self.burst);
        self.filled += self.period * periods;
        if self.tokens == 0 {
            self.refused += 1;
            return None;
        }
        self.tokens -= 1;
        Some(std::mem::take(&mut self.refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_has_no_effect() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut limit = RateLimit::new(second, 5, start);
        assert_eq!((0..1000).filter(|_| limit.next(start).is_some()).count(), 5);
        let later = start + second;
        assert_eq!(limit.next(later), Some(995));
        assert_eq!(limit.next(later), None);
        assert_eq!(limit.next(later + 3600 * second), Some(1));
        assert_eq!((0..10).filter(|_| limit.next(later + 3600 * second).is_some()).count(), 4);
    }
}
