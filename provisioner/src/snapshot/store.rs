//! Storage of snapshots: the trait and its errors.

use std::fmt;
use std::time::SystemTime;

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, QuotaLimits};

use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::snapshot::{SnapshotId, StoredId};
use crate::store::{ErrorSource, ImagesUnsupported, VolumeStoreError};

/// A snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// When it was created.
    pub created: SystemTime,
    /// The smallest byte limit of a volume that is created from it: the limit of its volume at that time.
    pub restore_size: Bytes,
    /// The kind of its volume, and of a volume that is created from it.
    pub kind: VolumeKind,
}

/// Creates and removes the snapshots of one node, and creates volumes from them and from other volumes. The
/// [`VolumeStore`](crate::VolumeStore) of the node's volumes implements it.
///
/// # Contract
/// - **Creation.** When [`create_snapshot`](Self::create_snapshot) returns, the snapshot has all files of the volume.
///   The volume may be in use: each file has the content of one moment of the call, and two files may have those of
///   different moments; one that is renamed during the call may be missing, or be there under both names. The volume is not
///   changed, and no other writer waits. Creating an existing snapshot returns it as it is.
/// - **Copies.** When [`create_volume_from`](Self::create_volume_from) returns, the volume has all files of its
///   source, with their owners, modes and times, and its own limits; at no time does it exist without either. Creating
///   an existing volume changes nothing but limits, which it raises as
///   [`VolumeStore::create`](crate::VolumeStore::create) does.
/// - **Independence.** A change of a volume, a snapshot or a copy, or its removal, changes no other one.
/// - **Images.** A snapshot of a block or strict volume is one of the same kind, as after a power loss, but for what a
///   mounted file system had in memory, which it has; and so is a copy.
/// - **Publication.** Until [`mark_published`](Self::mark_published), or until it is opened for a pod, a volume created
///   from a source counts as empty: [`VolumeStore::remove_empty`](crate::VolumeStore::remove_empty) removes it.
/// - **Removal.** When [`remove_snapshot`](Self::remove_snapshot) returns, no other method finds the snapshot. Removing
///   a missing snapshot succeeds.
/// - **Atomicity.** After an error, a crash or a dropped future, each has happened completely or not at all, once the
///   store has been opened again; and each can be called again.
/// - **Identity**, **durability** and **concurrency** are those of [`VolumeStore`](crate::VolumeStore).
///
/// `testing::snapshot_conformance` (feature `testing`) checks any store against it.
#[async_trait]
pub trait SnapshotStore: Send + Sync + fmt::Debug {
    /// Creates a snapshot of a volume.
    ///
    /// # Errors
    /// [`SnapshotStoreError::Unsupported`], [`SnapshotStoreError::NoVolume`], [`SnapshotStoreError::Create`].
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError>;

    /// A snapshot; `None` if it does not exist.
    ///
    /// # Errors
    /// [`SnapshotStoreError::Read`]: a retry can help.
    async fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, SnapshotStoreError>;

    /// Removes a snapshot and all its data, which may be erased in the background.
    ///
    /// # Errors
    /// [`SnapshotStoreError::Remove`]: the snapshot may still be there; a retry can help.
    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), SnapshotStoreError>;

    /// All snapshots, sorted by id.
    ///
    /// # Errors
    /// [`SnapshotStoreError::List`]: a retry can help.
    async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, SnapshotStoreError>;

    /// Creates a volume with these limits and the files of its source.
    ///
    /// # Errors
    /// [`VolumeStoreError::Exhausted`]: the node has no free space for it, and no other node has the source.
    /// [`VolumeStoreError::Create`]: the source is missing or larger than the limits, the store can't copy, or
    /// anything else; a retry can help.
    async fn create_volume_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        limits: QuotaLimits,
    ) -> Result<(), VolumeStoreError>;

    /// Creates a block or strict volume of this format and size with the content of its source, which has this format,
    /// too. It is larger than requested if its source is by the rounding of its size. Default: an error.
    ///
    /// # Errors
    /// Those of [`create_volume_from`](Self::create_volume_from).
    async fn create_image_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let _ = (source, format, size);
        Err(VolumeStoreError::Create { id: id.clone(), source: Box::new(ImagesUnsupported) })
    }

    /// Records that a volume has a PersistentVolume, so that its data may be needed. Of other volumes than those
    /// created from a source or as an image, and of missing ones, nothing is recorded.
    ///
    /// # Errors
    /// [`VolumeStoreError::Open`]: a retry can help.
    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError>;
}

/// An operation on a snapshot failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotStoreError {
    /// The store can't take snapshots, such as one on ext4. A retry does not help.
    #[error("can't take snapshots on this node")]
    Unsupported {
        /// The missing capability.
        #[source]
        source: ErrorSource,
    },
    /// The volume does not exist on this node. A retry does not help.
    #[error("can't create snapshot {id}: volume {volume} does not exist on this node")]
    NoVolume {
        /// The snapshot.
        id: SnapshotId,
        /// The volume that it would be taken of.
        volume: VolumeId,
    },
    /// Creating the snapshot failed; nothing of it is visible.
    #[error("can't create snapshot {id}")]
    Create {
        /// The snapshot.
        id: SnapshotId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Reading the snapshot failed.
    #[error("can't read snapshot {id}")]
    Read {
        /// The snapshot.
        id: SnapshotId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Removing the snapshot failed, or making the removal durable did.
    #[error("can't remove snapshot {id}")]
    Remove {
        /// The snapshot.
        id: SnapshotId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Listing the snapshots failed.
    #[error("can't list the snapshots on this node")]
    List {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
}
