//! What goes wrong with files and directories.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::name::InvalidName;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// To open a file or a directory.
    Open,
    /// To create a directory.
    CreateDir,
    /// To read a file.
    Read,
    /// To put a new content in a file's place.
    Write,
    /// To list a directory.
    List,
    /// To read what is known about a file or a directory.
    Inspect,
    /// To rename.
    Rename,
    /// To remove a file, or a tree.
    Remove,
    /// To make durable.
    Sync,
    /// To remove what killed writers have left behind.
    Sweep,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::CreateDir => "create directory",
            Self::Read => "read",
            Self::Write => "write",
            Self::List => "list",
            Self::Inspect => "inspect",
            Self::Rename => "rename",
            Self::Remove => "remove",
            Self::Sync => "sync",
            Self::Sweep => "sweep",
        })
    }
}

/// An operation on a path that failed. Its source says why.
#[derive(Debug, Error)]
#[error("{operation} {}", .path.display())]
pub struct Error {
    operation: Operation,
    path: PathBuf,
    source: io::Error,
}

/// What is refused by this crate and not by the kernel, or what the kernel says with a number that tells less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum Refusal {
    #[error("a symbolic link is in the way, and none is followed here: replace it by what it points to")]
    Symlink,
    #[error("a file system is mounted there: unmount it first")]
    MountPoint,
    #[error("it is no regular file")]
    NotAFile,
    #[error("it is larger than {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("it was stopped before its end")]
    Stopped,
    #[error("it changes while it is being removed")]
    Changing,
    #[error("the kernel has no openat2: Linux 5.6 or newer is needed")]
    NoOpenat2,
}

impl Refusal {
    fn kind(self) -> io::ErrorKind {
        match self {
            Self::Symlink | Self::NotAFile => io::ErrorKind::InvalidInput,
            Self::MountPoint | Self::Changing => io::ErrorKind::ResourceBusy,
            Self::TooLarge { .. } => io::ErrorKind::FileTooLarge,
            Self::Stopped => io::ErrorKind::Interrupted,
            Self::NoOpenat2 => io::ErrorKind::Unsupported,
        }
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal.kind(), refusal)
    }
}

impl From<InvalidName> for io::Error {
    fn from(invalid: InvalidName) -> Self {
        Self::new(io::ErrorKind::InvalidFilename, invalid)
    }
}

impl Error {
    /// What failed, on which path, and why. For implementers of [`Placement`](crate::Placement).
    pub fn new(operation: Operation, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self { operation, path: path.into(), source: source.into() }
    }

    /// What was asked for.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// On what. It is for people: the directory may have another name by now.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of the source.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }

    /// There is nothing of that name.
    pub fn is_not_found(&self) -> bool {
        self.kind() == io::ErrorKind::NotFound
    }

    /// There is something of that name already.
    pub fn is_already_exists(&self) -> bool {
        self.kind() == io::ErrorKind::AlreadyExists
    }

    /// The file system, or the quota, has no space (or no inode) left. A retry helps once something was removed.
    pub fn is_full(&self) -> bool {
        matches!(self.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// The caller may not do that.
    pub fn is_denied(&self) -> bool {
        self.kind() == io::ErrorKind::PermissionDenied
    }

    /// The file system is mounted read-only, or has become so by an error of its own.
    pub fn is_read_only(&self) -> bool {
        self.kind() == io::ErrorKind::ReadOnlyFilesystem
    }

    /// What is there is no directory, where one was asked for.
    pub fn is_not_a_directory(&self) -> bool {
        self.kind() == io::ErrorKind::NotADirectory
    }

    /// A symbolic link is in the way.
    pub fn is_symlink(&self) -> bool {
        self.refusal() == Some(Refusal::Symlink)
    }

    /// A file system is mounted in the way.
    pub fn is_mount_point(&self) -> bool {
        self.refusal() == Some(Refusal::MountPoint)
    }

    /// What is there is no regular file, where one was asked for.
    pub fn is_not_a_file(&self) -> bool {
        self.refusal() == Some(Refusal::NotAFile) || self.kind() == io::ErrorKind::IsADirectory
    }

    /// The file is larger than it may be.
    pub fn is_too_large(&self) -> bool {
        self.kind() == io::ErrorKind::FileTooLarge
    }

    /// A caller's hook has stopped it. What was done stays done.
    pub fn is_stopped(&self) -> bool {
        self.refusal() == Some(Refusal::Stopped)
    }

    /// The path is no relative path of plain names: the file system was not asked.
    pub fn is_invalid_path(&self) -> bool {
        self.kind() == io::ErrorKind::InvalidFilename
    }

    fn refusal(&self) -> Option<Refusal> {
        self.source.get_ref()?.downcast_ref().copied()
    }
}

/// Says what the kernel's number means for a path that was resolved beneath a directory.
pub(crate) fn resolved(errno: Errno) -> io::Error {
    match errno {
        Errno::LOOP => Refusal::Symlink.into(),
        Errno::NOSYS => Refusal::NoOpenat2.into(),
        errno => errno.into(),
    }
}
