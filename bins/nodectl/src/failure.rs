//! How a command fails, and what the shell is told.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use nodekeel_node::client::{ConnectError, EntryError};
use thiserror::Error;
use tonic::{Code, Status};

#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{}", .0.message())]
    Call(Box<Status>),
    #[error("the node at the socket went away; is noded still running?")]
    Gone,
    #[error(
        "noded does not answer: nothing came within {patience:?}; is it stopped, or very busy? --timeout waits longer"
    )]
    NoAnswer { patience: Duration },
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error("can't use {}; give another file", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("write the output")]
    Write(#[source] io::Error),
    #[error("{dn} {how}; `nodectl status {dn}` says more")]
    NotReached { dn: String, how: String },
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        // A connection that breaks has no status of the node's own; what it does have says nothing to people.
        let broken =
            matches!(status.code(), Code::Unknown | Code::Unavailable | Code::Internal | Code::Cancelled);
        if broken && status.source().is_some() { Self::Gone } else { Self::Call(Box::new(status)) }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl Failure {
    /// Whether whoever read the output has seen enough.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Whether what answered has ended, as the control API does when it is restarted.
    pub(crate) fn is_gone(&self) -> bool {
        match self {
            Self::Gone => true,
            Self::Call(status) => status.code() == Code::Unavailable,
            _ => false,
        }
    }

    /// The whole of it on one line.
    pub(crate) fn with_causes(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Connect(ConnectError::Permission { .. }) => 5,
            Self::Connect(_) | Self::Gone | Self::NoAnswer { .. } => 3,
            Self::Call(status) => match status.code() {
                Code::NotFound => 4,
                Code::PermissionDenied => 5,
                Code::Unavailable => 3,
                _ => 1,
            },
            Self::Entry(_) | Self::File { .. } | Self::Write(_) | Self::NotReached { .. } => 1,
        })
    }
}
