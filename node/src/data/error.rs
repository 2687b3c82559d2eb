//! Errors of the data directory, each with a hint.

use std::io;
use std::path::PathBuf;

use nodekeel_localstorage::tree::LayoutError;
use nodekeel_localstorage::{Error as DirError, TrustError};
use thiserror::Error;

use super::READ_ONLY;
use crate::program_name::program_name;

/// The reason why the data directory can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// Another instance uses it. Stop that one, or use another directory.
    #[error("data directory {} is in use by {holder}: stop that process, or use another directory with --data", path.display())]
    InUse {
        /// The data directory.
        path: PathBuf,
        /// The process that holds the lock.
        holder: String,
    },
    /// The data directory, or one of its subdirectories, is a file, or is below one. Move the file away.
    #[error("{} is not a directory: move it away, or use another directory with --data", path.display())]
    NotADirectory {
        /// The conflicting file.
        path: PathBuf,
    },
    /// One of its files is not a regular file. Move it away.
    #[error("{} is not a regular file: move it away, or use another directory with --data", path.display())]
    NotAFile {
        /// The conflicting file.
        path: PathBuf,
    },
    /// One of its files or directories is a symbolic link. Replace it by its target.
    #[error(
        "{} is a symbolic link, and links below the data directory are not followed: replace it by its target (or a \
         mount), or use another directory with --data",
        path.display()
    )]
    Symlink {
        /// The link.
        path: PathBuf,
    },
    /// It, a parent or a subdirectory belongs to another user, or others can write to it. The message has the command that
    /// changes it.
    #[error(transparent)]
    Untrusted(#[from] TrustError),
    /// This user can't write there. Run noded as the owner or as root.
    #[error(
        "permission denied to write to {}: run {} as its owner or as root, or use another directory with --data",
        path.display(), program_name()
    )]
    Permission {
        /// The existing directory that is not writable.
        path: PathBuf,
    },
    /// No user can create files there. Use another directory.
    #[error("can't store data in {}: it is {why}; use another directory with --data", path.display())]
    Unusable {
        /// The existing directory.
        path: PathBuf,
        /// A clause: "mounted read-only", for example.
        why: &'static str,
    },
    /// The file system has too little free space.
    #[error(
        "not enough disk space for {}: {} MiB free, {} MiB required; free some, or use another directory with --data",
        path.display(), free >> 20, needed.div_ceil(1 << 20)
    )]
    DiskFull {
        /// A directory on that file system.
        path: PathBuf,
        /// Free bytes.
        free: u64,
        /// Required bytes.
        needed: u64,
    },
    /// The lock file can't be created, locked or written.
    #[error("can't create or lock {}, which keeps other instances out of the data directory", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// Something in it can't be created, read or written.
    #[error("can't access the data directory")]
    Access(#[source] DirError),
    /// The layout can't be placed in it.
    #[error("can't create the directory layout in {}", path.display())]
    PlaceLayout {
        /// The data directory.
        path: PathBuf,
        /// The error of the placement.
        #[source]
        source: LayoutError,
    },
}

/// Chooses the variant whose message has the hint for the conflict.
impl From<DirError> for DataError {
    fn from(error: DirError) -> Self {
        let path = error.path().to_owned();
        if error.is_symlink() {
            Self::Symlink { path }
        } else if error.is_not_a_directory() {
            Self::NotADirectory { path }
        } else if error.is_not_a_file() {
            Self::NotAFile { path }
        } else if error.is_denied() {
            Self::Permission { path }
        } else if error.is_read_only() {
            Self::Unusable { path, why: READ_ONLY }
        } else {
            Self::Access(error)
        }
    }
}
