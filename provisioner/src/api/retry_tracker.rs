//! Retries and backoff, per object.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

/// The delay that stands for never; a moment that is much later can't be represented.
const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The retry states of objects that were not reconciled at the first attempt, by UID.
#[derive(Debug)]
pub(crate) struct RetryTracker {
    backoff: Backoff,
    retry_states: Mutex<HashMap<String, RetryState>>,
}

#[derive(Debug, Default)]
struct RetryState {
    failures: u32,
    wait_until: Option<Instant>,
    held_until: Option<Instant>,
    last_rejection: Option<String>,
}

impl RetryTracker {
    pub(crate) fn new(backoff: Backoff) -> Self {
        Self { backoff, retry_states: Mutex::default() }
    }

    fn retry_states(&self) -> MutexGuard<'_, HashMap<String, RetryState>> {
        self.retry_states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of consecutive failures.
    pub(crate) fn failure_count(&self, uid: &str) -> u32 {
        self.retry_states().get(uid).map_or(0, |state| state.failures)
    }

    /// Records a failure and returns the delay before the next attempt.
    pub(crate) fn record_failure(&self, uid: &str) -> Duration {
        let mut all = self.retry_states();
        let state = all.entry(uid.to_owned()).or_default();
        state.failures = state.failures.saturating_add(1);
        self.backoff.jittered_delay(state.failures, random_fraction())
    }

    /// Records that a claim was rescheduled after a failure, or that a failure was written into its object. If it
    /// comes back, it is held for the backoff delay, which is returned.
    pub(crate) fn record_reschedule(&self, uid: &str) -> Duration {
        let time = self.record_failure(uid);
        self.retry_states().entry(uid.to_owned()).or_default().held_until = Some(later(time));
        time
    }

    /// The time for which such an object is still held.
    pub(crate) fn remaining_hold(&self, uid: &str) -> Option<Duration> {
        let until = self.retry_states().get(uid).and_then(|state| state.held_until)?;
        Some(until.saturating_duration_since(Instant::now())).filter(|time| !time.is_zero())
    }

    /// Ends the holds of all objects, and forgets their failures: what has failed was not their fault, and is repaired.
    pub(crate) fn end_delays(&self) {
        for state in self.retry_states().values_mut() {
            (state.failures, state.held_until) = (0, None);
        }
    }

    /// Forgets the failures and rejections of an object that was reconciled.
    pub(crate) fn record_success(&self, uid: &str) {
        self.retry_states().remove(uid);
    }

    /// Forgets an object that is deleted or no longer ours.
    pub(crate) fn forget(&self, uid: &str) {
        self.retry_states().remove(uid);
    }

    /// The rest of a wait that the first call starts; `None` once it is over, and then the next call starts a
    /// new one.
    pub(crate) fn remaining_wait(&self, uid: &str, time: impl FnOnce() -> Duration) -> Option<Duration> {
        let (mut all, now) = (self.retry_states(), Instant::now());
        let state = all.entry(uid.to_owned()).or_default();
        let due = *state.wait_until.get_or_insert_with(|| later(time()));
        let left = due.saturating_duration_since(now);
        if left.is_zero() {
            state.wait_until = None;
            return None;
        }
        Some(left)
    }

    /// Returns whether a rejection differs from the last one.
    pub(crate) fn is_new_rejection(&self, uid: &str, rejection: &str) -> bool {
        let mut all = self.retry_states();
        let state = all.entry(uid.to_owned()).or_default();
        let is_new = state.last_rejection.as_deref() != Some(rejection);
        state.last_rejection = Some(rejection.to_owned());
        is_new
    }
}

/// The moment after a time that a configuration may have set, however long it is.
pub(crate) fn later(time: Duration) -> Instant {
    Instant::now() + time.min(LONGEST_WAIT)
}

/// A random number in `[0, 1)`.
pub(crate) fn random_fraction() -> f64 {
    // Each `RandomState` has different keys. The upper 53 bits of the hash are as many as a `f64` holds exactly.
    (RandomState::new().hash_one(0) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_tracker() -> RetryTracker {
        let (initial, max) = (Duration::from_secs(1), Duration::from_secs(300));
        RetryTracker::new(Backoff { initial, factor: 2.0, max, jitter: 0.0 })
    }

    #[test]
    fn each_object_backs_off_by_itself_from_a_second_to_five_minutes() {
        let tracker = test_tracker();
        let seconds: Vec<u64> = (0..12).map(|_| tracker.record_failure("a").as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        assert_eq!(tracker.record_failure("b").as_secs(), 1);
        tracker.record_success("a");
        assert_eq!((tracker.failure_count("a"), tracker.record_failure("a").as_secs()), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_starts_once_and_ends() {
        let tracker = test_tracker();
        let wait = || tracker.remaining_wait("a", || Duration::from_secs(2));
        assert_eq!(wait(), Some(Duration::from_secs(2)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(wait(), Some(Duration::from_secs(1)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(wait(), None);
    }

    #[test]
    fn a_hold_may_last_for_ever() {
        let initial = Duration::MAX;
        let tracker = RetryTracker::new(Backoff { initial, factor: 2.0, max: initial, jitter: 0.0 });
        tracker.record_reschedule("a");
        assert!(tracker.remaining_hold("a").is_some_and(|time| time > LONGEST_WAIT / 2));
        assert!(tracker.remaining_wait("b", || initial).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_repair_ends_the_holds_and_failures_of_all_objects() {
        let tracker = test_tracker();
        for _ in 0..9 {
            tracker.record_reschedule("a");
        }
        assert!(tracker.remaining_hold("a").is_some_and(|time| time > Duration::from_secs(100)));
        tracker.end_delays();
        assert_eq!((tracker.remaining_hold("a"), tracker.failure_count("a")), (None, 0));
    }

    #[test]
    fn a_rejection_is_new_if_it_differs_from_the_last_one() {
        let tracker = test_tracker();
        let is_new: Vec<bool> = ["x", "x", "y", "x"].map(|text| tracker.is_new_rejection("a", text)).into();
        assert_eq!(is_new, [true, false, true, true]);
        assert!((0.0..1.0).contains(&random_fraction()));
    }
}
