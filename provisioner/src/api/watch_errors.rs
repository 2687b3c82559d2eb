//! Failing watches: an error that all of them have is logged once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::Client;
use kube::runtime::watcher;
use tokio::time::Instant;

use crate::api::call::{error_hint, status_code};
use crate::api::recovery_probe::RecoveryProbe;
use crate::metrics::VolumeMetrics;

/// A watch that was not rejected again within this time of its retry works. It has no event before an object changes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// The HTTP status of a watch whose changes are no longer available: it must list again.
pub(crate) const GONE: u16 = 410;

/// The HTTP status of an API that is not installed.
const NOT_FOUND: u16 = 404;

/// The watches that currently fail: an unreachable server is logged once, not by each watch.
#[derive(Debug, Clone)]
pub(crate) struct WatchErrors {
    metrics: Arc<dyn VolumeMetrics>,
    failing: Arc<Mutex<BTreeMap<&'static str, WatchFailure>>>,
    /// The API may not be installed: then nothing fails.
    is_optional: bool,
    /// Ends the backoff of watches whose server was unreachable.
    pub(crate) recovery: RecoveryProbe,
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
    pub(crate) fn new(metrics: Arc<dyn VolumeMetrics>, client: Client) -> Self {
        Self { metrics, failing: Arc::default(), is_optional: false, recovery: RecoveryProbe::new(client) }
    }

    /// The errors of watches that volumes can be served without, of APIs that may not be installed.
    pub(crate) fn of_optional_apis(&self) -> Self {
        Self { is_optional: true, ..self.clone() }
    }

    /// Returns whether the watched API is not installed, and need not be.
    pub(crate) fn is_not_installed(&self, error: &watcher::Error) -> bool {
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

    /// The error of a watch that currently fails, unless it is optional.
    #[cfg(feature = "agent")]
    pub(crate) fn failure(&self) -> Option<String> {
        let now = Instant::now();
        let failing = self.lock_failing();
        let mut required = failing.values().filter(|failure| !failure.is_optional);
        required.find(|failure| now < failure.until).map(|failure| failure.text.clone())
    }

    /// Records a failure that is retried after this time, and returns whether to log it.
    pub(crate) fn record_failure(
        &self,
        kind: &'static str,
        error: &watcher::Error,
        text: &str,
        retry_in: Duration,
    ) -> bool {
        let code = error_code(error);
        // The server keeps changes for a limited time only. The watcher lists again, which is no error.
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
        // An unreachable server fails all watches with the same text. The first of them logs it.
        let is_known = failing.values().any(|known| known.text == failure.text);
        failing.insert(kind, failure);
        !is_known
    }

    /// Records that a watch works, and returns whether to log it.
    pub(crate) fn record_success(&self, kind: &'static str) -> bool {
        let mut failing = self.lock_failing();
        let ended = failing.remove(kind);
        // The last watch with this error logs that it is over.
        ended.is_some_and(|ended| !failing.values().any(|known| known.text == ended.text))
    }

    fn lock_failing(&self) -> MutexGuard<'_, BTreeMap<&'static str, WatchFailure>> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The HTTP status with which the server has rejected a watch, if it answered.
pub(crate) fn error_code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::WatchError(status) => Some(status.code),
        error => request_error(error).and_then(status_code),
    }
}

/// The error of a watch's request.
pub(crate) fn request_error(error: &watcher::Error) -> Option<&kube::Error> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(error),
        _ => None,
    }
}

/// The advice for a failing watch, if its cause is clear.
pub(crate) fn watch_hint(error: &watcher::Error) -> &'static str {
    request_error(error).map_or("", error_hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeApi;

    #[tokio::test]
    async fn an_error_of_all_watches_is_logged_once_and_so_is_its_end() {
        let errors = WatchErrors::new(Arc::new(()), FakeApi::default().client());
        let fail = |kind, text| {
            errors.record_failure(kind, &watcher::Error::NoResourceVersion, text, Duration::ZERO)
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
    async fn a_watch_is_rejected_until_it_works_and_an_expired_one_is_no_failure() {
        let errors = WatchErrors::new(Arc::new(()), FakeApi::default().client());
        let rejected = |code| {
            let status = kube::core::Status { code, ..kube::core::Status::default() };
            watcher::Error::WatchStartFailed(kube::Error::Api(status.boxed()))
        };
        let fail = |kind, error, text| errors.record_failure(kind, &error, text, Duration::from_secs(30));
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
