//! What becomes of a claim.

use k8s_openapi::api::core::v1::PersistentVolumeClaimSpec;
use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, TopologySelectorTerm,
};
use k8s_openapi::api::storage::v1::StorageClass;

use crate::id::VolumeId;
use crate::plan::{
    BETA_STORAGE_PROVISIONER, ClaimRefusal, HOSTNAME, Identity, Reclaim, SELECTED_NODE, STORAGE_PROVISIONER,
    VolumeSpec, size,
};

/// The annotation by which claims named their class before the field; it wins, as it does in Kubernetes.
const BETA_CLASS: &str = "volume.beta.kubernetes.io/storage-class";

/// Access modes that a directory of one node can serve.
const ACCESS_MODES: [&str; 3] = ["ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"];

/// A claim and what belongs to it, as far as they are known.
#[derive(Debug, Clone, Copy)]
pub struct SeenClaim<'a> {
    /// The claim.
    pub claim: &'a PersistentVolumeClaim,
    /// The class that it names, if that exists.
    pub class: Option<&'a StorageClass>,
    /// The PersistentVolume that has the name of the claim's volume, whoever made it.
    pub volume: Option<&'a PersistentVolume>,
}

/// What to do with a claim.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ClaimAction {
    /// Nothing.
    Ignore(ClaimIgnored),
    /// Say that this node makes the volume, before another one does.
    TakeNode,
    /// Make the volume and its PersistentVolume.
    Provision(Box<VolumeSpec>),
    /// Look again in a moment, and then refuse: what is missing may only not have been heard of.
    Wait(ClaimRefusal),
    /// Say why not, and wait until the claim or its class changes.
    Refuse(ClaimRefusal),
}

/// Why nothing is to be done with a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClaimIgnored {
    /// It is for another driver.
    OtherDriver,
    /// Its volume is on another node.
    OtherNode,
    /// No pod has been placed yet, so there is no node either.
    AwaitsNode,
    /// It has a volume, or will have in a moment.
    HasVolume,
    /// It is being deleted.
    Deleted,
    /// It has lost its volume, or is in a phase that isn't known.
    NotPending,
}

/// Decides on a claim.
pub fn plan_claim(me: &Identity, seen: SeenClaim<'_>) -> ClaimAction {
    if let Some(why) = ignored(me, seen.claim) {
        return ClaimAction::Ignore(why);
    }
    let Some(name) = class_name(seen.claim) else { return ClaimAction::Refuse(ClaimRefusal::NoClass) };
    let Some(class) = seen.class else {
        return ClaimAction::Wait(ClaimRefusal::UnknownClass { class: name.to_owned() });
    };
    if class.provisioner != me.driver.as_str() {
        return ClaimAction::Ignore(ClaimIgnored::OtherDriver);
    }
    let is_selected = annotation(seen.claim, SELECTED_NODE).is_some();
    match is_selected {
        false if waits_for_consumer(class) => return ClaimAction::Ignore(ClaimIgnored::AwaitsNode),
        false if !is_allowed(me, class) => return ClaimAction::Ignore(ClaimIgnored::OtherNode),
        _ => {}
    }
    match spec(seen.claim, class) {
        Ok(spec) => match seen.volume {
            Some(volume) => beside(&spec, volume),
            None if is_selected => ClaimAction::Provision(Box::new(spec)),
            None => ClaimAction::TakeNode,
        },
        // Where no node is selected, nobody has to speak for all: the first to take the claim does.
        Err(_) if !is_selected => ClaimAction::TakeNode,
        Err(refusal) => ClaimAction::Refuse(refusal),
    }
}

/// The name of a claim's class; none for the empty one, which asks for a volume that exists already.
pub(crate) fn class_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    let field = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    annotation(claim, BETA_CLASS).or(field).filter(|name| !name.is_empty())
}

/// Why a claim is none of this node's business by itself, whatever its class is.
pub(crate) fn ignored(me: &Identity, claim: &PersistentVolumeClaim) -> Option<ClaimIgnored> {
    let driver = annotation(claim, STORAGE_PROVISIONER).or(annotation(claim, BETA_STORAGE_PROVISIONER));
    if driver != Some(me.driver.as_str()) {
        return Some(ClaimIgnored::OtherDriver);
    }
    if annotation(claim, SELECTED_NODE).is_some_and(|node| node != me.node.as_str()) {
        return Some(ClaimIgnored::OtherNode);
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return Some(ClaimIgnored::Deleted);
    }
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    if volume.is_some_and(|name| !name.is_empty()) {
        return Some(ClaimIgnored::HasVolume);
    }
    // A claim that has just been made has no phase yet.
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    (!matches!(phase, "" | "Pending")).then_some(ClaimIgnored::NotPending)
}

/// An annotation; none if it is empty, which is how some tools remove one.
fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    let value = claim.metadata.annotations.as_ref().and_then(|annotations| annotations.get(key));
    value.map(String::as_str).filter(|value| !value.is_empty())
}

fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Whether the class allows volumes on this node. A key that isn't the host name says nothing that is known here.
fn is_allowed(me: &Identity, class: &StorageClass) -> bool {
    let names_us = |term: &TopologySelectorTerm| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions
            .all(|label| label.key == HOSTNAME && label.values.iter().any(|value| value == me.node.as_str()))
    };
    class.allowed_topologies.as_ref().is_none_or(|terms| terms.is_empty() || terms.iter().any(names_us))
}

/// What becomes of a claim whose volume's name is taken by a PersistentVolume.
fn beside(spec: &VolumeSpec, volume: &PersistentVolume) -> ClaimAction {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    match claim.and_then(|claim| claim.uid.as_deref()) == Some(spec.id.claim_uid()) {
        true => ClaimAction::Ignore(ClaimIgnored::HasVolume),
        false => ClaimAction::Refuse(ClaimRefusal::Taken { id: spec.id.clone() }),
    }
}

fn spec(claim: &PersistentVolumeClaim, class: &StorageClass) -> Result<VolumeSpec, ClaimRefusal> {
    let (meta, empty) = (&claim.metadata, PersistentVolumeClaimSpec::default());
    let asked = claim.spec.as_ref().unwrap_or(&empty);
    let uid = meta.uid.as_deref().unwrap_or_default();
    let id = VolumeId::from_uid(uid).map_err(|_| ClaimRefusal::Uid { uid: uid.to_owned() })?;
    check_kind(asked)?;
    let capacity = size::capacity(asked)?;
    Ok(VolumeSpec {
        id,
        capacity,
        limits: size::limits(capacity, class)?,
        claim: reference(claim),
        access_modes: access_modes(asked)?,
        class: class_name(claim).unwrap_or_default().to_owned(),
        mount_options: class.mount_options.clone().unwrap_or_default(),
        reclaim: reclaim(class)?,
    })
}

/// Refuses whatever asks for more than a new, empty directory.
fn check_kind(asked: &PersistentVolumeClaimSpec) -> Result<(), ClaimRefusal> {
    let refuse =
        |field, value: &str, hint| Err(ClaimRefusal::Unsupported { field, value: value.to_owned(), hint });
    if let Some(mode) = asked.volume_mode.as_deref().filter(|mode| !matches!(*mode, "" | "Filesystem")) {
        return refuse("spec.volumeMode", mode, ": use Filesystem");
    }
    if let Some(source) = &asked.data_source {
        return refuse("spec.dataSource", &source.name, ": volumes are made empty");
    }
    if let Some(source) = &asked.data_source_ref {
        return refuse("spec.dataSourceRef", &source.name, ": volumes are made empty");
    }
    if asked.selector.is_some() {
        return refuse("spec.selector", "", ": a selector is for volumes that exist already");
    }
    match asked.volume_attributes_class_name.as_deref() {
        None | Some("") => Ok(()),
        Some(class) => refuse("spec.volumeAttributesClassName", class, ""),
    }
}

fn access_modes(asked: &PersistentVolumeClaimSpec) -> Result<Vec<String>, ClaimRefusal> {
    let mut modes = asked.access_modes.clone().unwrap_or_default();
    // The kubelet tells the CSI plugin the first one alone, and with ReadOnlyMany nobody could ever write.
    modes.sort_by_key(|mode| mode == "ReadOnlyMany");
    let refused = match modes.iter().find(|mode| !ACCESS_MODES.contains(&mode.as_str())) {
        Some(mode) => Some(mode.clone()),
        None => modes.is_empty().then(String::new),
    };
    let Some(value) = refused else { return Ok(modes) };
    let hint = ": use ReadWriteOnce, ReadWriteOncePod or ReadOnlyMany";
    Err(ClaimRefusal::Unsupported { field: "spec.accessModes", value, hint })
}

fn reclaim(class: &StorageClass) -> Result<Reclaim, ClaimRefusal> {
    match class.reclaim_policy.as_deref() {
        None | Some("" | "Delete") => Ok(Reclaim::Delete),
        Some("Retain") => Ok(Reclaim::Retain),
        Some(other) => Err(ClaimRefusal::Unsupported {
            field: "the class's reclaimPolicy",
            value: other.to_owned(),
            hint: ": use Delete or Retain",
        }),
    }
}

/// The claim as a reference, complete, so that nobody has to add to it when the volume is bound.
pub(crate) fn reference(claim: &PersistentVolumeClaim) -> ObjectReference {
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
