//! Logging and backoff of failing watches.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff as KubeBackoff;
use kube::runtime::watcher::{self, Event};
use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

use crate::controller::event_filter::watch_hint;
use crate::controller::retry_tracker::random_fraction;
use crate::error_chain::format_chain;

/// Same as kube's default: short enough to notice soon that the server is back, long enough not to overload
/// it.
const BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(800), factor: 2.0, max: Duration::from_secs(30), jitter: 0.5 };

/// After this time without a failure, the next one starts a new backoff.
const RESET_AFTER: Duration = Duration::from_secs(120);

/// The logged errors of watches that currently fail: an unreachable server is logged once, not by each watch.
#[derive(Debug, Clone, Default)]
pub(super) struct WatchErrors(Arc<Mutex<HashMap<&'static str, String>>>);

impl WatchErrors {
    /// Whether to log this change. `None`: the watch works.
    fn should_log(&self, kind: &'static str, error: Option<&str>) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match error {
            Some(text) => {
                let is_known = logged.values().any(|known| known == text);
                logged.insert(kind, text.to_owned());
                !is_known
            }
            None => logged.remove(kind).is_some_and(|ended| !logged.values().any(|known| *known == ended)),
        }
    }
}

/// Retries a failing watch with exponential backoff, and logs each error once.
///
/// kube's backoff resets with each success, and counts the start of a list as one, which precedes each
/// failure to list: it would retry, and log, every second while the server is unreachable.
pub(super) fn with_backoff<K>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>> + Send,
    errors: WatchErrors,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + Send {
    let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
    let has_succeeded = Arc::new(AtomicBool::new(false));
    let backoff = WatchBackoff { has_succeeded: Arc::clone(&has_succeeded), failures: 0, last: None };
    let events = events.inspect_ok(move |event| {
        has_succeeded.fetch_or(is_success(event), Ordering::Relaxed);
    });
    events.backoff(backoff).inspect(move |event| match event {
        Ok(event) if !is_success(event) => {}
        Ok(_) => {
            if errors.should_log(kind, None) {
                tracing::info!(kind, "watch of the API server has recovered");
            }
        }
        Err(error) => {
            let text =
                format!("watch the API server{}: {}; retrying", watch_hint(error), format_chain(error));
            if errors.should_log(kind, Some(&text)) {
                tracing::warn!(kind, "{text}");
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
    has_succeeded: Arc<AtomicBool>,
    failures: u32,
    last: Option<Instant>,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let is_unrelated = self.last.is_some_and(|last| last.elapsed() > RESET_AFTER);
        if self.has_succeeded.swap(false, Ordering::Relaxed) || is_unrelated {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.last = Some(Instant::now());
        Some(BACKOFF.jittered_delay(self.failures, random_fraction()))
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
        let errors = WatchErrors::default();
        assert!(errors.should_log("A", Some("gone")));
        assert!(!errors.should_log("A", Some("gone")) && !errors.should_log("B", Some("gone")));
        assert!(errors.should_log("B", Some("forbidden")));
        assert!(errors.should_log("A", None), "no other watch has that error");
        assert!(!errors.should_log("A", None), "the watch did not fail");
        assert!(!errors.should_log("C", Some("forbidden")));
        assert!(!errors.should_log("B", None), "another watch still has that error");
        assert!(errors.should_log("C", None));
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_an_unreachable_server_back_off() {
        let start = Instant::now();
        let mut events = pin!(with_backoff(failing_watch(11), WatchErrors::default()));
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_backoff_resets_after_an_answer() {
        let answers = stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
        let troubled = failing_watch(10).chain(answers).chain(failing_watch(1));
        let mut events = pin!(with_backoff(troubled, WatchErrors::default()));
        for _ in 0..24 {
            events.next().await;
        }
        let failed = Instant::now();
        assert!(events.next().await.is_none());
        assert!(failed.elapsed() < Duration::from_secs(2), "{:?}", failed.elapsed());
    }
}
