//! Finds out whether a store is the one of another node's volumes, or misses the snapshots of this one.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::ListParams;

use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError};
use crate::loss::store::named_store;
use crate::snapshot::{SnapshotId, list_ready_snapshots};
use crate::store_id::StoreId;

/// Page size of volume lists.
const PAGE_SIZE: u32 = 500;

impl ActionApplier {
    /// Finds a PersistentVolume of this driver that names a store, on any node.
    pub(crate) async fn find_volume_of_store(
        &self,
        store: &StoreId,
    ) -> Result<Option<PersistentVolume>, ApplyError> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.0.clone());
        let is_of_driver = |volume: &PersistentVolume| {
            let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            csi.is_some_and(|csi| csi.driver == self.identity.driver.as_str())
        };
        let mut params = ListParams::default().limit(PAGE_SIZE);
        loop {
            let page =
                with_timeout(volumes.list(&params)).await.map_err(ApiCall::ListVolumes.wrap_error())?;
            let mut named =
                page.items.into_iter().filter(|volume| named_store(volume).as_ref() == Some(store));
            if let Some(found) = named.find(is_of_driver) {
                return Ok(Some(found));
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(None),
            }
        }
    }

    /// The snapshots of this node that were taken and are not being removed.
    pub(crate) async fn list_ready_snapshots(&self) -> Result<BTreeSet<SnapshotId>, ApplyError> {
        let listed = list_ready_snapshots(&self.client.0, &self.identity).await;
        listed.map_err(ApiCall::ListSnapshotContents.wrap_error())
    }
}
