//! When and how fast a runnable is started again, as plain data.

use std::time::Duration;

/// How a child is restarted.
///
/// The default: always, after [`Backoff::default`], and ten seconds of readiness clear the record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// Which ends are followed by a new start.
    pub restart: Restart,
    /// The delay before a start that follows a failure.
    pub backoff: Backoff,
    /// How long a runnable must have been ready for its earlier failures to be forgotten.
    ///
    /// Being ready is not enough: what signals ready and then fails at once would otherwise never back off.
    pub stable_after: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self { restart: Restart::Always, backoff: Backoff::default(), stable_after: Duration::from_secs(10) }
    }
}

/// Which ends of a runnable are followed by a new start.
///
/// None of them outlives the parent: a parent that runs again adds its children again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Restart {
    /// Every end but a clean return after [`done`](crate::Context::done) (OTP: permanent).
    #[default]
    Always,
    /// A failure; a return of `Ok` is the end of the work (OTP: transient).
    OnFailure,
    /// None (OTP: temporary).
    Never,
}

/// Exponential backoff with jitter.
///
/// The `n`th failure in a row is followed by `initial` × `factor`^(`n`-1), at most `max`, give or take the share
/// `jitter` of it. Values that make no sense are brought into range: a factor below 1 or not a number is 1, the jitter
/// is cut to 0 ..= 1.
///
/// *Source:* the defaults are those that Monogon's supervisor gets from its backoff library.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// The delay after the first failure. Default 500 ms; zero means none.
    pub initial: Duration,
    /// What each further failure multiplies the delay by. Default 1.5.
    pub factor: f64,
    /// The longest delay before jitter. Default 60 s.
    pub max: Duration,
    /// The share of the delay that chance adds or takes. Default 0.5.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_secs(60), jitter: 0.5 }
    }
}

impl Backoff {
    /// No delay at all: for tests and benches, or where something else limits the rate.
    pub const NONE: Self = Self { initial: Duration::ZERO, factor: 1.0, max: Duration::ZERO, jitter: 0.0 };

    /// The delay before jitter after `failures` failures in a row; zero for none.
    pub fn interval(&self, failures: u32) -> Duration {
        let Some(steps) = failures.checked_sub(1) else { return Duration::ZERO };
        let factor = if self.factor >= 1.0 { self.factor } else { 1.0 };
        let seconds = self.initial.as_secs_f64() * factor.powf(f64::from(steps));
        // Zero times infinity is no number, and no delay.
        match seconds.is_nan() {
            true => Duration::ZERO,
            false if seconds < self.max.as_secs_f64() => Duration::from_secs_f64(seconds),
            false => self.max,
        }
    }

    /// The delay after `failures` failures in a row, where `chance` in `[0, 1)` picks the place within the jitter.
    pub fn delay(&self, failures: u32, chance: f64) -> Duration {
        let jitter = if self.jitter.is_nan() { 0.0 } else { self.jitter.clamp(0.0, 1.0) };
        let interval = self.interval(failures);
        let share = 1.0 - jitter + 2.0 * jitter * chance.clamp(0.0, 1.0);
        let delay = Duration::try_from_secs_f64(interval.as_secs_f64() * share);
        delay.unwrap_or(Duration::MAX).min(interval.saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn delays_grow_by_the_factor_up_to_the_longest() {
        let backoff = Backoff::default();
        let seconds: Vec<f64> =
            [1, 2, 3, 4, 100, u32::MAX].map(|n| backoff.delay(n, 0.5).as_secs_f64()).into();
        for (got, want) in seconds.iter().zip([0.5, 0.75, 1.125, 1.6875, 60.0, 60.0]) {
            assert!((got - want).abs() < 1e-6, "{seconds:?}");
        }
        assert_eq!(backoff.delay(0, 0.5), Duration::ZERO);
        assert_eq!(Backoff::NONE.delay(7, 0.9), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn any_values_give_a_delay_within_the_jitter_of_a_bounded_interval(
            initial: Duration, max: Duration, factor: f64, jitter: f64, failures: u32, chance in 0.0..1.0,
        ) {
            let backoff = Backoff { initial, factor, max, jitter };
            let interval = backoff.interval(failures);
            prop_assert!(interval <= max);
            prop_assert!(backoff.delay(failures, chance) <= interval.saturating_mul(2));
        }
    }
}
