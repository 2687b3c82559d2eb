//! The consequences of a failure: who ends with it, when and how fast a runnable restarts. Plain data.

use std::time::Duration;

/// The rules by which the supervisor restarts a child.
///
/// The default: always, after [`Backoff::default`], without a limit, and ten seconds of readiness clear the failure
/// count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChildPolicy {
    /// The exits that a restart follows.
    pub restart: RestartPolicy,
    /// The delay before a restart that follows a failure.
    pub backoff: Backoff,
    /// The time for which a runnable must have been ready before its earlier failures are cleared.
    ///
    /// Readiness alone is not enough: a runnable that signals ready and then fails at once would never back
    /// off.
    pub stable_after: Duration,
    /// The number of times that it may restart after failures before its [`RestartLimitAction`] follows. Default: as often
    /// as needed. A node should rather retry at the pace of its backoff than take down what still works.
    pub restart_limit: Option<RestartLimit>,
}

/// A number of restarts within a period (OTP: intensity and period).
///
/// The failure that would need one more restart is not followed by one. The [`RestartLimitAction`] follows instead.
/// Restarts of canceled runnables and an operator's restarts do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartLimit {
    /// The number of restarts that are allowed within the period; zero: the first failure fails the parent.
    pub restarts: u32,
    /// The period. The backoff must leave room for the restarts within it, or the limit is never exceeded.
    pub period: Duration,
    /// The consequence in place of one more restart.
    pub action: RestartLimitAction,
}

/// The consequence for a runnable that exceeds its restart limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum RestartLimitAction {
    /// The parent fails with [`ExitReason::RestartLimit`](crate::ExitReason::RestartLimit), as if by itself: its
    /// group shares its fate, it restarts by its policy, and its limit counts that restart. A restarted parent adds
    /// its children with new counts. A root that exceeds its limit stays dead, and the tree
    /// [has ended](crate::Supervisor::ended).
    #[default]
    FailParent,
    /// The runnable stays dead until an operator starts it, with a new count, or its parent restarts. Everything else
    /// runs on; its group ends with this failure as with any, and restarts without it.
    StayDead,
}

/// The members of a group that end and restart together when one of them fails.
///
/// Members that end together start only after all of them have ended: then the canceled ones at once, and each
/// failed one after its backoff. The policy concerns neither the order of a
/// [shutdown](crate::ChildSpec::stop_before), nor what an operator stops or restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum GroupPolicy {
    /// The failed member alone.
    OneForOne,
    /// All members.
    #[default]
    OneForAll,
    /// The failed member and those after it, in the order of their addition. In this order they start, each when those
    /// before it are ready or done: one that is dead or stopped keeps those after it waiting, if they are not running.
    RestForOne,
}

impl Default for ChildPolicy {
    fn default() -> Self {
        Self {
            restart: RestartPolicy::Always,
            backoff: Backoff::default(),
            stable_after: Duration::from_secs(10),
            restart_limit: None,
        }
    }
}

/// The exits of a runnable that a restart follows.
///
/// This holds only while the parent runs: a restarted parent adds its children again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum RestartPolicy {
    /// Every exit except a clean return after [`signal_done`](crate::Context::signal_done) (OTP: permanent).
    #[default]
    Always,
    /// Failures only; a return of `Ok` completes the work (OTP: transient).
    OnFailure,
    /// No exit (OTP: temporary). Its failure still ends its group.
    Never,
}

/// Exponential backoff with jitter.
///
/// The `n`th consecutive failure is followed by a delay of `initial` × `factor`^(`n`-1), at most `max`, plus
/// or minus the fraction `jitter` of it. Invalid values are clamped: a factor below 1 or NaN is 1, the jitter
/// is limited to 0 ..= 1.
///
/// *Source:* the defaults of the backoff library that Monogon's supervisor uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// The delay after the first failure. Default 500 ms; zero means no delay.
    pub initial: Duration,
    /// The factor by which each further failure multiplies the delay. Default 1.5.
    pub factor: f64,
    /// The longest delay before jitter. Default 60 s.
    pub max: Duration,
    /// The random fraction of the delay that is added or subtracted. Default 0.5.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_secs(60), jitter: 0.5 }
    }
}

impl Backoff {
    /// No delay: for tests and benches, or where something else limits the rate.
    pub const NONE: Self = Self { initial: Duration::ZERO, factor: 1.0, max: Duration::ZERO, jitter: 0.0 };

    /// The delay before jitter after `failures` consecutive failures; zero after none.
    pub fn base_delay(&self, failures: u32) -> Duration {
        let Some(steps) = failures.checked_sub(1) else { return Duration::ZERO };
        // Zero times an infinite power would be NaN.
        if self.initial.is_zero() {
            return Duration::ZERO;
        }
        let factor = if self.factor >= 1.0 { self.factor } else { 1.0 };
        let seconds = self.initial.as_secs_f64() * factor.powf(f64::from(steps));
        // After many failures the product is infinite, which is not below the maximum either.
        if seconds < self.max.as_secs_f64() { Duration::from_secs_f64(seconds) } else { self.max }
    }

    /// The delay after `failures` consecutive failures; `chance` in `[0, 1)` selects the point within the
    /// jitter.
    pub fn jittered_delay(&self, failures: u32, chance: f64) -> Duration {
        let jitter = if self.jitter.is_nan() { 0.0 } else { self.jitter.clamp(0.0, 1.0) };
        let interval = self.base_delay(failures);
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
    fn delays_grow_by_the_factor_up_to_the_maximum() {
        let backoff = Backoff::default();
        let seconds: Vec<f64> =
            [1, 2, 3, 4, 100, u32::MAX].map(|n| backoff.jittered_delay(n, 0.5).as_secs_f64()).into();
        for (got, want) in seconds.iter().zip([0.5, 0.75, 1.125, 1.6875, 60.0, 60.0]) {
            assert!((got - want).abs() < 1e-6, "{seconds:?}");
        }
        assert_eq!(backoff.jittered_delay(0, 0.5), Duration::ZERO);
        assert_eq!(Backoff::NONE.jittered_delay(7, 0.9), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn any_values_give_a_delay_within_the_jitter_of_a_bounded_interval(
            initial: Duration, max: Duration, factor: f64, jitter: f64, failures: u32, chance in 0.0..1.0,
        ) {
            let backoff = Backoff { initial, factor, max, jitter };
            let interval = backoff.base_delay(failures);
            prop_assert!(interval <= max);
            prop_assert!(backoff.jittered_delay(failures, chance) <= interval.saturating_mul(2));
        }
    }
}
