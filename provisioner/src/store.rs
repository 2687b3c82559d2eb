//! Where volumes live: the trait, and what it says when it fails.

use std::error::Error;
use std::fmt;
use std::os::fd::OwnedFd;

use async_trait::async_trait;
use nodekeel_fsquota::{Limits, Usage};

use crate::id::VolumeId;

/// A failure's cause, as a store hands it out.
pub type Cause = Box<dyn Error + Send + Sync>;

/// What a volume may hold, and what it does hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeUsage {
    /// The limits in force.
    pub limits: Limits,
    /// What is used of them.
    pub usage: Usage,
}

/// Makes, changes and destroys the volumes of one node.
///
/// # Contract
/// - **Birth.** When [`create`](Self::create) returns, the volume exists, is empty unless it existed before, and has its
///   limits; at no time does it exist without them. A volume that exists already is success: what it holds stays, and a
///   limit of it that is lower than asked is raised, never lowered.
/// - **Death.** When [`remove`](Self::remove) returns, the volume is gone for every other method, will not come back by
///   a crash, and its name is free. A volume that isn't there is success. Erasing what it held may go on in the
///   background, and goes on after a restart; `remove` doesn't wait for it.
/// - **Emptiness.** [`remove_empty`](Self::remove_empty) is a death as [`remove`](Self::remove) is, of what holds nothing.
///   [`usage`](Self::usage) is for people and decides nothing.
/// - **Idempotence.** Each method can be called again after an error, a crash, or a dropped future, and then ends in
///   the state that it would have ended in.
/// - **Durability.** What a method did before it returned survives a power cut.
/// - **Concurrency.** Methods may be called at the same time, also for the same volume; each acts as if alone.
/// - **Cancel safety.** A dropped future may or may not have had its effect, wholly or not at all, once the store has
///   been opened again.
/// - **Units.** Bytes and inodes as they are; nothing is rounded. `None` is no limit.
///
/// `testing::conformance` (feature `testing`) checks it for any store.
#[async_trait]
pub trait VolumeStore: Send + Sync + fmt::Debug {
    /// Makes a volume with these limits.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`]: this node has no room for it, and another one may. [`StoreError::Create`]: anything
    /// else; a retry can help.
    async fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError>;

    /// Sets the limits of a volume, each of them up or down; what it holds stays even where it is more.
    ///
    /// # Errors
    /// [`StoreError::NotFound`], [`StoreError::Exhausted`] or [`StoreError::Resize`].
    async fn resize(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError>;

    /// The limits of a volume and how much of them is used.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] or [`StoreError::Usage`].
    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, StoreError>;

    /// Destroys a volume and all that it holds.
    ///
    /// # Errors
    /// [`StoreError::Remove`]: the volume may still be there; a retry can help.
    async fn remove(&self, id: &VolumeId) -> Result<(), StoreError>;

    /// Destroys a volume if it holds nothing at all: what was made and never handed out is swept by it. `false`: the volume
    /// was left as it is, because it holds something, or because this store can't tell, which is the default.
    ///
    /// It decides whether data live, so it looks at what is there, and believes no count: neither a quota's nor a file
    /// system's.
    ///
    /// # Errors
    /// [`StoreError::Remove`]: the volume may still be there; a retry can help.
    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, StoreError> {
        let _ = id;
        Ok(false)
    }

    /// The volumes that there are, in the order of their ids.
    ///
    /// # Errors
    /// [`StoreError::List`]: a retry can help.
    async fn list(&self) -> Result<Vec<VolumeId>, StoreError>;
}

/// A store whose volumes are directories that a pod can be given by a bind mount.
///
/// # Contract
/// The descriptor is of the volume's own directory (`O_DIRECTORY`, not `O_PATH`), reached without following a symbolic link.
/// It names the volume as it is now: once the volume is removed it names a directory that is being erased.
pub trait OpenVolume: Send + Sync + fmt::Debug {
    /// Opens a volume's directory. It blocks for as long as the file system takes.
    ///
    /// # Errors
    /// [`StoreError::NotFound`] or [`StoreError::Open`].
    fn open(&self, id: &VolumeId) -> Result<OwnedFd, StoreError>;
}

/// What went wrong with a volume.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such volume. A retry doesn't help.
    #[error("no volume {id}")]
    NotFound {
        /// The volume asked for.
        id: VolumeId,
    },
    /// The node has no room for the volume: its disk, its inodes or its quota are used up. Another node may have.
    #[error("no room for volume {id} on this node")]
    Exhausted {
        /// The volume that doesn't fit.
        id: VolumeId,
        /// What said so.
        #[source]
        source: Cause,
    },
    /// The volume could not be made; nothing of it is visible.
    #[error("create volume {id}")]
    Create {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The limits could not be set; the old ones hold.
    #[error("set the limits of volume {id}")]
    Resize {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The limits or the usage could not be read.
    #[error("read the usage of volume {id}")]
    Usage {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The volume could not be removed, or not durably.
    #[error("remove volume {id}")]
    Remove {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The volumes could not be listed.
    #[error("list the volumes")]
    List {
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The volume's directory could not be opened.
    #[error("open volume {id}")]
    Open {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
}

impl StoreError {
    /// Whether another node may have the room that this one lacks.
    pub fn is_exhausted(&self) -> bool {
        matches!(self, Self::Exhausted { .. })
    }

    /// Whether the same call can succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::NotFound { .. })
    }
}

/// The larger of two limits, where none is the largest.
pub(crate) fn larger<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.zip(b).map(|(a, b)| a.max(b))
}
