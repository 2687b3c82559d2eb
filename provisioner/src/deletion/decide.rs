//! Plans the action for a PersistentVolume.

use k8s_openapi::api::core::v1::{
    NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, PersistentVolumeSpec,
};

use crate::id::VolumeId;
use crate::plan::{PROVISIONED_BY, ProvisionerIdentity, VolumeRejection};

/// Maximum characters of a handle in a rejection.
const SHOWN_CHARS: usize = 64;

/// What to do with a PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeAction {
    /// Nothing.
    Ignore(VolumeIgnoreReason),
    /// Remove the volume, then its object.
    Delete(VolumeId),
    /// Add our finalizer: without it, the object could be deleted while the data stay.
    AddFinalizer,
    /// Remove our finalizer, and keep the data.
    RemoveFinalizer,
    /// Annotate it with the UID of the claim that it is bound to, which is not the one that it was created
    /// for: an administrator has made it available again. So it can be deleted after that claim.
    RecordClaim {
        /// The claim's UID.
        uid: String,
    },
    /// Emit an event with the reason why it is not deleted, and wait until it changes.
    Reject(VolumeRejection),
}

/// Why a PersistentVolume needs no action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeIgnoreReason {
    /// It belongs to another driver.
    OtherDriver,
    /// Its affinity names another node, several nodes, or none.
    OtherNode,
    /// It is bound, or about to be.
    InUse,
    /// Its reclaim policy is not Delete.
    Retained,
    /// Its object is being deleted, and our finalizer was removed before.
    FinalizerRemoved,
}

/// Plans the action for a volume.
pub fn plan_volume(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> VolumeAction {
    let empty = PersistentVolumeSpec::default();
    let spec = volume.spec.as_ref().unwrap_or(&empty);
    if let Some(reason) = ownership_mismatch(identity, spec) {
        return VolumeAction::Ignore(reason);
    }
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    let is_protected = has_finalizer(identity, volume);
    let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
    let may_delete = match phase {
        "Released" => true,
        // Another component failed to delete it, or made it available to another claim: it may be deleted if
        // it still names the claim that it was created for.
        "Available" | "Failed" => is_deleting && is_protected,
        _ => false,
    };
    if phase == "Bound"
        && let Err(VolumeRejection::ClaimMismatch { claim, .. }) = verify_ownership(identity, volume, spec)
    {
        return VolumeAction::RecordClaim { uid: claim };
    }
    match spec.persistent_volume_reclaim_policy.as_deref() {
        Some("Delete") if may_delete && is_deleting && !is_protected && identity.finalizer.is_some() => {
            VolumeAction::Ignore(VolumeIgnoreReason::FinalizerRemoved)
        }
        Some("Delete") if may_delete => match verify_ownership(identity, volume, spec) {
            Ok(id) => VolumeAction::Delete(id),
            Err(rejection) => VolumeAction::Reject(rejection),
        },
        Some("Delete")
            if lacks_finalizer(identity, volume) && verify_ownership(identity, volume, spec).is_ok() =>
        {
            VolumeAction::AddFinalizer
        }
        Some("Delete") => VolumeAction::Ignore(VolumeIgnoreReason::InUse),
        // A finalizer on a retained volume would only block the deletion of its object.
        _ if is_protected && verify_ownership(identity, volume, spec).is_ok() => {
            VolumeAction::RemoveFinalizer
        }
        _ => VolumeAction::Ignore(VolumeIgnoreReason::Retained),
    }
}

/// Why a volume is not one of this driver on this node, judged by its driver and its affinity.
pub(crate) fn ownership_mismatch(
    identity: &ProvisionerIdentity,
    spec: &PersistentVolumeSpec,
) -> Option<VolumeIgnoreReason> {
    if spec.csi.as_ref().is_none_or(|csi| csi.driver != identity.driver.as_str()) {
        return Some(VolumeIgnoreReason::OtherDriver);
    }
    let required = spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    let terms = required.map(|required| required.node_selector_terms.as_slice()).unwrap_or_default();
    let is_here = !terms.is_empty() && terms.iter().all(|term| selects_only_node(identity, term));
    (!is_here).then_some(VolumeIgnoreReason::OtherNode)
}

/// Whether a term selects this node only. A term that selects several is not ours: each of them would claim
/// the volume.
fn selects_only_node(identity: &ProvisionerIdentity, term: &NodeSelectorTerm) -> bool {
    let is_node = |expression: &NodeSelectorRequirement| {
        let values = expression.values.as_deref().unwrap_or_default();
        expression.operator == "In" && identity.is_label_of_node(&expression.key, values)
    };
    term.match_expressions.iter().flatten().any(is_node)
}

/// The id of a volume on this node, if all its fields agree that we provisioned it.
pub(crate) fn verify_ownership(
    identity: &ProvisionerIdentity,
    volume: &PersistentVolume,
    spec: &PersistentVolumeSpec,
) -> Result<VolumeId, VolumeRejection> {
    let annotations = volume.metadata.annotations.as_ref();
    if annotations.and_then(|all| all.get(PROVISIONED_BY)).map(String::as_str)
        != Some(identity.driver.as_str())
    {
        return Err(VolumeRejection::NotProvisioned);
    }
    let handle = spec.csi.as_ref().map(|csi| csi.volume_handle.as_str()).unwrap_or_default();
    let id: VolumeId = handle
        .parse()
        .map_err(|_| VolumeRejection::InvalidHandle { handle: handle.chars().take(SHOWN_CHARS).collect() })?;
    if volume.metadata.name.as_deref() != Some(id.as_str()) {
        return Err(VolumeRejection::HandleMismatch { handle: id });
    }
    let claim = spec.claim_ref.as_ref();
    let claim = claim
        .map(|claim| [&claim.namespace, &claim.name, &claim.uid].map(|text| text.as_deref().unwrap_or("")));
    match claim {
        Some([namespace, name, uid]) if !namespace.is_empty() && !name.is_empty() && !uid.is_empty() => {
            let annotation = identity.driver.claim_annotation();
            let recorded = annotations.and_then(|all| all.get(&annotation)).map(String::as_str);
            match uid == id.claim_uid() || recorded == Some(uid) {
                true => Ok(id),
                false => {
                    Err(VolumeRejection::ClaimMismatch { handle: id, claim: uid.to_owned(), annotation })
                }
            }
        }
        _ => Err(VolumeRejection::NoClaim { handle: id }),
    }
}

/// Whether a volume has our finalizer.
pub(crate) fn has_finalizer(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let mut finalizers = volume.metadata.finalizers.iter().flatten();
    identity.finalizer.as_ref().is_some_and(|ours| finalizers.any(|finalizer| finalizer == ours))
}

/// Whether our finalizer is missing and can still be added: not while the object is being deleted.
fn lacks_finalizer(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    identity.finalizer.is_some() && !is_deleting && !has_finalizer(identity, volume)
}
