//! Errors of the data directory, each with a hint.

use std::io;
use std::path::PathBuf;

use nodekeel_localstorage::Error as DirError;
use nodekeel_localstorage::tree::LayoutError;
use nodekeel_localstorage::volume::VolumeError;
use thiserror::Error;

use super::READ_ONLY;

/// Why the data directory can't be used.
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
    /// The data directory, or one of its subdirectories, is a file, or lies below one. Move the file away.
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
    /// etcd's data is where releases before the present layout kept it. The message has the command that
    /// moves it.
    #[error(
        "{} is etcd's data in the layout of an earlier noded: move it to its new place: mkdir -m 700 {} && mv {} {}",
        path.display(), to.display(), path.display(), to.display()
    )]
    FormerLayout {
        /// Where it is.
        path: PathBuf,
        /// Where it belongs.
        to: PathBuf,
    },
    /// A directory is both where an earlier release kept it and where this one does. Nothing was moved. Remove or
    /// rename the one that is not the node's.
    #[error(
        "can't move {} to {}, where this release keeps it: both exist; remove or rename the one that is not this node's",
        path.display(), to.display()
    )]
    MoveConflict {
        /// Where an earlier release kept it.
        path: PathBuf,
        /// Where it belongs.
        to: PathBuf,
    },
    /// A directory of an earlier release can't be renamed to where this release keeps it, because one of the two
    /// is, or lies on, a mounted file system. Nothing was moved. Mount the file system at the new place, or copy the
    /// data.
    #[error(
        "can't move {} to {}, where this release keeps it: a file system is mounted on one of them; mount that of {} \
         at {}, or copy its files there and remove it",
        path.display(), to.display(), path.display(), to.display()
    )]
    MoveMountPoint {
        /// Where an earlier release kept it.
        path: PathBuf,
        /// Where it belongs.
        to: PathBuf,
    },
    /// The node's data volume is another one than the directory, but an earlier release has left data in the
    /// directory. Copy them to the volume, or remove them.
    #[error(
        "{} has data of an earlier release, but this node keeps its data on another volume: move them there, or \
         away from this directory",
        path.display()
    )]
    FormerData {
        /// Where an earlier release kept them.
        path: PathBuf,
    },
    /// The directory of the data volume can't be used as one.
    #[error("can't use the directory of the data volume")]
    Volume(#[source] VolumeError),
    /// The empty directory of an earlier release can't be removed.
    #[error("can't remove the empty directory {} of an earlier release", path.display())]
    RemoveFormer {
        /// The directory.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// This user can't write there. Run noded as the owner or as root.
    #[error(
        "permission denied to write to {}: run noded as its owner or as root, or use another directory with --data",
        path.display()
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
        /// What it is.
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
        match () {
            () if error.is_symlink() => Self::Symlink { path },
            () if error.is_not_a_directory() => Self::NotADirectory { path },
            () if error.is_not_a_file() => Self::NotAFile { path },
            () if error.is_denied() => Self::Permission { path },
            () if error.is_read_only() => Self::Unusable { path, why: READ_ONLY },
            () => Self::Access(error),
        }
    }
}
