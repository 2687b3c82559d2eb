//! Reconciles bound claims: expands their volumes, and gives them their VolumeAttributesClass.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::reflector::ObjectRef;

use crate::api::event::EventReason;
use crate::api::retry_tracker::RetryTracker;
use crate::api::watches::ObjectCaches;
use crate::api::work_queue::NextRun;
use crate::failure::{FailureReporter, ReconcileError, catch_panic};
use crate::id::VolumeId;
use crate::identity::{ProvisionerIdentity, STORAGE_PROVISIONER};
use crate::loss::status::ServedStore;
use crate::objects::{bound_volume_name, class_name, nonempty_annotation, object_reference};
use crate::resize::apply::{ClaimResizer, ResizeKind};
use crate::resize::bound_claim::bound_volume;
use crate::resize::expansion::needs_expansion;
use crate::resize::modification::needs_modification;

/// Returns whether this node may have to resize a claim's volume. Judged by the claim alone, so that it may turn out to be
/// another driver's or node's: its PersistentVolume names its node. The selected node does not, once the volume's disk
/// was moved to another node.
pub(crate) fn may_resize(identity: &ProvisionerIdentity, claim: &PersistentVolumeClaim) -> bool {
    // A claim that was bound to an existing volume has no such annotation.
    let provisioner = nonempty_annotation(claim, STORAGE_PROVISIONER);
    bound_volume_name(claim).is_some_and(|name| name.parse::<VolumeId>().is_ok())
        && claim.metadata.deletion_timestamp.is_none()
        && provisioner.is_none_or(|provisioner| provisioner == identity.driver.as_str())
        && (needs_expansion(claim) || needs_modification(claim))
}

/// Reconciles the bound claims whose volumes are to be resized.
pub(crate) struct ResizeReconciler {
    pub(crate) resizer: ClaimResizer,
    pub(crate) caches: ObjectCaches,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) served: ServedStore,
    pub(crate) failures: FailureReporter,
}

impl ResizeReconciler {
    pub(crate) async fn reconcile(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ReconcileError> {
        catch_panic(self.try_reconcile(claim)).await
    }

    /// Expands the claim's volume, and then modifies it: a failure of one doesn't delay the other.
    async fn try_reconcile(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ReconcileError> {
        self.served.wait_until_served().await;
        // The volume of another driver or node is not in the cache. If it is still to come, its event has the
        // claim reconciled again.
        let volume = bound_volume_name(claim).and_then(|name| self.caches.volumes.get(name));
        let id = volume.and_then(|volume| bound_volume(&self.resizer.api.identity, claim, &volume));
        let Some(id) = id else { return Ok(NextRun::OnChange) };
        let class = class_name(claim).and_then(|name| self.caches.classes.get(&ObjectRef::new(name)));
        let mut result = Ok(NextRun::OnChange);
        for (kind, is_needed, reason) in [
            (ResizeKind::Expansion, needs_expansion(claim), EventReason::VolumeResizeFailed),
            (ResizeKind::Modification, needs_modification(claim), EventReason::VolumeModifyFailed),
        ] {
            if !is_needed {
                continue;
            }
            if let Err(error) = self.resizer.resize_claim(kind, claim, &id, class.as_deref()).await {
                self.failures.report(&error, &object_reference(claim), reason).await;
                result = result.and(Err(error));
            }
        }
        if result.is_ok() {
            self.retries.record_success(claim.metadata.uid.as_deref().unwrap_or_default());
        }
        result
    }
}
