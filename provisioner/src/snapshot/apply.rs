//! Creates and removes snapshots, and writes the status of their VolumeSnapshotContents.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::api::call::ApiCall;
use crate::api::event::{EventReason, EventRecorder, MAX_NOTE_BYTES, truncate_bytes};
use crate::api::writer::{ApiWriter, ObjectPart, Patched};
use crate::failure::ReconcileError;
use crate::id::VolumeId;
use crate::name::StoreName;
use crate::objects::object_reference;
use crate::snapshot::decide::{SnapshotAction, SnapshotRejection, has_content_finalizer, plan_snapshot};
use crate::snapshot::{
    CONTENT_FINALIZER, SnapshotId, SnapshotInfo, SnapshotStore, VolumeSnapshotContent, recorded_store,
    store_annotation,
};
use crate::step::VolumeStep;

/// Applies the actions of VolumeSnapshotContents.
#[derive(Debug)]
pub(crate) struct SnapshotApplier {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn SnapshotStore>,
    pub(crate) recorder: Arc<EventRecorder>,
}

impl SnapshotApplier {
    pub(crate) fn store_name(&self) -> Option<&str> {
        self.api.identity.store.as_ref().map(StoreName::as_str)
    }

    /// Returns whether a content names this store, or need not.
    pub(crate) fn has_recorded_store(&self, content: &VolumeSnapshotContent) -> bool {
        self.store_name().is_none_or(|name| recorded_store(&self.api.identity, content) == Some(name))
    }

    /// Records on a content the store that its snapshot is about to be taken in, or that has it: its removal must not take
    /// place in another one, in which a missing snapshot looks removed.
    pub(crate) async fn record_store(&self, content: &VolumeSnapshotContent) -> Result<(), ReconcileError> {
        let annotation = store_annotation(&self.api.identity);
        let patch = json!({ "metadata": { "annotations": { annotation: self.store_name() } } });
        self.patch(VolumeStep::UpdateSnapshotStatus, content, ObjectPart::Main, patch).await?;
        Ok(())
    }

    /// Takes a snapshot of a volume, and writes it into the status of its content.
    pub(crate) async fn create_snapshot(
        &self,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<(), ReconcileError> {
        let info = self.store.create_snapshot(id, volume).await.map_err(ReconcileError::Snapshot)?;
        tracing::info!(handle = %id, volume = %volume, "took a snapshot");
        // If the process is killed here, the next run finds the snapshot by its name, the UID of the VolumeSnapshot.
        match self.patch_status(content, ready_status(id, info)).await? {
            // No object names the snapshot: its content was deleted by force before it was reported.
            Patched::Gone => self.store.remove_snapshot(id).await.map_err(ReconcileError::Snapshot),
            // The watch reports the changed content, whose next run finds the snapshot.
            Patched::Done(_) | Patched::Changed => Ok(()),
        }
    }

    /// Writes an existing snapshot into the status of its content; a missing one is a rejection.
    pub(crate) async fn report_snapshot(
        &self,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
    ) -> Result<Option<SnapshotRejection>, ReconcileError> {
        match self.store.find_snapshot(id).await.map_err(ReconcileError::Snapshot)? {
            Some(info) => self.patch_status(content, ready_status(id, info)).await.map(|_| None),
            None => Ok(Some(SnapshotRejection::Missing { id: id.clone() })),
        }
    }

    /// Removes a snapshot, and then the finalizer of its content, if the content is still to be deleted. A content that
    /// is ready becomes not ready first, and is then planned again.
    pub(crate) async fn delete_snapshot(
        &self,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
    ) -> Result<(), ReconcileError> {
        let name = content.metadata.name.as_deref().unwrap_or_default();
        let contents = self.api.all::<VolumeSnapshotContent>();
        let live = self.api.read(ApiCall::ReadSnapshotContent, &contents, name).await?;
        // The cached content may be stale, or be another object of the same name.
        let Some(live) = live.filter(|live| live.metadata.uid == content.metadata.uid) else { return Ok(()) };
        if plan_snapshot(&self.api.identity, &live) != SnapshotAction::Delete(id.clone()) {
            return Ok(());
        }
        if live.is_ready() {
            // Record that the snapshot is there, and is being removed: from then on, a missing one was removed, and is not on
            // a disk that isn't mounted.
            let found = self.store.list_snapshots().await.map_err(ReconcileError::Snapshot)?;
            if !found.contains(id) {
                return Err(ReconcileError::SnapshotMissing { id: id.clone() });
            }
            // The change of the content brings it back.
            return self.patch_status(&live, json!({ "readyToUse": false })).await.map(drop);
        }
        tracing::info!(handle = %id, content = name, "deleting snapshot");
        // First the snapshot, then the finalizer: after a kill between the two, the content is not ready, and the
        // removal of a missing snapshot succeeds.
        self.store.remove_snapshot(id).await.map_err(ReconcileError::Snapshot)?;
        self.release_content(&live).await
    }

    /// Removes the finalizer of exactly this version of a content.
    pub(crate) async fn release_content(
        &self,
        content: &VolumeSnapshotContent,
    ) -> Result<(), ReconcileError> {
        if !has_content_finalizer(content) {
            return Ok(());
        }
        // A merge patch replaces the whole list, so it applies only to the version with this list.
        let others: Vec<_> =
            content.metadata.finalizers.iter().flatten().filter(|it| *it != CONTENT_FINALIZER).collect();
        let patch = json!({ "metadata": { "finalizers": others } });
        self.patch(VolumeStep::RemoveSnapshotFinalizer, content, ObjectPart::Main, patch).await?;
        Ok(())
    }

    /// Writes into the status of a content, and into an event, why its snapshot was not created; once. The message
    /// may have a path that a pod has chosen, so it is truncated.
    pub(crate) async fn report_failure(
        &self,
        content: &VolumeSnapshotContent,
        message: &str,
    ) -> Result<(), ReconcileError> {
        let message = truncate_bytes(message, MAX_NOTE_BYTES);
        let known = content.status.as_ref().and_then(|status| status.error.as_ref()?.message.as_deref());
        if known == Some(message) {
            return Ok(());
        }
        let about = object_reference(content);
        // First the event: once the status has the message, no event is recorded again.
        self.recorder.record_event(&about, EventReason::SnapshotCreationFailed, message).await;
        let error = json!({ "message": message, "time": Timestamp::now() });
        self.patch_status(content, json!({ "readyToUse": false, "error": error })).await.map(drop)
    }

    /// Merges fields into the status of exactly this version of a content.
    async fn patch_status(
        &self,
        content: &VolumeSnapshotContent,
        status: Value,
    ) -> Result<Patched<VolumeSnapshotContent>, ReconcileError> {
        let patch = json!({ "status": status });
        self.patch(VolumeStep::UpdateSnapshotStatus, content, ObjectPart::Status, patch).await
    }

    async fn patch(
        &self,
        step: VolumeStep,
        content: &VolumeSnapshotContent,
        part: ObjectPart,
        patch: Value,
    ) -> Result<Patched<VolumeSnapshotContent>, ReconcileError> {
        let call = ApiCall::PatchSnapshotContent;
        Ok(self.api.patch_version(step, call, &self.api.all(), content, part, patch).await?)
    }
}

/// The status of a content whose snapshot is ready.
fn ready_status(id: &SnapshotId, info: SnapshotInfo) -> Value {
    let created = info.created.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    json!({
        "snapshotHandle": id.as_str(),
        "creationTime": i64::try_from(created).unwrap_or_default(),
        "restoreSize": i64::try_from(info.restore_size.0).unwrap_or(i64::MAX),
        "readyToUse": true,
        "error": null,
    })
}
