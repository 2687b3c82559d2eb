//! Reconciles PersistentVolumes.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::json;

use crate::api::event::EventReason;
use crate::api::retry_tracker::RetryTracker;
use crate::api::work_queue::NextRun;
use crate::deletion::apply::VolumeRemover;
use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::deletion::live_claims::LiveClaims;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError, catch_panic};
use crate::loss::status::ServedStore;
use crate::objects::object_reference;
use crate::snapshot::SnapshotStore;
use crate::step::VolumeStep;

/// Reconciles the PersistentVolumes of this node: keeps their finalizers, takes the
/// marks of unpublished copies off, and deletes the released ones.
#[derive(Debug)]
pub(crate) struct VolumeReconciler {
    pub(crate) remover: Arc<VolumeRemover>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    pub(crate) live_claims: Arc<LiveClaims>,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) served: ServedStore,
    pub(crate) failures: FailureReporter,
}

impl VolumeReconciler {
    /// Reconciles a PersistentVolume, and returns when it is reconciled again.
    pub(crate) async fn reconcile(&self, volume: &PersistentVolume) -> NextRun {
        let error = match catch_panic(self.try_reconcile(volume)).await {
            Ok(next) => return next,
            Err(error) => error,
        };
        self.failures.report(&error, &object_reference(volume), EventReason::VolumeFailedDelete).await;
        let time = self.retries.record_failure(volume.metadata.uid.as_deref().unwrap_or_default());
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(
            pv = name,
            "reconcile PersistentVolume: {}; retrying in {time:?}",
            format_chain(&error)
        );
        NextRun::After(time)
    }

    async fn try_reconcile(&self, volume: &PersistentVolume) -> Result<NextRun, ReconcileError> {
        let store = self.served.wait_until_served().await;
        let (api, uid) = (&self.remover.api, volume.metadata.uid.as_deref().unwrap_or_default());
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        // A copy keeps a mark until it is known that it has its PersistentVolume.
        if let (Some(store), Ok(id)) = (&self.snapshots, name.parse()) {
            store.mark_published(&id).await.map_err(ReconcileError::Store)?;
        }
        match plan_volume(&api.identity, volume) {
            VolumeAction::Delete(id) => {
                let is_claim_cached = self.live_claims.contains_uid(id.claim_uid());
                self.remover.delete_volume(volume, &id, store.id(), is_claim_cached).await?;
            }
            VolumeAction::RecordClaim { uid } => {
                tracing::info!(
                    pv = name,
                    claim_uid = uid,
                    "recording that the volume is bound to another claim"
                );
                let annotation = api.identity.driver.claim_annotation();
                let patch = json!({ "metadata": { "annotations": { annotation: uid } } });
                api.patch_volume_version(VolumeStep::RecordClaim, volume, patch).await?;
            }
            VolumeAction::AddFinalizer => {
                // A merge patch replaces the whole list, so it applies only to the version with this list.
                let found = volume.metadata.finalizers.iter().flatten();
                let finalizers: Vec<_> = found.chain(&api.identity.finalizer).collect();
                let patch = json!({ "metadata": { "finalizers": finalizers } });
                api.patch_volume_version(VolumeStep::AddFinalizer, volume, patch).await?;
            }
            VolumeAction::RemoveFinalizer => self.remover.remove_finalizer(volume).await?,
            VolumeAction::Ignore(_) => {}
            VolumeAction::Reject(rejection) => {
                let text = rejection.to_string();
                if self.retries.is_new_rejection(uid, &text) {
                    tracing::warn!(pv = name, "volume not deleted: {text}");
                    let class = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
                    self.failures.metrics.record_delete(class.unwrap_or_default(), Duration::ZERO, false);
                    let about = object_reference(volume);
                    self.failures.recorder.record_event(&about, EventReason::VolumeFailedDelete, &text).await;
                }
                // Not a success, which would forget the rejection and so emit its event again.
                return Ok(NextRun::OnChange);
            }
        }
        self.retries.record_success(uid);
        Ok(NextRun::OnChange)
    }
}
