//! Errors of commands, and their exit codes.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use nodekeel_node::client::{ConnectError, InvalidLogEntry};
use thiserror::Error;
use tonic::{Code, Status};

#[derive(Debug, Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{}", .0.message())]
    Call(Box<Status>),
    #[error("connection to noded lost: is noded still running?")]
    ConnectionLost,
    #[error("noded does not answer within {timeout:?}: is it stopped, or busy? --timeout waits longer")]
    Timeout { timeout: Duration },
    #[error(transparent)]
    Entry(#[from] InvalidLogEntry),
    #[error("can't use file {}; use another one", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't read the recovery passphrase from the terminal or the standard input")]
    Passphrase(#[source] io::Error),
    #[error("can't write the output")]
    Write(#[source] io::Error),
    #[error("{dn} {reason}; see `nodectl status {dn}`")]
    ActionFailed { dn: String, reason: String },
    #[error("nothing was changed: type yes, or add --yes")]
    NotAgreed,
    /// The output names the problems.
    #[error("not healthy")]
    NotHealthy,
}

impl From<Status> for CommandError {
    fn from(status: Status) -> Self {
        // A broken connection has a status of the transport, not of the node; its message does not help an
        // operator.
        let broken =
            matches!(status.code(), Code::Unknown | Code::Unavailable | Code::Internal | Code::Cancelled);
        // tonic keeps the error of the transport as the source. A status that the node has sent has no source.
        if broken && status.source().is_some() { Self::ConnectionLost } else { Self::Call(Box::new(status)) }
    }
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl CommandError {
    /// True if the reader of the output has closed the pipe.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Write(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// True if the control API has closed the connection, as it does when it restarts.
    pub(crate) fn is_connection_lost(&self) -> bool {
        match self {
            Self::ConnectionLost => true,
            // The node answers so while it stops.
            Self::Call(status) => status.code() == Code::Unavailable,
            _ => false,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Connect(ConnectError::Permission { .. }) => 5,
            Self::Connect(_) | Self::ConnectionLost | Self::Timeout { .. } => 3,
            Self::Call(status) => match status.code() {
                Code::NotFound => 4,
                Code::PermissionDenied => 5,
                Code::Unavailable => 3,
                _ => 1,
            },
            Self::NotHealthy => 6,
            Self::Entry(_)
            | Self::File { .. }
            | Self::Passphrase(_)
            | Self::Write(_)
            | Self::NotAgreed
            | Self::ActionFailed { .. } => 1,
        })
    }
}
