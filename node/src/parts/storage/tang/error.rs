//! Errors of Tang servers, with what to do.

use std::io;

use hyper::StatusCode;
use nodekeel_localstorage::tang::{TangError, Thumbprint};
use nodekeel_localstorage::volume::VolumeError;
use thiserror::Error;

use super::server::TangUrl;
use crate::error_chain::error_chain;

/// A Tang server does not do what it is asked for.
#[derive(Debug, Error)]
#[error("Tang server {url}")]
pub(crate) struct TangServerError {
    pub(super) url: TangUrl,
    #[source]
    pub(super) problem: ServerProblem,
}

#[derive(Debug, Error)]
pub(crate) enum ServerProblem {
    #[error("can't be reached")]
    Connect(#[source] io::Error),
    #[error("does not answer within {seconds} s")]
    Timeout { seconds: u64 },
    #[error("sends no valid HTTP")]
    Http(#[source] hyper::Error),
    #[error("answers with more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("answers with {0}")]
    Status(StatusCode),
    #[error(
        "does not have the key {key} that signs for it: compare storage.tang with the output of tang-show-keys on the \
         server"
    )]
    NoSigner { key: Thumbprint },
    #[error(
        "does not have the key {key} any more: restore it from a backup of the server, or open the volume by its recovery \
         passphrase and type: nodectl storage rotate --recovery"
    )]
    KeyGone { key: Thumbprint },
    #[error("can't be used")]
    Protocol(#[source] TangError),
    #[error("gives back another key than it was given")]
    OtherKey,
}

impl ServerProblem {
    /// Returns whether this server will not open the binding later, either.
    pub(super) fn is_permanent(&self) -> bool {
        matches!(self, Self::KeyGone { .. } | Self::OtherKey | Self::Protocol(TangError::WrongAnswer))
    }
}

/// The other half of the volume's key can't be bound or recovered.
#[derive(Debug, Error)]
pub(crate) enum TangKeyError {
    #[error("the data volume is not encrypted, and has no key that a Tang server could keep")]
    NotEncrypted,
    #[error("can't read from its header which volume the disk has")]
    Volume(#[source] VolumeError),
    #[error("can't read or write a binding to a Tang server in esp/")]
    File(#[source] nodekeel_localstorage::Error),
    #[error("can't open the directory of the bindings to Tang servers")]
    Esp(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("{}", describe_all(.0))]
    Servers(Vec<TangServerError>),
    #[error(
        "esp/ has no binding of volume {volume} to a Tang server: open it by its recovery passphrase, and type: nodectl \
         storage rotate --recovery"
    )]
    Unbound { volume: String },
}

fn describe_all(errors: &[TangServerError]) -> String {
    let texts: Vec<_> = errors.iter().map(|error| error_chain(error)).collect();
    texts.join("; ")
}
