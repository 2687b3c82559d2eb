//! What becomes of a PersistentVolume.

use k8s_openapi::api::core::v1::{
    NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, PersistentVolumeSpec,
};

use crate::id::VolumeId;
use crate::plan::{HOSTNAME, Identity, PROVISIONED_BY, VolumeRefusal};

/// Most characters of a handle that a refusal repeats.
const SHOWN_CHARS: usize = 64;

/// What to do with a PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeAction {
    /// Nothing.
    Ignore(VolumeIgnored),
    /// Destroy the volume, then its object.
    Delete(VolumeId),
    /// Put our finalizer on: without it, the object could go while the data stay.
    Protect,
    /// Take our finalizer off, and leave the data.
    Release,
    /// Say why it is not destroyed, and wait until it changes.
    Refuse(VolumeRefusal),
}

/// Why nothing is to be done with a PersistentVolume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeIgnored {
    /// It is another driver's.
    OtherDriver,
    /// It is on another node, on several, or says nothing of the kind.
    OtherNode,
    /// It is in use, or about to be.
    InUse,
    /// It is to be kept.
    Retained,
    /// Its object is going away, and whoever did that has taken our finalizer off before.
    LetGo,
}

/// Decides on a volume.
pub fn plan_volume(me: &Identity, volume: &PersistentVolume) -> VolumeAction {
    let empty = PersistentVolumeSpec::default();
    let spec = volume.spec.as_ref().unwrap_or(&empty);
    if let Some(why) = not_here(me, spec) {
        return VolumeAction::Ignore(why);
    }
    let is_going = volume.metadata.deletion_timestamp.is_some();
    let is_protected = has_finalizer(me, volume);
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    let ends = match phase {
        "Released" => true,
        // Somebody else has failed to delete it, or has made it free for another claim: what is to go may go, if it still
        // names the claim that it was made for.
        "Available" | "Failed" => is_going && is_protected,
        _ => false,
    };
    match spec.persistent_volume_reclaim_policy.as_deref() {
        Some("Delete") if ends && is_going && !is_protected && me.finalizer.is_some() => {
            VolumeAction::Ignore(VolumeIgnored::LetGo)
        }
        Some("Delete") if ends => match own(me, volume, spec) {
            Ok(id) => VolumeAction::Delete(id),
            Err(refusal) => VolumeAction::Refuse(refusal),
        },
        Some("Delete") if lacks_finalizer(me, volume) && own(me, volume, spec).is_ok() => {
            VolumeAction::Protect
        }
        Some("Delete") => VolumeAction::Ignore(VolumeIgnored::InUse),
        // A finalizer on what is kept would only keep its object from being removed.
        _ if is_protected && own(me, volume, spec).is_ok() => VolumeAction::Release,
        _ => VolumeAction::Ignore(VolumeIgnored::Retained),
    }
}

/// Why a volume can't be on this node by this driver, as far as its driver and its affinity say.
pub(crate) fn not_here(me: &Identity, spec: &PersistentVolumeSpec) -> Option<VolumeIgnored> {
    if spec.csi.as_ref().is_none_or(|csi| csi.driver != me.driver.as_str()) {
        return Some(VolumeIgnored::OtherDriver);
    }
    let required = spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    let terms = required.map(|required| required.node_selector_terms.as_slice()).unwrap_or_default();
    let is_here = !terms.is_empty() && terms.iter().all(|term| is_bound_to(me, term));
    (!is_here).then_some(VolumeIgnored::OtherNode)
}

/// Whether a term lets in no other node. One that lets in several is not ours: another node could think the same.
fn is_bound_to(me: &Identity, term: &NodeSelectorTerm) -> bool {
    let is_us = |expression: &NodeSelectorRequirement| {
        let values = expression.values.as_deref().unwrap_or_default();
        expression.key == HOSTNAME && expression.operator == "In" && values == [me.node.as_str()]
    };
    term.match_expressions.iter().flatten().any(is_us)
}

/// The id of a volume that is here, if every sign agrees that we have made it.
fn own(
    me: &Identity,
    volume: &PersistentVolume,
    spec: &PersistentVolumeSpec,
) -> Result<VolumeId, VolumeRefusal> {
    let annotations = volume.metadata.annotations.as_ref();
    if annotations.and_then(|all| all.get(PROVISIONED_BY)).map(String::as_str) != Some(me.driver.as_str()) {
        return Err(VolumeRefusal::NotProvisioned);
    }
    let handle = spec.csi.as_ref().map(|csi| csi.volume_handle.as_str()).unwrap_or_default();
    let id: VolumeId = handle
        .parse()
        .map_err(|_| VolumeRefusal::Handle { handle: handle.chars().take(SHOWN_CHARS).collect() })?;
    if volume.metadata.name.as_deref() != Some(id.as_str()) {
        return Err(VolumeRefusal::OtherVolume { handle: id });
    }
    let claim = spec.claim_ref.as_ref();
    let claim = claim
        .map(|claim| [&claim.namespace, &claim.name, &claim.uid].map(|text| text.as_deref().unwrap_or("")));
    match claim {
        Some([namespace, name, uid]) if !namespace.is_empty() && !name.is_empty() && !uid.is_empty() => {
            match uid == id.claim_uid() {
                true => Ok(id),
                false => Err(VolumeRefusal::OtherClaim { handle: id, claim: uid.to_owned() }),
            }
        }
        _ => Err(VolumeRefusal::NoClaim { handle: id }),
    }
}

/// Whether our finalizer is on it.
pub(crate) fn has_finalizer(me: &Identity, volume: &PersistentVolume) -> bool {
    let mut finalizers = volume.metadata.finalizers.iter().flatten();
    me.finalizer.as_ref().is_some_and(|ours| finalizers.any(|finalizer| finalizer == ours))
}

/// Whether our finalizer should be on it and still can be put on: not once it is going away.
fn lacks_finalizer(me: &Identity, volume: &PersistentVolume) -> bool {
    let is_going = volume.metadata.deletion_timestamp.is_some();
    me.finalizer.is_some() && !is_going && !has_finalizer(me, volume)
}
