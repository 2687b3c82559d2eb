//! Reconciles PersistentVolumes.

use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::runtime::reflector::ObjectRef;
use tokio_util::sync::CancellationToken;

use crate::api::event::EventReason;
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::apply::{ApplyError, volume_reference};
use crate::controller::ReconcileContext;
use crate::controller::failures::{catch_panic, is_worth_an_event};
use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::error_chain::format_chain;

/// Reconciles PersistentVolumes that change until the token is canceled.
pub(crate) async fn run_volumes(
    context: &ReconcileContext,
    changes: impl Stream<Item = ObjectRef<PersistentVolume>>,
    token: &CancellationToken,
) {
    let (volumes, concurrency) = (context.volumes.clone(), context.provisioner.config.concurrency);
    reconcile_changes(changes.take_until(token.cancelled()), (volumes, concurrency), async |volume| {
        let done = context.reconcile_volume(&volume).await;
        done.unwrap_or_else(|error| retry_volume(&volume, &error, context))
    })
    .await;
}

impl ReconcileContext {
    async fn reconcile_volume(&self, volume: &PersistentVolume) -> Result<NextRun, ApplyError> {
        let done = catch_panic(self.try_reconcile_volume(volume)).await;
        if let Err(error) = &done {
            self.record_api_error(error);
        }
        if let Err(error) = &done
            && is_worth_an_event(error)
        {
            let (recorder, about) = (&self.provisioner.applier.recorder, volume_reference(volume));
            recorder.record_event(&about, EventReason::VolumeFailedDelete, &format_chain(error)).await;
        }
        done
    }

    async fn try_reconcile_volume(&self, volume: &PersistentVolume) -> Result<NextRun, ApplyError> {
        let store = self.served_store().await;
        let applier = &self.provisioner.applier;
        let uid = volume.metadata.uid.clone().unwrap_or_default();
        applier.confirm_publication(volume).await?;
        match plan_volume(&applier.identity, volume) {
            VolumeAction::Delete(id) => {
                let is_claim_cached = self.live_claims.contains_uid(id.claim_uid());
                applier.delete_volume(volume, (&id, store.id()), is_claim_cached).await?;
            }
            VolumeAction::RecordClaim { uid } => applier.record_claim(volume, &uid).await?,
            VolumeAction::AddFinalizer => applier.add_finalizer(volume).await?,
            VolumeAction::RemoveFinalizer => applier.remove_finalizer(volume).await?,
            VolumeAction::Ignore(_) => {}
            VolumeAction::Reject(rejection) => {
                let text = rejection.to_string();
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                if self.retries.is_new_rejection(&uid, &text) {
                    tracing::warn!(pv = name, "volume not deleted: {text}");
                    let class = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
                    applier.metrics.record_delete(class.unwrap_or_default(), Duration::ZERO, false);
                    let about = volume_reference(volume);
                    applier.recorder.record_event(&about, EventReason::VolumeFailedDelete, &text).await;
                }
                return Ok(NextRun::OnChange);
            }
        }
        self.retries.record_success(&uid);
        Ok(NextRun::OnChange)
    }
}

/// Logs a failure, and returns when the volume is tried again.
fn retry_volume(volume: &PersistentVolume, error: &ApplyError, context: &ReconcileContext) -> NextRun {
    let time = context.retries.record_failure(volume.metadata.uid.as_deref().unwrap_or_default());
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    tracing::warn!(pv = name, "reconcile PersistentVolume: {}; retrying in {time:?}", format_chain(error));
    NextRun::After(time)
}
