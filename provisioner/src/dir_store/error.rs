//! What a store of directories says when it fails.

use std::io;
use std::path::PathBuf;

use nodekeel_fsquota::Error as QuotaError;
use nodekeel_localstorage::Error as DirError;

use crate::id::VolumeId;
use crate::store::{Cause, StoreError};

/// What the directories or the quota said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirStoreError {
    /// Something could not be done with a directory or in it.
    #[error(transparent)]
    Directory(DirError),
    /// Another store works on the directory, of another program or of this one: end that one.
    #[error("another store works on {}", path.display())]
    InUse {
        /// What it has locked.
        path: PathBuf,
    },
    /// The directory could not be locked, so that nobody knows whether another store works on it.
    #[error("lock {}", path.display())]
    Lock {
        /// What was to be locked.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The quota of a directory could not be read or changed.
    #[error("the quota of {}", path.display())]
    Quota {
        /// The directory.
        path: PathBuf,
        /// What the quota said.
        #[source]
        source: QuotaError,
    },
    /// A volume has no limits, although it was born with some: somebody has taken them. Set them with `dirquota`.
    #[error("{} has no limits", path.display())]
    Unlimited {
        /// The volume's directory.
        path: PathBuf,
    },
    /// It could not be told whether a volume is empty, or it could not be removed although it is.
    #[error("remove {} if it is empty", path.display())]
    RemoveEmpty {
        /// The volume's directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The thread that erases could not be started.
    #[error("start the thread that erases volumes")]
    Thread(#[source] io::Error),
    /// The runtime stopped before the work was done. The next store finds it as it is.
    #[error("the runtime stopped before the work was done")]
    Stopped,
}

impl DirStoreError {
    /// Whether the disk, its inodes or its project numbers are used up.
    fn is_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Directory(error) => error.is_full(),
            Self::Quota { source: QuotaError::Exhausted { .. }, .. } => true,
            Self::Quota { source: QuotaError::Kernel { source, .. }, .. } => {
                matches!(source.kind(), StorageFull | QuotaExceeded)
            }
            _ => false,
        }
    }
}

/// What a failed call is called, where it isn't that the disk is full.
pub(super) type Named = fn(VolumeId, Cause) -> StoreError;

pub(super) fn named(id: &VolumeId, error: DirStoreError, name: Named) -> StoreError {
    let (id, is_full) = (id.clone(), error.is_full());
    let source: Cause = Box::new(error);
    if is_full { StoreError::Exhausted { id, source } } else { name(id, source) }
}
