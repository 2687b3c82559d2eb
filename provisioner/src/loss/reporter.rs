//! Reports the condition of volumes on their PersistentVolumes and claims.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use kube::runtime::reflector::ObjectRef;
use tokio::time::sleep;

use crate::api::event::EventReason;
use crate::api::retry_tracker::random_fraction;
use crate::apply::volume_reference;
use crate::controller::ReconcileContext;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::loss::condition::{
    ConditionChange, VolumeCondition, plan_condition_changes, plan_conditions, reported_conditions,
};
use crate::loss::status::StoreStatus;

/// How many events are written at once: the volumes of a node are reported within seconds.
const CONCURRENCY: usize = 8;

/// Text of the event when a volume can be used again.
const NORMAL_TEXT: &str = "pods can use the volume again";

/// Writes events whenever the condition of a volume changes, and again what the API server did not accept.
pub(crate) async fn run_reporter(context: &ReconcileContext) {
    let mut status = context.provisioner.store_status.subscribe();
    let (mut missing, mut volumes) =
        (context.missing_volumes.subscribe(), context.volumes_changed.subscribe());
    let (mut reported, mut failures) = (None, 0);
    loop {
        volumes.borrow_and_update();
        let (now, absent) = (status.borrow_and_update().clone(), missing.borrow_and_update().clone());
        let is_complete = report_conditions(context, &mut reported, (&now, &absent)).await;
        failures = if is_complete { 0 } else { failures + 1 };
        let delay = context.provisioner.config.backoff.jittered_delay(failures, random_fraction());
        // A change of a volume matters only while some are reported: most changes are claims being served.
        let is_served = matches!(now, StoreStatus::Served(_)) && reported.iter().all(BTreeMap::is_empty);
        tokio::select! {
            _ = status.changed() => {}
            _ = missing.changed() => {}
            _ = volumes.changed(), if !is_served => {}
            () = sleep(delay), if !is_complete => {}
        }
    }
}

/// Reports what has changed since the last report, also if another process has made it. Returns whether all was written.
async fn report_conditions(
    context: &ReconcileContext,
    reported: &mut Option<BTreeMap<VolumeId, VolumeCondition>>,
    now: (&StoreStatus, &BTreeSet<VolumeId>),
) -> bool {
    let (identity, objects) = (&context.provisioner.config.identity, context.volumes.state());
    // Once it is known, the cache is complete.
    let Some(wanted) = plan_conditions(identity, now, objects.iter().map(AsRef::as_ref)) else {
        return true;
    };
    // The marks are read once: later, the cache may still have one that this process has removed.
    let reported =
        reported.get_or_insert_with(|| reported_conditions(identity, objects.iter().map(AsRef::as_ref)));
    report_changes(context, reported, &wanted).await
}

/// Writes the events that lead from the reported conditions to the wanted ones. Returns whether all were written.
async fn report_changes(
    context: &ReconcileContext,
    reported: &mut BTreeMap<VolumeId, VolumeCondition>,
    wanted: &BTreeMap<VolumeId, VolumeCondition>,
) -> bool {
    let changes = plan_condition_changes(reported, wanted);
    let written = stream::iter(changes).map(|(id, change)| async move {
        let is_written = match context.volumes.get(&ObjectRef::new(id.as_str())) {
            Some(volume) => report_change(context, &volume, &change).await,
            None => true,
        };
        (id, change, is_written)
    });
    let written: Vec<_> = written.buffer_unordered(CONCURRENCY).collect().await;
    let is_complete = written.iter().all(|(_, _, is_written)| *is_written);
    for (id, change, _) in written.into_iter().filter(|(_, _, is_written)| *is_written) {
        match change {
            ConditionChange::Abnormal { condition, .. } => drop(reported.insert(id, condition)),
            ConditionChange::Normal => drop(reported.remove(&id)),
        }
    }
    is_complete
}

/// Reports a change of a volume's condition, and keeps its mark. Returns whether all was written.
///
/// A process that is killed in between leaves the mark: the next one rather reports a well volume as normal once too
/// often than leaves it reported as abnormal.
async fn report_change(
    context: &ReconcileContext,
    volume: &PersistentVolume,
    change: &ConditionChange,
) -> bool {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    match change {
        ConditionChange::Abnormal { condition, is_marked } => {
            let text = condition.text.as_str();
            tracing::error!(pv = name, "no pod can use the volume: {text}");
            // A failure to mark it must not keep the event from the operator.
            let is_marked = *is_marked || set_mark(context, volume, true).await;
            record_condition(context, volume, (EventReason::VolumeConditionAbnormal, text)).await && is_marked
        }
        ConditionChange::Normal => {
            tracing::info!(pv = name, "{NORMAL_TEXT}");
            record_condition(context, volume, (EventReason::VolumeConditionNormal, NORMAL_TEXT)).await
                && set_mark(context, volume, false).await
        }
    }
}

/// Sets or removes the mark of a volume that was reported as abnormal. A failure is logged; returns whether there was none.
async fn set_mark(context: &ReconcileContext, volume: &PersistentVolume, is_abnormal: bool) -> bool {
    let marked = context.provisioner.applier.mark_condition(volume, is_abnormal).await;
    if let Err(error) = &marked {
        context.record_api_error(error);
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(pv = name, "mark the condition of the volume: {}; retrying", format_chain(error));
    }
    marked.is_ok()
}

/// Records an event on a PersistentVolume and on the claim that is bound to it.
async fn record_condition(
    context: &ReconcileContext,
    volume: &PersistentVolume,
    (reason, text): (EventReason, &str),
) -> bool {
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
