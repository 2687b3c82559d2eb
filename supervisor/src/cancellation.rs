//! The signals from the supervisor to a run: cancel, and abort.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// An event that fires once and that tasks wait for. It takes a fraction of the memory of a
/// [`CancellationToken`], of which every run would need two.
#[derive(Debug, Default)]
pub(crate) struct OneShotEvent {
    wait_fired: AtomicBool,
    waiters: Notify,
}

impl OneShotEvent {
    pub(crate) fn fire(&self) {
        self.wait_fired.store(true, Ordering::Release);
        self.waiters.notify_waiters();
    }

    pub(crate) fn has_fired(&self) -> bool {
        self.wait_fired.load(Ordering::Acquire)
    }

    /// Resolves when it has fired.
    pub(crate) async fn wait_fired(&self) {
        // Created before the check, so that a `fire` in between wakes it.
        let waiting = self.waiters.notified();
        if !self.has_fired() {
            waiting.await;
        }
    }
}

/// The cancellation and abort signals of one run.
#[derive(Debug, Default)]
pub(crate) struct RunCancellation {
    canceled: OneShotEvent,
    /// Drops the run's tasks, where the cancellation had no effect.
    pub(crate) aborted: OneShotEvent,
    /// Created for the first library that needs one.
    library_token: Mutex<Option<CancellationToken>>,
}

impl RunCancellation {
    pub(crate) fn cancel(&self) {
        self.canceled.fire();
        if let Some(token) = &*self.library_token.lock().unwrap_or_else(PoisonError::into_inner) {
            token.cancel();
        }
    }

    pub(crate) fn canceled(&self) -> &OneShotEvent {
        &self.canceled
    }

    /// A separate token that is canceled with the run.
    pub(crate) fn child_token(&self) -> CancellationToken {
        let mut token = self.library_token.lock().unwrap_or_else(PoisonError::into_inner);
        let token = token.get_or_insert_default();
        // A later cancellation finds the token.
        if self.canceled.has_fired() {
            token.cancel();
        }
        token.child_token()
    }
}
