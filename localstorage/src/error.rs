//! Errors of operations on files and directories.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::file_name::InvalidName;

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileOperation {
    /// Open a file or a directory.
    Open,
    /// Create a directory.
    CreateDir,
    /// Read a file.
    Read,
    /// Replace the content of a file.
    Write,
    /// List a directory.
    List,
    /// Read the metadata of a file or a directory.
    Inspect,
    /// Set the mode of an entry.
    SetMode,
    /// Set the owner of an entry.
    SetOwner,
    /// Lock a directory.
    Lock,
    /// Rename a file or a directory.
    Rename,
    /// Remove a file or a tree.
    Remove,
    /// Make a directory durable.
    Sync,
    /// Remove the temporary files of killed writers.
    RemoveStale,
    /// Clone a file or a tree.
    Clone,
    /// Write a tree into a stream.
    Send,
    /// Make a tree from a stream.
    Receive,
}

impl fmt::Display for FileOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::CreateDir => "create directory",
            Self::Read => "read",
            Self::Write => "write",
            Self::List => "list",
            Self::Inspect => "inspect",
            Self::SetMode => "set the mode of",
            Self::SetOwner => "set the owner of",
            Self::Lock => "lock",
            Self::Rename => "rename",
            Self::Remove => "remove",
            Self::Sync => "sync",
            Self::RemoveStale => "remove stale files in",
            Self::Clone => "clone",
            Self::Send => "send",
            Self::Receive => "receive the files of",
        })
    }
}

/// A failed operation on a path. Its source is the cause.
#[derive(Debug, Error)]
#[error("can't {operation} {}", .path.display())]
pub struct Error {
    operation: FileOperation,
    path: PathBuf,
    source: io::Error,
}

/// A cause that this crate rejects itself, or for which the kernel's error number is too vague.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum RejectReason {
    #[error("path contains a symbolic link, and links are not followed: replace the link with its target")]
    Symlink,
    #[error("an earlier write of the new content failed")]
    Incomplete,
    #[error("another file system is mounted there: unmount it first")]
    MountPoint,
    #[error("the path is not a regular file")]
    NotAFile,
    #[error("the file is larger than the limit of {limit} bytes")]
    TooLarge { limit: u64 },
    #[error(
        "this record of an interrupted file update is damaged, and the files next to it may be old or new: \
         restore their directory, or remove this record if the files match each other"
    )]
    DamagedCommit,
    #[error("the caller stopped the removal before it was complete: remove again to complete it")]
    Stopped,
    #[error(
        "another process adds files to the directory during its removal: stop that process, then try again"
    )]
    Changing,
    #[error("the caller stopped the clone before it was complete")]
    CloneStopped,
    #[error("another process moved a directory while its tree was cloned: try again")]
    Moved,
    #[error("the stream of the tree is damaged or not complete: send it again")]
    DamagedStream,
    #[error("the file system can't share blocks between files (reflink): use XFS made with reflink=1")]
    NoReflink,
    #[error("the kernel does not support openat2: use Linux 5.6 or newer")]
    NoOpenat2,
    #[error("/proc is not mounted: mount it")]
    NoProc,
    #[error("this store has no directory of the operating system: use an OsFileStore")]
    NoDirectory,
}

impl RejectReason {
    fn kind(self) -> io::ErrorKind {
        match self {
            Self::Symlink | Self::NotAFile => io::ErrorKind::InvalidInput,
            Self::MountPoint | Self::Changing | Self::Moved => io::ErrorKind::ResourceBusy,
            Self::TooLarge { .. } => io::ErrorKind::FileTooLarge,
            Self::DamagedCommit | Self::Incomplete | Self::DamagedStream => io::ErrorKind::InvalidData,
            Self::Stopped | Self::CloneStopped => io::ErrorKind::Interrupted,
            Self::NoReflink | Self::NoOpenat2 | Self::NoProc | Self::NoDirectory => {
                io::ErrorKind::Unsupported
            }
        }
    }
}

impl From<RejectReason> for io::Error {
    fn from(reason: RejectReason) -> Self {
        Self::new(reason.kind(), reason)
    }
}

impl From<InvalidName> for io::Error {
    fn from(invalid: InvalidName) -> Self {
        Self::new(io::ErrorKind::InvalidFilename, invalid)
    }
}

impl Error {
    /// An error from the operation, its path and its cause. For implementers of
    /// [`FileStore`](crate::FileStore).
    pub fn new(operation: FileOperation, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self { operation, path: path.into(), source: source.into() }
    }

    /// The operation that failed.
    pub fn operation(&self) -> FileOperation {
        self.operation
    }

    /// The path, for display: the directory may have been renamed since it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cause alone, for a caller whose own error names the operation and the path.
    pub fn into_cause(self) -> io::Error {
        self.source
    }

    /// The kind of the source error.
    pub fn io_kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// The kernel's error number; none for an error of this crate.
    pub(crate) fn raw_os_error(&self) -> Option<i32> {
        self.source.raw_os_error()
    }

    /// The path does not exist.
    pub fn is_not_found(&self) -> bool {
        self.io_kind() == io::ErrorKind::NotFound
    }

    /// The path already exists.
    pub fn is_already_exists(&self) -> bool {
        self.io_kind() == io::ErrorKind::AlreadyExists
    }

    /// The file system or the quota has no free space or inodes. A retry helps after something was removed.
    pub fn is_full(&self) -> bool {
        matches!(self.io_kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Permission denied.
    pub fn is_denied(&self) -> bool {
        self.io_kind() == io::ErrorKind::PermissionDenied
    }

    /// The file system is mounted read-only, or became read-only after an error.
    pub fn is_read_only(&self) -> bool {
        self.io_kind() == io::ErrorKind::ReadOnlyFilesystem
    }

    /// The directory is not empty.
    pub fn is_not_empty(&self) -> bool {
        self.io_kind() == io::ErrorKind::DirectoryNotEmpty
    }

    /// The path, or a component of it, is not a directory.
    pub fn is_not_a_directory(&self) -> bool {
        self.io_kind() == io::ErrorKind::NotADirectory
    }

    /// The path contains a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.reject_reason() == Some(RejectReason::Symlink)
    }

    /// A file system is mounted on the path.
    pub fn is_mount_point(&self) -> bool {
        self.reject_reason() == Some(RejectReason::MountPoint)
    }

    /// The path is not a regular file.
    pub fn is_not_a_file(&self) -> bool {
        // rename(2) onto a directory fails with EISDIR before this crate has looked at its kind.
        self.reject_reason() == Some(RejectReason::NotAFile) || self.io_kind() == io::ErrorKind::IsADirectory
    }

    /// The file is larger than the limit.
    pub fn is_too_large(&self) -> bool {
        self.io_kind() == io::ErrorKind::FileTooLarge
    }

    /// The record of an interrupted [commit](crate::tree::LayoutDir::commit_files) is damaged: some files of
    /// its directory may be replaced, and others not. Nothing was changed.
    pub fn is_damaged_commit(&self) -> bool {
        self.reject_reason() == Some(RejectReason::DamagedCommit)
    }

    /// The caller's hook stopped the operation. Earlier changes remain.
    pub fn is_stopped(&self) -> bool {
        matches!(self.reject_reason(), Some(RejectReason::Stopped | RejectReason::CloneStopped))
    }

    /// The file system can't share blocks between files. A retry does not help.
    pub fn is_clone_unsupported(&self) -> bool {
        self.reject_reason() == Some(RejectReason::NoReflink)
    }

    /// The path is not a relative path of plain names. The file system was not accessed.
    pub fn is_invalid_path(&self) -> bool {
        self.io_kind() == io::ErrorKind::InvalidFilename
    }

    fn reject_reason(&self) -> Option<RejectReason> {
        self.source.get_ref()?.downcast_ref().copied()
    }
}

/// Translates the kernel's error number for a path that was resolved beneath a directory.
pub(crate) fn resolve_error(errno: Errno) -> io::Error {
    match errno {
        // RESOLVE_NO_SYMLINKS fails with ELOOP at the first link. *Source:* openat2(2).
        Errno::LOOP => RejectReason::Symlink.into(),
        Errno::NOSYS => RejectReason::NoOpenat2.into(),
        errno => errno.into(),
    }
}
