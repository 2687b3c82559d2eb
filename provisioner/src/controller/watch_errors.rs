//! Logging and backoff of failing watches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff as KubeBackoff;
use kube::runtime::watcher::{self, Event};
use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

use crate::apply::status_code;
use crate::controller::event_filter::watch_hint;
use crate::controller::retry_tracker::random_fraction;
use crate::error_chain::format_chain;
use crate::metrics::VolumeMetrics;

/// Same as kube's default: short enough to notice soon that the server is back, long enough not to overload
/// it.
const BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(800), factor: 2.0, max: Duration::from_secs(30), jitter: 0.5 };

/// After this time without a failure, the next one starts a new backoff.
const RESET_AFTER: Duration = Duration::from_secs(120);

/// A watch that was not rejected again within this time of its retry works, and says so only when an object
/// changes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The HTTP status of a watch whose changes are no longer available: it must list again.
const GONE: u16 = 410;

/// The HTTP status of an API that is not installed.
const NOT_FOUND: u16 = 404;

/// The watches that currently fail: an unreachable server is logged once, not by each watch.
#[derive(Debug, Clone)]
pub(crate) struct WatchErrors {
    metrics: Arc<dyn VolumeMetrics>,
    failing: Arc<Mutex<BTreeMap<&'static str, WatchFailure>>>,
    /// The API may not be installed: then nothing fails.
    is_optional: bool,
}

/// The last error of a watch.
#[derive(Debug)]
struct WatchFailure {
    text: String,
    /// Until then, the watch fails: it may work again without an event.
    until: Instant,
    /// The server has answered.
    is_rejected: bool,
    is_optional: bool,
}

impl WatchErrors {
    pub(crate) fn new(metrics: Arc<dyn VolumeMetrics>) -> Self {
        Self { metrics, failing: Arc::default(), is_optional: false }
    }

    /// Those of watches that volumes can be served without, of APIs that may not be installed.
    pub(super) fn of_optional_apis(&self) -> Self {
        Self { is_optional: true, ..self.clone() }
    }

    /// Whether the watched API is not installed, and need not be.
    fn is_not_installed(&self, error: &watcher::Error) -> bool {
        self.is_optional && error_code(error) == Some(NOT_FOUND)
    }

    /// The error of a watch that the server currently rejects, unless it is optional.
    pub(crate) fn rejection(&self) -> Option<String> {
        let failing = self.lock_failing();
        let now = Instant::now();
        let is_rejected = |failure: &&WatchFailure| failure.is_rejected && now < failure.until;
        let rejected = failing.values().filter(|failure| !failure.is_optional).find(is_rejected);
        rejected.map(|failure| failure.text.clone())
    }

    /// Forgets watches that were dropped.
    #[cfg(feature = "agent")]
    pub(crate) fn clear(&self) {
        self.lock_failing().clear();
    }

    /// The error of a watch that currently fails.
    #[cfg(feature = "agent")]
    pub(crate) fn failure(&self) -> Option<String> {
        let now = Instant::now();
        let failing = self.lock_failing();
        failing.values().find(|failure| now < failure.until).map(|failure| failure.text.clone())
    }

    /// Records a failure that is retried after this time, and returns whether to log it.
    fn record_failure(
        &self,
        kind: &'static str,
        (error, text): (&watcher::Error, &str),
        retry_in: Duration,
    ) -> bool {
        let code = error_code(error);
        if code == Some(GONE) {
            return false;
        }
        if !self.is_not_installed(error) {
            self.metrics.record_api_error("watch");
        }
        let failure = WatchFailure {
            text: text.to_owned(),
            until: Instant::now() + retry_in + ANSWER_TIMEOUT,
            is_rejected: code.is_some(),
            is_optional: self.is_optional,
        };
        let mut failing = self.lock_failing();
        let is_known = failing.values().any(|known| known.text == failure.text);
        failing.insert(kind, failure);
        !is_known
    }

    /// Records that a watch works, and returns whether to log it.
    fn record_success(&self, kind: &'static str) -> bool {
        let mut failing = self.lock_failing();
        let ended = failing.remove(kind);
        ended.is_some_and(|ended| !failing.values().any(|known| known.text == ended.text))
    }

    fn lock_failing(&self) -> MutexGuard<'_, BTreeMap<&'static str, WatchFailure>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The HTTP status with which the server has rejected a watch, if it answered.
fn error_code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => status_code(error),
        watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

/// Retries a failing watch with exponential backoff, and logs each error once. A watch whose changes are no
/// longer available lists again at once: the server has answered.
///
/// kube's backoff resets with each success, and counts the start of a list as one, which precedes each
/// failure to list: it would retry, and log, every second while the server is unreachable.
pub(crate) fn with_backoff<K>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>> + Send,
    errors: WatchErrors,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + Send {
    let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
    let has_succeeded = Arc::new(AtomicBool::new(false));
    let has_expired = Arc::new(AtomicBool::new(false));
    let retry_in = Arc::new(AtomicU64::new(0));
    let backoff = WatchBackoff {
        retry_in: Arc::clone(&retry_in),
        has_succeeded: Arc::clone(&has_succeeded),
        has_expired: Arc::clone(&has_expired),
        was_expired: false,
        failures: 0,
        last: None,
    };
    let events = events.inspect(move |event| match event {
        Ok(event) => drop(has_succeeded.fetch_or(is_success(event), Ordering::Relaxed)),
        Err(error) => has_expired.store(error_code(error) == Some(GONE), Ordering::Relaxed),
    });
    events.backoff(backoff).inspect(move |event| match event {
        Ok(event) if !is_success(event) => {}
        Ok(_) => {
            if errors.record_success(kind) {
                tracing::info!(kind, "watch of the API server has recovered");
            }
        }
        Err(error) => {
            let text =
                format!("watch the API server{}: {}; retrying", watch_hint(error), format_chain(error));
            // The backoff was asked before this.
            let retry_in = Duration::from_millis(retry_in.load(Ordering::Relaxed));
            match errors.record_failure(kind, (error, &text), retry_in) {
                true if errors.is_not_installed(error) => {
                    tracing::info!(kind, "the API server does not have this API: off until it is installed");
                }
                true => tracing::warn!(kind, "{text}"),
                false => {}
            }
        }
    })
}

/// Whether an event shows that the server answers.
fn is_success<K>(event: &Event<K>) -> bool {
    !matches!(event, Event::Init | Event::InitApply(_))
}

/// The delays after consecutive failures.
struct WatchBackoff {
    /// The last delay in milliseconds.
    retry_in: Arc<AtomicU64>,
    has_succeeded: Arc<AtomicBool>,
    has_expired: Arc<AtomicBool>,
    /// The last failure was an expired watch, and nothing has succeeded since.
    was_expired: bool,
    failures: u32,
    last: Option<Instant>,
}

impl WatchBackoff {
    fn next_delay(&mut self) -> Duration {
        let is_unrelated = self.last.is_some_and(|last| last.elapsed() > RESET_AFTER);
        if self.has_succeeded.swap(false, Ordering::Relaxed) || is_unrelated {
            self.failures = 0;
            self.was_expired = false;
        }
        // Not twice in a row: a list that expires again and again must not become a loop without pauses.
        let was_expired = std::mem::replace(&mut self.was_expired, self.has_expired.load(Ordering::Relaxed));
        if self.was_expired && !was_expired {
            self.failures = 0;
            return Duration::ZERO;
        }
        self.failures = self.failures.saturating_add(1);
        self.last = Some(Instant::now());
        BACKOFF.jittered_delay(self.failures, random_fraction())
    }
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let delay = self.next_delay();
        self.retry_in.store(u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        Some(delay)
    }
}

impl KubeBackoff for WatchBackoff {
    /// kube calls it after any event; only a success resets this backoff.
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::stream;
    use k8s_openapi::api::storage::v1::StorageClass;

    use super::*;

    /// The events of a watcher whose lists fail.
    fn failing_watch(times: usize) -> impl Stream<Item = Result<Event<StorageClass>, watcher::Error>> + Send {
        let attempt = || [Ok(Event::Init), Err(watcher::Error::NoResourceVersion)];
        stream::iter((0..times).flat_map(move |_| attempt()))
    }

    #[test]
    fn an_error_of_all_watches_is_logged_once_and_so_is_its_end() {
        let errors = WatchErrors::new(Arc::new(()));
        let fail = |kind, text| {
            errors.record_failure(kind, (&watcher::Error::NoResourceVersion, text), Duration::ZERO)
        };
        assert!(fail("A", "gone"));
        assert!(!fail("A", "gone") && !fail("B", "gone"));
        assert!(fail("B", "forbidden"));
        assert!(errors.record_success("A"), "no other watch has that error");
        assert!(!errors.record_success("A"), "the watch did not fail");
        assert!(!fail("C", "forbidden"));
        assert!(!errors.record_success("B"), "another watch still has that error");
        assert!(errors.record_success("C"));
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_an_unreachable_server_back_off() {
        let start = Instant::now();
        let mut events = pin!(with_backoff(failing_watch(11), WatchErrors::new(Arc::new(()))));
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_backoff_resets_after_an_answer() {
        let answers = stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
        let troubled = failing_watch(10).chain(answers).chain(failing_watch(1));
        let mut events = pin!(with_backoff(troubled, WatchErrors::new(Arc::new(()))));
        for _ in 0..24 {
            events.next().await;
        }
        let failed = Instant::now();
        assert!(events.next().await.is_none());
        assert!(failed.elapsed() < Duration::from_secs(2), "{:?}", failed.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn an_expired_watch_lists_again_at_once_after_an_outage() {
        let expired = || {
            let status = kube::core::Status { code: GONE, ..kube::core::Status::default() };
            stream::iter([Err(watcher::Error::WatchError(status.boxed()))])
        };
        let lists = stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
        let mut events = pin!(with_backoff(
            failing_watch(10).chain(expired()).chain(lists),
            WatchErrors::new(Arc::new(()))
        ));
        for _ in 0..21 {
            events.next().await;
        }
        let answered = Instant::now();
        while events.next().await.is_some() {}
        assert_eq!(answered.elapsed(), Duration::ZERO);

        let again = expired().chain(expired()).chain(expired());
        let mut events = pin!(with_backoff(again, WatchErrors::new(Arc::new(()))));
        let start = Instant::now();
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(1), "the second in a row waits: {:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_is_rejected_until_it_works_and_an_expired_one_is_no_failure() {
        let errors = WatchErrors::new(Arc::new(()));
        let rejected = |code| {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            watcher::Error::WatchStartFailed(kube::Error::Api(status.boxed()))
        };
        let fail = |kind, error, text| errors.record_failure(kind, (&error, text), Duration::from_secs(30));
        assert!(!fail("A", rejected(GONE), "expired"));
        assert_eq!(errors.rejection(), None);
        assert!(fail("A", rejected(403), "forbidden"));
        assert!(fail("B", watcher::Error::NoResourceVersion, "unreadable"));
        assert_eq!(errors.rejection().as_deref(), Some("forbidden"));
        errors.record_success("A");
        assert_eq!(errors.rejection(), None, "the server has not rejected the other one");
        fail("A", rejected(403), "forbidden");
        tokio::time::advance(Duration::from_secs(30)).await;
        assert!(errors.rejection().is_some(), "its retry has no answer yet");
        tokio::time::advance(ANSWER_TIMEOUT).await;
        assert_eq!(errors.rejection(), None, "its retry was not rejected");
    }
}
