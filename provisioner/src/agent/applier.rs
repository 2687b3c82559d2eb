//! Acts on conditions: each effect can be interrupted at any point and repeated.

use std::fmt::Debug;
use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::Instant;

use super::agenda::ActionOutcome;
use super::facts::{ClaimKey, ClusterObjects, PendingClaim, PodKey, VolumeFacts, volume_identity};
use super::lease::SLOW_ANSWER;
use super::metrics::AgentMetrics;
use super::plan::{
    ClusterCondition, NodeProblem, PodProblem, UnservedReason, VolumeKey, has_room, most_free, no_room_note,
};
use crate::api::call::{error_hint, status_code};
use crate::api::event::{EventReason, EventRecorder};
use crate::api::timeout::with_timeout;
use crate::api::writer::ClientHandle;
use crate::capacity::objects::{DRIVER_LABEL, MANAGER_LABEL};
use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::error_chain::format_chain;
use crate::identity::{FINALIZER, SELECTED_NODE};
use crate::node_lease::lease_name;
use crate::objects::is_bound_elsewhere;
use crate::step::{StepRunner, VolumeStep};
use crate::{DriverName, NodeName};

/// The namespace in which each kubelet renews the Lease of its node. *Source:* Kubernetes, "Leases".
const NODE_LEASES: &str = "kube-node-lease";

/// A call of the API server failed.
#[derive(Debug, thiserror::Error)]
#[error("can't {verb} {object}{}", error_hint(source))]
struct CallError {
    verb: &'static str,
    object: String,
    /// The call in metrics.
    label: &'static str,
    #[source]
    source: kube::Error,
}

/// Acts on conditions.
#[derive(Debug)]
pub(super) struct AgentApplier {
    pub(super) driver: DriverName,
    /// The namespace of the Leases and of the capacity of the nodes.
    pub(super) namespace: String,
    pub(super) client: ClientHandle,
    pub(super) recorder: EventRecorder,
    pub(super) metrics: Arc<dyn AgentMetrics>,
    pub(super) steps: StepRunner,
}

impl AgentApplier {
    /// Acts on a condition that is due. Failures are logged.
    pub(super) async fn act(&self, objects: &ClusterObjects, condition: &ClusterCondition) -> ActionOutcome {
        let result = match condition {
            ClusterCondition::Unresponsive { node } => self.withdraw_from_scheduler(objects, node).await,
            ClusterCondition::UnusableNode { claim, node, problem } => {
                match objects.claims.get(&claim_name(claim)) {
                    Some(claim) => self.deselect_node(objects, claim, (node, *problem)).await,
                    None => Ok(ActionOutcome::Done),
                }
            }
            ClusterCondition::UnservedClaim { claim, reason } => {
                self.report_unserved(objects, claim, reason).await
            }
            ClusterCondition::StuckPod { pod, problem } => self.report_pod(objects, pod, problem).await,
            ClusterCondition::NodeGone { volume, node } => match objects.volumes.get(&volume.name) {
                Some(facts) => self.report_gone_volume(volume, facts, node).await,
                None => Ok(ActionOutcome::Done),
            },
            ClusterCondition::Removable { volume, node } => self.remove_volume(volume, node).await,
        };
        result.unwrap_or_else(|error| {
            self.metrics.record_api_error(error.label);
            tracing::warn!("{}; retrying", format_chain(&error));
            ActionOutcome::Retry
        })
    }

    /// Returns whether the Lease of a node is what was seen last, by a read of the server: a watch may be late.
    async fn is_unrenewed(&self, objects: &ClusterObjects, node: &str) -> Result<bool, CallError> {
        let Ok(name) = NodeName::try_new(node) else { return Ok(false) };
        let leases = Api::<Lease>::namespaced(self.client.0.clone(), &self.namespace);
        let asked_at = Instant::now();
        let live = self.read_object(&leases, &lease_name(&self.driver, &name)).await?;
        // A server that has stood still answers this read before it takes the renewals that have waited, too.
        if asked_at.elapsed() > SLOW_ANSWER {
            return Ok(false);
        }
        Ok(live.and_then(|lease| lease.spec).as_ref() == objects.leases.last_seen(node))
    }

    /// Keeps pods with new claims from a node that does not answer. Back again, it publishes its capacity anew.
    async fn withdraw_from_scheduler(
        &self,
        objects: &ClusterObjects,
        node: &str,
    ) -> Result<ActionOutcome, CallError> {
        if !self.is_unrenewed(objects, node).await? {
            return Ok(ActionOutcome::Retry);
        }
        let problem = NodeProblem::LeaseExpired;
        tracing::warn!(node, "the node {problem}; its pods with new claims are placed elsewhere");
        self.withdraw_capacity(node).await?;
        Ok(ActionOutcome::Done)
    }

    /// Reports a claim that no node can serve.
    async fn report_unserved(
        &self,
        objects: &ClusterObjects,
        claim: &ClaimKey,
        reason: &UnservedReason,
    ) -> Result<ActionOutcome, CallError> {
        if let UnservedReason::SourceUnavailable { node, problem: NodeProblem::LeaseExpired } = reason
            && !self.is_unrenewed(objects, node).await?
        {
            return Ok(ActionOutcome::Retry);
        }
        let note = match reason {
            UnservedReason::NoRoom { class, .. } => {
                let class = objects.classes.get(class);
                // It has become known otherwise: the condition ends.
                let Some(most) = class.and_then(|class| most_free(&self.driver, objects, class)) else {
                    return Ok(ActionOutcome::Retry);
                };
                no_room_note(reason, &most)
            }
            _ => reason.to_string(),
        };
        tracing::warn!(namespace = claim.namespace, claim = claim.name, "claim not served: {note}");
        let about = claim_reference(claim);
        self.report_of(&about, EventReason::ProvisioningFailed, &reason.to_string(), &note).await
    }

    /// Reports a pod that can't start.
    async fn report_pod(
        &self,
        objects: &ClusterObjects,
        pod: &PodKey,
        problem: &PodProblem,
    ) -> Result<ActionOutcome, CallError> {
        let mut problem = problem.clone();
        if let PodProblem::NoRoom { node, others, .. } = &mut problem {
            let capacities = self.list_capacities(node).await?;
            let has_none = |other: &String| {
                let other = objects.claims.get(&format!("{}/{other}", pod.namespace));
                other.is_some_and(|other| !has_room(&capacities, other))
            };
            // Something else keeps the scheduler from that node; later it may be this.
            let Some(other) = others.iter().find(|other| has_none(other)) else {
                return Ok(ActionOutcome::Retry);
            };
            *others = vec![other.clone()];
        }
        tracing::warn!(namespace = pod.namespace, pod = pod.name, "the pod can't start: {problem}");
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        self.report(&about, EventReason::ProvisioningFailed, &problem.to_string()).await
    }

    /// The capacity that a node has published.
    async fn list_capacities(&self, node: &str) -> Result<Vec<CSIStorageCapacity>, CallError> {
        let labels = [(DRIVER_LABEL, self.driver.as_str()), (MANAGER_LABEL, node)];
        let is_of_node = |object: &CSIStorageCapacity| {
            let found = object.metadata.labels.as_ref();
            labels
                .iter()
                .all(|(key, value)| found.and_then(|all| all.get(*key)).is_some_and(|it| it == value))
        };
        let selector = labels.map(|(key, value)| format!("{key}={value}")).join(",");
        let capacities = Api::<CSIStorageCapacity>::namespaced(self.client.0.clone(), &self.namespace);
        let listed = with_timeout(capacities.list(&ListParams::default().labels(&selector))).await;
        let listed = listed.map_err(capacity_error(node, "list", "list_csistoragecapacity"))?;
        Ok(listed.items.into_iter().filter(is_of_node).collect())
    }

    /// Deletes what a node has published of its capacity.
    async fn withdraw_capacity(&self, node: &str) -> Result<(), CallError> {
        let capacities = Api::<CSIStorageCapacity>::namespaced(self.client.0.clone(), &self.namespace);
        for object in self.list_capacities(node).await? {
            let name = object.metadata.name.as_deref().unwrap_or_default();
            let preconditions = Some(Preconditions {
                uid: object.metadata.uid.clone(),
                resource_version: object.metadata.resource_version.clone(),
            });
            let params = DeleteParams { preconditions, ..DeleteParams::default() };
            let call = with_timeout(capacities.delete(name, &params));
            match self.steps.run_async(VolumeStep::RemoveCapacity, call).await {
                Ok(_) => {}
                // Its node has just written it, so it answers; or somebody else has deleted it.
                Err(error) if matches!(status_code(&error), Some(404 | 409)) => {}
                Err(source) => {
                    return Err(capacity_error(node, "delete", "delete_csistoragecapacity")(source));
                }
            }
        }
        Ok(())
    }

    /// Removes the selected node from exactly this version of a claim, so that the scheduler selects another.
    async fn deselect_node(
        &self,
        objects: &ClusterObjects,
        claim: &PendingClaim,
        (node, problem): (&str, NodeProblem),
    ) -> Result<ActionOutcome, CallError> {
        if problem == NodeProblem::LeaseExpired && !self.is_unrenewed(objects, node).await? {
            return Ok(ActionOutcome::Retry);
        }
        // The watch of claims may be ahead of that of volumes.
        let name = claim.volume_name();
        if self.read_object::<PersistentVolume>(&Api::all(self.client.0.clone()), &name).await?.is_some() {
            return Ok(ActionOutcome::Retry);
        }
        // First the capacity, then the claim: a provisioner that has stopped in order leaves it behind, and the scheduler
        // would select the node again and again.
        if problem == NodeProblem::DriverMissing
            && let Err(error) = self.withdraw_capacity(node).await
        {
            // Without the permission, too: the claim may find another node all the same.
            self.metrics.record_api_error(error.label);
            tracing::warn!("{}", format_chain(&error));
        }
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": claim.key.uid,
            "resourceVersion": claim.resource_version,
            "annotations": { SELECTED_NODE: null },
        } }));
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.0.clone(), &claim.key.namespace);
        let params = PatchParams::default();
        let call = with_timeout(claims.patch(&claim.key.name, &params, &patch));
        match self.steps.run_async(VolumeStep::DeselectNode, call).await {
            Ok(_) => {}
            // The claim has changed or is deleted: the watch reports it.
            Err(error) if matches!(status_code(&error), Some(404 | 409)) => return Ok(ActionOutcome::Retry),
            Err(source) => {
                let object = format!("claim {}", claim_name(&claim.key));
                return Err(CallError {
                    verb: "patch",
                    object,
                    label: "patch_persistentvolumeclaim",
                    source,
                });
            }
        }
        let (namespace, name) = (&claim.key.namespace, &claim.key.name);
        tracing::info!(namespace, claim = name, node, "deselected the claim's node: it {problem}");
        self.metrics.record_deselection(problem.metric_label());
        let note =
            format!("selected node {node} {problem}: deselected it, so that the scheduler selects another");
        let about = claim_reference(&claim.key);
        // The claim is free: a lost event must not bring a second patch.
        if let Err(error) = self.report(&about, EventReason::ProvisioningFailed, &note).await {
            tracing::warn!("{}", format_chain(&error));
        }
        Ok(ActionOutcome::Deselected)
    }

    async fn report_gone_volume(
        &self,
        volume: &VolumeKey,
        facts: &VolumeFacts,
        node: &NodeName,
    ) -> Result<ActionOutcome, CallError> {
        tracing::warn!(pv = volume.name, %node, "the volume's node does not exist");
        let note = format!(
            "node {node}, on whose disk the data of the volume are, does not exist: bring it back, or delete the \
             claim and the PersistentVolume (docs/operations.md, \"A node with volumes is gone\")"
        );
        let about = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolume".to_owned()),
            name: Some(volume.name.clone()),
            uid: Some(volume.uid.clone()),
            ..ObjectReference::default()
        };
        self.report(&about, EventReason::ReferencedNodeDeleted, &note).await?;
        if let Some(claim) = &facts.bound_claim {
            self.report(&claim_reference(claim), EventReason::ReferencedNodeDeleted, &note).await?;
        }
        Ok(ActionOutcome::Done)
    }

    /// Removes the PersistentVolume of a deleted node if that node's provisioner would delete it now.
    async fn remove_volume(&self, volume: &VolumeKey, node: &NodeName) -> Result<ActionOutcome, CallError> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.0.clone());
        let live = self.read_object(&volumes, &volume.name).await?;
        let Some(live) = live.filter(|live| live.metadata.uid.as_deref() == Some(&volume.uid)) else {
            return Ok(ActionOutcome::Done);
        };
        // Decide again on the live object, as the provisioner of the deleted node would.
        let VolumeAction::Delete(id) = plan_volume(&volume_identity(&self.driver, node, &live), &live) else {
            return Ok(ActionOutcome::Retry);
        };
        // A node that comes back would find its data without an object: any sign of life stops the removal.
        if let Some(kind) = self.find_sign_of_life(node).await? {
            tracing::info!(pv = volume.name, %node, "not removing the volume: the node still has a {kind}");
            return Ok(ActionOutcome::Retry);
        }
        // A live claim keeps its volume in every phase.
        let claim = live.spec.as_ref().and_then(|spec| spec.claim_ref.clone()).unwrap_or_default();
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.0.clone(), claim.namespace.as_deref().unwrap_or_default());
        let found = self.read_object(&claims, claim.name.as_deref().unwrap_or_default()).await?;
        if found.is_some_and(|found| found.metadata.uid == claim.uid && !is_bound_elsewhere(&found, &id)) {
            tracing::warn!(pv = volume.name, "not removing the volume: its claim still exists");
            return Ok(ActionOutcome::Retry);
        }
        if !self.remove_object(&volumes, &live).await? {
            return Ok(ActionOutcome::Retry);
        }
        tracing::warn!(pv = volume.name, %node, "removed the PersistentVolume: its data stay on the deleted node's disk");
        self.metrics.record_removal();
        Ok(ActionOutcome::Done)
    }

    /// The kind of an object that shows that a node may still run.
    async fn find_sign_of_life(&self, node: &NodeName) -> Result<Option<&'static str>, CallError> {
        let (client, name) = (&self.client.0, node.as_str());
        let leases = Api::<Lease>::namespaced(client.clone(), NODE_LEASES);
        if self.read_object::<Node>(&Api::all(client.clone()), name).await?.is_some() {
            return Ok(Some("Node"));
        }
        if self.read_object::<CSINode>(&Api::all(client.clone()), name).await?.is_some() {
            return Ok(Some("CSINode"));
        }
        Ok(self.read_object(&leases, name).await?.map(|_| "Lease"))
    }

    /// Deletes exactly this version of a PersistentVolume, and its finalizer; `false` if it has changed.
    async fn remove_object(
        &self,
        volumes: &Api<PersistentVolume>,
        live: &PersistentVolume,
    ) -> Result<bool, CallError> {
        let name = live.metadata.name.as_deref().unwrap_or_default();
        let mut live = live.clone();
        if live.metadata.deletion_timestamp.is_none() {
            let preconditions = Preconditions {
                uid: live.metadata.uid.clone(),
                resource_version: live.metadata.resource_version.clone(),
            };
            let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            let call = with_timeout(volumes.delete(name, &params));
            let deleted = self.steps.run_async(VolumeStep::DeletePersistentVolume, call).await;
            match unless_changed(deleted, "delete", name)? {
                None => return Ok(false),
                Some(answer) => match answer.left() {
                    // Finalizers keep the object, which has a new version with the mark of the deletion.
                    Some(going) => live = going,
                    None => return Ok(true),
                },
            }
        }
        let finalizers = live.metadata.finalizers.unwrap_or_default();
        // The other finalizers belong to controllers that still run.
        let others: Vec<&String> = finalizers.iter().filter(|finalizer| *finalizer != FINALIZER).collect();
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": live.metadata.uid,
            "resourceVersion": live.metadata.resource_version,
            "finalizers": others,
        } }));
        let params = PatchParams::default();
        let call = with_timeout(volumes.patch(name, &params, &patch));
        let patched = self.steps.run_async(VolumeStep::RemoveFinalizer, call).await;
        let patched = unless_changed(patched, "patch", name)?;
        Ok(patched.is_some())
    }

    /// Emits an event once, however many agents find the same.
    async fn report(
        &self,
        about: &ObjectReference,
        reason: EventReason,
        note: &str,
    ) -> Result<ActionOutcome, CallError> {
        self.report_of(about, reason, note, note).await
    }

    /// The same with a note that has figures, which don't make it another event: it is told apart by what it is `of`.
    async fn report_of(
        &self,
        about: &ObjectReference,
        reason: EventReason,
        of: &str,
        note: &str,
    ) -> Result<ActionOutcome, CallError> {
        let recorded = self.recorder.record_once(about, reason, of, note).await;
        recorded.map(|()| ActionOutcome::Done).map_err(|source| {
            let object = format!("an event about {}", about.name.as_deref().unwrap_or_default());
            CallError { verb: "create", object, label: "create_event", source }
        })
    }

    async fn read_object<K>(&self, api: &Api<K>, name: &str) -> Result<Option<K>, CallError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        with_timeout(api.get_opt(name)).await.map_err(|source| CallError {
            verb: "read",
            object: format!("{} {name}", K::kind(&())),
            label: "get",
            source,
        })
    }
}

/// The answer to a write of a PersistentVolume; `None` if it has changed or is deleted, which the watch reports.
fn unless_changed<T>(
    answer: Result<T, kube::Error>,
    verb: &'static str,
    name: &str,
) -> Result<Option<T>, CallError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if matches!(status_code(&error), Some(404 | 409)) => Ok(None),
        Err(source) => {
            let label = if verb == "delete" { "delete_persistentvolume" } else { "patch_persistentvolume" };
            Err(CallError { verb, object: format!("PersistentVolume {name}"), label, source })
        }
    }
}

fn capacity_error(
    node: &str,
    verb: &'static str,
    label: &'static str,
) -> impl FnOnce(kube::Error) -> CallError {
    let object = format!("the CSIStorageCapacity objects of node {node}");
    move |source| CallError { verb, object, label, source }
}

fn claim_name(claim: &ClaimKey) -> String {
    format!("{}/{}", claim.namespace, claim.name)
}

fn claim_reference(claim: &ClaimKey) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: Some(claim.namespace.clone()),
        name: Some(claim.name.clone()),
        uid: Some(claim.uid.clone()),
        ..ObjectReference::default()
    }
}
