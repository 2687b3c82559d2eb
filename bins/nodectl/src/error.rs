//! Errors of commands, and their exit codes.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use nodekeel_logtree::render::printable_json;
use nodekeel_node::client::{ConnectError, InvalidLogEntry, format_chain};
use serde_json::json;
use thiserror::Error;
use tonic::{Code, Status};

/// The exit code of a wrong command line, as clap has it.
const USAGE_CODE: u8 = 2;

/// The JSON of an error; docs/nodectl.md describes it.
fn json_error(kind: &str, message: &str, exit_code: u8) -> String {
    let error = json!({ "error": { "kind": kind, "message": message, "exit_code": exit_code } });
    printable_json(error.to_string())
}

/// The JSON of a command line that clap refuses.
pub(crate) fn usage_json(message: &str) -> String {
    json_error("usage", message, USAGE_CODE)
}

#[derive(Debug, Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{}", .0.message())]
    Call(Box<Status>),
    #[error(
        "connection to noded lost: it has ended, or the role of this operator has changed; repeat the command"
    )]
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
    #[error("unknown context {name:?}, {known}; `nodectl context add` adds one")]
    UnknownContext {
        name: String,
        /// A clause about those that are.
        known: String,
    },
    #[error("can't find the file of contexts: set HOME or XDG_CONFIG_HOME")]
    NoContextsFile,
    #[error("private key {} can be read by other users: `chmod 600 {}`, and replace it if one may have", path.display(), path.display())]
    OpenKeyFile { path: PathBuf },
    #[error("can't read the recovery passphrase from the terminal or the standard input")]
    Passphrase(#[source] io::Error),
    #[error("can't write the output")]
    Write(#[source] io::Error),
    /// Several DNs end with a short name; the message has them.
    #[error("{}", .0.message())]
    AmbiguousDn(Box<Status>),
    #[error("{dn} {what} after {limit:?}{why}; see `nodectl status {dn}`")]
    WaitEnded {
        dn: String,
        /// A clause without the object.
        what: &'static str,
        limit: Duration,
        /// What it waits for, as the end of the clause.
        why: String,
    },
    #[error("{message}; see --help")]
    Usage { message: String },
    #[error("{dn} {reason}; see `nodectl status {dn}`")]
    ActionFailed { dn: String, reason: String },
    #[error("images of the archive are left out: {}", images.join("; "))]
    ImagesLeftOut { images: Vec<String> },
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
        ExitCode::from(self.kind_and_code().1)
    }

    /// The name of the error for programs, and its exit code.
    fn kind_and_code(&self) -> (&'static str, u8) {
        match self {
            Self::Connect(ConnectError::Permission { .. } | ConnectError::UnknownOperator { .. }) => {
                ("permission-denied", 5)
            }
            Self::Connect(_) | Self::ConnectionLost => ("unreachable", 3),
            Self::Timeout { .. } => ("timeout", 3),
            Self::Call(status) => match status.code() {
                Code::NotFound => ("not-found", 4),
                Code::PermissionDenied => ("permission-denied", 5),
                Code::Unavailable => ("unreachable", 3),
                Code::FailedPrecondition => ("failed-precondition", 1),
                Code::InvalidArgument => ("invalid-argument", 1),
                Code::Aborted => ("aborted", 1),
                _ => ("internal", 1),
            },
            Self::AmbiguousDn(_) => ("ambiguous-dn", 4),
            Self::WaitEnded { .. } => ("wait-ended", 6),
            Self::NotHealthy => ("not-healthy", 6),
            Self::UnknownContext { .. } | Self::NoContextsFile => ("context", 1),
            Self::Usage { .. } => ("usage", USAGE_CODE),
            Self::Entry(_) => ("invalid-entry", 1),
            Self::File { .. } | Self::OpenKeyFile { .. } => ("file", 1),
            Self::Passphrase(_) => ("passphrase", 1),
            Self::Write(_) => ("write", 1),
            Self::NotAgreed => ("not-agreed", 1),
            Self::ActionFailed { .. } | Self::ImagesLeftOut { .. } => ("action-failed", 1),
        }
    }

    /// The error for programs, as one line of JSON.
    pub(crate) fn to_json(&self) -> String {
        let (kind, code) = self.kind_and_code();
        json_error(kind, &format_chain(self), code)
    }
}
