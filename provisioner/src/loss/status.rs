//! The state of a store: whether its volumes are served.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_fsquota::Bytes;
use tokio::sync::watch;

use crate::ability::{Ability, InabilityCause};
use crate::image::ImageFormat;
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

/// The status of a provisioner's store, and whether it can be used: the store guard sets the one, the prober the other,
/// and everything else waits for them. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ServedStore(Arc<ServedState>);

#[derive(Debug)]
struct ServedState {
    status: watch::Sender<StoreStatus>,
    /// Of a store that is not served, it follows from the status.
    ability: watch::Sender<Ability>,
    /// The formats of which no volume can be created although the store is able, with the reason.
    missing_formats: Mutex<BTreeMap<ImageFormat, String>>,
    /// The size of the largest new volume; `None` if it is not limited, or not known yet.
    offered: Mutex<Option<Bytes>>,
}

impl ServedStore {
    pub(crate) fn new() -> Self {
        let (status, ability) =
            (watch::Sender::new(StoreStatus::Unknown), watch::Sender::new(Ability::Unknown));
        Self(Arc::new(ServedState {
            status,
            ability,
            missing_formats: Mutex::default(),
            offered: Mutex::default(),
        }))
    }

    pub(crate) fn status(&self) -> StoreStatus {
        self.0.status.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<StoreStatus> {
        self.0.status.subscribe()
    }

    /// Sets the status. Returns whether it differs from the last one; otherwise no waiter is woken.
    pub(crate) fn set(&self, status: StoreStatus) -> bool {
        let ability = match &status {
            // A store that is served from now on is probed first.
            StoreStatus::Unknown | StoreStatus::Served(_) => Ability::Unknown,
            StoreStatus::Unserved { why, .. } => {
                Ability::Unable { cause: InabilityCause::Unserved, why: why.clone() }
            }
        };
        let has_changed =
            self.0.status.send_if_modified(|old| std::mem::replace(old, status.clone()) != status);
        if has_changed {
            self.0.ability.send_if_modified(|old| std::mem::replace(old, ability.clone()) != ability);
        }
        has_changed
    }

    /// Whether volumes can be created.
    pub(crate) fn ability(&self) -> Ability {
        self.0.ability.borrow().clone()
    }

    pub(crate) fn subscribe_ability(&self) -> watch::Receiver<Ability> {
        self.0.ability.subscribe()
    }

    /// Sets what a probe of the served store has found. Returns the last ability if it was another one; otherwise no
    /// waiter is woken.
    pub(crate) fn set_probed(&self, ability: Ability) -> Option<Ability> {
        // Held, so that a store that is lost meanwhile is not reported as able.
        let status = self.0.status.borrow();
        if !matches!(*status, StoreStatus::Served(_)) {
            return None;
        }
        let mut last = None;
        self.0.ability.send_if_modified(|old| {
            let is_same = old.is_same(&ability);
            let replaced = std::mem::replace(old, ability);
            last = (!is_same).then_some(replaced);
            !is_same
        });
        last
    }

    /// The size of the largest new volume that is offered.
    pub(crate) fn offered(&self) -> Option<Bytes> {
        *self.0.offered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set_offered(&self, size: Bytes) {
        *self.0.offered.lock().unwrap_or_else(PoisonError::into_inner) = Some(size);
    }

    /// The formats of which no volume can be created, with the reason.
    pub(crate) fn missing_formats(&self) -> MutexGuard<'_, BTreeMap<ImageFormat, String>> {
        self.0.missing_formats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets them. Returns whether they have changed; then who waits for a change of the ability is woken.
    pub(crate) fn set_missing_formats(&self, missing: BTreeMap<ImageFormat, String>) -> bool {
        let mut known = self.missing_formats();
        if *known == missing {
            return false;
        }
        *known = missing;
        drop(known);
        self.0.ability.send_modify(|_| {});
        true
    }

    /// Waits until it is known whether volumes can be created, and returns that.
    pub(crate) async fn wait_until_known(&self) -> Ability {
        let mut ability = self.subscribe_ability();
        let known = ability.wait_for(|ability| *ability != Ability::Unknown).await.map(|known| known.clone());
        match known {
            Ok(known) => known,
            // The sender lives as long as `self`.
            Err(_) => std::future::pending().await,
        }
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
