//! Plans the action for a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, TopologySelectorTerm,
};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::claim::mount_option::{MountOption, UnknownMountOption, split_options};
use crate::claim::size;
use crate::claim::source::requested_source;
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::plan::{
    BETA_STORAGE_PROVISIONER, ClaimRejection, HOSTNAME, ProvisionerIdentity, ReclaimPolicy, SELECTED_NODE,
    STORAGE_PROVISIONER, VolumeSpec,
};
use crate::resize::modification::requested_attributes;

/// The annotation that named a claim's class before the field existed; it overrides the field, as in
/// Kubernetes.
const BETA_STORAGE_CLASS: &str = "volume.beta.kubernetes.io/storage-class";

/// Access modes that a volume on one node can serve.
const ACCESS_MODES: [&str; 3] = ["ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"];

/// A claim and the objects related to it, as far as they are in the cache.
#[derive(Debug, Clone, Copy)]
pub struct ObservedClaim<'a> {
    /// The claim.
    pub claim: &'a PersistentVolumeClaim,
    /// Its storage class, if it exists.
    pub class: Option<&'a StorageClass>,
    /// The PersistentVolume with the name of the claim's volume, whatever created it.
    pub volume: Option<&'a PersistentVolume>,
}

/// What to do with a claim.
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

/// Why a claim needs no action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimIgnoreReason {
    /// It belongs to another driver.
    OtherDriver,
    /// Its volume belongs on another node.
    OtherNode,
    /// Its class waits for the first consumer: no pod has been scheduled, so no node is selected.
    WaitsForConsumer,
    /// It has a volume, or is about to be bound to one.
    HasVolume,
    /// It is being deleted.
    Deleting,
    /// It has lost its volume, or is in an unknown phase.
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
    let is_selected = nonempty_annotation(observed.claim, SELECTED_NODE).is_some();
    match is_selected {
        false if waits_for_consumer(class) => {
            return ClaimAction::Ignore(ClaimIgnoreReason::WaitsForConsumer);
        }
        false if !allows_node(identity, class) => return ClaimAction::Ignore(ClaimIgnoreReason::OtherNode),
        _ => {}
    }
    match build_spec(observed.claim, class) {
        Ok(spec) => match observed.volume {
            Some(volume) => plan_existing_volume(&spec, volume),
            None if is_selected => ClaimAction::Provision(Box::new(spec)),
            None => ClaimAction::SelectNode,
        },
        // Without a selected node, every node would emit the rejection: the node that selects itself does it.
        Err(_) if !is_selected => ClaimAction::SelectNode,
        Err(rejection) => ClaimAction::Reject(rejection),
    }
}

/// The name of a claim's class; `None` for the empty name, which asks for a pre-provisioned volume.
pub(crate) fn class_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    let field = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    nonempty_annotation(claim, BETA_STORAGE_CLASS).or(field).filter(|name| !name.is_empty())
}

/// Why this node ignores a claim, whatever its class is.
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

/// An annotation's value; `None` if it is empty, which is how some tools remove one.
pub(crate) fn nonempty_annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    let value = claim.metadata.annotations.as_ref().and_then(|annotations| annotations.get(key));
    value.map(String::as_str).filter(|value| !value.is_empty())
}

pub(crate) fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Whether the class allows volumes on this node. Terms with keys other than the driver's topology key and
/// the hostname label never match.
pub(crate) fn allows_node(identity: &ProvisionerIdentity, class: &StorageClass) -> bool {
    let topology_key = identity.driver.topology_key();
    let names_node = |term: &TopologySelectorTerm| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|label| {
            (label.key == HOSTNAME || label.key == topology_key)
                && label.values.iter().any(|value| value == identity.node.as_str())
        })
    };
    class.allowed_topologies.as_ref().is_none_or(|terms| terms.is_empty() || terms.iter().any(names_node))
}

/// Plans the action for a claim if a PersistentVolume with its volume's name exists.
fn plan_existing_volume(spec: &VolumeSpec, volume: &PersistentVolume) -> ClaimAction {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    match claim.and_then(|claim| claim.uid.as_deref()) == Some(spec.id.claim_uid()) {
        true => ClaimAction::Ignore(ClaimIgnoreReason::HasVolume),
        false => ClaimAction::Reject(ClaimRejection::NameConflict { id: spec.id.clone() }),
    }
}

pub(crate) fn build_spec(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
) -> Result<VolumeSpec, ClaimRejection> {
    let (meta, empty) = (&claim.metadata, PersistentVolumeClaimSpec::default());
    let request = claim.spec.as_ref().unwrap_or(&empty);
    let uid = meta.uid.as_deref().unwrap_or_default();
    let id = VolumeId::from_uid(uid).map_err(|_| ClaimRejection::InvalidUid { uid: uid.to_owned() })?;
    let is_block = checked_mode(request)?;
    let capacity = size::requested_capacity(request)?;
    let (kind, limits) = size::volume_shape(capacity, class, is_block)?;
    Ok(VolumeSpec {
        id,
        capacity,
        kind,
        limits,
        claim_ref: claim_reference(claim),
        access_modes: checked_access_modes(request)?,
        storage_class: class_name(claim).unwrap_or_default().to_owned(),
        source: requested_source(request)?,
        attributes_class: requested_attributes(claim).map(str::to_owned),
        // A device is not mounted.
        mount_options: if is_block { Vec::new() } else { checked_mount_options(class, kind)? },
        reclaim_policy: parse_reclaim_policy(class)?,
    })
}

/// Whether a claim asks for a block volume. Rejects one for an existing volume.
fn checked_mode(request: &PersistentVolumeClaimSpec) -> Result<bool, ClaimRejection> {
    let reject =
        |field, value: &str, hint| Err(ClaimRejection::Unsupported { field, value: value.to_owned(), hint });
    if request.selector.is_some() {
        return reject("spec.selector", "", ": selectors apply to pre-provisioned volumes only");
    }
    match request.volume_mode.as_deref() {
        None | Some("" | "Filesystem") => Ok(false),
        Some("Block") => Ok(true),
        Some(mode) => reject("spec.volumeMode", mode, ": use Filesystem or Block"),
    }
}

fn checked_access_modes(request: &PersistentVolumeClaimSpec) -> Result<Vec<String>, ClaimRejection> {
    let mut modes = request.access_modes.clone().unwrap_or_default();
    // The kubelet passes only the first mode to the CSI plugin; with ReadOnlyMany first, no pod could write.
    modes.sort_by_key(|mode| mode == "ReadOnlyMany");
    let rejected = match modes.iter().find(|mode| !ACCESS_MODES.contains(&mode.as_str())) {
        Some(mode) => Some(mode.clone()),
        None => modes.is_empty().then(String::new),
    };
    let Some(value) = rejected else { return Ok(modes) };
    let hint = ": use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany";
    Err(ClaimRejection::Unsupported { field: "spec.accessModes", value, hint })
}

/// The class's mount options for a volume of this kind. The kubelet would report one that is unknown or refused only
/// once a pod waits for its mount.
fn checked_mount_options(class: &StorageClass, kind: VolumeKind) -> Result<Vec<String>, ClaimRejection> {
    let options = class.mount_options.as_deref().unwrap_or_default();
    let reject = |value: &str, hint| {
        let field = "the class's mountOptions";
        Err(ClaimRejection::Unsupported { field, value: value.to_owned(), hint })
    };
    let mut has_devices = false;
    for flag in split_options(options) {
        match flag.parse() {
            Ok(MountOption::Dev(allowed)) => has_devices = allowed,
            Ok(_) => {}
            Err(UnknownMountOption) => return reject(flag, UnknownMountOption::HINT),
        }
    }
    match has_devices && kind != VolumeKind::Directory {
        true => reject("dev", " by strict volumes: remove it, or use a class without strict"),
        false => Ok(options.to_owned()),
    }
}

fn parse_reclaim_policy(class: &StorageClass) -> Result<ReclaimPolicy, ClaimRejection> {
    match class.reclaim_policy.as_deref() {
        None | Some("" | "Delete") => Ok(ReclaimPolicy::Delete),
        Some("Retain") => Ok(ReclaimPolicy::Retain),
        Some(other) => Err(ClaimRejection::Unsupported {
            field: "the class's reclaimPolicy",
            value: other.to_owned(),
            hint: ": use Delete or Retain",
        }),
    }
}

/// A complete reference to the claim, so that the PersistentVolume controller adds nothing when it binds the
/// volume.
pub(crate) fn claim_reference(claim: &PersistentVolumeClaim) -> ObjectReference {
    let meta = &claim.metadata;
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        namespace: meta.namespace.clone(),
        name: meta.name.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        field_path: None,
    }
}
