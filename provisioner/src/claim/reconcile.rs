//! Reconciles pending claims.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::runtime::reflector::ObjectRef;

use crate::ability::{Ability, SelectedClaimAction, plan_selected_claim};
use crate::api::event::EventReason;
use crate::api::retry_tracker::RetryTracker;
use crate::api::watches::ObjectCaches;
use crate::api::work_queue::NextRun;
use crate::capacity::publisher::CapacityPublisher;
use crate::claim::apply::{ClaimProvisioner, ProvisionOutcome};
use crate::claim::decide::{ClaimAction, ClaimIgnoreReason, ObservedClaim, plan_claim};
use crate::claim::peers::PeerObserver;
use crate::claim::size::{requested_capacity, strict_format};
use crate::claim::spec::ClaimRejection;
use crate::failure::{FailureReporter, ReconcileError, catch_panic};
use crate::loss::status::ServedStore;
use crate::objects::{class_name, object_reference};
use crate::scope::StoreScope;

/// Time to wait for an object that may not be in the cache yet, before it is reported as missing.
const CACHE_GRACE_PERIOD: Duration = Duration::from_secs(1);

pub(crate) struct ClaimReconciler {
    pub(crate) provisioner: ClaimProvisioner,
    pub(crate) scope: StoreScope,
    pub(crate) caches: ObjectCaches,
    pub(crate) capacity: Arc<CapacityPublisher>,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) served: ServedStore,
    pub(crate) peers: PeerObserver,
    pub(crate) failures: FailureReporter,
    /// As in the configuration of the provisioner.
    pub(crate) node_selection_delay: Duration,
    pub(crate) reschedule_after: u32,
    /// The longest delay of a retry.
    pub(crate) max_delay: Duration,
}

impl ClaimReconciler {
    /// Reconciles a claim, and returns when it is reconciled again.
    pub(crate) async fn reconcile(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ReconcileError> {
        let done = catch_panic(self.try_reconcile(claim)).await;
        if let Err(error) = &done {
            self.record_failed_provision(claim);
            self.failures.report(error, &object_reference(claim), EventReason::ProvisioningFailed).await;
        }
        done
    }

    async fn try_reconcile(&self, claim: &PersistentVolumeClaim) -> Result<NextRun, ReconcileError> {
        // Until it is known whether the node can create volumes, the claim waits here: the directory of an absent disk
        // looks like an empty store.
        let class = || class_name(claim).and_then(|name| self.caches.classes.get(&ObjectRef::new(name)));
        let unknown = class().and_then(|class| self.scope.unknown_store(&class));
        let ability = match &unknown {
            Some(store) => Ability::without_store(store),
            None => self.served.wait_until_known().await,
        };
        let identity = match unknown {
            // As if it was ours: the claim is given up like one that no volume can be created for.
            Some(store) => &self.scope.identity.with_store(Some(store)),
            None => &self.scope.identity,
        };
        let class = class();
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let volume = self.caches.volumes.get(&format!("pvc-{uid}"));
        let labels = self.provisioner.node.facts().map(|node| node.labels);
        let seen = ObservedClaim {
            claim,
            class: class.as_deref(),
            volume: volume.as_ref(),
            node_labels: labels.as_deref(),
        };
        let outcome = match plan_claim(identity, seen) {
            ClaimAction::Provision(spec) => {
                // This node was selected before and gave the claim up: retry with a growing delay.
                if let Some(time) = self.retries.remaining_hold(uid) {
                    return Ok(NextRun::After(time));
                }
                let Some(class) = &class else { return Ok(NextRun::OnChange) };
                match plan_selected_claim(&ability, spec.source.is_some()) {
                    SelectedClaimAction::Provision => {
                        // A copy has its file system already.
                        let format = spec.kind.image_format().filter(|_| spec.source.is_none());
                        let missing =
                            format.and_then(|format| self.served.missing_formats().get(&format).cloned());
                        if let Some(why) = missing {
                            return self.give_up(claim, &why).await;
                        }
                    }
                    SelectedClaimAction::Deselect(why) => return self.give_up(claim, why).await,
                    SelectedClaimAction::Wait(why) => {
                        return Err(ReconcileError::NodeUnable { why: why.to_owned() });
                    }
                }
                let store = self.served.wait_until_served().await;
                let may_reschedule = self.retries.failure_count(uid) + 1 >= self.reschedule_after;
                self.provisioner.provision_claim(&spec, class, store.id(), may_reschedule).await?
            }
            // The end of its inability brings the claim back.
            ClaimAction::SelectNode if !ability.is_able() || self.lacks_format(claim, class.as_deref()) => {
                return Ok(NextRun::OnChange);
            }
            ClaimAction::SelectNode => {
                let Some(class) = &class else { return Ok(NextRun::OnChange) };
                let hold = self.retries.remaining_hold(uid).unwrap_or_default();
                let delay = || hold.max(self.peers.delay(identity, class, uid, self.node_selection_delay));
                if let Some(time) = self.retries.remaining_wait(uid, delay) {
                    return Ok(NextRun::After(time));
                }
                // If it does not fit, a change of the node or of the capacity brings the claim back.
                if self.has_space_for(claim).await? {
                    self.provisioner.select_node(claim).await?;
                }
                // Earlier failures are kept: whether the claim can be provisioned here is not known yet.
                return Ok(NextRun::OnChange);
            }
            ClaimAction::Wait(rejection) => match self.retries.remaining_wait(uid, || CACHE_GRACE_PERIOD) {
                Some(time) => return Ok(NextRun::After(time)),
                None => ProvisionOutcome::Rejected(rejection),
            },
            ClaimAction::Reject(rejection) => ProvisionOutcome::Rejected(rejection),
            // Not a success, which would forget the failures: the claim may come back after this node was deselected.
            ClaimAction::Ignore(ClaimIgnoreReason::WaitsForConsumer) => return Ok(NextRun::OnChange),
            ClaimAction::Ignore(_) => ProvisionOutcome::Done,
        };
        match outcome {
            ProvisionOutcome::Done => {
                self.retries.record_success(uid);
                Ok(NextRun::OnChange)
            }
            ProvisionOutcome::Exhausted { claim: live, size } => {
                // First the capacity, then the claim: otherwise the scheduler might select this node again.
                self.capacity.publish_shortage(size).await?;
                self.provisioner.deselect_node(&live, "no free space for the claim's volume").await?;
                self.record_failed_provision(claim);
                self.retries.record_reschedule(uid);
                Ok(NextRun::OnChange)
            }
            ProvisionOutcome::HandedOver => {
                self.retries.record_reschedule(uid);
                Ok(NextRun::OnChange)
            }
            ProvisionOutcome::Rejected(rejection) => Ok(self.reject(claim, uid, &rejection).await),
        }
    }

    /// Gives up a claim that this node can't serve, for another node, once the scheduler knows.
    async fn give_up(&self, claim: &PersistentVolumeClaim, why: &str) -> Result<NextRun, ReconcileError> {
        let uid = claim.metadata.uid.as_deref().unwrap_or_default();
        let note = format!(
            "node {} can't create volumes, and is deselected: {why}",
            self.provisioner.api.identity.node
        );
        let recorder = &self.failures.recorder;
        recorder.record_event(&object_reference(claim), EventReason::ProvisioningFailed, &note).await;
        // First the capacity, then the claim: otherwise the scheduler might select this node again.
        self.capacity.publish_inability().await?;
        self.provisioner.deselect_node(claim, "this node can't create volumes").await?;
        self.record_failed_provision(claim);
        self.retries.record_reschedule(uid);
        Ok(NextRun::OnChange)
    }

    /// Returns whether the file system of a claim's volume can't be made on this node.
    fn lacks_format(&self, claim: &PersistentVolumeClaim, class: Option<&StorageClass>) -> bool {
        let is_block = claim.spec.as_ref().is_some_and(|spec| spec.volume_mode.as_deref() == Some("Block"));
        let format = class.and_then(strict_format).filter(|_| !is_block);
        format.is_some_and(|format| self.served.missing_formats().contains_key(&format))
    }

    /// Returns whether a claim that no scheduler places fits on this node; an invalid one does, to be rejected.
    async fn has_space_for(&self, claim: &PersistentVolumeClaim) -> Result<bool, ReconcileError> {
        let Some(Ok(size)) = claim.spec.as_ref().map(requested_capacity) else { return Ok(true) };
        let Some(why) = self.capacity.find_shortage(size).await? else { return Ok(true) };
        let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
        tracing::info!(
            namespace,
            claim = name,
            "leaving a claim with immediate binding to other nodes: {why}"
        );
        Ok(false)
    }

    /// Emits a rejection once and waits for a change. A name conflict is retried, because it depends on
    /// another object.
    async fn reject(&self, claim: &PersistentVolumeClaim, uid: &str, rejection: &ClaimRejection) -> NextRun {
        let text = rejection.to_string();
        if self.retries.is_new_rejection(uid, &text) {
            let about = object_reference(claim);
            let (namespace, name) = (about.namespace.as_deref(), about.name.as_deref());
            tracing::warn!(namespace, claim = name, "claim rejected: {text}");
            self.record_failed_provision(claim);
            self.failures.recorder.record_event(&about, EventReason::ProvisioningFailed, &text).await;
        }
        match rejection {
            ClaimRejection::NameConflict { .. } => NextRun::After(self.max_delay),
            _ => NextRun::OnChange,
        }
    }

    fn record_failed_provision(&self, claim: &PersistentVolumeClaim) {
        let class = class_name(claim).unwrap_or_default();
        self.failures.metrics.record_provision(class, Duration::ZERO, false);
    }
}
