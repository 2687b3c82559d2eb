//! Serves a store only while it is the one of this node's volumes, and again when it is back.

use std::collections::BTreeSet;
use std::time::Duration;

use nodekeel_supervisor::Backoff;
use tokio::time::sleep;

use crate::api::retry_tracker::random_fraction;
use crate::controller::ReconcileContext;
use crate::controller::event_filter::SweepRequest;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::loss::condition::required_volume;
use crate::loss::evidence::ListedVolumes;
use crate::loss::status::{StoreFault, StoreStatus};
use crate::loss::store::{StoreAction, StoreRejection, named_store, plan_store};
use crate::provisioner::RunError;
use crate::store_id::{StoreId, StoreIdentity};

/// The longest time between two looks for a store that no mount has brought back.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(30);

/// The shortest time between two looks: mounts change often while pods start.
const LOOK_PAUSES: Backoff =
    Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(5), jitter: 0.0 };

impl ReconcileContext {
    /// The store, once it is served.
    pub(crate) async fn served_store(&self) -> StoreIdentity {
        let mut status = self.provisioner.store_status.subscribe();
        let is_served = |status: &StoreStatus| matches!(status, StoreStatus::Served(_));
        match status.wait_for(is_served).await.map(|status| status.clone()) {
            Ok(StoreStatus::Served(store)) => store,
            // The sender lives as long as `self`.
            _ => std::future::pending().await,
        }
    }

    /// Waits until the store is not served.
    pub(crate) async fn unserved_store(&self) {
        let mut status = self.provisioner.store_status.subscribe();
        // Never fails: the sender lives as long as `self`.
        let _ = status.wait_for(|status| !matches!(status, StoreStatus::Served(_))).await;
    }

    /// Does work while the store is served: drops it when the store is lost, and starts it anew when it is back.
    pub(crate) async fn while_served<F: Future<Output = ()> + Send>(&self, work: impl Fn() -> F + Sync) {
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
    pub(crate) async fn guard_store(&self) -> RunError {
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
            if !is_named {
                objects.extend(self.find_volume_of_store(store, listed).await);
            }
        }
        let volumes = objects.iter().map(AsRef::as_ref);
        let action = match plan_store(&applier.identity, (&found, &present), volumes) {
            StoreAction::CreateIdentity => self.confirm_new_store(&objects).await?,
            action => action,
        };
        let served = match action {
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
