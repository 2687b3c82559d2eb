//! Expands the volumes of bound claims: see the plan, `plan/expansion.rs`.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::{Bytes, QuotaLimits};
use serde_json::json;

use crate::api::event::EventReason;
use crate::apply::bound_claim::LiveClaim;
use crate::apply::{ActionApplier, ApplyError};
use crate::claim::decide::claim_reference;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::quantity::format_quantity;
use crate::resize::claim_status::{resize_failed, resize_finished, resize_started};
use crate::resize::expansion::{ExpansionAction, plan_expansion};
use crate::step::VolumeStep;

impl ActionApplier {
    /// Expands the volume of a claim to the size that it requests, if it does. A failure is written into the
    /// claim's status.
    pub(crate) async fn expand_claim(
        &self,
        seen: &PersistentVolumeClaim,
        (id, class): (&VolumeId, Option<&StorageClass>),
    ) -> Result<(), ApplyError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        // The cached objects may be stale: the request may have been lowered since.
        let Some(mut live) = self.read_bound_claim(seen).await? else { return Ok(()) };
        let (mut last, mut is_durable) = (None, false);
        loop {
            let action = plan_expansion(&live.observed(class, None));
            if last.replace(action.clone()).is_some_and(|last| last == action) {
                return Err(ApplyError::FieldDropped { id: live.id });
            }
            let goes_on = match action {
                ExpansionAction::Ignore => return Ok(()),
                ExpansionAction::MarkInProgress(size) => self.start_expansion(&mut live, size).await,
                ExpansionAction::SetLimits(limits) => {
                    is_durable = true;
                    self.set_expanded_limits(&mut live, limits).await
                }
                ExpansionAction::SetCapacity(size) => self.set_capacity(&mut live, size, is_durable).await,
                ExpansionAction::Finish(size) => {
                    return self.finish_expansion(&mut live, size, started).await;
                }
                ExpansionAction::Reject(rejection) => {
                    Err(self.fail_expansion(&mut live, ApplyError::Rejected(rejection)).await)
                }
            };
            // The volume of an object that has changed meanwhile is reconciled again.
            if !goes_on.inspect_err(|_| self.record_failed_resize(&live))? {
                return Ok(());
            }
        }
    }

    fn record_failed_resize(&self, live: &LiveClaim) {
        self.metrics.record_resize(live.class_label(), Duration::ZERO, false);
    }

    async fn start_expansion(&self, live: &mut LiveClaim, size: Bytes) -> Result<bool, ApplyError> {
        let status = live.claim.status.clone().unwrap_or_default();
        let patch = resize_started(&status, size, Timestamp::now());
        if !self.patch_claim_status(VolumeStep::MarkResize, live, patch).await? {
            return Ok(false);
        }
        let note = format!("Resizing volume {} to {}", live.id, format_quantity(size.0).0);
        self.recorder.record_event(&claim_reference(&live.claim), EventReason::Resizing, &note).await;
        Ok(true)
    }

    async fn set_expanded_limits(
        &self,
        live: &mut LiveClaim,
        limits: QuotaLimits,
    ) -> Result<bool, ApplyError> {
        match self.store.resize(&live.id, limits).await {
            Ok(()) => {
                live.usage.limits = limits;
                Ok(true)
            }
            Err(error) => Err(self.fail_expansion(live, ApplyError::Store(error)).await),
        }
    }

    /// Writes the capacity into the PersistentVolume. An earlier attempt may have set the limits without making them
    /// durable: then they are set again before.
    async fn set_capacity(
        &self,
        live: &mut LiveClaim,
        size: Bytes,
        is_durable: bool,
    ) -> Result<bool, ApplyError> {
        if !is_durable {
            let limits = live.usage.limits;
            self.set_expanded_limits(live, limits).await?;
        }
        let capacity = json!({ "capacity": { "storage": format_quantity(size.0) } });
        self.patch_volume_spec(live, capacity).await
    }

    async fn finish_expansion(
        &self,
        live: &mut LiveClaim,
        size: Bytes,
        started: Instant,
    ) -> Result<(), ApplyError> {
        let status = live.claim.status.clone().unwrap_or_default();
        let patch = resize_finished(&status, size, Timestamp::now());
        let patched = self.patch_claim_status(VolumeStep::FinishResize, live, patch).await;
        if !patched.inspect_err(|_| self.record_failed_resize(live))? {
            return Ok(());
        }
        self.metrics.record_resize(live.class_label(), started.elapsed(), true);
        let meta = &live.claim.metadata;
        tracing::info!(
            pv = %live.id,
            namespace = meta.namespace.as_deref(),
            claim = meta.name.as_deref(),
            bytes = size.0,
            "expanded volume"
        );
        let note = format!("Volume {} has {}", live.id, format_quantity(size.0).0);
        let about = claim_reference(&live.claim);
        self.recorder.record_event(&about, EventReason::VolumeResizeSuccessful, &note).await;
        Ok(())
    }

    /// Writes into the claim's status why its volume was not expanded. Returns that error, which is retried:
    /// room may become free, or the request may be lowered.
    async fn fail_expansion(&self, live: &mut LiveClaim, error: ApplyError) -> ApplyError {
        let is_infeasible = !matches!(&error, ApplyError::Store(error) if !error.is_exhausted());
        let status = live.claim.status.clone().unwrap_or_default();
        let reason = format_chain(&error);
        if let Some(patch) = resize_failed(&status, (&reason, is_infeasible), Timestamp::now()) {
            let marked = self.patch_claim_status(VolumeStep::MarkInfeasible, live, patch).await;
            if let Err(failed) = marked {
                tracing::warn!(pv = %live.id, "report a failed expansion: {}", format_chain(&failed));
            }
        }
        error
    }
}
