//! The signals from the supervisor to a run: cancel, and then abort.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// A signal to a run. A run that is to be aborted is canceled.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RunSignal {
    Cancel = 1,
    /// Drops the run's tasks, where the cancellation had no effect.
    Abort = 2,
}

/// The signals to one run. It takes a fraction of the memory of a [`CancellationToken`], of which every run would
/// need two.
#[derive(Debug, Default)]
pub(crate) struct RunCancellation {
    /// The latest [`RunSignal`]; 0 without one.
    level: AtomicU8,
    waiters: Notify,
    /// Created for the first library that needs one.
    library_token: Mutex<Option<CancellationToken>>,
}

impl RunCancellation {
    pub(crate) fn send(&self, signal: RunSignal) {
        // The maximum: a late cancellation must not take back an abort. Before the notification: the woken tasks
        // read the level.
        self.level.fetch_max(signal as u8, Ordering::AcqRel);
        self.waiters.notify_waiters();
        if let Some(token) = &*self.library_token.lock().unwrap_or_else(PoisonError::into_inner) {
            token.cancel();
        }
    }

    pub(crate) fn is_canceled(&self) -> bool {
        self.has_received(RunSignal::Cancel)
    }

    fn has_received(&self, signal: RunSignal) -> bool {
        self.level.load(Ordering::Acquire) >= signal as u8
    }

    /// Resolves when the signal has been sent.
    #[expect(clippy::manual_async_fn, reason = "the future of an `async fn` keeps its arguments twice")]
    pub(crate) fn wait_for(&self, signal: RunSignal) -> impl Future<Output = ()> {
        async move {
            loop {
                // Created before the check, so that a signal in between wakes it.
                let waiting = self.waiters.notified();
                if self.has_received(signal) {
                    return;
                }
                waiting.await;
            }
        }
    }

    /// A separate token that is canceled with the run.
    pub(crate) fn child_token(&self) -> CancellationToken {
        let mut token = self.library_token.lock().unwrap_or_else(PoisonError::into_inner);
        let token = token.get_or_insert_default();
        // A later cancellation finds the token.
        if self.is_canceled() {
            token.cancel();
        }
        token.child_token()
    }
}
