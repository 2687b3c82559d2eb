//! Serves a store only while it is the one of this node's volumes, and again when it is back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_supervisor::Backoff;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::controller::ReconcileContext;
use crate::controller::event_filter::SweepRequest;
use crate::controller::retry_tracker::random_fraction;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::plan::{StoreAction, StoreRejection, named_store, plan_store, required_volume};
use crate::provisioner::RunError;
use crate::store_id::{StoreId, StoreIdentity};
use crate::store_status::{StoreFault, StoreStatus};

/// The longest time between two looks for a store that no mount has brought back.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The shortest time between two looks: mounts change often while pods start.
const LOOK_PAUSES: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(5), jitter: 0.0 };

/// What a list of the PersistentVolumes of all nodes has shown.
struct ListedVolumes {
    store: StoreId,
    /// One that names the store.
    named: Option<Arc<PersistentVolume>>,
    until: Instant,
    /// Whether the cached volumes have changed since.
    changes: watch::Receiver<()>,
}

impl ListedVolumes {
    fn is_current(&self, store: &StoreId) -> bool {
        let is_unchanged = self.changes.has_changed().is_ok_and(|has_changed| !has_changed);
        self.store == *store && Instant::now() < self.until && is_unchanged
    }
}

impl ReconcileContext {
    /// The store, once it is served.
    pub(super) async fn served_store(&self) -> StoreIdentity {
        let mut status = self.provisioner.store_status.subscribe();
        let is_served = |status: &StoreStatus| matches!(status, StoreStatus::Served(_));
        match status.wait_for(is_served).await.map(|status| status.clone()) {
            Ok(StoreStatus::Served(store)) => store,
            // The sender lives as long as `self`.
            _ => std::future::pending().await,
        }
    }

    /// Waits until the store is not served.
    pub(super) async fn unserved_store(&self) {
        let mut status = self.provisioner.store_status.subscribe();
        // Never fails: the sender lives as long as `self`.
        let _ = status.wait_for(|status| !matches!(status, StoreStatus::Served(_))).await;
    }

    /// Does work while the store is served: drops it when the store is lost, and starts it anew when it is back.
    pub(super) async fn while_served<F: Future<Output = ()> + Send>(&self, work: impl Fn() -> F + Sync) {
        loop {
            self.served_store().await;
            tokio::select! {
                () = work() => return,
                () = self.unserved_store() => {}
            }
        }
    }

    /// Serves the store while it is the one of this node's volumes, and looks for it when it is not. Returns why it is
    /// not, if the store can't be opened again.
    pub(super) async fn guard_store(&self) -> RunError {
        self.wait_for_cache_sync().await;
        let store = &self.provisioner.applier.store;
        let (mut listed, mut failures) = (None, 0);
        let mut admitted = self.admit_store(&mut listed).await;
        loop {
            let error = match admitted {
                Ok((served, present)) => {
                    failures = 0;
                    self.serve_store(served, &present);
                    RunError::StoreLost(store.wait_until_lost().await)
                }
                Err(error) => error,
            };
            // What changes from now on is noticed, also while the store is being opened.
            let Some(change) = store.watch_changes() else { return error };
            let mut volumes = self.volumes_changed.subscribe();
            self.stop_serving(&error);
            admitted = match store.reopen().await {
                Ok(()) => self.admit_store(&mut listed).await,
                Err(error) => Err(RunError::StoreLost(error)),
            };
            if let Err(error) = &admitted {
                self.stop_serving(error);
                failures += 1;
                sleep(LOOK_PAUSES.base_delay(failures)).await;
                let delay = self.provisioner.config.backoff.jittered_delay(failures, random_fraction());
                let delay = delay.min(LOOK_INTERVAL);
                tokio::select! {
                    // A failure to watch is not one to wait: the delay does.
                    Ok(()) = change => {}
                    // The operator has deleted the volumes of a lost disk, or declared them lost.
                    _ = volumes.changed() => {}
                    // Something else may have changed, such as a file.
                    () = sleep(delay) => {}
                }
            }
        }
    }

    fn serve_store(&self, store: StoreIdentity, present: &BTreeSet<VolumeId>) {
        let was_lost = matches!(*self.provisioner.store_status.borrow(), StoreStatus::Unserved { .. });
        if was_lost {
            tracing::info!(store = store.id().map(StoreId::as_str), "serving the volumes again");
            self.signals.request_sweep(SweepRequest::All);
        }
        // The store may be restored from a backup, which lacks some.
        let objects = self.volumes.state();
        let required =
            objects.iter().filter_map(|object| required_volume(&self.provisioner.config.identity, object));
        self.missing_volumes.send_replace(required.filter(|id| !present.contains(id)).collect());
        self.provisioner.store_status.send_replace(StoreStatus::Served(store));
    }

    fn stop_serving(&self, error: &RunError) {
        let fault = match error {
            RunError::StoreRejected(StoreRejection::Other { .. }) => StoreFault::Replaced,
            RunError::StoreRejected(StoreRejection::Moved { .. }) => StoreFault::Moved,
            _ => StoreFault::Absent,
        };
        let status = StoreStatus::Unserved { fault, why: format_chain(error) };
        let is_new = self.provisioner.store_status.send_if_modified(|old| {
            let is_new = *old != status;
            *old = status.clone();
            is_new
        });
        if let StoreStatus::Unserved { why, .. } = status
            && is_new
        {
            tracing::error!("the volumes are not served, and nothing is changed: {why}");
        }
    }

    /// A PersistentVolume of any node that names a store. Asks until the API server answers.
    async fn find_volume_of_store(&self, store: &StoreId) -> Option<Arc<PersistentVolume>> {
        let mut failures = 0;
        loop {
            match self.provisioner.applier.find_volume_of_store(store).await {
                Ok(found) => return found.map(Arc::new),
                Err(error) => {
                    self.record_api_error(&error);
                    failures += 1;
                    let delay = self.provisioner.config.backoff.jittered_delay(failures, random_fraction());
                    tracing::warn!(
                        "look for the store's node: {}; retrying in {delay:?}",
                        format_chain(&error)
                    );
                    sleep(delay).await;
                }
            }
        }
    }

    /// Decides whether the store is served. Returns its identity, and the volumes that it has. One that is not served is
    /// closed, so that its disk can be unmounted.
    async fn admit_store(
        &self,
        listed: &mut Option<ListedVolumes>,
    ) -> Result<(StoreIdentity, BTreeSet<VolumeId>), RunError> {
        let admitted = self.check_store(listed).await;
        if admitted.is_err() {
            self.provisioner.applier.store.close().await;
        }
        admitted
    }

    async fn check_store(
        &self,
        listed: &mut Option<ListedVolumes>,
    ) -> Result<(StoreIdentity, BTreeSet<VolumeId>), RunError> {
        let applier = &self.provisioner.applier;
        let found = applier.store.identity().await.map_err(RunError::StoreLost)?;
        let present: BTreeSet<_> =
            applier.store.list().await.map_err(RunError::StoreLost)?.into_iter().collect();
        let mut objects = self.volumes.state();
        if let Some(store) = found.id() {
            let is_named = objects.iter().any(|volume| named_store(volume).as_ref() == Some(store));
            // The cache has the volumes of this node only.
            if !is_named {
                if !listed.as_ref().is_some_and(|listed| listed.is_current(store)) {
                    let changes = self.volumes_changed.subscribe();
                    let named = self.find_volume_of_store(store).await;
                    let until = Instant::now() + LOOK_INTERVAL;
                    *listed = Some(ListedVolumes { store: store.clone(), named, until, changes });
                }
                objects.extend(listed.as_ref().and_then(|listed| listed.named.clone()));
            }
        }
        let served =
            match plan_store(&applier.identity, (&found, &present), objects.iter().map(AsRef::as_ref)) {
                StoreAction::Serve => found,
                StoreAction::CreateIdentity => {
                    applier.store.create_identity().await.map_err(RunError::StoreLost)?
                }
                StoreAction::Reject(rejection) => return Err(RunError::StoreRejected(rejection)),
            };
        applier.store.start_serving().await.map_err(RunError::StoreLost)?;
        Ok((served, present))
    }
}
