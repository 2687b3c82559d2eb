//! Serves a store only while it is the one of this node's volumes.

use crate::controller::ReconcileContext;
use crate::plan::{StoreAction, plan_store};
use crate::provisioner::RunError;
use crate::store::VolumeStoreError;
use crate::store_id::StoreIdentity;

impl ReconcileContext {
    /// The store, once it is known to be the one of this node's volumes.
    pub(super) async fn served_store(&self) -> StoreIdentity {
        let mut store = self.store.subscribe();
        let served = store.wait_for(Option::is_some).await.ok().and_then(|served| (*served).clone());
        match served {
            Some(served) => served,
            // The sender lives as long as `self`.
            None => std::future::pending().await,
        }
    }

    /// Decides whether the store is served, and then watches it. Returns why it is not, or no longer.
    pub(super) async fn guard_store(&self) -> RunError {
        match self.admit_store().await {
            Ok(served) => drop(self.store.send_replace(Some(served))),
            Err(error) => return error,
        }
        RunError::StoreLost(self.provisioner.applier.store.wait_until_lost().await)
    }

    async fn admit_store(&self) -> Result<StoreIdentity, RunError> {
        self.wait_for_cache_sync().await;
        let applier = &self.provisioner.applier;
        let lost = |error: VolumeStoreError| RunError::StoreLost(error);
        let found = applier.store.identity().await.map_err(lost)?;
        let present = applier.store.list().await.map_err(lost)?.into_iter().collect();
        let objects = self.volumes.state();
        let objects = objects.iter().map(std::convert::AsRef::as_ref);
        match plan_store(&applier.identity, (&found, &present), objects) {
            StoreAction::Serve => Ok(found),
            StoreAction::CreateIdentity => applier.store.create_identity().await.map_err(lost),
            StoreAction::Reject(rejection) => Err(RunError::StoreRejected(rejection)),
        }
    }
}
