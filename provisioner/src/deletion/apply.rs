//! Deletes volumes and their PersistentVolumes, after all checks on the live objects.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, Patch, Preconditions};
use serde_json::json;
use std::ops::ControlFlow;

use crate::api::call::{ApiCall, none_if_not_found};
use crate::api::writer::ApiWriter;
use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::deletion::reservation::{GuardError, VolumeGuard, VolumeReservation};
use crate::failure::ReconcileError;
use crate::id::VolumeId;
use crate::metrics::VolumeMetrics;
use crate::objects::{has_finalizer, is_bound_elsewhere, is_marked_lost, named_store};
use crate::step::VolumeStep;
use crate::store::{VolumeStore, VolumeStoreError};
use crate::store_id::StoreId;
use crate::volume_locks::VolumeLocks;

/// Removes volumes.
#[derive(Debug)]
pub(crate) struct VolumeRemover {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) guard: Option<Arc<dyn VolumeGuard>>,
    pub(crate) locks: Arc<VolumeLocks>,
    pub(crate) metrics: Arc<dyn VolumeMetrics>,
}

impl VolumeRemover {
    /// Deletes a volume and its PersistentVolume. `is_claim_cached`: the cache has a live claim with the
    /// volume's UID, so the claim is searched by UID if the PersistentVolume's claim reference does not lead
    /// to it.
    pub(crate) async fn delete_volume(
        &self,
        seen: &PersistentVolume,
        id: &VolumeId,
        store: Option<&StoreId>,
        is_claim_cached: bool,
    ) -> Result<(), ReconcileError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        let deleted = self.delete_locked_volume(seen, id, store, is_claim_cached).await;
        let class = seen.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
        // A volume that is gone, or no longer to be deleted, counts neither as a success nor as a failure.
        if !matches!(deleted, Ok(false)) {
            self.metrics.record_delete(class.unwrap_or_default(), started.elapsed(), deleted.is_ok());
        }
        deleted.map(drop)
    }

    /// Returns whether this call has deleted the volume.
    async fn delete_locked_volume(
        &self,
        seen: &PersistentVolume,
        id: &VolumeId,
        store: Option<&StoreId>,
        is_claim_cached: bool,
    ) -> Result<bool, ReconcileError> {
        // Decide again on the live volume. The cached one may be stale: it may be in use again, or be another object of the
        // same name.
        let Some(live) = self.api.read_volume(id.as_str()).await? else { return Ok(false) };
        let is_same = live.metadata.uid == seen.metadata.uid;
        if !is_same || plan_volume(&self.api.identity, &live) != VolumeAction::Delete(id.clone()) {
            return Ok(false);
        }

        // A live claim keeps its volume in every phase.
        let spec = live.spec.clone().unwrap_or_default();
        let claim = match self.api.read_claim(&spec.claim_ref.unwrap_or_default()).await? {
            None if is_claim_cached => self.find_claim(id).await?,
            claim => claim,
        };
        if let Some(claim) = claim.filter(|claim| !is_bound_elsewhere(claim, id)) {
            return Err(ReconcileError::ClaimExists { claim: claim.metadata.name.unwrap_or_default() });
        }

        // A volume of another store is not removed because it is missing in this one, unless that store is lost for good.
        if let Some(named) = named_store(&live).filter(|named| store.is_some_and(|store| store != named))
            && !is_marked_lost(&self.api.identity, &live)
            && !self.volume_exists(id).await
        {
            return Err(ReconcileError::OtherStore { id: id.clone(), named });
        }

        // From here on no pod on this node can begin to use it.
        let _reservation = self.reserve_volume(id).await?;
        tracing::info!(pv = %id, handle = %id, claim_uid = id.claim_uid(), "deleting volume");
        // First the data, then the object: after a kill between the two, the released object causes another removal.
        self.store.remove(id).await.map_err(ReconcileError::Store)?;
        self.delete_object(&live, id).await?;
        Ok(true)
    }

    /// Finds the claim that a volume was created for by its UID, under any name.
    async fn find_claim(&self, id: &VolumeId) -> Result<Option<PersistentVolumeClaim>, ReconcileError> {
        let mut found = None;
        let visit = |claim: PersistentVolumeClaim| {
            if claim.metadata.uid.as_deref() != Some(id.claim_uid()) {
                return ControlFlow::Continue(());
            }
            found = Some(claim);
            ControlFlow::Break(())
        };
        self.api.for_each(ApiCall::ListClaims, visit).await?;
        Ok(found)
    }

    /// Returns whether the store has this volume, or cannot tell.
    pub(crate) async fn volume_exists(&self, id: &VolumeId) -> bool {
        !matches!(self.store.usage(id).await, Err(VolumeStoreError::NotFound { .. }))
    }

    /// Ensures that a volume is not in use on this node, and is not used from now on.
    async fn reserve_volume(&self, id: &VolumeId) -> Result<Option<VolumeReservation>, ReconcileError> {
        let Some(guard) = self.guard.clone() else { return Ok(None) };
        let owned = id.clone();
        // The guard blocks in the kernel, and must not stop the loops, which share a task.
        let reserved = tokio::task::spawn_blocking(move || guard.reserve(&owned)).await;
        // This task fails only if the guard panics or the runtime shuts down: then the volume counts as in use.
        let stopped = |error| Err(GuardError::Inspect { id: id.clone(), source: Box::new(error) });
        reserved.unwrap_or_else(stopped).map(Some).map_err(ReconcileError::Guard)
    }

    /// Removes a volume without a PersistentVolume on this node, if it is empty. Returns whether it was.
    pub(crate) async fn remove_if_empty(&self, id: &VolumeId) -> Result<bool, ReconcileError> {
        let _reservation = self.reserve_volume(id).await?;
        let claim_uid = id.claim_uid();
        tracing::info!(handle = %id, claim_uid, "deleting volume if empty: no PersistentVolume on this node");
        self.store.remove_empty(id).await.map_err(ReconcileError::Store)
    }

    /// Deletes a PersistentVolume whose volume was removed, with our finalizer.
    async fn delete_object(&self, live: &PersistentVolume, id: &VolumeId) -> Result<(), ReconcileError> {
        // The object is already being deleted, so another call would change nothing.
        if live.metadata.deletion_timestamp.is_some() {
            return self.remove_finalizer(live).await;
        }
        let uid = live.metadata.uid.clone();
        // An object of this name may have replaced the one that was read: the UID protects it.
        let preconditions = Some(Preconditions { uid, resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        let api = self.api.all::<PersistentVolume>();
        let deleted =
            self.api.write(VolumeStep::DeletePersistentVolume, api.delete(id.as_str(), &params)).await;
        let deleted = none_if_not_found(deleted).map_err(|error| ApiCall::DeleteVolume.wrap_error(error))?;
        // The object stays until its finalizers are removed.
        match deleted.and_then(|answer| answer.left()) {
            Some(going) => self.remove_finalizer(&going).await,
            None => Ok(()),
        }
    }

    /// Removes our finalizer from any version of the volume: the volume controllers remove theirs at the same
    /// time.
    pub(crate) async fn remove_finalizer(&self, volume: &PersistentVolume) -> Result<(), ReconcileError> {
        if !has_finalizer(&self.api.identity, volume) {
            return Ok(());
        }
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(pv = name, "removing the finalizer of the PersistentVolume");
        let patch = Patch::Strategic(json!({ "metadata": {
            "uid": volume.metadata.uid,
            "$deleteFromPrimitiveList/finalizers": self.api.identity.finalizer.as_slice(),
        } }));
        // A conflict is not tolerated: the volume would be deleted a second time, and counted twice.
        self.api.patch_volume(VolumeStep::RemoveFinalizer, volume, &patch).await?;
        Ok(())
    }
}
