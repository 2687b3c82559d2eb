//! Errors of quota operations.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::{LimitError, ProjectId};

/// Time for which a change of limits waits for another one.
pub(crate) const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// An operation on a directory or on a project failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a directory, but a file, a symbolic link or something else; only directories can have limits.
    #[error("not a directory: only directories can have quota limits")]
    NotADirectory,
    /// The directory has been removed.
    #[error("the directory has been removed")]
    Removed,
    /// The directory is on another file system than the one that was opened.
    #[error(
        "the directory is on another file system than the one whose quotas were opened: open the quotas of \
         its file system"
    )]
    OtherFileSystem,
    /// Existing entries would keep their old project. Empty the directory, or apply the call to the whole
    /// tree.
    #[error(
        "the directory is not empty, and its existing files would not count towards the limits: empty it, or \
         set limits on its whole tree"
    )]
    NotEmpty,
    /// The directory belongs to the project of a directory above it; projects do not nest. Change the limits there.
    #[error(
        "the directory belongs to quota project {project} of a directory above it: change the limits of that \
         directory"
    )]
    InheritedProject {
        /// The project of the directory above.
        project: ProjectId,
    },
    /// The directory is not empty, and inodes elsewhere have its project: it was copied with all attributes,
    /// or moved out of a limited directory, or removed files of it are still open, or its symbolic links and
    /// special files, whose project can't be read, are counted. The call could change the limits of another
    /// directory. Applied to the whole tree, it gives the tree a separate project.
    #[error(
        "quota project {project} of the directory also has inodes elsewhere, whose limits would change, or \
         links, whose project can't be read: set limits on its whole tree, which gets another project, or \
         close removed files that are still open"
    )]
    SharedProject {
        /// The shared project.
        project: ProjectId,
    },
    /// The directory is immutable, and its project is an attribute. Run `chattr -i` on it.
    #[error("the directory is immutable: run `chattr -i` on it, then try again")]
    Immutable,
    /// The file system no longer enforces the limits of projects.
    #[error(
        "the file system does not enforce the limits of projects: turn enforcement on, on XFS with \
         `xfs_quota -x -c 'enable -p' MOUNT`, on ext4 with `quotaon -P MOUNT`"
    )]
    EnforcementOff,
    /// The file system enforces the limits of projects, as it says, and a file has grown past the limit of its directory:
    /// a defect of the kernel, or of the file system. Check the file system, or use another one.
    #[error(
        "a file has grown to {written} in a directory with a limit of {limit}: the file system does not enforce limits; \
         check it with its fsck or xfs_repair"
    )]
    LimitNotBinding {
        /// The limit of the directory.
        limit: crate::Bytes,
        /// The size that the file has reached.
        written: crate::Bytes,
    },
    /// The file system is mounted read-only. Remount it.
    #[error("the file system is mounted read-only: remount it with `mount -o remount,rw`")]
    ReadOnly,
    /// Other processes, which only root can start, have held the lock that serializes changes until the
    /// deadline. A retry helps.
    #[error(
        "other processes have held {0} for {1} s: wait for them, or stop them (`fuser -v {0}`)",
        path.display(),
        LOCK_TIMEOUT.as_secs()
    )]
    LockTimeout {
        /// The lock file.
        path: PathBuf,
    },
    /// Another user could hold the lock that serializes changes, because the lock file isn't one that only
    /// root can open. Remove it.
    #[error("{} is not a lock file that only root can open: remove it", path.display())]
    UnsafeLock {
        /// The lock file.
        path: PathBuf,
    },
    /// The kernel can't store the limit.
    #[error("invalid quota limit")]
    InvalidLimit(#[source] LimitError),
    /// Every project number of the range is allocated. Release those of removed directories, or open with a
    /// larger range.
    #[error(
        "all quota project IDs from {first} to {last} are allocated: release those of removed directories, \
         or use a larger range"
    )]
    RangeExhausted {
        /// First number of the range.
        first: ProjectId,
        /// Last number of the range.
        last: ProjectId,
    },
    /// A program that ignores the lock allocated every number that was tried. A retry helps.
    #[error("other programs allocated every quota project ID that was tried: try again")]
    AllocationContended,
    /// Inodes still belong to the project, so its limits stay. A retry helps if they are being removed.
    #[error(
        "can't release quota project {project}: files still belong to it; remove them, and close removed \
         files that are still open"
    )]
    ProjectInUse {
        /// The project that keeps its limits.
        project: ProjectId,
    },
    /// A call to the kernel failed.
    #[error("can't {call}")]
    Kernel {
        /// The step that failed.
        call: KernelOperation,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An entry of the tree could not be changed. Earlier changes stay; repeat the call to resume.
    #[error("can't change the quota project of {}", path.display())]
    ChangeTree {
        /// The entry, relative to the directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The tree of a directory without a mark could not be counted, so its owner is unknown. Nothing was
    /// changed.
    #[error("can't count the files and directories in {}", path.display())]
    CountTree {
        /// The entry, relative to the directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An entry of the tree could not be inspected or repaired. Earlier repairs stay; repeat the call to resume.
    #[error("can't audit {}", audited_name(path))]
    AuditTree {
        /// The entry, relative to the directory; empty for the directory itself.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The caller has canceled the audit. Earlier repairs stay; repeat the call to resume.
    #[error("the audit was canceled")]
    Canceled,
    /// Another implementation of [`QuotaSetter`](crate::QuotaSetter) failed.
    #[error("quota backend failed")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}

fn audited_name(path: &std::path::Path) -> std::path::Display<'_> {
    if path.as_os_str().is_empty() { std::path::Path::new("the directory").display() } else { path.display() }
}

/// The step that failed in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelOperation {
    /// Inspect the directory.
    InspectDirectory,
    /// Read the project of the directory.
    ReadProject,
    /// Write the project of the directory.
    WriteProject,
    /// Read the mark of the project's owner.
    ReadOwner,
    /// Write that mark.
    WriteOwner,
    /// Read whether limits are enforced.
    ReadEnforcement,
    /// Read the limits and the usage of a project.
    ReadLimits,
    /// Write the limits of a project.
    WriteLimits,
    /// Lock the allocation of projects against other processes.
    LockAllocation,
    /// Wait until the kernel no longer counts removed files.
    FlushRemoved,
    /// Write past a limit, to see that it binds.
    WritePastLimit,
}

impl std::fmt::Display for KernelOperation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::InspectDirectory => "inspect the directory",
            Self::ReadProject => "read the directory's quota project",
            Self::WriteProject => "set the directory's quota project",
            Self::ReadOwner => "read the directory's attribute trusted.nodekeel.project",
            Self::WriteOwner => "write the directory's attribute trusted.nodekeel.project",
            Self::ReadEnforcement => "read whether the file system enforces quotas",
            Self::ReadLimits => "read the quota project's limits",
            Self::WriteLimits => "set the quota project's limits",
            Self::LockAllocation => "lock the allocation of quota project IDs",
            Self::FlushRemoved => "wait until removed files are no longer counted",
            Self::WritePastLimit => "write a file up to the limit of its directory",
        })
    }
}

impl KernelOperation {
    /// The error of this step, for `map_err`.
    pub(crate) fn into_error(self) -> impl FnOnce(io::Error) -> Error {
        move |source| match source.kind() {
            io::ErrorKind::ReadOnlyFilesystem => Error::ReadOnly,
            _ => Error::Kernel { call: self, source },
        }
    }
}

impl Error {
    /// Returns whether the same call may succeed later without intervention: the disk was full, memory was short, the
    /// project was still being removed, another process held the lock.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::ProjectInUse { .. }
            | Self::AllocationContended
            | Self::LockTimeout { .. }
            | Self::Canceled => true,
            Self::Kernel { source, .. }
            | Self::ChangeTree { source, .. }
            | Self::AuditTree { source, .. }
            | Self::CountTree { source, .. } => matches!(
                source.raw_os_error(),
                Some(
                    libc::EINTR
                        | libc::EAGAIN
                        | libc::EBUSY
                        | libc::ENOMEM
                        | libc::EMFILE
                        | libc::ENFILE
                        | libc::ENOSPC
                        | libc::EIO
                )
            ),
            _ => false,
        }
    }

    /// Returns whether the caller lacks permission: only root in the initial user namespace may change projects.
    pub fn is_permission(&self) -> bool {
        match self {
            Self::Kernel { source, .. }
            | Self::ChangeTree { source, .. }
            | Self::AuditTree { source, .. }
            | Self::CountTree { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}
