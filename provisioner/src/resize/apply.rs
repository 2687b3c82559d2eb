//! Brings the volume of a bound claim to what the claim asks for, step by step: each step follows from what the API server
//! and the store have, so a killed process resumes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::{Bytes, QuotaLimits};
use serde_json::{Value, json};

use crate::api::call::ApiCall;
use crate::api::event::{EventReason, EventRecorder};
use crate::api::writer::{ApiWriter, ObjectPart, Patched};
use crate::claim::attributes::AttributesRejection;
use crate::claim::spec::ClaimRejection;
use crate::error_chain::format_chain;
use crate::failure::ReconcileError;
use crate::id::VolumeId;
use crate::metrics::VolumeMetrics;
use crate::objects::{bound_volume_name, object_reference};
use crate::quantity::format_quantity;
use crate::resize::bound_claim::{BoundClaim, bound_volume};
use crate::resize::claim_status;
use crate::resize::claim_status::{
    ModifyState, modify_finished, modify_marked, resize_failed, resize_finished, resize_started,
};
use crate::resize::expansion::{ExpansionAction, plan_expansion};
use crate::resize::modification::{ModificationAction, plan_modification, rejected_state};
use crate::step::VolumeStep;
use crate::store::{VolumeStore, VolumeUsage};
use crate::volume_locks::VolumeLocks;

/// The property of a volume that is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResizeKind {
    /// The size that the claim requests.
    Expansion,
    /// The VolumeAttributesClass that the claim names.
    Modification,
}

/// The value that the property gets.
#[derive(Debug, Clone, PartialEq)]
enum Target {
    Size(Bytes),
    Class(String),
}

/// The next step, of either kind.
#[derive(Debug, Clone, PartialEq)]
enum NextStep {
    Nothing,
    /// Write into the claim's status that the change is in progress.
    Mark(Target),
    SetLimits(QuotaLimits),
    /// Write the value into the PersistentVolume.
    UpdateVolume(Target),
    /// Write the value into the claim's status. `None`: a first modification that was withdrawn.
    Finish(Option<Target>),
    RejectSize(ClaimRejection),
    RejectClass(AttributesRejection),
}

impl From<ExpansionAction> for NextStep {
    fn from(action: ExpansionAction) -> Self {
        match action {
            ExpansionAction::Ignore => Self::Nothing,
            ExpansionAction::MarkInProgress(size) => Self::Mark(Target::Size(size)),
            ExpansionAction::SetLimits(limits) => Self::SetLimits(limits),
            ExpansionAction::SetCapacity(size) => Self::UpdateVolume(Target::Size(size)),
            ExpansionAction::Finish(size) => Self::Finish(Some(Target::Size(size))),
            ExpansionAction::Reject(rejection) => Self::RejectSize(rejection),
        }
    }
}

impl From<ModificationAction> for NextStep {
    fn from(action: ModificationAction) -> Self {
        match action {
            ModificationAction::Ignore => Self::Nothing,
            ModificationAction::MarkInProgress(class) => Self::Mark(Target::Class(class)),
            ModificationAction::SetLimits(limits) => Self::SetLimits(limits),
            ModificationAction::SetClass(class) => Self::UpdateVolume(Target::Class(class)),
            ModificationAction::Finish(class) => Self::Finish(class.map(Target::Class)),
            ModificationAction::Reject(rejection) => Self::RejectClass(rejection),
        }
    }
}

/// A bound claim, its volume and the usage, as the API server and the store have them now.
struct LiveClaim {
    claim: PersistentVolumeClaim,
    volume: PersistentVolume,
    id: VolumeId,
    usage: VolumeUsage,
}

/// Resizes the volumes of bound claims.
#[derive(Debug)]
pub(crate) struct ClaimResizer {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) locks: Arc<VolumeLocks>,
    pub(crate) metrics: Arc<dyn VolumeMetrics>,
    pub(crate) recorder: Arc<EventRecorder>,
}

impl ClaimResizer {
    /// Expands or modifies the volume of a claim until it is as the claim asks. A failure is written into the claim's
    /// status.
    pub(crate) async fn resize_claim(
        &self,
        kind: ResizeKind,
        seen: &PersistentVolumeClaim,
        id: &VolumeId,
        class: Option<&StorageClass>,
    ) -> Result<(), ReconcileError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        // The cached objects may be stale: the request may have been lowered since.
        let Some(mut live) = self.read_live_claim(seen).await? else { return Ok(()) };
        let attributes = match (kind, live.observed(class, None).wanted_attributes()) {
            // An expansion keeps the limit that a class has set, so it needs no class.
            (ResizeKind::Modification, Some(name)) => {
                self.api.read(ApiCall::ReadAttributesClass, &self.api.all(), name).await?
            }
            _ => None,
        };
        let (mut last, mut is_durable) = (None, false);
        loop {
            // Each pass plans anew from the state after the last step, as a process that resumes does.
            let observed = live.observed(class, attributes.as_ref());
            let step: NextStep = match kind {
                ResizeKind::Expansion => plan_expansion(&observed).into(),
                ResizeKind::Modification => plan_modification(&self.api.identity, &observed).into(),
            };
            // After a step, the plan must be another one. If it is not, the API server has dropped a written field.
            if last.replace(step.clone()).is_some_and(|last| last == step) {
                return Err(ReconcileError::FieldDropped { id: live.id });
            }
            let goes_on = match step {
                NextStep::Nothing => return Ok(()),
                NextStep::Mark(target) => self.mark_in_progress(&mut live, &target).await,
                NextStep::SetLimits(limits) => {
                    is_durable = true;
                    self.set_limits(kind, &mut live, limits).await
                }
                NextStep::UpdateVolume(target) => {
                    self.update_volume(kind, &mut live, &target, is_durable).await
                }
                NextStep::Finish(target) => {
                    return self.finish(kind, &mut live, target.as_ref(), started).await;
                }
                NextStep::RejectSize(rejection) => {
                    Err(self.fail_expansion(&mut live, ReconcileError::Rejected(rejection)).await)
                }
                NextStep::RejectClass(rejection) => Err(self.reject_class(&mut live, rejection).await),
            };
            // An object that has changed since it was read is reconciled again.
            if !goes_on.inspect_err(|_| self.record(kind, &live, Duration::ZERO, false))? {
                return Ok(());
            }
        }
    }

    /// Reads a claim, its volume and the usage; `None` if they are no longer bound to each other on this node.
    async fn read_live_claim(
        &self,
        seen: &PersistentVolumeClaim,
    ) -> Result<Option<LiveClaim>, ReconcileError> {
        let Some(claim) = self.api.read_claim(&object_reference(seen)).await? else { return Ok(None) };
        let Some(name) = bound_volume_name(&claim) else { return Ok(None) };
        let Some(volume) = self.api.read_volume(name).await? else { return Ok(None) };
        let Some(id) = bound_volume(&self.api.identity, &claim, &volume) else { return Ok(None) };
        let usage = self.store.usage(&id).await.map_err(ReconcileError::Store)?;
        Ok(Some(LiveClaim { claim, volume, id, usage }))
    }

    async fn mark_in_progress(&self, live: &mut LiveClaim, target: &Target) -> Result<bool, ReconcileError> {
        let (status, now) = (live.status(), Timestamp::now());
        let (patch, reason, note) = match target {
            Target::Size(size) => (
                Some(resize_started(&status, *size, now)),
                EventReason::Resizing,
                format!("Resizing volume {} to {}", live.id, format_quantity(size.0).0),
            ),
            Target::Class(class) => (
                modify_marked(&status, ModifyState::InProgress, class, "", now),
                EventReason::VolumeModify,
                format!("Modifying volume {} to VolumeAttributesClass {class}", live.id),
            ),
        };
        if let Some(patch) = patch
            && !self.patch_claim_status(VolumeStep::MarkResize, live, patch).await?
        {
            return Ok(false);
        }
        self.recorder.record_event(&object_reference(&live.claim), reason, &note).await;
        Ok(true)
    }

    async fn set_limits(
        &self,
        kind: ResizeKind,
        live: &mut LiveClaim,
        limits: QuotaLimits,
    ) -> Result<bool, ReconcileError> {
        match (self.store.resize(&live.id, limits).await, kind) {
            (Ok(()), _) => {
                // The usage is read once, so the next pass learns of the new limits here.
                live.usage.limits = limits;
                Ok(true)
            }
            (Err(error), ResizeKind::Expansion) => {
                Err(self.fail_expansion(live, ReconcileError::Store(error)).await)
            }
            // Still in progress: the store may be able to later.
            (Err(error), ResizeKind::Modification) => Err(ReconcileError::Store(error)),
        }
    }

    /// Writes the value into the PersistentVolume. An earlier attempt may have set the limits without making them
    /// durable: then they are set again before.
    async fn update_volume(
        &self,
        kind: ResizeKind,
        live: &mut LiveClaim,
        target: &Target,
        is_durable: bool,
    ) -> Result<bool, ReconcileError> {
        if !is_durable {
            let limits = live.usage.limits;
            self.set_limits(kind, live, limits).await?;
        }
        let patch = json!({ "spec": match target {
            Target::Size(size) => json!({ "capacity": { "storage": format_quantity(size.0) } }),
            Target::Class(class) => json!({ "volumeAttributesClassName": class }),
        } });
        match self.api.patch_volume_version(VolumeStep::UpdateVolume, &live.volume, patch).await? {
            Patched::Done(volume) => live.volume = *volume,
            Patched::Changed | Patched::Gone => return Ok(false),
        }
        Ok(true)
    }

    async fn finish(
        &self,
        kind: ResizeKind,
        live: &mut LiveClaim,
        target: Option<&Target>,
        started: Instant,
    ) -> Result<(), ReconcileError> {
        let (status, now) = (live.status(), Timestamp::now());
        let patch = match target {
            Some(Target::Size(size)) => resize_finished(&status, *size, now),
            Some(Target::Class(class)) => modify_finished(&status, Some(class), now),
            None => modify_finished(&status, None, now),
        };
        let patched = self.patch_claim_status(VolumeStep::FinishResize, live, patch).await;
        if !patched.inspect_err(|_| self.record(kind, live, Duration::ZERO, false))? {
            return Ok(());
        }
        let Some(target) = target else { return Ok(()) };
        self.record(kind, live, started.elapsed(), true);
        let (pv, about) = (&live.id, object_reference(&live.claim));
        let (namespace, claim) = (about.namespace.as_deref(), about.name.as_deref());
        let (reason, note) = match target {
            Target::Size(size) => {
                tracing::info!(%pv, namespace, claim, bytes = size.0, "expanded volume");
                let note = format!("Volume {pv} has {}", format_quantity(size.0).0);
                (EventReason::VolumeResizeSuccessful, note)
            }
            Target::Class(class) => {
                tracing::info!(%pv, namespace, claim, attributes_class = class, "modified volume");
                (
                    EventReason::VolumeModifySuccessful,
                    format!("Volume {pv} has VolumeAttributesClass {class}"),
                )
            }
        };
        self.recorder.record_event(&about, reason, &note).await;
        Ok(())
    }

    /// Writes into the claim's status why its volume was not expanded. Returns that error, which is retried:
    /// room may become free, or the request may be lowered.
    async fn fail_expansion(&self, live: &mut LiveClaim, error: ReconcileError) -> ReconcileError {
        // A full node or an invalid request is infeasible: the user may lower the request. Another fault of the store
        // may pass, so the expansion stays in progress.
        let is_infeasible = !matches!(&error, ReconcileError::Store(error) if !error.is_exhausted());
        let state = if is_infeasible { claim_status::INFEASIBLE } else { claim_status::IN_PROGRESS };
        let patch = resize_failed(&live.status(), &format_chain(&error), state, Timestamp::now());
        self.write_failure(live, patch, "expansion").await;
        error
    }

    /// Writes into the claim's status why its volume was not modified, and returns that error.
    async fn reject_class(&self, live: &mut LiveClaim, rejection: AttributesRejection) -> ReconcileError {
        let state = rejected_state(&rejection);
        let class = rejection.class().to_owned();
        let error = ReconcileError::Attributes(rejection);
        let patch = modify_marked(&live.status(), state, &class, &format_chain(&error), Timestamp::now());
        self.write_failure(live, patch, "modification").await;
        error
    }

    /// A failure to write it is not worse than the failure itself, which is retried.
    async fn write_failure(&self, live: &mut LiveClaim, patch: Option<Value>, act: &str) {
        let Some(patch) = patch else { return };
        if let Err(failed) = self.patch_claim_status(VolumeStep::MarkInfeasible, live, patch).await {
            tracing::warn!(pv = %live.id, "report a failed {act}: {}", format_chain(&failed));
        }
    }

    /// Patches the status of exactly this version of the claim. `false`: it has changed or is deleted, which
    /// the watch reports.
    async fn patch_claim_status(
        &self,
        step: VolumeStep,
        live: &mut LiveClaim,
        status: Value,
    ) -> Result<bool, ReconcileError> {
        let (api, call) =
            (self.api.namespaced(live.claim.metadata.namespace.as_deref()), ApiCall::PatchClaimStatus);
        let patch = json!({ "status": status });
        match self.api.patch_version(step, call, &api, &live.claim, ObjectPart::Status, patch).await? {
            // The next patch names the version of this answer.
            Patched::Done(claim) => live.claim = *claim,
            Patched::Changed | Patched::Gone => return Ok(false),
        }
        Ok(true)
    }

    fn record(&self, kind: ResizeKind, live: &LiveClaim, took: Duration, succeeded: bool) {
        let class = live.volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
        let class = class.unwrap_or_default();
        match kind {
            ResizeKind::Expansion => self.metrics.record_resize(class, took, succeeded),
            ResizeKind::Modification => self.metrics.record_modification(class, took, succeeded),
        }
    }
}

impl LiveClaim {
    fn observed<'a>(
        &'a self,
        class: Option<&'a StorageClass>,
        attributes: Option<&'a VolumeAttributesClass>,
    ) -> BoundClaim<'a> {
        BoundClaim { claim: &self.claim, volume: &self.volume, class, attributes, usage: self.usage }
    }

    fn status(&self) -> PersistentVolumeClaimStatus {
        self.claim.status.clone().unwrap_or_default()
    }
}
