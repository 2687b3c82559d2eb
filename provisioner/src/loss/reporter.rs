//! Reports the condition of volumes on their PersistentVolumes and claims.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use kube::api::Patch;
use nodekeel_supervisor::Backoff;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api::event::EventReason;
use crate::api::retry_tracker::random_fraction;
use crate::api::volume_cache::VolumeCache;
use crate::api::writer::ApiWriter;
use crate::error_chain::format_chain;
use crate::failure::FailureReporter;
use crate::id::VolumeId;
use crate::loss::condition::{
    ConditionChange, VolumeCondition, plan_condition_changes, plan_conditions, reported_conditions,
};
use crate::loss::status::{ServedStore, StoreStatus};
use crate::objects::object_reference;
use crate::scope::StoreScope;
use crate::step::VolumeStep;

/// The number of events that are written at once: the volumes of a node are reported within seconds.
const CONCURRENCY: usize = 8;

/// Text of the event when a volume can be used again.
const NORMAL_TEXT: &str = "pods can use the volume again";

/// The value of the annotation. Only its presence matters.
const ABNORMAL: &str = "abnormal";

pub(crate) struct ConditionReporter {
    pub(crate) api: ApiWriter,
    pub(crate) scope: StoreScope,
    pub(crate) volumes: VolumeCache,
    pub(crate) served: ServedStore,
    pub(crate) volumes_changed: Arc<watch::Sender<()>>,
    pub(crate) missing: Arc<watch::Sender<BTreeSet<VolumeId>>>,
    /// The volumes whose limits are wrong, and why.
    pub(crate) unlimited: Arc<watch::Sender<BTreeMap<VolumeId, String>>>,
    pub(crate) failures: FailureReporter,
    pub(crate) backoff: Backoff,
}

impl ConditionReporter {
    /// Writes events whenever the condition of a volume changes, and again those that the API server did not accept.
    pub(crate) async fn run(&self) {
        let mut status = self.served.subscribe();
        let (mut missing, mut volumes) = (self.missing.subscribe(), self.volumes_changed.subscribe());
        let mut unlimited = self.unlimited.subscribe();
        let (mut reported, mut failures) = (None, 0);
        loop {
            // Marked as seen before the report, so that no change during it is missed.
            volumes.borrow_and_update();
            let (now, absent) = (status.borrow_and_update().clone(), missing.borrow_and_update().clone());
            let wrong = unlimited.borrow_and_update().clone();
            let is_complete = self.report_conditions(&mut reported, &now, (&absent, &wrong)).await;
            failures = if is_complete { 0 } else { failures + 1 };
            let delay = self.backoff.jittered_delay(failures, random_fraction());
            // A change of a volume matters only while some are reported: most changes are claims being served.
            let is_served = matches!(now, StoreStatus::Served(_)) && reported.iter().all(BTreeMap::is_empty);
            tokio::select! {
                _ = status.changed() => {}
                _ = missing.changed() => {}
                _ = unlimited.changed() => {}
                _ = volumes.changed(), if !is_served => {}
                () = sleep(delay), if !is_complete => {}
            }
        }
    }

    /// Reports the changes since the last report, also of another process. Returns whether all were written.
    async fn report_conditions(
        &self,
        reported: &mut Option<BTreeMap<VolumeId, VolumeCondition>>,
        now: &StoreStatus,
        (missing, unlimited): (&BTreeSet<VolumeId>, &BTreeMap<VolumeId, String>),
    ) -> bool {
        // Once the conditions are known, the cache is complete.
        let Some(wanted) = plan_conditions(&self.scope, now, missing, unlimited, self.volumes.iter()) else {
            return true;
        };
        // The marks are read once: later, the cache may still have one that this process has removed.
        let reported = reported.get_or_insert_with(|| reported_conditions(&self.scope, self.volumes.iter()));
        let changes = plan_condition_changes(reported, &wanted);
        let written = stream::iter(changes).map(|(id, change)| async move {
            let is_written = match self.volumes.get(id.as_str()) {
                Some(volume) => self.report_change(&volume, &change).await,
                // The PersistentVolume was deleted, so there is no object to report on.
                None => true,
            };
            (id, change, is_written)
        });
        let written: Vec<_> = written.buffer_unordered(CONCURRENCY).collect().await;
        // Only written changes count as reported. The next report plans the others again.
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
    /// A process that is killed in between leaves the mark: the next one reports a usable volume as normal once
    /// too often, which is better than one that stays reported as abnormal.
    async fn report_change(&self, volume: &PersistentVolume, change: &ConditionChange) -> bool {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        match change {
            ConditionChange::Abnormal { condition, is_marked } => {
                let text = condition.text.as_str();
                tracing::error!(pv = name, "no pod can use the volume: {text}");
                // A failure to mark it must not keep the event from the operator.
                let is_marked = *is_marked || self.set_mark(volume, true).await;
                self.record_events(volume, EventReason::VolumeConditionAbnormal, text).await && is_marked
            }
            ConditionChange::Normal => {
                tracing::info!(pv = name, "{NORMAL_TEXT}");
                self.record_events(volume, EventReason::VolumeConditionNormal, NORMAL_TEXT).await
                    && self.set_mark(volume, false).await
            }
        }
    }

    /// Annotates a PersistentVolume that is about to be reported as abnormal, or removes the annotation. A failure is
    /// logged; returns whether there was none.
    ///
    /// The mark is not in the store, which may be lost, nor read from the events themselves: to list them, each
    /// node's token would need to read those of the whole cluster, and they are gone after an hour. A node may patch its
    /// PersistentVolumes anyway, and has them in its cache.
    async fn set_mark(&self, volume: &PersistentVolume, is_abnormal: bool) -> bool {
        let annotation = self.api.identity.driver.condition_annotation();
        // Only this node writes the annotation, so any version of the object will do.
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": volume.metadata.uid,
            "annotations": { annotation: is_abnormal.then_some(ABNORMAL) },
        } }));
        let marked = self.api.patch_volume(VolumeStep::MarkCondition, volume, &patch).await;
        if let Err(error) = &marked {
            self.failures.metrics.record_api_error(error.call.metric_label());
            let name = volume.metadata.name.as_deref().unwrap_or_default();
            tracing::warn!(pv = name, "mark the condition of the volume: {}; retrying", format_chain(error));
        }
        marked.is_ok()
    }

    /// Records an event on a PersistentVolume and on the claim that is bound to it.
    async fn record_events(&self, volume: &PersistentVolume, reason: EventReason, text: &str) -> bool {
        let recorder = &self.failures.recorder;
        let mut is_written = recorder.try_record_event(&object_reference(volume), reason, text).await;
        if let Some(claim) = bound_claim(volume) {
            is_written &= recorder.try_record_event(&claim, reason, text).await;
        }
        is_written
    }
}

/// A reference to the claim that is bound to a volume.
fn bound_claim(volume: &PersistentVolume) -> Option<ObjectReference> {
    let phase = volume.status.as_ref()?.phase.as_deref();
    let claim = volume.spec.as_ref()?.claim_ref.as_ref().filter(|_| phase == Some("Bound"))?;
    Some(ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        resource_version: None,
        field_path: None,
        ..claim.clone()
    })
}
