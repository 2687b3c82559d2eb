//! How operations fail.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::{LimitError, ProjectId};

/// Why an operation on a directory or on a project failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// It is a file, a symbolic link or something else; only directories have limits of their own.
    #[error("it is not a directory")]
    NotADirectory,
    /// The directory has been removed.
    #[error("the directory has been removed")]
    Removed,
    /// The directory is on another file system than the one whose quotas these are.
    #[error("the directory is on another file system")]
    OtherFileSystem,
    /// What is in the directory would keep its old project; empty it, or apply to the whole tree.
    #[error(
        "the directory is not empty, and what is in it would not be counted: empty it, or take its whole tree"
    )]
    NotEmpty,
    /// A directory above it has the limits that count for it; projects do not nest. Change them there.
    #[error(
        "the directory belongs to project {project}, whose limits were set on a directory above it: change them there"
    )]
    Inherited {
        /// Whose it is.
        project: ProjectId,
    },
    /// Something elsewhere has the same project, as a copy with all its attributes has, or what was moved out of a limited
    /// directory: its limits would be changed, too. Clear the directory, which leaves them as they are, and set it again.
    #[error("the directory shares project {project} with something elsewhere: clear it, then set it again")]
    Shared {
        /// Whose both are.
        project: ProjectId,
    },
    /// A limit can't be set at all.
    #[error("the limit is not possible")]
    Limit(#[source] LimitError),
    /// Every project number of the range is taken. Release those of removed directories, or open with a larger range.
    #[error("all project numbers from {first} to {last} are taken: release those of removed directories")]
    Exhausted {
        /// The first of the range.
        first: ProjectId,
        /// The last of the range.
        last: ProjectId,
    },
    /// Somebody who does not keep to the lock took every number that was tried. A retry helps.
    #[error("other programs took every project number that was tried: try again")]
    Contended,
    /// Files still belong to the project, so its limits stay. A retry helps if they are being removed.
    #[error("project {project} is still in use")]
    InUse {
        /// Whose limits stay.
        project: ProjectId,
    },
    /// A call to the kernel failed.
    #[error("{call}")]
    Kernel {
        /// What was being done.
        call: Call,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Something in the tree could not be changed; what was changed before it stays, and a repetition goes on from there.
    #[error("change the project of {}", path.display())]
    Tree {
        /// Where, below the directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Another implementation of [`QuotaSetter`](crate::QuotaSetter) failed.
    #[error("the quota's backend failed")]
    Backend(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// What was being done when the kernel failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// Look at the directory.
    Look,
    /// Read the project of the directory.
    ReadProject,
    /// Write the project of the directory.
    WriteProject,
    /// Read the limits and the usage of a project.
    ReadLimits,
    /// Write the limits of a project.
    WriteLimits,
    /// Keep other processes from allocating.
    Lock,
    /// Wait until removed files are accounted for.
    Settle,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Look => "look at the directory",
            Self::ReadProject => "read the directory's project",
            Self::WriteProject => "write the directory's project",
            Self::ReadLimits => "read the project's limits",
            Self::WriteLimits => "write the project's limits",
            Self::Lock => "lock the allocation of projects",
            Self::Settle => "wait until removed files are accounted for",
        })
    }
}

impl Call {
    /// For `map_err`.
    pub(crate) fn failed(self) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Kernel { call: self, source }
    }
}

impl Error {
    /// Whether the same call may succeed later without anybody's doing: the disk was full, the memory was short, the
    /// project was still being removed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::InUse { .. } | Self::Contended => true,
            Self::Kernel { source, .. } | Self::Tree { source, .. } => matches!(
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

    /// Whether the caller lacks the right: projects are changed by root in the initial user namespace.
    pub fn is_permission(&self) -> bool {
        match self {
            Self::Kernel { source, .. } | Self::Tree { source, .. } => {
                source.kind() == io::ErrorKind::PermissionDenied
            }
            _ => false,
        }
    }
}
