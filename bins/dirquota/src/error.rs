//! Errors of commands, and their exit codes.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use nodekeel_fsquota::{Error, OpenError, ProjectId};
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CommandError {
    #[error("can't open directory {}", path.display())]
    OpenDirectory { path: PathBuf, source: io::Error },
    #[error("{} is {what}: use a directory", path.display())]
    NotADirectory { path: PathBuf, what: &'static str },
    #[error(transparent)]
    OpenQuota(OpenError),
    #[error("can't {what} {}", path.display())]
    Action { what: &'static str, path: PathBuf, source: Error },
    #[error(
        "can't {what} {}: the directory is not empty, and its content would not be counted; use --recursive \
         to include it",
        path.display()
    )]
    NotEmpty { what: &'static str, path: PathBuf },
    #[error(
        "can't {what} {}: quota project {project} also has inodes elsewhere, whose limits would change, or \
         links, whose project can't be read; use --recursive to give the tree another project, or close \
         removed files that are still open",
        path.display()
    )]
    SharedProject { what: &'static str, path: PathBuf, project: ProjectId },
    #[error("can't {what} {path}: the directory is immutable; run `chattr -i {path}`, then try again", path = path.display())]
    Immutable { what: &'static str, path: PathBuf },
    #[error("{} has no quota limits", path.display())]
    NoLimits { path: PathBuf },
    #[error(
        "quota audit of {} found content that does not count where it lies: {}",
        path.display(),
        if *is_repaired { "see the output for what could not be repaired" } else { "repair it with --repair" }
    )]
    AuditFindings { path: PathBuf, is_repaired: bool },
    #[error(
        "quota audit of {} is incomplete: {unread} entries could not be inspected or repaired, which are leased, damaged or \
         were moved; see the output for their paths, then repeat the audit",
        path.display()
    )]
    AuditIncomplete { path: PathBuf, unread: u64 },
    #[error(
        "no directory in {} has project {project}: {}",
        path.display(),
        match unread {
            0 => "search the mount point".to_owned(),
            unread => format!("{unread} directories were not read, or moved meanwhile; search again"),
        }
    )]
    NoDirectory { project: ProjectId, path: PathBuf, unread: u64 },
    #[error("can't write the output")]
    WriteOutput(#[source] io::Error),
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        Self::WriteOutput(error)
    }
}

impl CommandError {
    /// Maps an error of an action on a path, for `map_err`.
    pub(crate) fn for_action(what: &'static str, path: &std::path::Path) -> impl FnOnce(Error) -> Self {
        move |source| match source {
            Error::NotEmpty => Self::NotEmpty { what, path: path.into() },
            Error::SharedProject { project } => Self::SharedProject { what, path: path.into(), project },
            Error::Immutable => Self::Immutable { what, path: path.into() },
            source => Self::Action { what, path: path.into(), source },
        }
    }

    /// True if the reader of the output closed the pipe.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::WriteOutput(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The error with its causes on one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = crate::output::escape_control(&self.to_string());
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {}", crate::output::escape_control(&error.to_string())));
            cause = error.source();
        }
        text
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        let of_io = |error: &io::Error| match error.kind() {
            io::ErrorKind::NotFound => 4,
            io::ErrorKind::PermissionDenied => 5,
            _ => 1,
        };
        ExitCode::from(match self {
            Self::OpenDirectory { source, .. } | Self::OpenQuota(OpenError::Open { source, .. }) => {
                of_io(source)
            }
            Self::OpenQuota(OpenError::Permission { .. }) => 5,
            Self::OpenQuota(OpenError::FindMount { .. } | OpenError::Probe { .. }) => 1,
            // The file system itself: it is read-only, or does not enforce limits.
            Self::OpenQuota(_) => 3,
            Self::Action { source: Error::EnforcementOff | Error::ReadOnly, .. } => 3,
            Self::Action { source, .. } if source.is_permission() => 5,
            Self::NoLimits { .. } | Self::NoDirectory { .. } => 4,
            Self::AuditFindings { .. } => 6,
            _ => 1,
        })
    }
}
