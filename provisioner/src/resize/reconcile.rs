//! Reconciles bound claims: expands their volumes, and gives them their VolumeAttributesClass.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::runtime::reflector::ObjectRef;

use crate::api::event::EventReason;
use crate::api::work_queue::NextRun;
use crate::apply::ApplyError;
use crate::claim::decide::{claim_reference, class_name};
use crate::controller::ReconcileContext;
use crate::controller::failures::{catch_panic, is_worth_an_event};
use crate::error_chain::format_chain;
use crate::resize::expansion::{bound_volume, bound_volume_name, needs_expansion};
use crate::resize::modification::needs_modification;

/// Reconciles a claim that is bound to a volume.
pub(crate) async fn reconcile_bound_claim(
    claim: &PersistentVolumeClaim,
    context: &ReconcileContext,
) -> Result<NextRun, ApplyError> {
    catch_panic(context.try_resize(claim)).await
}

impl ReconcileContext {
    /// Expands the claim's volume, and then modifies it: a failure of one doesn't delay the other.
    async fn try_resize(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ApplyError> {
        self.served_store().await;
        let applier = &self.provisioner.applier;
        // The volume of another driver or node is not in the cache. If it is still to come, its event has the
        // claim reconciled again.
        let volume = bound_volume_name(claim).and_then(|name| self.volumes.get(&ObjectRef::new(name)));
        let id = volume.and_then(|volume| bound_volume(&applier.identity, claim, &volume));
        let Some(id) = id else { return Ok(NextRun::OnChange) };
        let class = class_name(claim).and_then(|name| self.classes.get(&ObjectRef::new(name)));
        let target = (&id, class.as_deref());
        let expanded = match needs_expansion(claim) {
            true => applier.expand_claim(claim, target).await,
            false => Ok(()),
        };
        self.report_failure(claim, EventReason::VolumeResizeFailed, &expanded).await;
        let modified = match needs_modification(claim) {
            true => applier.modify_claim(claim, target).await,
            false => Ok(()),
        };
        self.report_failure(claim, EventReason::VolumeModifyFailed, &modified).await;
        expanded.and(modified)?;
        self.retries.record_success(claim.metadata.uid.as_deref().unwrap_or_default());
        Ok(NextRun::OnChange)
    }

    /// Reconciles the claims whose volumes are being resized: there may be room for them now.
    pub(crate) fn requeue_resized_claims(&self) {
        let resized = self.claims.state().into_iter().filter(|claim| bound_volume_name(claim).is_some());
        resized.for_each(|claim| self.signals.requeue_claim(ObjectRef::from_obj(&*claim)));
    }

    async fn report_failure(
        &self,
        claim: &PersistentVolumeClaim,
        reason: EventReason,
        done: &Result<(), ApplyError>,
    ) {
        let Err(error) = done else { return };
        self.record_api_error(error);
        if is_worth_an_event(error) {
            let (recorder, about) = (&self.provisioner.applier.recorder, claim_reference(claim));
            recorder.record_event(&about, reason, &format_chain(error)).await;
        }
    }
}
