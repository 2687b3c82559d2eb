//! Errors of the directory store.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;

use nodekeel_fsquota::{Bytes, Error as QuotaError};
use nodekeel_localstorage::{Dir, Error as DirError};
use rustix::io::Errno;

use crate::capacity::policy::CapacityShortage;
use crate::id::VolumeId;
use crate::image::{FormatError, VolumeKind};
use crate::snapshot::StoredId;
use crate::store::{ErrorSource, VolumeStoreError};

/// An operation on the directories or the quota failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirStoreError {
    /// An operation on a directory failed.
    #[error(transparent)]
    Directory(DirError),
    /// Another store, of this or of another process, uses the directory: stop that one.
    #[error(
        "another process already provisions volumes in directory {}: stop it, or use another directory",
        path.display()
    )]
    InUse {
        /// The locked directory.
        path: PathBuf,
    },
    /// Locking the directory failed, so it is unknown whether another store uses it.
    #[error("can't lock {}, which keeps other provisioners out", path.display())]
    Lock {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Reading or changing the quota of a directory failed.
    #[error("can't read or set the quota of {}", path.display())]
    Quota {
        /// The directory.
        path: PathBuf,
        /// The quota's error.
        #[source]
        source: QuotaError,
    },
    /// A volume has no limits although it was created with some: another program cleared them. Set them with
    /// `dirquota`.
    #[error("volume {} has no quota limits: set them with `dirquota set`", path.display())]
    NoLimits {
        /// The volume's directory.
        path: PathBuf,
    },
    /// The limit of a volume is more than may be promised.
    #[error(transparent)]
    Capacity(CapacityShortage),
    /// Reading the size of the file system failed.
    #[error("can't read the size of the file system of {}", path.display())]
    FileSystemSpace {
        /// The directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Checking whether a volume is empty, or removing the empty volume, failed.
    #[error("can't check or remove {}, which should be empty", path.display())]
    RemoveEmpty {
        /// The volume's directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The directory has no identity yet: nothing shows that it is the store, and not an empty directory whose
    /// disk isn't mounted.
    #[error(
        "directory {} has no store-id file, which a directory with volumes has: is its disk mounted?",
        path.display()
    )]
    NoIdentity {
        /// The directory.
        path: PathBuf,
    },
    /// The identity is unreadable. Restore the file from a PersistentVolume's `volumeAttributes.store`.
    #[error(
        "file {} is invalid: write the UUID in volumeAttributes.store of its PersistentVolumes into it",
        path.display()
    )]
    InvalidIdentity {
        /// The file.
        path: PathBuf,
    },
    /// The directory is no longer the store that was opened: its disk was unmounted, or it was replaced or
    /// emptied. Mount it again.
    #[error("the volumes are no longer at {}: mount their disk again", path.display())]
    Lost {
        /// The directory.
        path: PathBuf,
    },
    /// Opening the lost directory again failed.
    #[error("can't open the directory of the volumes again")]
    Reopen(#[source] ErrorSource),
    /// Making changed limits durable failed. They are in force, and a retry sets them again.
    #[error("can't make the limits of the volumes in {} durable", path.display())]
    SyncLimits {
        /// The directory of the volumes.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Watching the mounts failed, so that an unmounted disk would not be noticed.
    #[error("can't watch the mounts of this node for changes")]
    WatchMounts(#[source] io::Error),
    /// Generating an identity failed.
    #[error("can't generate a store-id for the directory of the volumes")]
    GenerateIdentity(#[source] io::Error),
    /// The volume or snapshot to copy does not exist on this node any more.
    #[error("{source_id} does not exist on this node: nothing was copied")]
    NoSource {
        /// The volume or snapshot to copy.
        source_id: StoredId,
    },
    /// The volume or snapshot to copy does not fit into the new volume: request more, or raise the class's `inodes`.
    #[error("{source_id} uses {used}, and the new volume may use {limit}: request a larger volume")]
    SourceTooLarge {
        /// The volume or snapshot to copy.
        source_id: StoredId,
        /// Bytes or inodes that it uses, with their unit.
        used: String,
        /// The new volume's limit.
        limit: String,
    },
    /// The volume is an imported directory that has no PersistentVolume yet. The import creates it, since it must be
    /// retained.
    #[error(
        "{} is being imported, and the import has not created its PersistentVolume yet: repeat the import if it was \
         interrupted",
        path.display()
    )]
    BeingImported {
        /// The volume's directory.
        path: PathBuf,
    },
    /// Reading the time of a snapshot failed.
    #[error("can't inspect {}", path.display())]
    ReadSnapshot {
        /// The snapshot's directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mark with the kind of a volume or a snapshot can't be read: nothing is done with either until it can.
    #[error(
        "file {} is missing or invalid: write the word in volumeAttributes.kind of its PersistentVolume, and a newline, into it",
        path.display()
    )]
    InvalidKind {
        /// The mark.
        path: PathBuf,
    },
    /// The volume or the snapshot is of another kind than its claim asks for. Ask for its kind.
    #[error("the kind of {id} is {found}, not {wanted}: nothing was created")]
    OtherKind {
        /// The volume or the snapshot.
        id: StoredId,
        /// The kind that it has.
        found: VolumeKind,
        /// The kind that was asked for.
        wanted: VolumeKind,
    },
    /// An operation on the file of a block or strict volume failed.
    #[error("can't {step} image {}", path.display())]
    Image {
        /// The failed step.
        step: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Making the file system of a strict volume failed.
    #[error("can't make the file system in image {}", path.display())]
    FormatImage {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: FormatError,
    },
    /// A block or strict volume can't be made smaller: its data may be anywhere in it. Request its size.
    #[error("can't shrink image {} from {} to {} bytes: request its size or more", path.display(), size.0, wanted.0)]
    ImageShrunk {
        /// The file.
        path: PathBuf,
        /// Size of the file.
        size: Bytes,
        /// The requested size.
        wanted: Bytes,
    },
    /// A block or strict volume has a size, and no inode limit.
    #[error("can't set these limits of image {}: it has a size, and no inode limit", path.display())]
    ImageLimits {
        /// The file.
        path: PathBuf,
    },
    /// Starting the thread that erases volumes failed.
    #[error("can't start the thread that erases volumes")]
    StartEraser(#[source] io::Error),
    /// The runtime shut down before the work was complete. The next store resumes it.
    #[error("the provisioner shut down before the work was complete; its next start resumes it")]
    RuntimeStopped,
}

impl DirStoreError {
    /// Returns whether a look at the directory failed for lack of file descriptors or memory, which tells nothing about
    /// it.
    pub(super) fn is_out_of_resources(&self) -> bool {
        match self {
            Self::Directory(error) => is_out_of_resources(error),
            Self::WatchMounts(error) => lacks_resources(error),
            _ => false,
        }
    }

    /// Returns whether the disk, its inodes or its project numbers are used up.
    pub(super) fn is_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Capacity(_) => true,
            Self::Directory(error) => error.is_full(),
            Self::Image { source, .. } => matches!(source.kind(), StorageFull | QuotaExceeded),
            Self::Quota { source: QuotaError::RangeExhausted { .. }, .. } => true,
            Self::Quota { source: QuotaError::Kernel { source, .. }, .. } => {
                matches!(source.kind(), StorageFull | QuotaExceeded)
            }
            _ => false,
        }
    }
}

/// Returns whether the process has too many open files, or the kernel no memory.
fn is_out_of_resources(error: &DirError) -> bool {
    error.source().and_then(|cause| cause.downcast_ref()).is_some_and(lacks_resources)
}

fn lacks_resources(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    [Errno::MFILE, Errno::NFILE, Errno::NOMEM].iter().any(|errno| number == Some(errno.raw_os_error()))
}

/// The error of a failed call of the quota of a directory.
pub(super) fn quota_error(dir: &Dir, source: QuotaError) -> DirStoreError {
    DirStoreError::Quota { path: dir.path().to_owned(), source }
}

/// The [`VolumeStoreError`] variant of a failed call, unless the disk is full.
pub(super) type ErrorConstructor = fn(VolumeId, ErrorSource) -> VolumeStoreError;

/// The error of a call that concerns the store as a whole.
pub(super) fn lost_error(source: DirStoreError) -> VolumeStoreError {
    VolumeStoreError::Lost { source: Box::new(source) }
}

pub(super) fn store_error(id: &VolumeId, error: DirStoreError, name: ErrorConstructor) -> VolumeStoreError {
    let (id, is_full) = (id.clone(), error.is_full());
    let source: ErrorSource = Box::new(error);
    if is_full { VolumeStoreError::Exhausted { id, source } } else { name(id, source) }
}
