//! Gives the volumes of bound claims their VolumeAttributesClass: see the plan, `plan/modification.rs`.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::QuotaLimits;
use serde_json::json;

use crate::api::event::EventReason;
use crate::apply::bound_claim::LiveClaim;
use crate::apply::{ActionApplier, ApplyError};
use crate::claim::decide::claim_reference;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::plan::VolumeSpec;
use crate::resize::claim_status::{ModifyState, modify_finished, modify_marked};
use crate::resize::modification::{ModificationAction, apply_attributes, plan_modification};
use crate::step::VolumeStep;

impl ActionApplier {
    /// Gives the volume of a claim the VolumeAttributesClass that the claim names. A failure is written into
    /// the claim's status.
    pub(crate) async fn modify_claim(
        &self,
        seen: &PersistentVolumeClaim,
        (id, class): (&VolumeId, Option<&StorageClass>),
    ) -> Result<(), ApplyError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        let Some(mut live) = self.read_bound_claim(seen).await? else { return Ok(()) };
        let attributes = match live.observed(class, None).wanted_attributes() {
            Some(name) => self.read_attributes_class(name).await?,
            None => None,
        };
        let (mut last, mut is_durable) = (None, false);
        loop {
            let action = plan_modification(&self.identity, &live.observed(class, attributes.as_ref()));
            if last.replace(action.clone()).is_some_and(|last| last == action) {
                return Err(ApplyError::FieldDropped { id: live.id });
            }
            let goes_on = match action {
                ModificationAction::Ignore => return Ok(()),
                ModificationAction::MarkInProgress(name) => self.start_modification(&mut live, &name).await,
                ModificationAction::SetLimits(limits) => {
                    is_durable = true;
                    self.set_modified_limits(&mut live, limits).await
                }
                ModificationAction::SetClass(name) => self.set_class(&mut live, &name, is_durable).await,
                ModificationAction::Finish(name) => {
                    return self.finish_modification(&mut live, name.as_deref(), started).await;
                }
                ModificationAction::Reject(rejection) => {
                    let target = (rejection.state(), rejection.class().to_owned());
                    Err(self.fail_modification(&mut live, target, ApplyError::Attributes(rejection)).await)
                }
            };
            if !goes_on.inspect_err(|_| self.record_failed_modification(&live))? {
                return Ok(());
            }
        }
    }

    /// Gives a volume that is to be created the limits of its VolumeAttributesClass, if it has one.
    pub(crate) async fn apply_attributes_class(
        &self,
        mut spec: VolumeSpec,
    ) -> Result<VolumeSpec, ApplyError> {
        if let Some(name) = &spec.attributes_class {
            let class = self.read_attributes_class(name).await?;
            apply_attributes(&self.identity, class.as_ref(), &mut spec).map_err(ApplyError::Attributes)?;
        }
        Ok(spec)
    }

    fn record_failed_modification(&self, live: &LiveClaim) {
        self.metrics.record_modification(live.class_label(), Duration::ZERO, false);
    }

    async fn start_modification(&self, live: &mut LiveClaim, class: &str) -> Result<bool, ApplyError> {
        let status = live.claim.status.clone().unwrap_or_default();
        let target = (ModifyState::InProgress, class);
        if let Some(patch) = modify_marked(&status, target, "", Timestamp::now())
            && !self.patch_claim_status(VolumeStep::MarkResize, live, patch).await?
        {
            return Ok(false);
        }
        let note = format!("Modifying volume {} to VolumeAttributesClass {class}", live.id);
        self.recorder.record_event(&claim_reference(&live.claim), EventReason::VolumeModify, &note).await;
        Ok(true)
    }

    async fn set_modified_limits(
        &self,
        live: &mut LiveClaim,
        limits: QuotaLimits,
    ) -> Result<bool, ApplyError> {
        match self.store.resize(&live.id, limits).await {
            Ok(()) => {
                live.usage.limits = limits;
                Ok(true)
            }
            // Still in progress: the store may be able to later.
            Err(error) => Err(ApplyError::Store(error)),
        }
    }

    /// Writes the class into the PersistentVolume. An earlier attempt may have set the limits without making them
    /// durable: then they are set again before.
    async fn set_class(
        &self,
        live: &mut LiveClaim,
        name: &str,
        is_durable: bool,
    ) -> Result<bool, ApplyError> {
        if !is_durable {
            let limits = live.usage.limits;
            self.set_modified_limits(live, limits).await?;
        }
        self.patch_volume_spec(live, json!({ "volumeAttributesClassName": name })).await
    }

    async fn finish_modification(
        &self,
        live: &mut LiveClaim,
        class: Option<&str>,
        started: Instant,
    ) -> Result<(), ApplyError> {
        let status = live.claim.status.clone().unwrap_or_default();
        let patch = modify_finished(&status, class, Timestamp::now());
        let patched = self.patch_claim_status(VolumeStep::FinishResize, live, patch).await;
        if !patched.inspect_err(|_| self.record_failed_modification(live))? {
            return Ok(());
        }
        let Some(class) = class else { return Ok(()) };
        self.metrics.record_modification(live.class_label(), started.elapsed(), true);
        let meta = &live.claim.metadata;
        tracing::info!(
            pv = %live.id,
            namespace = meta.namespace.as_deref(),
            claim = meta.name.as_deref(),
            attributes_class = class,
            "modified volume"
        );
        let note = format!("Volume {} has VolumeAttributesClass {class}", live.id);
        let about = claim_reference(&live.claim);
        self.recorder.record_event(&about, EventReason::VolumeModifySuccessful, &note).await;
        Ok(())
    }

    /// Writes into the claim's status why its volume was not modified, and returns that error.
    async fn fail_modification(
        &self,
        live: &mut LiveClaim,
        (state, class): (ModifyState, String),
        error: ApplyError,
    ) -> ApplyError {
        let status = live.claim.status.clone().unwrap_or_default();
        let target = (state, class.as_str());
        if let Some(patch) = modify_marked(&status, target, &format_chain(&error), Timestamp::now()) {
            let marked = self.patch_claim_status(VolumeStep::MarkInfeasible, live, patch).await;
            if let Err(failed) = marked {
                tracing::warn!(pv = %live.id, "report a failed modification: {}", format_chain(&failed));
            }
        }
        error
    }
}
