//! Storage of volumes: the trait and its errors.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use nodekeel_fsquota::{AuditOptions, AuditSummary, Bytes, QuotaLimits, QuotaUsage};

use crate::capacity::policy::StoreCapacity;
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::store_id::StoreIdentity;

/// The source of an error, of any type.
pub type ErrorSource = Box<dyn Error + Send + Sync>;

/// The limits of a volume and what it uses of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeUsage {
    /// The limits in force.
    pub limits: QuotaLimits,
    /// The usage that counts against them.
    pub usage: QuotaUsage,
}

/// The limits of a volume as the kernel has them now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature, and made by implementations of stores")]
pub struct FoundLimits {
    /// The limits in force; those of a block or strict volume are its size.
    pub limits: QuotaLimits,
    /// The usage that counts against them.
    pub usage: QuotaUsage,
    /// False if not all files of the volume count against them, or those of another one do: it was copied or restored.
    pub is_own: bool,
}

/// What an audit of all volumes has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature, and made by implementations of stores")]
pub struct LimitAudit {
    /// The totals.
    pub summary: AuditSummary,
    /// The volumes with files and directories that don't count against their limits, and how many.
    pub uncounted: BTreeMap<VolumeId, u64>,
}

/// The attempts to open volumes for pods, since they were last asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature, and made by implementations of stores")]
pub struct PublishAttempts {
    /// The volumes.
    pub volumes: BTreeSet<VolumeId>,
    /// Of them, those that had lost their limits and have them again, and the number of files and directories in each
    /// that don't count against them all the same.
    pub restored: BTreeMap<VolumeId, u64>,
    /// One has failed, and not for a reason of its pod.
    pub has_failed: bool,
}

/// Creates, resizes and removes the volumes of one node.
///
/// # Contract
/// - **Creation.** When [`create`](Self::create) returns, the volume exists, is empty unless it existed
///   before, and has its limits; at no time does it exist without them. Creating an existing volume succeeds:
///   its data stay, and a limit lower than requested is raised, never lowered.
/// - **Images.** A volume that [`create_image`](Self::create_image) has created is a block device, or a file system, of
///   its size: its kind is in a mark that no pod can change. No method takes it for a directory, nor the other way round. Until
///   it is published, it counts as empty.
/// - **Removal.** When [`remove`](Self::remove) returns, no other method finds the volume, a crash does not
///   bring it back, and its name is free. Removing a missing volume succeeds. Its data may be erased in the
///   background, also after a restart; `remove` does not wait for it.
/// - **Identity.** A store that can be absent, such as a directory whose disk isn't mounted, has an
///   [`identity`](Self::identity). Without it, or once it is lost, the store changes nothing, and a missing
///   volume does not count as removed: each other method fails.
/// - **Capacity.** A store with a [`capacity`](Self::capacity) rejects what does not fit into it, except limits that
///   it has accepted before: existing volumes are served also above its capacity.
/// - **Emptiness.** [`remove_empty`](Self::remove_empty) is a removal like [`remove`](Self::remove), of an
///   empty volume only. [`usage`](Self::usage) is informational; no deletion depends on it.
/// - **Idempotence.** Each method can be called again after an error, a crash, or a dropped future, and then
///   reaches the state that the first call would have reached.
/// - **Durability.** The effect of a method that has returned survives a power loss.
/// - **Concurrency.** Methods may be called concurrently, also for the same volume; each call is atomic.
/// - **Cancel safety.** After a dropped future, the effect has happened completely or not at all, once the
///   store has been opened again.
/// - **Units.** Bytes and inodes, not rounded. `None` means unlimited.
///
/// `testing::conformance` (feature `testing`) checks any store against it.
#[async_trait]
pub trait VolumeStore: Send + Sync + fmt::Debug {
    /// Creates a volume with these limits.
    ///
    /// # Errors
    /// [`VolumeStoreError::Exhausted`]: this node has no free space for it; another node may.
    /// [`VolumeStoreError::Create`]: anything else; a retry can help.
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError>;

    /// Creates a block or strict volume of this format and size, in bytes, which may be rounded up to blocks of 4 KiB.
    /// Default: an error, for a store without such volumes.
    ///
    /// # Errors
    /// Those of [`create`](Self::create); [`VolumeStoreError::Create`] also if the volume exists and is of another
    /// kind, or if the node lacks the program that makes the file system.
    async fn create_image(
        &self,
        id: &VolumeId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let _ = (format, size);
        Err(VolumeStoreError::Create { id: id.clone(), source: Box::new(ImagesUnsupported) })
    }

    /// Sets the limits of a volume, raising or lowering each; its data stay even if they exceed the new
    /// limits. Those of a block or strict volume are its size, which can't be lowered, and no inode limit; its device
    /// and its file system have the new size at once.
    ///
    /// # Errors
    /// [`VolumeStoreError::NotFound`], [`VolumeStoreError::Exhausted`] or [`VolumeStoreError::Resize`].
    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError>;

    /// The limits and the usage of a volume.
    ///
    /// # Errors
    /// [`VolumeStoreError::NotFound`] or [`VolumeStoreError::Usage`].
    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError>;

    /// Looks whether the limits of a volume are still those that were set: other programs can change them, and a volume
    /// that was restored from a backup may have none. `is_image` is what its PersistentVolume says of its kind. `None`, the
    /// default: they can't be lost.
    ///
    /// # Errors
    /// [`VolumeStoreError::NotFound`]; [`VolumeStoreError::Usage`], also for a volume of the other kind.
    async fn find_limits(
        &self,
        id: &VolumeId,
        is_image: bool,
    ) -> Result<Option<FoundLimits>, VolumeStoreError> {
        let _ = (id, is_image);
        Ok(None)
    }

    /// Sets the limits of a volume whose limits were lost, so that each of its files counts against them. They were
    /// promised, so they are set above the capacity, too. Takes as long as reading the volume's directories. Those of
    /// a block or strict volume are set for its size; any other one is given an inode limit. Returns how many of its files
    /// and directories don't count all the same, such as those that another program has limited. Default:
    /// [`resize`](Self::resize).
    ///
    /// # Errors
    /// [`VolumeStoreError::NotFound`] or [`VolumeStoreError::Resize`].
    async fn restore_limits(&self, id: &VolumeId, limits: QuotaLimits) -> Result<u64, VolumeStoreError> {
        self.resize(id, limits).await.map(|()| 0)
    }

    /// Waits until volumes were to be opened for pods, and returns the attempts since the last call: their limits, and
    /// the store after a failure, should be looked at. Never returns, the default: it is not told.
    ///
    /// # Cancel safety
    /// Has no side effects: the attempts are returned by the next call.
    async fn wait_for_publish(&self) -> PublishAttempts {
        std::future::pending().await
    }

    /// Counts these volumes with these bytes in the [`capacity`](Self::capacity), if they have no limit: it was promised
    /// to them, and not nothing. Default: nothing happens.
    fn count_promised(&self, volumes: &[(VolumeId, Bytes)]) {
        let _ = volumes;
    }

    /// Removes a volume and all its data.
    ///
    /// # Errors
    /// [`VolumeStoreError::Remove`]: the volume may still be there; a retry can help.
    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError>;

    /// Removes a volume if it is completely empty: sweeps volumes that were created and never published.
    /// `false`: the volume is unchanged, because it is not empty, or because this store cannot tell, which is
    /// the default.
    ///
    /// The answer decides whether data are lost, so the store must look at the entries themselves, and not trust a
    /// count of the quota or of the file system.
    ///
    /// # Errors
    /// [`VolumeStoreError::Remove`]: the volume may still be there; a retry can help.
    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        let _ = id;
        Ok(false)
    }

    /// All volumes, sorted by id.
    ///
    /// # Errors
    /// [`VolumeStoreError::List`]: a retry can help.
    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError>;

    /// The space of the store, and what is promised of it: what a new volume can have. Cheap enough to ask for
    /// each claim. `None`, the default: it is unlimited or unknown.
    ///
    /// # Errors
    /// [`VolumeStoreError::Capacity`]: a retry can help.
    async fn capacity(&self) -> Result<Option<StoreCapacity>, VolumeStoreError> {
        Ok(None)
    }

    /// Waits until more or less is promised or reserved than in `seen`, without asking again and again. Never returns,
    /// the default: nothing changes.
    ///
    /// # Cancel safety
    /// Has no side effects.
    async fn wait_for_capacity_change(&self, seen: &StoreCapacity) {
        let _ = seen;
        std::future::pending().await
    }

    /// Does once what a new volume needs: creates one with a small limit, sees that the limit binds, and removes it; also
    /// what a killed probe has left. Success says that volumes can be created at all, and not that there is room for one:
    /// a full store is able. Cheap enough for once a minute. Default: success, for a store that can't become unable.
    ///
    /// # Errors
    /// [`VolumeStoreError::Probe`]: no volume can be created now. The chain of its sources says why.
    ///
    /// # Cancel safety
    /// A dropped probe may go on. The next one waits for it, and starts no second one.
    async fn probe(&self) -> Result<(), VolumeStoreError> {
        Ok(())
    }

    /// Looks whether the node has the program that makes the file system of volumes of this format. Default: success, for a
    /// store that needs none.
    ///
    /// # Errors
    /// [`VolumeStoreError::Probe`]: no volume of this format can be created now, but those of other formats can.
    async fn check_format(&self, format: ImageFormat) -> Result<(), VolumeStoreError> {
        let _ = format;
        Ok(())
    }

    /// Audits all volumes, and changes nothing: files that left the limits of their volume, or that count for
    /// another one. `None`, the default: limits of this store can't be left.
    ///
    /// # Errors
    /// [`VolumeStoreError::Audit`]: a retry can help.
    ///
    /// # Cancel safety
    /// Has no side effects, and ends soon after the future is dropped.
    async fn audit_limits(&self, options: AuditOptions) -> Result<Option<LimitAudit>, VolumeStoreError> {
        let _ = options;
        Ok(None)
    }

    /// Reads the identity of this store anew. `Unsupported`, the default: it cannot be absent.
    ///
    /// # Errors
    /// [`VolumeStoreError::Lost`]: this is no longer the store that it was. The caller must stop using it, and
    /// open it again.
    async fn identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        Ok(StoreIdentity::Unsupported)
    }

    /// Waits until this is no longer the store that it was, without asking again and again. Never returns, the
    /// default: it cannot be lost.
    ///
    /// # Cancel safety
    /// Has no side effects.
    async fn wait_until_lost(&self) -> VolumeStoreError {
        std::future::pending().await
    }

    /// Serves the volumes from now on: the caller knows that this is their store, and not one of another node.
    /// Completes and erases what a killed process has left; before, nothing of it is changed. By default, nothing
    /// happens. It can be called again.
    ///
    /// # Errors
    /// [`VolumeStoreError::Lost`]: a retry can help.
    async fn start_serving(&self) -> Result<(), VolumeStoreError> {
        Ok(())
    }

    /// Closes the store, completely, so that its disk can be unmounted. Until it is opened again each call fails. By
    /// default, nothing happens.
    async fn close(&self) {}

    /// Starts to wait for the next change after which a store that is lost, or not the one of the node's volumes, may
    /// be back; other changes may end the wait, too. `None`, the default: this store can't be opened again.
    fn watch_changes(&self) -> Option<BoxFuture<'static, Result<(), VolumeStoreError>>> {
        None
    }

    /// Closes the store, completely, and opens it again, for the caller to look at its identity. Until then each call
    /// fails. By default, nothing happens.
    ///
    /// # Errors
    /// [`VolumeStoreError::Lost`]: it can't be opened now, and stays closed.
    async fn reopen(&self) -> Result<(), VolumeStoreError> {
        Ok(())
    }

    /// Creates the identity of a new store, unless it has one. The caller has made sure that this is not an
    /// empty directory in the place of the store.
    ///
    /// # Errors
    /// [`VolumeStoreError::Lost`]: a retry can help.
    async fn create_identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        Ok(StoreIdentity::Unsupported)
    }
}

/// An open volume.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenVolume {
    /// The directory of the volume (`O_DIRECTORY`, not `O_PATH`).
    Directory(OwnedFd),
    /// The file of the volume: the content of a block device, or a file system.
    Image {
        /// Open for reading and writing; for reading only if it was opened by
        /// [`inspect`](VolumeOpener::inspect).
        file: OwnedFd,
        /// The content of the file.
        format: ImageFormat,
    },
}

impl AsFd for OpenVolume {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Directory(dir) => dir.as_fd(),
            Self::Image { file, .. } => file.as_fd(),
        }
    }
}

impl OpenVolume {
    /// The kind of the volume.
    pub fn kind(&self) -> VolumeKind {
        match self {
            Self::Directory(_) => VolumeKind::Directory,
            Self::Image { format, .. } => VolumeKind::Image(*format),
        }
    }
}

/// A store whose volumes can be mounted into a pod.
///
/// # Contract
/// The descriptor refers to the volume's directory or file, opened without following a symbolic link. It refers to
/// the volume as it is now: once the volume is removed, it refers to one that is being erased.
pub trait VolumeOpener: Send + Sync + fmt::Debug {
    /// Opens a volume for a pod, which may write into it from now on. Blocks for as long as the file system takes.
    ///
    /// # Errors
    /// [`VolumeStoreError::NotFound`] or [`VolumeStoreError::Open`].
    fn open(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError>;

    /// Opens a volume to find its mounts and its file system: nothing is written into it, and the store records
    /// nothing. Default: [`open`](Self::open), for a store that records nothing then.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    fn inspect(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        self.open(id)
    }

    /// Tells that a pod could not get a volume, and not for a reason of the pod: the disk, or the kernel, may fail.
    /// Default: nothing happens.
    fn report_failure(&self, id: &VolumeId) {
        let _ = id;
    }
}

/// The store has no block and strict volumes: the source of an error.
#[derive(Debug, thiserror::Error)]
#[error(
    "this node has no block and strict volumes: request volumeMode Filesystem, of a class without strict"
)]
pub(crate) struct ImagesUnsupported;

/// An operation on a volume failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeStoreError {
    /// The volume does not exist. A retry does not help.
    #[error("volume {id} does not exist on this node")]
    NotFound {
        /// The requested volume.
        id: VolumeId,
    },
    /// The volume does not fit on the node: its disk, its inodes or its quota are used up. Another node may have room.
    /// The source names what is used up, and the remedy.
    #[error("no room for volume {id} on this node")]
    Exhausted {
        /// The volume that does not fit.
        id: VolumeId,
        /// The failed call.
        #[source]
        source: ErrorSource,
    },
    /// Creating the volume failed; nothing of it is visible.
    #[error("can't create volume {id}")]
    Create {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Setting the limits failed; the old ones stay in force.
    #[error("can't set the limits of volume {id}")]
    Resize {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Reading the limits or the usage failed.
    #[error("can't read the usage of volume {id}")]
    Usage {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Removing the volume failed, or making the removal durable did.
    #[error("can't remove volume {id}")]
    Remove {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Listing the volumes failed.
    #[error("can't list the volumes on this node")]
    List {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Reading the capacity failed.
    #[error("can't read the capacity of the volumes on this node")]
    Capacity {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// A probe has found that no volume can be created.
    #[error("can't create volumes in the directory of this node")]
    Probe {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Auditing the limits of the volumes failed.
    #[error("can't audit the limits of the volumes on this node")]
    Audit {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// The store is not there: its identity is missing, unreadable or another one, usually because its disk
    /// isn't mounted.
    #[error("can't use the directory of the volumes")]
    Lost {
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Opening the volume's directory failed.
    #[error("can't open volume {id}")]
    Open {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
}

impl VolumeStoreError {
    /// Returns whether another node may have the free space that this one lacks.
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }

    /// Returns whether the same call can succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::NotFound { .. })
    }
}

/// The larger of two limits; `None` (unlimited) is the largest.
pub(crate) fn larger_limit<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.zip(b).map(|(a, b)| a.max(b))
}
