//! Plans the action for a PersistentVolume.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeSpec};

use crate::id::VolumeId;
use crate::identity::{PROVISIONED_BY, ProvisionerIdentity};
use crate::objects::{has_finalizer, is_in_store, is_of_driver, is_on_node};

/// Maximum characters of a handle in a rejection.
const SHOWN_CHARS: usize = 64;

/// The action for a PersistentVolume.
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

/// The reason why a PersistentVolume needs no action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeIgnoreReason {
    /// Belongs to another driver.
    OtherDriver,
    /// The affinity names another node, several nodes, or none.
    OtherNode,
    /// Names another store of this node.
    OtherStore,
    /// Is bound, or about to be.
    InUse,
    /// The reclaim policy is not Delete.
    Retained,
    /// The object is being deleted, and our finalizer was removed before.
    FinalizerRemoved,
}

/// The reason why a volume is not deleted although its state asks for it: its fields contradict each other. The message
/// is the event's note.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeRejection {
    /// The handle is not a volume id.
    #[error("invalid volume handle {handle:?}: not a volume of this driver; nothing was deleted")]
    InvalidHandle {
        /// The handle, truncated to what fits into an event.
        handle: String,
    },
    /// The handle is the id of another volume.
    #[error(
        "the PersistentVolume's spec.csi.volumeHandle {handle} differs from its name, so it is not a volume \
         of this driver; nothing was deleted"
    )]
    HandleMismatch {
        /// The handle.
        handle: VolumeId,
    },
    /// The claim reference is missing or incomplete: an administrator has made the volume available to
    /// another claim.
    #[error(
        "PersistentVolume {handle} has no complete spec.claimRef, so its data may still be needed; nothing \
         was deleted (to delete the object and keep the data, remove the driver's finalizer)"
    )]
    NoClaim {
        /// The handle.
        handle: VolumeId,
    },
    /// The claim is neither the one that the volume was created for, nor one that it was seen bound to.
    #[error(
        "PersistentVolume {handle} was created for another claim than {claim:?} in its spec.claimRef; \
         nothing was deleted (to delete its data, annotate it: {annotation}={claim})"
    )]
    ClaimMismatch {
        /// The handle.
        handle: VolumeId,
        /// The UID of the claim in its reference.
        claim: String,
        /// The annotation of a volume that was bound to another claim.
        annotation: String,
    },
    /// The annotation of volumes provisioned by this driver is missing.
    #[error("the PersistentVolume was not provisioned by this driver; nothing was deleted")]
    NotProvisioned,
}

/// Plans the action for a volume.
pub fn plan_volume(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> VolumeAction {
    if !is_of_driver(identity, volume) {
        return VolumeAction::Ignore(VolumeIgnoreReason::OtherDriver);
    }
    if !is_on_node(identity, volume) {
        return VolumeAction::Ignore(VolumeIgnoreReason::OtherNode);
    }
    if !is_in_store(identity, volume) {
        return VolumeAction::Ignore(VolumeIgnoreReason::OtherStore);
    }
    let empty = PersistentVolumeSpec::default();
    let spec = volume.spec.as_ref().unwrap_or(&empty);
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
    // While it is bound: once it is released, its claim may be gone, and then nothing shows that the claim was real.
    if phase == "Bound"
        && let Err(VolumeRejection::ClaimMismatch { claim, .. }) = verify_ownership(identity, volume, spec)
    {
        return VolumeAction::RecordClaim { uid: claim };
    }
    match spec.persistent_volume_reclaim_policy.as_deref() {
        // We remove the finalizer after the data: the object is about to go.
        Some("Delete") if may_delete && is_deleting && !is_protected && identity.finalizer.is_some() => {
            VolumeAction::Ignore(VolumeIgnoreReason::FinalizerRemoved)
        }
        Some("Delete") if may_delete => match verify_ownership(identity, volume, spec) {
            Ok(id) => VolumeAction::Delete(id),
            Err(rejection) => VolumeAction::Reject(rejection),
        },
        // Without our finalizer, the object could be deleted before the data.
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
    // Two objects could have one handle, and the volume must not be deleted for the wrong one.
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
            // The claim that the volume was created for, or the one that this node has seen bound to it.
            if uid == id.claim_uid() || recorded == Some(uid) {
                Ok(id)
            } else {
                Err(VolumeRejection::ClaimMismatch { handle: id, claim: uid.to_owned(), annotation })
            }
        }
        _ => Err(VolumeRejection::NoClaim { handle: id }),
    }
}

/// Returns whether our finalizer is missing and can still be added: not while the object is being deleted.
fn lacks_finalizer(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let is_deleting = volume.metadata.deletion_timestamp.is_some();
    identity.finalizer.is_some() && !is_deleting && !has_finalizer(identity, volume)
}
