//! What a run is told from outside: to stop, and that it is given up on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Something that happens once, and that tasks wait for. A fraction of a [`CancellationToken`], of which every run would
/// need two.
#[derive(Debug, Default)]
pub(crate) struct Once {
    happened: AtomicBool,
    waiters: Notify,
}

impl Once {
    pub(crate) fn happen(&self) {
        self.happened.store(true, Ordering::Release);
        self.waiters.notify_waiters();
    }

    pub(crate) fn has_happened(&self) -> bool {
        self.happened.load(Ordering::Acquire)
    }

    /// Resolves when it has happened.
    pub(crate) async fn happened(&self) {
        // Made before the look: what happens in between wakes it.
        let waiting = self.waiters.notified();
        if !self.has_happened() {
            waiting.await;
        }
    }
}

/// The switches of one run.
#[derive(Debug, Default)]
pub(crate) struct Switches {
    cancelled: Once,
    /// Drops what still runs, where the cancellation did not help.
    pub(crate) aborted: Once,
    /// Made for the first library that asks for one.
    token: Mutex<Option<CancellationToken>>,
}

impl Switches {
    pub(crate) fn cancel(&self) {
        self.cancelled.happen();
        if let Some(token) = &*self.token.lock().unwrap_or_else(PoisonError::into_inner) {
            token.cancel();
        }
    }

    pub(crate) fn cancelled(&self) -> &Once {
        &self.cancelled
    }

    /// A token of its own, cancelled with the run.
    pub(crate) fn token(&self) -> CancellationToken {
        let mut token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        let token = token.get_or_insert_default();
        // A cancellation that comes later finds the token.
        if self.cancelled.has_happened() {
            token.cancel();
        }
        token.child_token()
    }
}
