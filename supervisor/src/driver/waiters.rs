//! Callers that wait for the tree: for a runnable to be ready, for any change, for the end.

use std::sync::{Arc, PoisonError};

use tokio::sync::{oneshot, watch};

use super::{DriverState, TreeDriver};
use crate::fsm::RunKey;

/// A caller that waits for a runnable to become ready.
pub(super) struct ReadyWaiter {
    dn: Arc<str>,
    ready: oneshot::Sender<()>,
}

impl TreeDriver {
    /// Resolves when the runnable with this DN is ready or done; at once if it already is. Fails when the
    /// tree is shut down.
    pub(crate) fn wait_ready(&self, dn: &str) -> oneshot::Receiver<()> {
        let mut state = self.lock();
        let (ready, waiting) = oneshot::channel();
        match state.fsm.readiness_of(dn) {
            Some(true) => _ = ready.send(()),
            _ if state.fsm.is_shutting_down() => {}
            _ => {
                state.waiters.retain(|waiter| !waiter.ready.is_closed());
                state.waiters.push(ReadyWaiter { dn: dn.into(), ready });
            }
        }
        waiting
    }

    /// Records for the status that a runnable waits for another one, or no longer does.
    pub(crate) fn set_dependency(&self, key: RunKey, dn: Option<Arc<str>>) {
        let mut state = self.lock();
        state.fsm.set_dependency(key, dn);
        self.count_change(&mut state);
    }

    /// Notifies those who watch the tree of a change without an event.
    pub(crate) fn announce_status_change(&self) {
        self.count_change(&mut self.lock());
    }

    /// Counts a change for those who watch the tree: usually nobody, and a notification takes as long as the rest of a
    /// signal.
    pub(super) fn count_change(&self, state: &mut DriverState) {
        state.has_uncounted_change = self.version.receiver_count() == 0;
        if !state.has_uncounted_change {
            self.version.send_modify(|version| *version += 1);
        }
    }

    /// A counter that changes with the tree.
    pub(crate) fn version(&self) -> watch::Receiver<u64> {
        let mut state = self.lock();
        if std::mem::take(&mut state.has_uncounted_change) {
            self.version.send_modify(|version| *version += 1);
        }
        self.version.subscribe()
    }

    /// Resolves when a shutdown is complete, all its events are queued for the hook, and every process that
    /// can be killed has exited.
    pub(crate) async fn finished(&self) {
        let mut finished = self.finished.subscribe();
        // `self` owns the sender, so this can't fail.
        drop(finished.wait_for(|finished| *finished).await);
        let host = self.process_host.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(host) = host {
            host.wait_reaped().await;
        }
        *self.process_host.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Resolves when nothing is running and nothing will start by itself.
    pub(crate) async fn ended(&self) {
        // `self` owns the sender, so this can't fail.
        drop(self.ended.subscribe().wait_for(|ended| *ended).await);
    }
}

impl DriverState {
    /// Notifies those who wait for a runnable that has become ready or done, unless its run is ending.
    pub(super) fn notify_ready(&mut self, dn: &str) {
        if self.waiters.is_empty() || self.fsm.readiness_of(dn) != Some(true) {
            return;
        }
        for waiter in self.waiters.extract_if(.., |waiter| &*waiter.dn == dn) {
            // The receiver is gone if the caller no longer waits.
            let _ = waiter.ready.send(());
        }
    }
}
