//! What a watch that fails says, and when it tries again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff as Pauses;
use kube::runtime::watcher::{self, Event};
use nodekeel_supervisor::Backoff;
use tokio::time::Instant;

use crate::chain::chain;
use crate::controller::attempts::chance;
use crate::controller::sift::hint;

/// As kube's own: short enough to hear soon of a server that is back, long enough not to keep it from coming back.
const BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(800), factor: 2.0, max: Duration::from_secs(30), jitter: 0.5 };

/// A failure so long after the last one has nothing to do with it.
const UNRELATED: Duration = Duration::from_secs(120);

/// What was said of the watches that don't work at the moment: a server that is gone is said once, not by each of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Troubles(Arc<Mutex<HashMap<&'static str, String>>>);

impl Troubles {
    /// Whether this is to be said. `None` is that the watch works.
    fn is_news(&self, kind: &'static str, trouble: Option<&str>) -> bool {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match trouble {
            Some(text) => {
                let is_known = told.values().any(|known| known == text);
                told.insert(kind, text.to_owned());
                !is_known
            }
            None => told.remove(kind).is_some_and(|ended| !told.values().any(|known| *known == ended)),
        }
    }
}

/// Tries again after failures, later each time, and says each trouble once.
///
/// kube's own backoff begins anew with every success, and takes the beginning of a list for one, which comes before each
/// failure to list: it would ask a server that is gone, and complain, every second.
pub(super) fn patiently<K>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>> + Send,
    troubles: Troubles,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + Send {
    let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
    let works = Arc::new(AtomicBool::new(false));
    let patience = Patience { works: Arc::clone(&works), failures: 0, last: None };
    let events = events.inspect_ok(move |event| {
        works.fetch_or(is_success(event), Ordering::Relaxed);
    });
    events.backoff(patience).inspect(move |event| match event {
        Ok(event) if !is_success(event) => {}
        Ok(_) => {
            if troubles.is_news(kind, None) {
                tracing::info!(kind, "the watch of the API server works again");
            }
        }
        Err(error) => {
            let text = format!("can't watch the API server{}, will try again: {}", hint(error), chain(error));
            if troubles.is_news(kind, Some(&text)) {
                tracing::warn!(kind, "{text}");
            }
        }
    })
}

/// Whether an event shows that the server answers.
fn is_success<K>(event: &Event<K>) -> bool {
    !matches!(event, Event::Init | Event::InitApply(_))
}

/// How long to wait after each failure.
struct Patience {
    works: Arc<AtomicBool>,
    failures: u32,
    last: Option<Instant>,
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let is_unrelated = self.last.is_some_and(|last| last.elapsed() > UNRELATED);
        if self.works.swap(false, Ordering::Relaxed) || is_unrelated {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.last = Some(Instant::now());
        Some(BACKOFF.delay(self.failures, chance()))
    }
}

impl Pauses for Patience {
    /// Any event asks for it, but only a success counts.
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::stream;
    use k8s_openapi::api::storage::v1::StorageClass;

    use super::*;

    /// What a watcher gives whose lists fail.
    fn failing(times: usize) -> impl Stream<Item = Result<Event<StorageClass>, watcher::Error>> + Send {
        let attempt = || [Ok(Event::Init), Err(watcher::Error::NoResourceVersion)];
        stream::iter((0..times).flat_map(move |_| attempt()))
    }

    #[test]
    fn what_all_watches_have_is_said_once_and_so_is_its_end() {
        let troubles = Troubles::default();
        assert!(troubles.is_news("A", Some("gone")));
        assert!(!troubles.is_news("A", Some("gone")) && !troubles.is_news("B", Some("gone")));
        assert!(troubles.is_news("B", Some("forbidden")));
        assert!(troubles.is_news("A", None), "it was the last that was gone");
        assert!(!troubles.is_news("A", None), "nothing was wrong");
        assert!(!troubles.is_news("C", Some("forbidden")));
        assert!(!troubles.is_news("B", None), "it is not over");
        assert!(troubles.is_news("C", None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_answer_is_asked_less_and_less() {
        let start = Instant::now();
        let mut events = pin!(patiently(failing(11), Troubles::default()));
        while events.next().await.is_some() {}
        assert!(start.elapsed() > Duration::from_secs(60), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_has_answered_is_asked_again_soon() {
        let answers = stream::iter([Ok(Event::Init), Ok(Event::InitDone)]);
        let troubled = failing(10).chain(answers).chain(failing(1));
        let mut events = pin!(patiently(troubled, Troubles::default()));
        for _ in 0..24 {
            events.next().await;
        }
        let failed = Instant::now();
        assert!(events.next().await.is_none());
        assert!(failed.elapsed() < Duration::from_secs(2), "{:?}", failed.elapsed());
    }
}
