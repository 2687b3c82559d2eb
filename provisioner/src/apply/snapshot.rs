//! Snapshots: creates and removes them, and writes the status of their VolumeSnapshotContents.

use std::time::UNIX_EPOCH;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::api::event::{EventReason, MAX_NOTE_BYTES, truncate_bytes};
use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError, status_code};
use crate::id::VolumeId;
use crate::snapshot::decide::{SnapshotAction, SnapshotRejection, has_content_finalizer, plan_snapshot};
use crate::snapshot::{CONTENT_FINALIZER, SnapshotId, SnapshotInfo, SnapshotStore, VolumeSnapshotContent};
use crate::step::VolumeStep;

/// A change of an object that was expected to be this version of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PatchOutcome {
    Done,
    /// It has changed meanwhile: the watch reports it.
    Changed,
    /// It does not exist any more.
    Gone,
}

impl ActionApplier {
    /// Takes a snapshot of a volume, and writes it into the status of its content.
    pub(crate) async fn create_snapshot(
        &self,
        store: &dyn SnapshotStore,
        content: &VolumeSnapshotContent,
        (id, volume): (&SnapshotId, &VolumeId),
    ) -> Result<(), ApplyError> {
        let info = store.create_snapshot(id, volume).await.map_err(ApplyError::Snapshot)?;
        tracing::info!(handle = %id, volume = %volume, "took a snapshot");
        match self.patch_status(content, ready_status(id, info)).await? {
            // Nobody knows of the snapshot: its content was deleted by force before it was reported.
            PatchOutcome::Gone => store.remove_snapshot(id).await.map_err(ApplyError::Snapshot),
            PatchOutcome::Done | PatchOutcome::Changed => Ok(()),
        }
    }

    /// Writes an existing snapshot into the status of its content; a missing one is a rejection.
    pub(crate) async fn report_snapshot(
        &self,
        store: &dyn SnapshotStore,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
    ) -> Result<Option<SnapshotRejection>, ApplyError> {
        match store.find_snapshot(id).await.map_err(ApplyError::Snapshot)? {
            Some(info) => self.patch_status(content, ready_status(id, info)).await.map(|_| None),
            None => Ok(Some(SnapshotRejection::Missing { id: id.clone() })),
        }
    }

    /// Removes a snapshot, and then the finalizer of its content, if the content is still to be deleted. A content that
    /// is ready becomes not ready first, and is then planned again.
    pub(crate) async fn delete_snapshot(
        &self,
        store: &dyn SnapshotStore,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
    ) -> Result<(), ApplyError> {
        let name = content.metadata.name.as_deref().unwrap_or_default();
        let live = self.read_snapshot_content(name).await?;
        // The cached content may be stale, or be another object of the same name.
        let Some(live) = live.filter(|live| live.metadata.uid == content.metadata.uid) else { return Ok(()) };
        if plan_snapshot(&self.identity, &live) != SnapshotAction::Delete(id.clone()) {
            return Ok(());
        }
        if live.is_ready() {
            return self.mark_deletion(store, &live, id).await;
        }
        tracing::info!(handle = %id, content = name, "deleting snapshot");
        store.remove_snapshot(id).await.map_err(ApplyError::Snapshot)?;
        self.release_content(&live).await
    }

    /// Records that the snapshot of a content is there, and is being removed: from then on, a missing one was removed,
    /// and is not on a disk that isn't mounted.
    async fn mark_deletion(
        &self,
        store: &dyn SnapshotStore,
        content: &VolumeSnapshotContent,
        id: &SnapshotId,
    ) -> Result<(), ApplyError> {
        let found = store.list_snapshots().await.map_err(ApplyError::Snapshot)?;
        if !found.contains(id) {
            return Err(ApplyError::SnapshotMissing { id: id.clone() });
        }
        // The change of the content brings it back.
        self.patch_status(content, json!({ "readyToUse": false })).await.map(drop)
    }

    /// Removes the finalizer of exactly this version of a content.
    pub(crate) async fn release_content(&self, content: &VolumeSnapshotContent) -> Result<(), ApplyError> {
        if !has_content_finalizer(content) {
            return Ok(());
        }
        let others: Vec<_> =
            content.metadata.finalizers.iter().flatten().filter(|it| *it != CONTENT_FINALIZER).collect();
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": content.metadata.uid,
            "resourceVersion": content.metadata.resource_version,
            "finalizers": others,
        } }));
        let name = content.metadata.name.as_deref().unwrap_or_default();
        let (api, params) = (self.contents_api(), PatchParams::default());
        let patched = self
            .steps
            .run_async(VolumeStep::RemoveSnapshotFinalizer, with_timeout(api.patch(name, &params, &patch)))
            .await;
        patch_outcome(patched).map(drop)
    }

    /// Writes into the status of a content, and into an event, why its snapshot was not created; once. The message
    /// may have a path that a pod has chosen, so it is truncated.
    pub(crate) async fn report_snapshot_failure(
        &self,
        content: &VolumeSnapshotContent,
        message: &str,
    ) -> Result<(), ApplyError> {
        let message = truncate_bytes(message, MAX_NOTE_BYTES);
        let known = content.status.as_ref().and_then(|status| status.error.as_ref()?.message.as_deref());
        if known == Some(message) {
            return Ok(());
        }
        self.recorder
            .record_event(&content_reference(content), EventReason::SnapshotCreationFailed, message)
            .await;
        let error = json!({ "message": message, "time": Timestamp::now() });
        self.patch_status(content, json!({ "readyToUse": false, "error": error })).await.map(drop)
    }

    /// Merges fields into the status of exactly this version of a content.
    async fn patch_status(
        &self,
        content: &VolumeSnapshotContent,
        status: Value,
    ) -> Result<PatchOutcome, ApplyError> {
        let patch = Patch::Merge(json!({
            "metadata": {
                "uid": content.metadata.uid,
                "resourceVersion": content.metadata.resource_version,
            },
            "status": status,
        }));
        let name = content.metadata.name.as_deref().unwrap_or_default();
        let (api, params) = (self.contents_api(), PatchParams::default());
        let patched = self
            .steps
            .run_async(
                VolumeStep::UpdateSnapshotStatus,
                with_timeout(api.patch_status(name, &params, &patch)),
            )
            .await;
        patch_outcome(patched)
    }

    fn contents_api(&self) -> Api<VolumeSnapshotContent> {
        Api::all(self.client.0.clone())
    }
}

fn patch_outcome<T>(patched: Result<T, kube::Error>) -> Result<PatchOutcome, ApplyError> {
    match patched {
        Ok(_) => Ok(PatchOutcome::Done),
        Err(error) => match status_code(&error) {
            Some(404) => Ok(PatchOutcome::Gone),
            Some(409) => Ok(PatchOutcome::Changed),
            _ => Err(ApiCall::PatchSnapshotContent.wrap_error()(error)),
        },
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

/// A reference to a content for events.
pub(crate) fn content_reference(content: &VolumeSnapshotContent) -> ObjectReference {
    ObjectReference {
        api_version: Some("snapshot.storage.k8s.io/v1".to_owned()),
        kind: Some("VolumeSnapshotContent".to_owned()),
        name: content.metadata.name.clone(),
        uid: content.metadata.uid.clone(),
        resource_version: content.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}
