//! Plans the action for a claim.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::claim::spec::{ClaimRejection, VolumeSpec, build_spec};
use crate::identity::{BETA_STORAGE_PROVISIONER, ProvisionerIdentity, SELECTED_NODE, STORAGE_PROVISIONER};
use crate::objects::{allows_node, class_name, nonempty_annotation, waits_for_consumer};
use crate::scope::is_class_of_store;

/// A claim and the objects related to it, as far as they are in the cache.
#[derive(Debug, Clone, Copy)]
pub struct ObservedClaim<'a> {
    /// The claim.
    pub claim: &'a PersistentVolumeClaim,
    /// The storage class, if it exists.
    pub class: Option<&'a StorageClass>,
    /// The PersistentVolume with the name of the claim's volume, of this component or another; in the cache,
    /// only one of this node.
    pub volume: Option<&'a PersistentVolume>,
    /// The labels of this node, which the class's allowedTopologies refer to; `None` if they are not known.
    pub node_labels: Option<&'a BTreeMap<String, String>>,
}

/// The action for a claim.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ClaimAction {
    /// Nothing.
    Ignore(ClaimIgnoreReason),
    /// Write this node into the claim as its selected node, before another node does.
    SelectNode,
    /// Create the volume and its PersistentVolume.
    Provision(Box<VolumeSpec>),
    /// Check again shortly and then reject: the missing object may not be in the cache yet.
    Wait(ClaimRejection),
    /// Emit an event with the reason, and wait until the claim or its class changes.
    Reject(ClaimRejection),
}

/// The reason why a claim needs no action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimIgnoreReason {
    /// Belongs to another driver.
    OtherDriver,
    /// The volume belongs on another node.
    OtherNode,
    /// The class names another store of this node.
    OtherStore,
    /// The class waits for the first consumer: no pod has been scheduled, so no node is selected.
    WaitsForConsumer,
    /// Has a volume, or is about to be bound to one.
    HasVolume,
    /// Is being deleted.
    Deleting,
    /// Has lost its volume, or is in an unknown phase.
    NotPending,
}

/// Plans the action for a claim.
pub fn plan_claim(identity: &ProvisionerIdentity, observed: ObservedClaim<'_>) -> ClaimAction {
    if let Some(reason) = claim_ignore_reason(identity, observed.claim) {
        return ClaimAction::Ignore(reason);
    }
    let Some(name) = class_name(observed.claim) else { return ClaimAction::Reject(ClaimRejection::NoClass) };
    let Some(class) = observed.class else {
        return ClaimAction::Wait(ClaimRejection::UnknownClass { class: name.to_owned() });
    };
    if class.provisioner != identity.driver.as_str() {
        return ClaimAction::Ignore(ClaimIgnoreReason::OtherDriver);
    }
    if !is_class_of_store(identity, class) {
        return ClaimAction::Ignore(ClaimIgnoreReason::OtherStore);
    }
    // The scheduler selects a node once a pod needs the claim. A class with immediate binding has no such pod: then the nodes
    // select themselves, and the first one wins.
    let is_selected = nonempty_annotation(observed.claim, SELECTED_NODE).is_some();
    if !is_selected && waits_for_consumer(class) {
        return ClaimAction::Ignore(ClaimIgnoreReason::WaitsForConsumer);
    }
    let is_allowed = allows_node(identity, observed.node_labels, class);
    if !is_selected && !is_allowed {
        return ClaimAction::Ignore(ClaimIgnoreReason::OtherNode);
    }
    match build_spec(observed.claim, class) {
        Ok(spec) => match observed.volume {
            // The name follows from the claim's UID, so an object of this name is the claim's, or in its way.
            Some(volume) => plan_existing_volume(&spec, volume),
            // The author of a claim can write its selected node, too: only the class says which nodes it may have.
            None if !is_allowed => {
                let (node, class) = (identity.node.clone(), name.to_owned());
                let rejection = ClaimRejection::NodeNotAllowed { node, class };
                match observed.node_labels {
                    Some(_) => ClaimAction::Reject(rejection),
                    None => ClaimAction::Wait(rejection),
                }
            }
            None if is_selected => ClaimAction::Provision(Box::new(spec)),
            None => ClaimAction::SelectNode,
        },
        // Without a selected node, every node would emit the rejection: the node that selects itself does it.
        Err(_) if !is_selected => ClaimAction::SelectNode,
        Err(rejection) => ClaimAction::Reject(rejection),
    }
}

/// The reason why this node ignores a claim, of any class.
pub(crate) fn claim_ignore_reason(
    identity: &ProvisionerIdentity,
    claim: &PersistentVolumeClaim,
) -> Option<ClaimIgnoreReason> {
    let driver = nonempty_annotation(claim, STORAGE_PROVISIONER)
        .or(nonempty_annotation(claim, BETA_STORAGE_PROVISIONER));
    if driver != Some(identity.driver.as_str()) {
        return Some(ClaimIgnoreReason::OtherDriver);
    }
    if nonempty_annotation(claim, SELECTED_NODE).is_some_and(|node| node != identity.node.as_str()) {
        return Some(ClaimIgnoreReason::OtherNode);
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return Some(ClaimIgnoreReason::Deleting);
    }
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    if volume.is_some_and(|name| !name.is_empty()) {
        return Some(ClaimIgnoreReason::HasVolume);
    }
    // A new claim has no phase yet.
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    (!matches!(phase, "" | "Pending")).then_some(ClaimIgnoreReason::NotPending)
}

/// Plans the action for a claim if a PersistentVolume with its volume's name exists.
fn plan_existing_volume(spec: &VolumeSpec, volume: &PersistentVolume) -> ClaimAction {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    if claim.and_then(|claim| claim.uid.as_deref()) == Some(spec.id.claim_uid()) {
        ClaimAction::Ignore(ClaimIgnoreReason::HasVolume)
    } else {
        ClaimAction::Reject(ClaimRejection::NameConflict { id: spec.id.clone() })
    }
}
