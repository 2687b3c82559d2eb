//! Decides whether a directory is the store of the node's volumes.

use std::borrow::Borrow;
use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::objects::{
    is_in_store, is_marked_lost, is_of_driver, is_on_node, named_store, node_of_volume, store_name,
};
use crate::snapshot::SnapshotId;
use crate::store_id::{StoreId, StoreIdentity};

/// The action for a store before its volumes are served.
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

/// The reason why a store is not the one of the node's volumes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreRejection {
    /// Has no identity, and a PersistentVolume of this node names one.
    #[error(
        "the directory has no store-id, and PersistentVolume {volume} is in store {store}: mount the disk of the \
         volumes; if it is lost for good, run `provisionerd store replace --lost {store}` on this node"
    )]
    Absent {
        /// The PersistentVolume.
        volume: VolumeId,
        /// The store.
        store: StoreId,
    },
    /// Has none of the node's volumes, which were created by a release without identities.
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
    /// Has no identity, and not one of the snapshots of this node, which has no volumes.
    #[error(
        "the directory has not one of the {count} snapshots of this node, such as {snapshot}: mount their disk; if it \
         is lost for good, delete the VolumeSnapshotContents of this node and their finalizers"
    )]
    WithoutSnapshots {
        /// A snapshot.
        snapshot: SnapshotId,
        /// The number of snapshots.
        count: usize,
    },
    /// Has an identity, and the PersistentVolumes of this node name another one only.
    #[error(
        "the directory is store {found}, but PersistentVolume {volume} is in store {store} \
         (volumeAttributes.store), so another disk is mounted: mount the disk of the volumes; if it is lost \
         for good, run `provisionerd store replace --lost {store}` on this node"
    )]
    Other {
        /// The identity that was found.
        found: StoreId,
        /// A PersistentVolume.
        volume: VolumeId,
        /// The store.
        store: StoreId,
    },
    /// Is the store of another node's volumes: its disk was moved here, or is a copy of theirs.
    #[error(
        "the directory is store {store} of node {node}, which has PersistentVolume {volume}: move its disk back; to keep \
         the volumes here, see \"Move a disk with volumes\" in docs/operations.md; if it is a copy, remove the files \
         store-id and volumes"
    )]
    Moved {
        /// The store.
        store: StoreId,
        /// The other node.
        node: String,
        /// A PersistentVolume of that node.
        volume: String,
    },
    /// Is another store of this node: the directories of its stores were exchanged, or their disks.
    #[error(
        "the directory is store {store}, in which PersistentVolume {volume} is by the name {name:?} (volumeAttributes.storeName): \
         give each store of the configuration the directory of its own disk"
    )]
    OtherName {
        /// The store.
        store: StoreId,
        /// The name of the store; empty for the one without a name.
        name: String,
        /// A PersistentVolume of that name.
        volume: String,
    },
}

/// Decides whether a store with this identity and these volumes is the one of a node with these
/// PersistentVolumes. Those of other drivers do not count, nor those declared lost; those of other nodes show that
/// the store was moved. Before an identity is created, [`plan_new_store`](crate::plan_new_store) looks at its snapshots.
pub fn plan_store(
    identity: &ProvisionerIdentity,
    found: &StoreIdentity,
    present: &BTreeSet<VolumeId>,
    objects: impl IntoIterator<Item: Borrow<PersistentVolume>>,
) -> StoreAction {
    // Looked at one by one: a node may have many, and who calls this need not keep them all.
    let (mut ours, mut elsewhere) = (Vec::new(), None);
    for object in objects {
        ours.extend(node_volume(identity, object.borrow()));
        elsewhere = elsewhere.or_else(|| find_other_node(identity, found.id()?, object.borrow()));
    }
    let first_named = ours.iter().find_map(|volume| Some((volume.id.clone(), volume.store.clone()?)));
    let without_volumes = |volume: &NodeVolume| {
        let volume = volume.id.clone();
        StoreAction::Reject(StoreRejection::WithoutVolumes { volume, count: ours.len() })
    };
    let has_none = !ours.iter().any(|volume| present.contains(&volume.id));
    let is_named = |found: &StoreId| ours.iter().any(|volume| volume.store.as_ref() == Some(found));
    // A disk that was moved here has another node's identity, so it must not count as this node's empty store.
    let is_unnamed = found.id().is_some_and(|found| !is_named(found));
    if let Some(moved) = elsewhere.filter(|_| is_unnamed) {
        return StoreAction::Reject(moved);
    }
    match (found, first_named) {
        // A store without identities can't be told from another one.
        (StoreIdentity::Unsupported, _) => StoreAction::Serve,
        (StoreIdentity::Present(found), Some(_)) if is_named(found) => StoreAction::Serve,
        (StoreIdentity::Present(found), Some((volume, store))) => {
            StoreAction::Reject(StoreRejection::Other { found: found.clone(), volume, store })
        }
        // The directories of those that are not bound may have been removed.
        (StoreIdentity::Present(_), None) => match ours.iter().find(|volume| volume.is_bound) {
            Some(bound) if has_none => without_volumes(bound),
            _ => StoreAction::Serve,
        },
        // This is a new disk, or the mount point of an absent one: it must not be served in place of the named store.
        (StoreIdentity::Absent, Some((volume, store))) => {
            StoreAction::Reject(StoreRejection::Absent { volume, store })
        }
        (StoreIdentity::Absent, None) => match ours.first() {
            // Volumes of a release without identities name no store. If not one of them is here, their disk is absent.
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
    if !is_in_store(identity, object) || is_marked_lost(identity, object) {
        return None;
    }
    let spec = object.spec.as_ref()?;
    let id: VolumeId = spec.csi.as_ref()?.volume_handle.parse().ok()?;
    let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
    let is_ours = object.metadata.name.as_deref() == Some(id.as_str());
    is_ours.then(|| NodeVolume { id, store: named_store(object), is_bound: phase == Some("Bound") })
}

/// The rejection of the store of another node, or of another name, if this volume is there and names it.
fn find_other_node(
    identity: &ProvisionerIdentity,
    found: &StoreId,
    object: &PersistentVolume,
) -> Option<StoreRejection> {
    let is_elsewhere = is_of_driver(identity, object)
        && !is_in_store(identity, object)
        && named_store(object).as_ref() == Some(found);
    if !is_elsewhere {
        return None;
    }
    let (store, volume) = (found.clone(), object.metadata.name.clone().unwrap_or_default());
    if is_on_node(identity, object) {
        let name = store_name(object).unwrap_or_default().to_owned();
        return Some(StoreRejection::OtherName { store, name, volume });
    }
    Some(StoreRejection::Moved {
        store,
        node: node_of_volume(object).unwrap_or("unknown").to_owned(),
        volume,
    })
}

/// Decides whether a store that [`plan_store`](crate::plan_store) found to be new is one, although the node has ready
/// snapshots: without any of them, it may be a directory whose disk isn't mounted.
///
/// Snapshots name the store at most by its name. So they count only where no PersistentVolume names the right store, or the one
/// that was declared lost.
pub fn plan_new_store(
    identity: &ProvisionerIdentity,
    present: &BTreeSet<SnapshotId>,
    ready: &BTreeSet<SnapshotId>,
    volumes: impl IntoIterator<Item: Borrow<PersistentVolume>>,
) -> StoreAction {
    match ready.first() {
        Some(snapshot)
            if present.is_disjoint(ready)
                && !volumes.into_iter().any(|volume| is_in_store(identity, volume.borrow())) =>
        {
            let (snapshot, count) = (snapshot.clone(), ready.len());
            StoreAction::Reject(StoreRejection::WithoutSnapshots { snapshot, count })
        }
        _ => StoreAction::CreateIdentity,
    }
}
