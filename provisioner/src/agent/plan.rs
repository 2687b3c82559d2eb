//! Decides what needs the agent: a pure function of the observed objects.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nodekeel_fsquota::Bytes;

use super::facts::{ClaimKey, ClusterObjects, NodeFacts, PendingClaim, PendingPod, PodKey, node_identity};
use crate::api::event::{MAX_NOTE_BYTES, truncate_bytes};
use crate::capacity::policy::BinarySize;
use crate::claim::size::{store_of_class, strict_format};
use crate::claim::source::DataSource;
use crate::identity::HOSTNAME;
use crate::image::ImageFormat;
use crate::objects::{allows_node, waits_for_consumer};
use crate::quantity::parse_quantity;
use crate::{DriverName, NodeName, StoreName};

/// Something that no node can do anything about. The agent acts once it has lasted for its delay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ClusterCondition {
    /// The provisioner of a node no longer renews its Lease. Before the others: the scheduler must know before it selects.
    Unresponsive { node: String },
    /// A pending claim's selected node cannot serve it.
    UnusableNode { claim: ClaimKey, node: String, problem: NodeProblem },
    /// No node can serve a pending claim.
    UnservedClaim { claim: ClaimKey, reason: UnservedReason },
    /// A pod can't start, because of where its claims are.
    StuckPod { pod: PodKey, problem: PodProblem },
    /// The node of a volume is deleted.
    NodeGone { volume: VolumeKey, node: NodeName },
    /// The node of a volume is deleted, and would delete the volume if it existed.
    Removable { volume: VolumeKey, node: NodeName },
}

/// A PersistentVolume, by its name and its UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct VolumeKey {
    pub(super) name: String,
    pub(super) uid: String,
}

/// The reason why a selected node cannot serve a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(super) enum NodeProblem {
    #[error("does not exist")]
    Deleted,
    #[error("does not have the driver: the pod of its provisionerd is missing or not ready")]
    DriverMissing,
    #[error(
        "no longer renews its Lease: its provisionerd was killed, hangs or can't reach the API server; see the log of its pod"
    )]
    LeaseExpired,
    #[error("is cordoned, and has not provisioned the claim")]
    Cordoned,
    #[error("is not ready, and has not provisioned the claim")]
    NotReady,
}

impl NodeProblem {
    pub(super) fn metric_label(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::DriverMissing => "no_driver",
            Self::LeaseExpired => "lease_expired",
            Self::Cordoned => "cordoned",
            Self::NotReady => "not_ready",
        }
    }
}

/// The reason why no node can serve a claim. The message is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(super) enum UnservedReason {
    #[error("no node has the driver: check the DaemonSet of provisionerd")]
    DriverMissing,
    #[error(
        "no node with the driver meets the allowedTopologies of the claim's storage class: use another class"
    )]
    TopologyNotAllowed,
    #[error(
        "every node that could serve the claim is cordoned or tainted: uncordon one, or use a storage class with \
         volumeBindingMode WaitForFirstConsumer"
    )]
    NodesUnschedulable,
    #[error(
        "no node has store {store}, which the claim's storage class names: add it to the stores in the configuration of a node, or \
         create the claim again with another class"
    )]
    StoreMissing { store: StoreName },
    #[error(
        "no node can make the file system of the strict volumes of the claim's storage class {class}, {format}: install the program \
         that makes it on a node ({program}), or create the claim again with another class"
    )]
    FormatMissing { class: String, format: ImageFormat, program: &'static str },
    /// The figures of the nodes, which change, are told apart from it.
    #[error("no node has room for the {} that the claim of storage class {class} requests", BinarySize(*size))]
    NoRoom { class: String, size: Bytes },
    #[error(
        "node {node}, on which the claim's data source is or may be, {problem}: repair it; or, if the source is on another \
         node, remove the claim's annotation volume.kubernetes.io/selected-node"
    )]
    SourceUnavailable { node: String, problem: NodeProblem },
}

/// A reason why a pod can't start. The message is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(super) enum PodProblem {
    /// If the node has room for the other claim, the scheduler reports what keeps the pod from it.
    #[error("{}", stuck_pod_note(pod, claim, node, others))]
    NoRoom { pod: PodKey, claim: String, node: String, others: Vec<String> },
    #[error(
        "claim {claim} is on node {node}, and claim {other} on node {other_node}: the pod needs both on one node. Create the claims \
         anew with a storage class with volumeBindingMode WaitForFirstConsumer"
    )]
    Apart { claim: String, node: String, other: String, other_node: String },
    #[error(
        "spec.nodeName bypasses the scheduler, which would select the node of claim {claim}: so it gets no volume. Use a \
         nodeSelector instead, or select the node: `kubectl -n {} annotate pvc {claim} volume.kubernetes.io/selected-node={node}`",
        pod.namespace
    )]
    Unscheduled { pod: PodKey, claim: String, node: String },
}

/// The note about a pod whose claims don't fit on one node. If the names are so long that it would not fit into an event,
/// the names before the commands are cut, and not the commands.
fn stuck_pod_note(pod: &PodKey, claim: &str, node: &str, others: &[String]) -> String {
    let what =
        format!("claim {claim} is on node {node}, which has no room for claim {}", others.join(" or "));
    let remedy = format!(
        ": the pod needs both on one node. Free space there. Or, if the claim there has no data that are \
         needed, and a controller creates it and the pod anew, `kubectl cordon {node} && kubectl -n {} delete pvc/{claim} pod/{}`, \
         and `kubectl uncordon {node}` once the pod runs",
        pod.namespace, pod.name
    );
    format!("{}{remedy}", truncate_bytes(&what, MAX_NOTE_BYTES.saturating_sub(remedy.len())))
}

/// All conditions of the driver's claims and volumes.
pub(super) fn find_conditions(driver: &DriverName, objects: &ClusterObjects) -> BTreeSet<ClusterCondition> {
    let claims = objects.claims.iter().map(|(_, claim)| claim);
    let claims = claims.filter_map(|claim| claim_condition(driver, objects, claim));
    // A deleted node has neither pods nor capacity.
    let unresponsive = objects.leases.expired().filter(|node| objects.nodes.get(node).is_some());
    let unresponsive = unresponsive.map(|node| ClusterCondition::Unresponsive { node: node.to_owned() });
    unresponsive
        .chain(claims)
        .chain(pod_conditions(driver, objects))
        .chain(volume_conditions(objects))
        .collect()
}

fn claim_condition(
    driver: &DriverName,
    objects: &ClusterObjects,
    claim: &PendingClaim,
) -> Option<ClusterCondition> {
    if !is_unserved(driver, objects, claim) {
        return None;
    }
    let class = class_of(objects, claim);
    let claim_key = claim.key.clone();
    match &claim.selected_node {
        Some(node) => {
            let (node, problem) = (node.clone(), node_problem(objects, node)?);
            // Another node would select this one again: only it has the data.
            if problem != NodeProblem::Deleted && may_have_source(objects, claim, &node) {
                let reason = UnservedReason::SourceUnavailable { node, problem };
                return Some(ClusterCondition::UnservedClaim { claim: claim_key, reason });
            }
            Some(ClusterCondition::UnusableNode { claim: claim_key, node, problem })
        }
        None => {
            let reason = unserved_reason(driver, objects, claim, class?)?;
            Some(ClusterCondition::UnservedClaim { claim: claim_key, reason })
        }
    }
}

fn class_of<'a>(objects: &'a ClusterObjects, claim: &PendingClaim) -> Option<&'a StorageClass> {
    claim.class.as_deref().and_then(|name| objects.classes.get(name))
}

/// Returns whether a claim is the driver's and has no volume.
fn is_unserved(driver: &DriverName, objects: &ClusterObjects, claim: &PendingClaim) -> bool {
    let class = class_of(objects, claim);
    let named = [claim.driver.as_deref(), class.map(|class| class.provisioner.as_str())];
    // The author of a claim can write the annotation that names its driver, too.
    let is_ours = named.iter().flatten().all(|name| *name == driver.as_str()) && named != [None, None];
    // With a PersistentVolume, the claim is about to be bound to it, wherever it is.
    is_ours && objects.volumes.get(&claim.volume_name()).is_none()
}

fn pod_conditions(driver: &DriverName, objects: &ClusterObjects) -> Vec<ClusterCondition> {
    let bound = objects.volumes.iter().filter_map(|(_, volume)| {
        let claim = volume.bound_claim.as_ref()?;
        Some(((claim.namespace.as_str(), claim.name.as_str()), volume.node.as_str()))
    });
    let bound: BTreeMap<_, _> = bound.collect();
    let pods = objects.pods.iter().map(|(_, pod)| pod);
    let stuck = pods.filter_map(|pod| {
        let problem = pod_problem(driver, objects, &bound, pod)?;
        Some(ClusterCondition::StuckPod { pod: pod.key.clone(), problem })
    });
    stuck.collect()
}

/// `bound` has the node of each bound claim, by its namespace and name. One problem at a time: the requests and the events
/// about a pod must not grow with its claims.
fn pod_problem(
    driver: &DriverName,
    objects: &ClusterObjects,
    bound: &BTreeMap<(&str, &str), &str>,
    pod: &PendingPod,
) -> Option<PodProblem> {
    let namespace = pod.key.namespace.as_str();
    // With immediate binding, the nodes select themselves; and one that is selected is at work.
    let waits = |claim: &&PendingClaim| {
        claim.selected_node.is_none()
            && is_unserved(driver, objects, claim)
            && class_of(objects, claim).is_some_and(waits_for_consumer)
    };
    let pending = pod.claims.iter().filter_map(|name| objects.claims.get(&format!("{namespace}/{name}")));
    let mut waiting = pending.filter(waits).map(|claim| claim.key.name.clone());
    if let Some(node) = &pod.node {
        return Some(PodProblem::Unscheduled {
            pod: pod.key.clone(),
            claim: waiting.next()?,
            node: node.clone(),
        });
    }
    let mut placed =
        pod.claims.iter().filter_map(|name| Some((name, *bound.get(&(namespace, name.as_str()))?)));
    let (claim, node) = placed.next().map(|(name, node)| (name.clone(), node.to_owned()))?;
    if let Some((other, other_node)) = placed.find(|(_, other)| *other != node) {
        let (other, other_node) = (other.clone(), other_node.to_owned());
        return Some(PodProblem::Apart { claim, node, other, other_node });
    }
    let others: Vec<String> = waiting.collect();
    (!others.is_empty()).then(|| PodProblem::NoRoom { pod: pod.key.clone(), claim, node, others })
}

/// Returns whether the scheduler finds room for a claim on the node that has published these capacities.
pub(super) fn has_room(capacities: &[CSIStorageCapacity], claim: &PendingClaim) -> bool {
    let bytes = |quantity: &Quantity| parse_quantity(&quantity.0).ok();
    let of_class = |found: &&CSIStorageCapacity| Some(&found.storage_class_name) == claim.class.as_ref();
    // *Source:* Kubernetes' plugin VolumeBinding: the largest volume, or else all that is free.
    let fits = |found: &CSIStorageCapacity| {
        let limit = found.maximum_volume_size.as_ref().or(found.capacity.as_ref()).and_then(bytes);
        limit.zip(claim.size).is_some_and(|(limit, size)| size.0 <= limit)
    };
    capacities.iter().filter(of_class).any(fits)
}

/// Returns whether the data source of a claim is on this node, or may be: the node of a snapshot is not known here.
fn may_have_source(objects: &ClusterObjects, claim: &PendingClaim, node: &str) -> bool {
    match &claim.source {
        None => false,
        Some(DataSource::Snapshot(_)) => true,
        Some(DataSource::Claim(name)) => {
            let is_source = |bound: &ClaimKey| bound.namespace == claim.key.namespace && bound.name == *name;
            let mut volumes = objects.volumes.iter().map(|(_, volume)| volume);
            let source = volumes.find(|volume| volume.bound_claim.as_ref().is_some_and(is_source));
            source.is_none_or(|source| source.node.as_str() == node)
        }
    }
}

fn node_problem(objects: &ClusterObjects, node: &str) -> Option<NodeProblem> {
    match objects.nodes.get(node) {
        None => Some(NodeProblem::Deleted),
        // A CSINode lists the drivers that have registered with the kubelet of the node.
        Some(_) if objects.csi_nodes.get(node) != Some(&true) => Some(NodeProblem::DriverMissing),
        // The kubelet keeps the driver of a process that was killed: its sockets are left.
        Some(_) if objects.leases.is_expired(node) => Some(NodeProblem::LeaseExpired),
        Some(facts) if !facts.is_ready => Some(NodeProblem::NotReady),
        Some(facts) => facts.is_cordoned.then_some(NodeProblem::Cordoned),
    }
}

/// The nodes whose provisioners run.
fn served_nodes(objects: &ClusterObjects) -> Vec<(&str, &NodeFacts)> {
    let with_driver = |(name, has_driver): (_, &bool)| {
        let is_served = *has_driver && !objects.leases.is_expired(name);
        Some((name, objects.nodes.get(name).filter(|_| is_served)?))
    };
    objects.csi_nodes.iter().filter_map(with_driver).collect()
}

/// Those of them on which a class allows volumes.
fn allowed_nodes<'a>(
    driver: &DriverName,
    nodes: &[(&'a str, &'a NodeFacts)],
    class: &StorageClass,
) -> Vec<(&'a str, &'a NodeFacts)> {
    let is_allowed = |name: &str, node: &NodeFacts| {
        let name = NodeName::try_new(name);
        name.is_ok_and(|name| allows_node(&node_identity(driver, &name), Some(&node.labels), class))
    };
    nodes.iter().filter(|(name, node)| is_allowed(name, node)).copied().collect()
}

/// The reason why no node can serve a claim of this class that has no selected node.
fn unserved_reason(
    driver: &DriverName,
    objects: &ClusterObjects,
    claim: &PendingClaim,
    class: &StorageClass,
) -> Option<UnservedReason> {
    let nodes = served_nodes(objects);
    let allowed = allowed_nodes(driver, &nodes, class);
    if nodes.is_empty() {
        return Some(UnservedReason::DriverMissing);
    }
    if allowed.is_empty() {
        return Some(UnservedReason::TopologyNotAllowed);
    }
    if let Some(reason) = missing_format(objects, claim, class, &allowed) {
        return Some(reason);
    }
    // With a pod, its tolerations and the published capacity decide, and the scheduler reports.
    if waits_for_consumer(class) {
        return None;
    }
    // The node that selects itself rejects an invalid name.
    if let Ok(Some(store)) = store_of_class(class)
        && allowed.iter().all(|(name, _)| objects.leases.lacks_store(name, &store))
    {
        return Some(UnservedReason::StoreMissing { store });
    }
    if allowed.iter().all(|(_, node)| node.is_tainted) {
        return Some(UnservedReason::NodesUnschedulable);
    }
    let (most, size) = (most_free(driver, objects, class)?, claim.size?);
    (most.free < size)
        .then(|| UnservedReason::NoRoom { class: claim.class.clone().unwrap_or_default(), size })
}

/// The file system of a claim's volume, if none of these nodes can make it. The scheduler would only report that they have no
/// free storage.
fn missing_format(
    objects: &ClusterObjects,
    claim: &PendingClaim,
    class: &StorageClass,
    nodes: &[(&str, &NodeFacts)],
) -> Option<UnservedReason> {
    // A block device has none, and a copy has that of its source.
    let format = strict_format(class).filter(|_| !claim.is_block && claim.source.is_none())?;
    let (store, program) = (store_of_class(class).ok()?, format.mkfs_program()?);
    let lacks_format = |name: &str| objects.leases.lacks_format(name, &store, format);
    let lacks_store =
        |name: &str| store.as_ref().is_some_and(|store| objects.leases.lacks_store(name, store));
    let (mut lacking, has_none) =
        (nodes.iter(), nodes.iter().all(|(name, _)| lacks_format(name) || lacks_store(name)));
    (has_none && lacking.any(|(name, _)| lacks_format(name))).then(|| UnservedReason::FormatMissing {
        class: claim.class.clone().unwrap_or_default(),
        format,
        program,
    })
}

/// The node with the most space for a claim that no scheduler places.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MostFree {
    pub(super) node: String,
    pub(super) free: Bytes,
}

/// The note about a claim that no node has room for.
pub(super) fn no_room_note(reason: &UnservedReason, most: &MostFree) -> String {
    let remedy = match most.free {
        // Of a store that is full, or can't be used.
        Bytes(0) => {
            "none offers any. Delete volumes, or enlarge a disk; /readyz of each provisionerd says whether its store can be used"
                .to_owned()
        }
        free => format!(
            "node {} has the most, {}. Delete volumes there or enlarge its disk, and a node takes the claim; or create the \
             claim again with a smaller request",
            most.node,
            BinarySize(free)
        ),
    };
    format!("{reason}: {remedy}")
}

/// The node of those that could serve a class with immediate binding which has the most space for it. `None` if there is none,
/// or if one of them doesn't say how much it has.
pub(super) fn most_free(
    driver: &DriverName,
    objects: &ClusterObjects,
    class: &StorageClass,
) -> Option<MostFree> {
    // The node that selects itself rejects an invalid name.
    let store = store_of_class(class).ok()?;
    let mut most: Option<MostFree> = None;
    for (name, node) in allowed_nodes(driver, &served_nodes(objects), class) {
        let lacks_store = store.as_ref().is_some_and(|store| objects.leases.lacks_store(name, store));
        if node.is_tainted || lacks_store {
            continue;
        }
        let free = objects.leases.offered(name, &store)?;
        if most.as_ref().is_none_or(|most| most.free < free) {
            most = Some(MostFree { node: name.to_owned(), free });
        }
    }
    most
}

fn volume_conditions(objects: &ClusterObjects) -> impl Iterator<Item = ClusterCondition> {
    let hostnames =
        objects.nodes.iter().filter_map(|(_, node)| node.labels.get(HOSTNAME)).map(String::as_str);
    // A CSINode without its Node is about to be collected, or its kubelet is about to register the node again.
    let names =
        objects.nodes.iter().map(|(name, _)| name).chain(objects.csi_nodes.iter().map(|(name, _)| name));
    // Volumes of release 0.1.0 name the hostname label, which may differ from the node's name.
    let existing: BTreeSet<&str> = names.chain(hostnames).collect();
    let gone = objects.volumes.iter().filter(move |(_, volume)| !existing.contains(volume.node.as_str()));
    gone.flat_map(|(name, volume)| {
        let key = VolumeKey { name: name.to_owned(), uid: volume.uid.clone() };
        let removable = ClusterCondition::Removable { volume: key.clone(), node: volume.node.clone() };
        let gone = ClusterCondition::NodeGone { volume: key, node: volume.node.clone() };
        std::iter::once(gone).chain(volume.is_removable.then_some(removable))
    })
}
