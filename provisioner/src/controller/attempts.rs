//! What was tried before, per object.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

/// What is remembered of the objects that did not go through at once, by their UIDs.
#[derive(Debug)]
pub(super) struct Attempts {
    backoff: Backoff,
    past: Mutex<HashMap<String, Past>>,
}

#[derive(Debug, Default)]
struct Past {
    failures: u32,
    due: Option<Instant>,
    held: Option<Instant>,
    refusal: Option<String>,
}

impl Attempts {
    pub(super) fn new(backoff: Backoff) -> Self {
        Self { backoff, past: Mutex::default() }
    }

    fn past(&self) -> MutexGuard<'_, HashMap<String, Past>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often in a row it has failed.
    pub(super) fn failures(&self, uid: &str) -> u32 {
        self.past().get(uid).map_or(0, |past| past.failures)
    }

    /// It has failed once more: when to try again.
    pub(super) fn failed(&self, uid: &str) -> Duration {
        let mut all = self.past();
        let past = all.entry(uid.to_owned()).or_default();
        past.failures = past.failures.saturating_add(1);
        self.backoff.delay(past.failures, chance())
    }

    /// It has failed once more and been given up: it is not to be tried before it would have been tried again.
    pub(super) fn given_up(&self, uid: &str) {
        let time = self.failed(uid);
        self.past().entry(uid.to_owned()).or_default().held = Some(Instant::now() + time);
    }

    /// How long it is not to be tried, after it was given up.
    pub(super) fn held(&self, uid: &str) -> Option<Duration> {
        let until = self.past().get(uid).and_then(|past| past.held)?;
        Some(until.saturating_duration_since(Instant::now())).filter(|time| !time.is_zero())
    }

    /// It has gone through.
    pub(super) fn succeeded(&self, uid: &str) {
        self.past().remove(uid);
    }

    /// It is gone, or somebody else's.
    pub(super) fn forget(&self, uid: &str) {
        self.past().remove(uid);
    }

    /// What remains of a wait that begins with the first call; none once it is over, and then the next call begins anew.
    pub(super) fn wait_for(&self, uid: &str, time: impl FnOnce() -> Duration) -> Option<Duration> {
        let (mut all, now) = (self.past(), Instant::now());
        let past = all.entry(uid.to_owned()).or_default();
        let due = *past.due.get_or_insert_with(|| now + time());
        let left = due.saturating_duration_since(now);
        if left.is_zero() {
            past.due = None;
            return None;
        }
        Some(left)
    }

    /// Whether a refusal differs from the last one.
    pub(super) fn is_new(&self, uid: &str, refusal: &str) -> bool {
        let mut all = self.past();
        let past = all.entry(uid.to_owned()).or_default();
        let is_new = past.refusal.as_deref() != Some(refusal);
        past.refusal = Some(refusal.to_owned());
        is_new
    }
}

/// A random number in `[0, 1)`.
pub(super) fn chance() -> f64 {
    // Each state has keys of its own.
    (RandomState::new().hash_one(0) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts() -> Attempts {
        let (initial, max) = (Duration::from_secs(1), Duration::from_secs(300));
        Attempts::new(Backoff { initial, factor: 2.0, max, jitter: 0.0 })
    }

    #[test]
    fn each_object_backs_off_by_itself_from_a_second_to_five_minutes() {
        let attempts = attempts();
        let seconds: Vec<u64> = (0..12).map(|_| attempts.failed("a").as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        assert_eq!(attempts.failed("b").as_secs(), 1);
        attempts.succeeded("a");
        assert_eq!((attempts.failures("a"), attempts.failed("a").as_secs()), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_begins_once_and_ends() {
        let attempts = attempts();
        let wait = || attempts.wait_for("a", || Duration::from_secs(2));
        assert_eq!(wait(), Some(Duration::from_secs(2)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(wait(), Some(Duration::from_secs(1)));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(wait(), None);
    }

    #[test]
    fn a_refusal_is_new_until_it_was_told() {
        let attempts = attempts();
        let told: Vec<bool> = ["x", "x", "y", "x"].map(|text| attempts.is_new("a", text)).into();
        assert_eq!(told, [true, false, true, true]);
        assert!((0.0..1.0).contains(&chance()));
    }
}
