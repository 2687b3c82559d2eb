//! Asks an unreachable API server until it answers again.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use nodekeel_supervisor::Backoff;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use crate::api::retry_tracker::random_fraction;
use crate::api::writer::ClientHandle;

/// A question costs the server a few bytes, and a process asks it once for all its watches: so it may come more often than
/// a watch may list again, and volumes are served within three seconds after an outage.
const BACKOFF: Backoff = Backoff {
    initial: Duration::from_millis(500),
    factor: 2.0,
    max: Duration::from_millis(1500),
    jitter: 0.5,
};

/// Timeout of an answer: packets to a host that is down are lost.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Asks an unreachable API server whether it answers again.
#[derive(Debug, Clone)]
pub(crate) struct RecoveryProbe {
    client: ClientHandle,
    /// Locked while it is asked: one watch asks, and the others wait for its result.
    outage: Arc<Mutex<Outage>>,
}

#[derive(Debug, Default)]
struct Outage {
    /// Questions in a row without an answer.
    failures: u32,
    ended: Option<Instant>,
}

impl RecoveryProbe {
    pub(crate) fn new(client: Client) -> Self {
        Self { client: ClientHandle(client), outage: Arc::default() }
    }

    /// Waits until the server answers that was unreachable at this time. Never returns if it answers the first question:
    /// then the watch has failed for another reason, and may cost the server more than an answer.
    ///
    /// # Cancel safety
    /// Another waiter asks on.
    pub(crate) async fn wait_for_recovery(&self, failed: Instant) {
        let mut outage = self.outage.lock().await;
        // Another watch may have seen the end of the outage while this one waited for the lock.
        while outage.ended.is_none_or(|ended| ended < failed) {
            // The failed watch was a question already: this one comes after a delay.
            sleep(BACKOFF.jittered_delay(outage.failures.saturating_add(1), random_fraction())).await;
            if !self.has_answer().await {
                outage.failures = outage.failures.saturating_add(1);
            } else if std::mem::take(&mut outage.failures) > 0 {
                // This ends the outage for every watch that has failed before.
                outage.ended = Some(Instant::now());
            } else {
                // This caller waits forever, and must not block the others by its lock.
                drop(outage);
                return pending().await;
            }
        }
    }

    /// Returns whether the server answers. It may reject the question.
    async fn has_answer(&self) -> bool {
        match timeout(TIMEOUT, self.client.0.apiserver_version()).await {
            Ok(Err(error)) => !is_unreachable(&error),
            answer => answer.is_ok(),
        }
    }
}

/// Returns whether a request has failed before the server answered.
pub(crate) fn is_unreachable(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Service(_) | kube::Error::HyperError(_))
}
