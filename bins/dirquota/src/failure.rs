//! How a command fails, and what the shell is told.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use nodekeel_fsquota::{Error, OpenError};
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error("open {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("{} is {what}; name a directory", path.display())]
    NotADirectory { path: PathBuf, what: &'static str },
    #[error(transparent)]
    Open(OpenError),
    #[error("{what} {}", path.display())]
    Act { what: &'static str, path: PathBuf, source: Error },
    #[error("{what} {}: it is not empty, and what is in it would not be counted; --recursive takes all of it", path.display())]
    NotEmpty { what: &'static str, path: PathBuf },
    #[error("{} has no limits", path.display())]
    NoLimits { path: PathBuf },
    #[error("write the output")]
    Write(#[source] io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl Failure {
    /// For `map_err`.
    pub(crate) fn act(what: &'static str, path: &std::path::Path) -> impl FnOnce(Error) -> Self {
        move |source| match source {
            Error::NotEmpty => Self::NotEmpty { what, path: path.into() },
            source => Self::Act { what, path: path.into(), source },
        }
    }

    /// Whether whoever read the output has seen enough.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The whole of it on one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = crate::out::safe(&self.to_string());
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {}", crate::out::safe(&error.to_string())));
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
            Self::Directory { source, .. } | Self::Open(OpenError::Open { source, .. }) => of_io(source),
            Self::Open(OpenError::Permission { .. }) => 5,
            Self::Open(OpenError::Mounts { .. } | OpenError::Probe { .. }) => 1,
            Self::Open(_) => 3,
            Self::Act { source, .. } if source.is_permission() => 5,
            Self::NoLimits { .. } => 4,
            _ => 1,
        })
    }
}
