//! Retries of failing watches.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use kube::runtime::watcher::{self, Event};
use nodekeel_supervisor::Backoff;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::api::recovery_probe::is_unreachable;
use crate::api::retry_tracker::random_fraction;
use crate::api::watch_errors::{GONE, WatchErrors, error_code, request_error, watch_hint};
use crate::error_chain::format_chain;

/// Same as kube's default: it does not overload a server that answers with errors.
const BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(800), factor: 2.0, max: Duration::from_secs(30), jitter: 0.5 };

/// After this time without a failure, the next one starts a new backoff.
const RESET_AFTER: Duration = Duration::from_secs(120);

/// Retries a failing watch with exponential backoff, or as soon as an unreachable server answers again, and logs each
/// error once. A watch whose changes are no longer available lists again at once: the server has answered.
///
/// kube's backoff resets with each success, and counts the start of a list as one, which precedes each
/// failure to list: it would retry, and log, every second while the server is unreachable.
pub(crate) fn with_backoff<K>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>> + Send,
    errors: WatchErrors,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + Send {
    let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
    let watch = RetriedWatch {
        events: Box::pin(events),
        kind,
        errors,
        backoff: WatchBackoff::default(),
        retry: None,
    };
    stream::unfold(watch, |mut watch| async move {
        let event = watch.next_event().await?;
        Some((event, watch))
    })
}

struct RetriedWatch<S> {
    events: Pin<Box<S>>,
    /// The watched objects.
    kind: &'static str,
    errors: WatchErrors,
    backoff: WatchBackoff,
    /// The last event was a failure.
    retry: Option<WatchRetry>,
}

struct WatchRetry {
    at: Instant,
    /// When the server was unreachable.
    unreachable: Option<Instant>,
}

impl<K, S: Stream<Item = Result<Event<K>, watcher::Error>>> RetriedWatch<S> {
    async fn next_event(&mut self) -> Option<S::Item> {
        // kube's watcher retries as soon as it is polled. The delay is here, after the event of the failure.
        if let Some(retry) = self.retry.take() {
            self.wait_for_retry(retry).await;
        }
        let event = self.events.next().await?;
        match &event {
            Ok(event) if is_success(event) => {
                self.backoff = WatchBackoff::default();
                if self.errors.record_success(self.kind) {
                    tracing::info!(kind = self.kind, "watch of the API server has recovered");
                }
            }
            Ok(_) => {}
            Err(error) => self.schedule_retry(error),
        }
        Some(event)
    }

    fn schedule_retry(&mut self, error: &watcher::Error) {
        let (kind, now) = (self.kind, Instant::now());
        let delay = self.backoff.next_delay(error_code(error) == Some(GONE));
        let unreachable = request_error(error).is_some_and(is_unreachable).then_some(now);
        self.retry = Some(WatchRetry { at: now + delay, unreachable });
        let text = format!("watch the API server{}: {}; retrying", watch_hint(error), format_chain(error));
        if !self.errors.record_failure(kind, error, &text, delay) {
            return;
        }
        if self.errors.is_not_installed(error) {
            tracing::info!(kind, "the API server does not have this API: off until it is installed");
        } else {
            tracing::warn!(kind, "{text}");
        }
    }

    async fn wait_for_retry(&mut self, retry: WatchRetry) {
        let Some(failed) = retry.unreachable else { return sleep_until(retry.at).await };
        // The probe can only shorten the delay: when it is over, the watch itself asks the server.
        if timeout_at(retry.at, self.errors.recovery.wait_for_recovery(failed)).await.is_ok() {
            self.backoff = WatchBackoff::default();
        }
    }
}

/// Returns whether an event shows that the server answers.
fn is_success<K>(event: &Event<K>) -> bool {
    !matches!(event, Event::Init | Event::InitApply(_))
}

/// The delays after consecutive failures.
#[derive(Default)]
struct WatchBackoff {
    failures: u32,
    last: Option<Instant>,
    /// The last failure was an expired watch.
    has_expired: bool,
}

impl WatchBackoff {
    fn next_delay(&mut self, has_expired: bool) -> Duration {
        if self.last.is_some_and(|last| last.elapsed() > RESET_AFTER) {
            *self = Self::default();
        }
        // Not twice in a row: a list that expires again and again must not become a loop without pauses.
        let was_expired = std::mem::replace(&mut self.has_expired, has_expired);
        if has_expired && !was_expired {
            self.failures = 0;
            return Duration::ZERO;
        }
        self.failures = self.failures.saturating_add(1);
        self.last = Some(Instant::now());
        BACKOFF.jittered_delay(self.failures, random_fraction())
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;

    use k8s_openapi::api::storage::v1::StorageClass;

    use super::*;
    use crate::testing::FakeApi;

    /// The events of a watcher whose lists fail.
    fn failing_watch(times: usize) -> impl Stream<Item = Result<Event<StorageClass>, watcher::Error>> + Send {
        let attempt = || [Ok(Event::Init), Err(watcher::Error::NoResourceVersion)];
        stream::iter((0..times).flat_map(move |_| attempt()))
    }

    /// The events of a watcher whose requests get no answer.
    fn unanswered_watch(
        times: usize,
    ) -> impl Stream<Item = Result<Event<StorageClass>, watcher::Error>> + Send {
        let refused =
            || kube::Error::Service(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into());
        stream::iter((0..times).map(move |_| Err(watcher::Error::WatchStartFailed(refused()))))
    }

    fn watch_errors(api: &FakeApi) -> WatchErrors {
        WatchErrors::new(Arc::new(()), api.client())
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_a_server_that_answers_back_off() {
        let start = Instant::now();
        let errors = watch_errors(&FakeApi::default());
        let mut events = pin!(with_backoff(failing_watch(11), errors.clone()));
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());

        let start = Instant::now();
        let mut events = pin!(with_backoff(unanswered_watch(11), errors));
        while events.next().await.is_some() {}
        assert!(
            start.elapsed() > Duration::from_secs(60),
            "it answers, but not the watch: {:?}",
            start.elapsed()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_an_unreachable_server_back_off_until_it_answers() {
        let api = FakeApi::default();
        api.set_reachable(false);
        let errors = watch_errors(&api);
        let (mut first, mut second) = (
            pin!(with_backoff(unanswered_watch(50), errors.clone())),
            pin!(with_backoff(unanswered_watch(50), errors)),
        );
        let start = Instant::now();
        for _ in 0..9 {
            tokio::join!(first.next(), second.next());
        }
        assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());
        let answers = Instant::now();
        api.set_reachable(true);
        tokio::join!(first.next(), second.next());
        assert!(answers.elapsed() < Duration::from_millis(2300), "{:?}", answers.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn the_backoff_resets_after_an_answer() {
        let answers = stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
        let troubled = failing_watch(10).chain(answers).chain(failing_watch(1));
        let mut events = pin!(with_backoff(troubled, watch_errors(&FakeApi::default())));
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
            watch_errors(&FakeApi::default())
        ));
        for _ in 0..21 {
            events.next().await;
        }
        let answered = Instant::now();
        while events.next().await.is_some() {}
        assert_eq!(answered.elapsed(), Duration::ZERO);

        let again = expired().chain(expired()).chain(expired());
        let mut events = pin!(with_backoff(again, watch_errors(&FakeApi::default())));
        let start = Instant::now();
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(1), "the second in a row waits: {:?}", start.elapsed());
    }
}
