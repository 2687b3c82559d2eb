//! Errors of an import.

use std::io;
use std::path::PathBuf;

use nodekeel_fsquota::{QuotaLimits, QuotaUsage};

use crate::capacity::policy::CapacityShortage;
use crate::dir_store::error::DirStoreError;
use crate::id::VolumeId;
use crate::store::ErrorSource;

/// A directory did not become a volume.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The store or its quota failed. Repeat the call to resume.
    #[error(transparent)]
    Store(DirStoreError),
    /// Another process imports a directory now.
    #[error("another import is running in {}: wait for it", path.display())]
    Busy {
        /// The locked directory.
        path: PathBuf,
    },
    /// The directory does not exist, and no earlier call has moved it.
    #[error("can't import {}: it does not exist", path.display())]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// Reading the directory failed.
    #[error("can't read {}", path.display())]
    Read {
        /// The entry.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The source is a file or a link.
    #[error("can't import {}: name a directory, not a file or a link to a directory", path.display())]
    NotADirectory {
        /// The source.
        path: PathBuf,
    },
    /// The directory contains the store, or is a part of it.
    #[error("can't import {}: it belongs to the store in {}", path.display(), base.display())]
    PartOfStore {
        /// The directory.
        path: PathBuf,
        /// The store.
        base: PathBuf,
    },
    /// The directory is on another mount than the store, so it can't be moved.
    #[error(
        "can't move {}: it is on another file system or mount than {}: import it without --move, which copies it",
        path.display(), base.display()
    )]
    OtherMount {
        /// The directory.
        path: PathBuf,
        /// The store.
        base: PathBuf,
    },
    /// Something is mounted in the directory.
    #[error("can't import what is mounted at {}: unmount it", path.display())]
    Mounted {
        /// The mount point.
        path: PathBuf,
    },
    /// The directory uses more than the volume's limits.
    #[error(
        "can't import {}: it uses {} bytes and {} inodes, and the claim's limits are {} bytes and {} inodes: \
         request more storage, or set `inodes` in the class",
        path.display(), used.bytes.0, used.inodes.0,
        format_limit(limits.bytes.map(|limit| limit.0)), format_limit(limits.inodes.map(|limit| limit.0))
    )]
    TooLarge {
        /// The directory.
        path: PathBuf,
        /// Bytes and inodes that the directory uses.
        used: QuotaUsage,
        /// The limits.
        limits: QuotaLimits,
    },
    /// The limits are more than the node may promise; nothing was changed.
    #[error("can't import {} (`--over-ceiling` imports it all the same)", path.display())]
    OverCeiling {
        /// The directory.
        path: PathBuf,
        /// The figures.
        #[source]
        source: CapacityShortage,
    },
    /// The claim has a volume already, because a pod used it.
    #[error(
        "the claim already has volume {id} on this node: create another claim, and import {} for it; nothing was \
         changed there",
        path.display()
    )]
    VolumeExists {
        /// The volume.
        id: VolumeId,
        /// Where the data are.
        path: PathBuf,
    },
    /// The limits of a volume of another node are more than this node may promise; nothing was changed.
    #[error("node has no room for volume {id}")]
    NoRoom {
        /// The volume.
        id: VolumeId,
        /// The figures.
        #[source]
        source: CapacityShortage,
    },
    /// A volume of this name, of no move or of another one, is on this node. It is never replaced.
    #[error(
        "volume {id} is on this node already, in {}: if its PersistentVolume is on another node, run \
         `provisionerd volumes settle {id}` here",
        path.display()
    )]
    CopyExists {
        /// The volume.
        id: VolumeId,
        /// Where it is.
        path: PathBuf,
    },
    /// A volume that has arrived from another node is not to be one of this node any more, or that is not known.
    #[error("volume {id} was not made one of this node")]
    Unwanted {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// An earlier call for this claim, with another directory, was interrupted.
    #[error("an import of {} for this claim was interrupted: repeat that command first", path.display())]
    OtherImport {
        /// That directory.
        path: PathBuf,
    },
    /// An earlier call was interrupted after it had moved the directory, and another one has its name now.
    #[error(
        "{} was moved to {} by an import that was interrupted, and exists again: rename it, and repeat the command",
        path.display(), staged.display()
    )]
    Reappeared {
        /// The source.
        path: PathBuf,
        /// The moved directory.
        staged: PathBuf,
    },
}

fn format_limit(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |limit| limit.to_string())
}
