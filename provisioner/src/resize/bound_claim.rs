//! A bound claim and its volume, as both kinds of resizing look at them.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use nodekeel_fsquota::{Bytes, Inodes};

use crate::claim::attributes::requested_attributes;
use crate::claim::size;
use crate::deletion::decide::verify_ownership;
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::image::VolumeKind;
use crate::objects::{bound_volume_name, is_in_store, named_kind};
use crate::quantity::parse_quantity;
use crate::store::VolumeUsage;

/// A bound claim, its volume, and the objects related to them.
#[derive(Debug, Clone, Copy)]
pub struct BoundClaim<'a> {
    /// The claim.
    pub claim: &'a PersistentVolumeClaim,
    /// The PersistentVolume.
    pub volume: &'a PersistentVolume,
    /// The storage class, if it still exists.
    pub class: Option<&'a StorageClass>,
    /// The VolumeAttributesClass with the name of [`BoundClaim::wanted_attributes`], if it exists.
    pub attributes: Option<&'a VolumeAttributesClass>,
    /// The volume's limits and usage.
    pub usage: VolumeUsage,
}

impl<'a> BoundClaim<'a> {
    /// The VolumeAttributesClass that the volume should have: that of the claim, or else that of the
    /// PersistentVolume, which the API server does not let be removed.
    pub fn wanted_attributes(&self) -> Option<&'a str> {
        let spec = self.volume.spec.as_ref();
        let given = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
        requested_attributes(self.claim).or(given.filter(|name| !name.is_empty()))
    }

    /// The status of the claim, which a bound one has.
    pub(crate) fn status(&self) -> PersistentVolumeClaimStatus {
        self.claim.status.clone().unwrap_or_default()
    }

    /// Returns whether the volume is a block or strict one, which has no inode limit and never shrinks.
    pub(crate) fn is_image(&self) -> bool {
        // An unknown kind, such as one of a later release, counts as an image: those never shrink.
        named_kind(self.volume) != Ok(VolumeKind::Directory)
    }

    /// The inode limit that the storage class gives a volume of this size; `None` if it is deleted.
    pub(crate) fn class_inodes(&self, size: Bytes) -> Option<Inodes> {
        self.class.and_then(|class| size::inode_limit(size, class).ok())
    }
}

/// The volume of a claim, if the claim and a PersistentVolume of this node agree that they are bound to each
/// other, and neither is being deleted.
pub(crate) fn bound_volume(
    identity: &ProvisionerIdentity,
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<VolumeId> {
    let spec = volume.spec.as_ref()?;
    // The two must name each other: each of them can be edited alone.
    let is_bound = bound_volume_name(claim).is_some_and(|name| volume.metadata.name.as_deref() == Some(name))
        && spec.claim_ref.as_ref().is_some_and(|reference| reference.uid == claim.metadata.uid);
    let is_deleting =
        claim.metadata.deletion_timestamp.is_some() || volume.metadata.deletion_timestamp.is_some();
    let is_ours = is_in_store(identity, volume);
    (is_bound && is_ours && !is_deleting).then(|| verify_ownership(identity, volume, spec).ok()).flatten()
}

/// The capacity of a PersistentVolume; 0 if it has none, so that it gets one.
pub(crate) fn volume_capacity(volume: &PersistentVolume) -> Bytes {
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage"));
    Bytes(capacity.and_then(|capacity| parse_quantity(&capacity.0).ok()).unwrap_or_default())
}
