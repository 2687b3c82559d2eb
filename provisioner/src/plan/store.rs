//! Decides whether a directory is the store of the node's volumes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::id::VolumeId;
use crate::plan::{ProvisionerIdentity, ownership_mismatch};
use crate::store_id::{StoreId, StoreIdentity};

/// The volume attribute with the id of the store that the volume was created in.
pub const STORE_ATTRIBUTE: &str = "store";

/// What to do with a store before its volumes are served.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreAction {
    /// Serve its volumes.
    Serve,
    /// Create its identity: it is new, or one of a release without identities.
    CreateIdentity,
    /// Change nothing: it is not the store of this node's volumes.
    Reject(StoreRejection),
}

/// Why a store is not the one of the node's volumes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreRejection {
    /// It has no identity, and a PersistentVolume of this node names one.
    #[error(
        "the directory has no store-id, and PersistentVolume {volume} is in store {store}: mount the disk of the \
         volumes; if it is lost for good, delete the PersistentVolumes of this node and their finalizers"
    )]
    Absent {
        /// The PersistentVolume.
        volume: VolumeId,
        /// Its store.
        store: StoreId,
    },
    /// It has none of the node's volumes, which were created by a release without identities.
    #[error(
        "the directory has not one of the {count} volumes of this node, such as {volume}: mount their disk; if it \
         is lost for good, delete the PersistentVolumes of this node and their finalizers"
    )]
    WithoutVolumes {
        /// A PersistentVolume.
        volume: VolumeId,
        /// The number of PersistentVolumes.
        count: usize,
    },
    /// It has an identity, and the PersistentVolumes of this node name another one only.
    #[error(
        "the directory is store {found}, but PersistentVolume {volume} is in store {store} \
         (volumeAttributes.store), so another disk is mounted: mount the disk of the volumes; if it is lost \
         for good, delete the PersistentVolumes of this node and their finalizers"
    )]
    Other {
        /// The identity that was found.
        found: StoreId,
        /// A PersistentVolume.
        volume: VolumeId,
        /// Its store.
        store: StoreId,
    },
}

/// Decides whether a store with this identity and these volumes is the one of a node with these
/// PersistentVolumes. Those of other drivers and nodes do not count.
pub fn plan_store<'a>(
    identity: &ProvisionerIdentity,
    (found, present): (&StoreIdentity, &BTreeSet<VolumeId>),
    objects: impl IntoIterator<Item = &'a PersistentVolume>,
) -> StoreAction {
    let ours: Vec<_> = objects.into_iter().filter_map(|object| node_volume(identity, object)).collect();
    let first_named = ours.iter().find_map(|volume| Some((volume.id.clone(), volume.store.clone()?)));
    let without_volumes = |volume: &NodeVolume| {
        let volume = volume.id.clone();
        StoreAction::Reject(StoreRejection::WithoutVolumes { volume, count: ours.len() })
    };
    let has_none = !ours.iter().any(|volume| present.contains(&volume.id));
    match (found, first_named) {
        (StoreIdentity::Unsupported, _) => StoreAction::Serve,
        (StoreIdentity::Present(found), Some((volume, store))) => {
            match ours.iter().any(|volume| volume.store.as_ref() == Some(found)) {
                true => StoreAction::Serve,
                false => StoreAction::Reject(StoreRejection::Other { found: found.clone(), volume, store }),
            }
        }
        // The directories of those that are not bound may have been removed.
        (StoreIdentity::Present(_), None) => match ours.iter().find(|volume| volume.is_bound) {
            Some(bound) if has_none => without_volumes(bound),
            _ => StoreAction::Serve,
        },
        (StoreIdentity::Absent, Some((volume, store))) => {
            StoreAction::Reject(StoreRejection::Absent { volume, store })
        }
        (StoreIdentity::Absent, None) => match ours.first() {
            Some(first) if has_none => without_volumes(first),
            _ => StoreAction::CreateIdentity,
        },
    }
}

/// A volume of this driver on this node.
struct NodeVolume {
    id: VolumeId,
    /// The store that it names.
    store: Option<StoreId>,
    is_bound: bool,
}

fn node_volume(identity: &ProvisionerIdentity, object: &PersistentVolume) -> Option<NodeVolume> {
    let spec = object.spec.as_ref().filter(|spec| ownership_mismatch(identity, spec).is_none())?;
    let id: VolumeId = spec.csi.as_ref()?.volume_handle.parse().ok()?;
    let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
    let is_ours = object.metadata.name.as_deref() == Some(id.as_str());
    is_ours.then(|| NodeVolume { id, store: named_store(object), is_bound: phase == Some("Bound") })
}

/// The store that a PersistentVolume names; `None` for one of a release without identities.
pub(crate) fn named_store(volume: &PersistentVolume) -> Option<StoreId> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    csi.volume_attributes.as_ref()?.get(STORE_ATTRIBUTE)?.parse().ok()
}
