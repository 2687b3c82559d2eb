//! The facts that the agent keeps of each object: enough to plan, and little memory.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSelectorTerm, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;

use nodekeel_fsquota::Bytes;

use super::mirror::ObjectMirror;
use super::node_leases::NodeLeases;
use crate::claim::size::requested_capacity;
use crate::claim::source::{DataSource, requested_source};
use crate::deletion::decide::{VolumeAction, plan_volume};
use crate::identity::{
    BETA_STORAGE_PROVISIONER, FINALIZER, HOSTNAME, ProvisionerIdentity, SELECTED_NODE, STORAGE_PROVISIONER,
};
use crate::node::taint_against_volumes;
use crate::objects::{class_name, is_on_node, nonempty_annotation, store_name};
use crate::{DriverName, NodeName, StoreName};

/// The taints of a node whose kubelet does not report, or is not ready. *Source:* Kubernetes, "well-known
/// labels, annotations and taints".
const NOT_READY_TAINTS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// All objects that planning needs.
#[derive(Debug, Default)]
pub(super) struct ClusterObjects {
    pub(super) claims: ObjectMirror<PendingClaim>,
    pub(super) classes: ObjectMirror<StorageClass>,
    pub(super) nodes: ObjectMirror<NodeFacts>,
    /// For each node, if it has the driver.
    pub(super) csi_nodes: ObjectMirror<bool>,
    pub(super) volumes: ObjectMirror<VolumeFacts>,
    /// Empty without the permission to watch them: then only the events about them are missing.
    pub(super) pods: ObjectMirror<PendingPod>,
    /// By which nodes show that their provisioners run.
    pub(super) leases: NodeLeases,
}

impl ClusterObjects {
    /// Returns whether all first lists are complete.
    pub(super) fn is_complete(&self) -> bool {
        let lists = [
            self.claims.is_complete(),
            self.classes.is_complete(),
            self.nodes.is_complete(),
            self.csi_nodes.is_complete(),
            self.volumes.is_complete(),
            self.leases.is_complete(),
        ];
        lists.into_iter().all(|is_complete| is_complete)
    }
}

/// A claim, by its name and its UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClaimKey {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

/// A claim without a volume, of any driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PendingClaim {
    pub(super) key: ClaimKey,
    pub(super) resource_version: String,
    /// The driver that must provision it; `None` until the volume controller has written it.
    pub(super) driver: Option<String>,
    pub(super) class: Option<String>,
    pub(super) selected_node: Option<String>,
    /// The requested size in bytes; `None` if it is invalid, which its node reports.
    pub(super) size: Option<Bytes>,
    /// What its volume is copied from.
    pub(super) source: Option<DataSource>,
    /// True if it asks for a block device.
    pub(super) is_block: bool,
}

impl PendingClaim {
    /// The facts of a claim; `None` if it is not pending.
    pub(super) fn extract(claim: &PersistentVolumeClaim) -> Option<Self> {
        let meta = &claim.metadata;
        let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        if meta.deletion_timestamp.is_some() || !volume.is_empty() || !matches!(phase, "" | "Pending") {
            return None;
        }
        let annotation = |key| nonempty_annotation(claim, key).map(str::to_owned);
        Some(Self {
            key: ClaimKey {
                namespace: meta.namespace.clone().unwrap_or_default(),
                name: meta.name.clone().unwrap_or_default(),
                uid: meta.uid.clone().unwrap_or_default(),
            },
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            driver: annotation(STORAGE_PROVISIONER).or(annotation(BETA_STORAGE_PROVISIONER)),
            class: class_name(claim).map(str::to_owned),
            selected_node: annotation(SELECTED_NODE),
            size: claim.spec.as_ref().and_then(|spec| requested_capacity(spec).ok()),
            // A node rejects a source that can't be copied.
            source: claim.spec.as_ref().and_then(|spec| requested_source(spec).ok().flatten()),
            is_block: claim.spec.as_ref().is_some_and(|spec| spec.volume_mode.as_deref() == Some("Block")),
        })
    }

    /// The name of the PersistentVolume that a node creates for it.
    pub(super) fn volume_name(&self) -> String {
        format!("pvc-{}", self.key.uid)
    }
}

/// A pod, by its name and its UID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PodKey {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

/// A pod with claims that does not run yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PendingPod {
    pub(super) key: PodKey,
    /// The node that it is placed on, by the scheduler or by its author.
    pub(super) node: Option<String>,
    /// The names of its claims.
    pub(super) claims: Vec<String>,
}

impl PendingPod {
    /// The facts of a pod; `None` if it is not pending, or has no claims.
    pub(super) fn extract(pod: &Pod) -> Option<Self> {
        let (meta, spec) = (&pod.metadata, pod.spec.as_ref()?);
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let name = meta.name.clone().unwrap_or_default();
        let claims = spec.volumes.iter().flatten().filter_map(|volume| {
            let claim = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
            // *Source:* Kubernetes, "Ephemeral volumes", naming of their claims.
            claim.or_else(|| volume.ephemeral.as_ref().map(|_| format!("{name}-{}", volume.name)))
        });
        let claims: Vec<String> = claims.collect();
        if claims.is_empty() || meta.deletion_timestamp.is_some() || !matches!(phase, "" | "Pending") {
            return None;
        }
        Some(Self {
            key: PodKey {
                namespace: meta.namespace.clone().unwrap_or_default(),
                name,
                uid: meta.uid.clone().unwrap_or_default(),
            },
            node: spec.node_name.clone().filter(|node| !node.is_empty()),
            claims,
        })
    }
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeFacts {
    /// The labels, to which the node affinity of volumes of release 0.1.0 and the allowedTopologies of classes refer.
    pub(super) labels: BTreeMap<String, String>,
    pub(super) is_cordoned: bool,
    pub(super) is_ready: bool,
    /// True if only pods that tolerate a taint are scheduled to it.
    pub(super) is_tainted: bool,
}

impl NodeFacts {
    pub(super) fn extract(node: &Node) -> Self {
        let spec = node.spec.as_ref();
        let mut taints = spec.and_then(|spec| spec.taints.as_deref()).unwrap_or_default().iter();
        Self {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            is_cordoned: spec.is_some_and(|spec| spec.unschedulable == Some(true)),
            is_ready: !taints.any(|taint| NOT_READY_TAINTS.contains(&taint.key.as_str())),
            is_tainted: taint_against_volumes(node).is_some(),
        }
    }
}

/// A volume of the driver on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeFacts {
    pub(super) uid: String,
    pub(super) node: NodeName,
    /// The claim that it is bound to.
    pub(super) bound_claim: Option<ClaimKey>,
    /// True if its node would delete it now, by the label that only this driver sets.
    pub(super) is_removable: bool,
}

impl VolumeFacts {
    /// The facts of a volume; `None` if it is not one of the driver on a single node.
    pub(super) fn extract(driver: &DriverName, volume: &PersistentVolume) -> Option<Self> {
        let spec = volume.spec.as_ref()?;
        let required = spec.node_affinity.as_ref()?.required.as_ref()?;
        let (key, node) = named_node(driver, required.node_selector_terms.first()?)?;
        let identity = volume_identity(driver, &node, volume);
        if !is_on_node(&identity, volume) {
            return None;
        }
        let is_bound = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
        let claim = spec.claim_ref.as_ref().filter(|_| is_bound);
        Some(Self {
            uid: volume.metadata.uid.clone().unwrap_or_default(),
            bound_claim: claim.map(|claim| ClaimKey {
                namespace: claim.namespace.clone().unwrap_or_default(),
                name: claim.name.clone().unwrap_or_default(),
                uid: claim.uid.clone().unwrap_or_default(),
            }),
            // A hostname label may differ from the node's name, so that it doesn't prove that the node is gone.
            is_removable: key == driver.topology_key()
                && matches!(plan_volume(&identity, volume), VolumeAction::Delete(_)),
            node,
        })
    }
}

pub(super) fn node_identity(driver: &DriverName, node: &NodeName) -> ProvisionerIdentity {
    ProvisionerIdentity {
        driver: driver.clone(),
        node: node.clone(),
        finalizer: Some(FINALIZER.to_owned()),
        store: None,
    }
}

/// The identity of the provisioner that a volume is the concern of: that of its own store.
pub(super) fn volume_identity(
    driver: &DriverName,
    node: &NodeName,
    volume: &PersistentVolume,
) -> ProvisionerIdentity {
    let store = store_name(volume).and_then(|name| StoreName::try_new(name).ok());
    ProvisionerIdentity { store, ..node_identity(driver, node) }
}

/// The label and the single node that a term selects.
fn named_node(driver: &DriverName, term: &NodeSelectorTerm) -> Option<(String, NodeName)> {
    let topology_key = driver.topology_key();
    term.match_expressions.iter().flatten().find_map(|expression| {
        let [value] = expression.values.as_deref()? else { return None };
        let is_ours = expression.key == topology_key || expression.key == HOSTNAME;
        let node =
            NodeName::try_new(value.as_str()).ok().filter(|_| is_ours && expression.operator == "In")?;
        Some((expression.key.clone(), node))
    })
}
