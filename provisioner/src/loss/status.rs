//! The state of a store: whether its volumes are served.

use std::sync::Arc;

use tokio::sync::watch;

use crate::store_id::StoreIdentity;

/// The state of a store as its provisioner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreStatus {
    /// Not known yet: the first lists of the API server are incomplete.
    Unknown,
    /// The provisioner serves its volumes.
    Served(StoreIdentity),
    /// The provisioner changes nothing, because the store is not there.
    Unserved {
        /// The fault.
        fault: StoreFault,
        /// The reason, and the remedy.
        why: String,
    },
}

/// The fault of a store that is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreFault {
    /// The store is absent: its disk is not mounted, or fails, or is a new one.
    Absent,
    /// Another store is in its place.
    Replaced,
    /// The store is that of another node's volumes.
    Moved,
}

/// The status of a provisioner's store: the store guard sets it, and everything else waits for it. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ServedStore(Arc<watch::Sender<StoreStatus>>);

impl ServedStore {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(StoreStatus::Unknown)))
    }

    pub(crate) fn status(&self) -> StoreStatus {
        self.0.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<StoreStatus> {
        self.0.subscribe()
    }

    /// Sets the status. Returns whether it differs from the last one; otherwise no waiter is woken.
    pub(crate) fn set(&self, status: StoreStatus) -> bool {
        self.0.send_if_modified(|old| std::mem::replace(old, status.clone()) != status)
    }

    /// Waits until the store is served, and returns it.
    pub(crate) async fn wait_until_served(&self) -> StoreIdentity {
        let mut status = self.subscribe();
        let is_served = |status: &StoreStatus| matches!(status, StoreStatus::Served(_));
        match status.wait_for(is_served).await.map(|status| status.clone()) {
            Ok(StoreStatus::Served(store)) => store,
            // The sender lives as long as `self`.
            _ => std::future::pending().await,
        }
    }

    pub(crate) async fn wait_until_unserved(&self) {
        let mut status = self.subscribe();
        // Never fails: the sender lives as long as `self`.
        let _ = status.wait_for(|status| !matches!(status, StoreStatus::Served(_))).await;
    }

    /// Does work while the store is served: drops it when the store is lost, and starts it anew when it is back.
    pub(crate) async fn while_served<F: Future<Output = ()> + Send>(&self, work: impl Fn() -> F + Sync) {
        loop {
            self.wait_until_served().await;
            tokio::select! {
                () = work() => return,
                () = self.wait_until_unserved() => {}
            }
        }
    }
}
