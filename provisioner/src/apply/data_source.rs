//! Volumes that are created from a snapshot or from another claim's volume.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Api;
use serde_json::json;

use crate::api::event::EventReason;
use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError, ApplyOutcome, none_if_not_found};
use crate::claim::source::{DataSource, SourceAction, check_source_kind, plan_clone, plan_restore};
use crate::plan::{ClaimRejection, VolumeSpec};
use crate::resize::expansion::bound_volume_name;
use crate::snapshot::{SnapshotStore, StoredId, VolumeSnapshot, VolumeSnapshotContent};
use crate::step::VolumeStep;

/// From what a volume is created.
pub(crate) enum VolumeContent<'a> {
    /// Nothing.
    Empty,
    /// A snapshot or a volume of this node.
    Copy(&'a dyn SnapshotStore, StoredId),
    /// It is not created now.
    Unavailable(ApplyOutcome),
}

impl ActionApplier {
    /// Finds the source of a claim's volume. A claim whose source is on another node is handed over to that node.
    pub(crate) async fn find_content(
        &self,
        claim: &PersistentVolumeClaim,
        spec: &VolumeSpec,
    ) -> Result<VolumeContent<'_>, ApplyError> {
        let Some(source) = &spec.source else { return Ok(VolumeContent::Empty) };
        let Some(store) = self.snapshots.as_deref() else {
            let rejection = ClaimRejection::SourcesUnsupported;
            return Ok(VolumeContent::Unavailable(ApplyOutcome::Rejected(rejection)));
        };
        match self.plan_source(spec, source).await? {
            SourceAction::Copy(id) => match self.check_snapshot_kind(store, &id, spec).await? {
                Some(rejection) => Ok(VolumeContent::Unavailable(ApplyOutcome::Rejected(rejection))),
                None => Ok(VolumeContent::Copy(store, id)),
            },
            SourceAction::Wait(reason) => Err(ApplyError::SourceNotReady { reason }),
            SourceAction::Reject(rejection) => {
                Ok(VolumeContent::Unavailable(ApplyOutcome::Rejected(rejection)))
            }
            SourceAction::HandOver(node) => {
                self.hand_over(claim, spec, &node).await?;
                Ok(VolumeContent::Unavailable(ApplyOutcome::HandedOver))
            }
        }
    }

    /// Rejects the restore of a snapshot of another kind: its object says only whether it is one of a block volume.
    async fn check_snapshot_kind(
        &self,
        store: &dyn SnapshotStore,
        id: &StoredId,
        spec: &VolumeSpec,
    ) -> Result<Option<ClaimRejection>, ApplyError> {
        let (StoredId::Snapshot(id), Some(DataSource::Snapshot(name))) = (id, &spec.source) else {
            return Ok(None);
        };
        let found = store.find_snapshot(id).await.map_err(ApplyError::Snapshot)?;
        Ok(found.and_then(|info| check_source_kind(spec, name, info.kind)))
    }

    /// Records that a volume of this node has its PersistentVolume.
    pub(crate) async fn confirm_publication(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        let id = volume.metadata.name.as_deref().and_then(|name| name.parse().ok());
        match (&self.snapshots, id) {
            (Some(store), Some(id)) => store.mark_published(&id).await.map_err(ApplyError::Store),
            _ => Ok(()),
        }
    }

    /// Reads the objects of a data source, and plans.
    async fn plan_source(&self, spec: &VolumeSpec, source: &DataSource) -> Result<SourceAction, ApplyError> {
        let namespace = spec.claim_ref.namespace.as_deref().unwrap_or_default();
        match source {
            DataSource::Snapshot(name) => {
                let snapshots: Api<VolumeSnapshot> = Api::namespaced(self.client.0.clone(), namespace);
                let snapshot = none_if_not_found(with_timeout(snapshots.get(name)).await)
                    .map_err(ApiCall::ReadSnapshot.wrap_error())?;
                let status = snapshot.as_ref().and_then(|snapshot| snapshot.status.as_ref());
                let content = match status.and_then(|it| it.bound_volume_snapshot_content_name.as_deref()) {
                    Some(name) => self.read_snapshot_content(name).await?,
                    None => None,
                };
                Ok(plan_restore(&self.identity, spec, name, (snapshot.as_ref(), content.as_ref())))
            }
            DataSource::Claim(name) => {
                let claim = with_timeout(self.claims_api(Some(namespace)).get(name)).await;
                let claim = none_if_not_found(claim).map_err(ApiCall::ReadClaim.wrap_error())?;
                let volume = match claim.as_ref().and_then(bound_volume_name) {
                    Some(name) => self.read_volume(name).await?,
                    None => None,
                };
                Ok(plan_clone(&self.identity, spec, name, (claim.as_ref(), volume.as_ref())))
            }
        }
    }

    pub(crate) async fn read_snapshot_content(
        &self,
        name: &str,
    ) -> Result<Option<VolumeSnapshotContent>, ApplyError> {
        let contents: Api<VolumeSnapshotContent> = Api::all(self.client.0.clone());
        none_if_not_found(with_timeout(contents.get(name)).await)
            .map_err(ApiCall::ReadSnapshotContent.wrap_error())
    }

    /// Writes the node of a claim's data source into the claim, in place of this one. The scheduler does not know
    /// where the source is, and would select any node again and again.
    async fn hand_over(
        &self,
        claim: &PersistentVolumeClaim,
        spec: &VolumeSpec,
        node: &str,
    ) -> Result<(), ApplyError> {
        let name = spec.claim_ref.name.as_deref().unwrap_or_default();
        tracing::info!(claim = name, node, "handing a claim over to the node of its data source");
        let note = format!("the claim's data source is on node {node}, so that node provisions its volume");
        self.recorder.record_event(&spec.claim_ref, EventReason::Provisioning, &note).await;
        self.patch_selected_node(VolumeStep::HandOverClaim, claim, json!(node)).await
    }
}
