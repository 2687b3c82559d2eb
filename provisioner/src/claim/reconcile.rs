//! Reconciles pending claims.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, future};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::api::event::EventReason;
use crate::api::retry_tracker::random_fraction;
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::apply::{ApplyError, ApplyOutcome};
use crate::claim::decide::{
    ClaimAction, ClaimIgnoreReason, ObservedClaim, claim_reference, class_name, plan_claim,
};
use crate::controller::failures::{catch_panic, is_worth_an_event};
use crate::controller::{ReconcileContext, event_filter};
use crate::error_chain::format_chain;
use crate::plan::ClaimRejection;
use crate::resize::expansion::bound_volume_name;
use crate::resize::reconcile::reconcile_bound_claim;

/// How long to wait for an object that may not be in the cache yet, before it is reported as missing.
const CACHE_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Reconciles claims that change until the token is canceled. Volumes with a data source are created separately: a copy may
/// take long, and no other claim waits for it.
pub(crate) async fn run_claims(
    context: &ReconcileContext,
    changes: impl Stream<Item = ObjectRef<PersistentVolumeClaim>>,
    token: &CancellationToken,
) {
    let (config, (copies, copy_changes)) = (&context.provisioner.config, mpsc::unbounded_channel());
    let changes = changes.take_until(token.cancelled());
    let claim_loop = reconcile_changes(
        changes,
        (context.claims.clone(), config.concurrency),
        move |claim: Arc<PersistentVolumeClaim>| {
            // Without a receiver, the run ends.
            let is_passed_on = is_copy(&claim) && copies.send(ObjectRef::from_obj(&*claim)).is_ok();
            async move {
                match is_passed_on {
                    true => NextRun::OnChange,
                    false => context.reconcile_claim(&claim).await,
                }
            }
        },
    );
    let changes = event_filter::receiver_stream(copy_changes).take_until(token.cancelled());
    let copy_loop =
        reconcile_changes(changes, (context.claims.clone(), config.copy_concurrency), async |claim| {
            context.reconcile_claim(&claim).await
        });
    future::join(claim_loop, copy_loop).await;
}

/// Whether a claim waits for a copy.
fn is_copy(claim: &PersistentVolumeClaim) -> bool {
    let has_source =
        claim.spec.as_ref().is_some_and(|spec| spec.data_source.is_some() || spec.data_source_ref.is_some());
    has_source && bound_volume_name(claim).is_none()
}

impl ReconcileContext {
    /// Reconciles a claim, and returns when it is reconciled again.
    async fn reconcile_claim(&self, claim: &PersistentVolumeClaim) -> NextRun {
        let done = match bound_volume_name(claim) {
            Some(_) => reconcile_bound_claim(claim, self).await,
            None => self.reconcile_pending_claim(claim).await,
        };
        done.unwrap_or_else(|error| retry_claim(claim, &error, self))
    }

    async fn reconcile_pending_claim(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ApplyError> {
        let done = catch_panic(self.try_reconcile_claim(claim)).await;
        if let Err(error) = &done {
            self.record_failed_provision(claim);
            self.record_api_error(error);
        }
        if let Err(error) = &done
            && is_worth_an_event(error)
        {
            let (recorder, about) = (&self.provisioner.applier.recorder, claim_reference(claim));
            recorder.record_event(&about, EventReason::ProvisioningFailed, &format_chain(error)).await;
        }
        done
    }

    /// The cached PersistentVolume of a claim's volume, if it is one of ours.
    fn cached_volume(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let uid = claim.metadata.uid.as_deref()?;
        self.volumes.get(&ObjectRef::new(&format!("pvc-{uid}")))
    }

    async fn try_reconcile_claim(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ApplyError> {
        let store = self.served_store().await;
        let applier = &self.provisioner.applier;
        let class = class_name(claim).and_then(|name| self.classes.get(&ObjectRef::new(name)));
        let volume = self.cached_volume(claim);
        let seen = ObservedClaim { claim, class: class.as_deref(), volume: volume.as_deref() };
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let applied = match plan_claim(&applier.identity, seen) {
            ClaimAction::Provision(spec) => {
                // This node was deselected and is selected again: retry with a growing delay.
                if let Some(time) = self.retries.remaining_hold(&uid) {
                    return Ok(NextRun::After(time));
                }
                let Some(class) = &class else { return Ok(NextRun::OnChange) };
                let may_reschedule =
                    self.retries.failure_count(&uid) + 1 >= self.provisioner.config.reschedule_after;
                applier.provision_claim(&spec, (class, store.id()), may_reschedule).await?
            }
            ClaimAction::SelectNode => {
                let within = self.provisioner.config.node_selection_delay;
                let hold = self.retries.remaining_hold(&uid).unwrap_or_default();
                match self.retries.remaining_wait(&uid, || hold.max(within.mul_f64(random_fraction()))) {
                    Some(time) => return Ok(NextRun::After(time)),
                    // Earlier failures are kept: whether the claim can be provisioned here is not known yet.
                    None => {
                        // Otherwise a change of the node or of the capacity brings the claim back.
                        if self.has_space_for(claim).await? {
                            applier.select_node(claim).await?;
                        }
                        return Ok(NextRun::OnChange);
                    }
                }
            }
            ClaimAction::Wait(rejection) => match self.retries.remaining_wait(&uid, || CACHE_GRACE_PERIOD) {
                Some(time) => return Ok(NextRun::After(time)),
                None => ApplyOutcome::Rejected(rejection),
            },
            ClaimAction::Reject(rejection) => ApplyOutcome::Rejected(rejection),
            ClaimAction::Ignore(ClaimIgnoreReason::WaitsForConsumer) => return Ok(NextRun::OnChange),
            ClaimAction::Ignore(_) => ApplyOutcome::Done,
        };
        match applied {
            ApplyOutcome::Done => {
                self.retries.record_success(&uid);
                Ok(NextRun::OnChange)
            }
            ApplyOutcome::Exhausted { claim: live, size } => {
                self.publish_shortage(size).await?;
                applier.deselect_node(&live).await?;
                self.record_failed_provision(claim);
                self.retries.record_reschedule(&uid);
                Ok(NextRun::OnChange)
            }
            ApplyOutcome::HandedOver => {
                self.retries.record_reschedule(&uid);
                Ok(NextRun::OnChange)
            }
            ApplyOutcome::Rejected(rejection) => Ok(self.reject_claim(claim, &uid, &rejection).await),
        }
    }

    /// Emits a rejection once and waits for a change. A name conflict is retried, because it depends on
    /// another object.
    async fn reject_claim(
        &self,
        claim: &PersistentVolumeClaim,
        uid: &str,
        rejection: &ClaimRejection,
    ) -> NextRun {
        let text = rejection.to_string();
        if self.retries.is_new_rejection(uid, &text) {
            let about = claim_reference(claim);
            let (namespace, name) = (about.namespace.as_deref(), about.name.as_deref());
            tracing::warn!(namespace, claim = name, "claim rejected: {text}");
            self.record_failed_provision(claim);
            self.provisioner
                .applier
                .recorder
                .record_event(&about, EventReason::ProvisioningFailed, &text)
                .await;
        }
        match rejection {
            ClaimRejection::NameConflict { .. } => NextRun::After(self.provisioner.config.backoff.max),
            _ => NextRun::OnChange,
        }
    }

    fn record_failed_provision(&self, claim: &PersistentVolumeClaim) {
        let class = class_name(claim).unwrap_or_default();
        self.provisioner.applier.metrics.record_provision(class, Duration::ZERO, false);
    }
}

/// Logs a failure, and returns when the claim is tried again.
fn retry_claim(claim: &PersistentVolumeClaim, error: &ApplyError, context: &ReconcileContext) -> NextRun {
    let time = context.retries.record_failure(claim.metadata.uid.as_deref().unwrap_or_default());
    let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
    let act = if bound_volume_name(claim).is_some() { "resize the volume of" } else { "provision" };
    tracing::warn!(namespace, claim = name, "{act} claim: {}; retrying in {time:?}", format_chain(error));
    NextRun::After(time)
}
