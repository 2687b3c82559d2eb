//! Reports the condition of volumes on their PersistentVolumes and claims.

use std::collections::BTreeMap;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use kube::runtime::reflector::ObjectRef;
use tokio::time::sleep;

use crate::apply::volume_reference;
use crate::controller::ReconcileContext;
use crate::controller::retry_tracker::random_fraction;
use crate::event::EventReason;
use crate::id::VolumeId;
use crate::plan::{VolumeCondition, plan_conditions};
use crate::store_status::StoreStatus;

/// How many events are written at once: the volumes of a node are reported within seconds.
const CONCURRENCY: usize = 8;

/// Text of the event when a volume can be used again.
const NORMAL_TEXT: &str = "pods can use the volume again";

/// Writes events whenever the condition of a volume changes, and again what the API server did not accept.
pub(super) async fn run_reporter(context: &ReconcileContext) {
    let mut status = context.provisioner.store_status.subscribe();
    let (mut missing, mut volumes) =
        (context.missing_volumes.subscribe(), context.volumes_changed.subscribe());
    let (mut reported, mut failures) = (BTreeMap::new(), 0);
    loop {
        volumes.borrow_and_update();
        let (now, absent) = (status.borrow_and_update().clone(), missing.borrow_and_update().clone());
        let objects = context.volumes.state();
        let wanted = plan_conditions(
            &context.provisioner.config.identity,
            (&now, &absent),
            objects.iter().map(AsRef::as_ref),
        );
        let is_complete = match wanted {
            Some(wanted) => report_changes(context, &mut reported, &wanted).await,
            None => true,
        };
        failures = if is_complete { 0 } else { failures + 1 };
        let delay = context.provisioner.config.backoff.jittered_delay(failures, random_fraction());
        // A change of a volume matters only while some are reported: most changes are claims being served.
        let is_served = matches!(now, StoreStatus::Served(_)) && reported.is_empty();
        tokio::select! {
            _ = status.changed() => {}
            _ = missing.changed() => {}
            _ = volumes.changed(), if !is_served => {}
            () = sleep(delay), if !is_complete => {}
        }
    }
}

/// Writes the events that lead from the reported conditions to the wanted ones. Returns whether all were written.
async fn report_changes(
    context: &ReconcileContext,
    reported: &mut BTreeMap<VolumeId, VolumeCondition>,
    wanted: &BTreeMap<VolumeId, VolumeCondition>,
) -> bool {
    let abnormal = wanted.iter().filter(|(id, condition)| reported.get(id) != Some(condition));
    let abnormal = abnormal.map(|(id, condition)| (id.clone(), Some(condition.clone())));
    let normal = reported.keys().filter(|id| !wanted.contains_key(id)).map(|id| (id.clone(), None));
    let changes: Vec<_> = abnormal.chain(normal).collect();
    let written = stream::iter(changes).map(|(id, condition)| async move {
        let is_written = match context.volumes.get(&ObjectRef::new(id.as_str())) {
            Some(volume) => report_condition(context, &volume, condition.as_ref()).await,
            None => true,
        };
        (id, condition, is_written)
    });
    let written: Vec<_> = written.buffer_unordered(CONCURRENCY).collect().await;
    let is_complete = written.iter().all(|(_, _, is_written)| *is_written);
    for (id, condition, _) in written.into_iter().filter(|(_, _, is_written)| *is_written) {
        match condition {
            Some(condition) => drop(reported.insert(id, condition)),
            None => drop(reported.remove(&id)),
        }
    }
    is_complete
}

/// Reports the condition of a volume on its PersistentVolume and on the claim that is bound to it.
async fn report_condition(
    context: &ReconcileContext,
    volume: &PersistentVolume,
    condition: Option<&VolumeCondition>,
) -> bool {
    let (reason, text) = match condition {
        Some(condition) => (EventReason::VolumeConditionAbnormal, condition.text.as_str()),
        None => (EventReason::VolumeConditionNormal, NORMAL_TEXT),
    };
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    match condition {
        Some(_) => tracing::error!(pv = name, "no pod can use the volume: {text}"),
        None => tracing::info!(pv = name, "{text}"),
    }
    let recorder = &context.provisioner.applier.recorder;
    let mut is_written = recorder.try_record_event(&volume_reference(volume), reason, text).await;
    if let Some(claim) = bound_claim(volume) {
        is_written &= recorder.try_record_event(&claim, reason, text).await;
    }
    is_written
}

/// A reference to the claim that is bound to a volume.
fn bound_claim(volume: &PersistentVolume) -> Option<ObjectReference> {
    let phase = volume.status.as_ref()?.phase.as_deref();
    let claim = volume.spec.as_ref()?.claim_ref.as_ref().filter(|_| phase == Some("Bound"))?;
    Some(ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        uid: claim.uid.clone(),
        ..ObjectReference::default()
    })
}
