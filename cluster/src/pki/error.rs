//! What goes wrong with an authority.

use nodekeel_localstorage::pki::{FormatError, PkiError};
use thiserror::Error;

use crate::consensus::kv::KvError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why an authority could not be made, loaded or used. What is stored stays as it is.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// The store gave no answer, or refused. A retry may help, and does no harm.
    #[error("{operation}")]
    Store {
        /// What was asked.
        operation: &'static str,
        /// Why.
        #[source]
        source: KvError,
    },
    /// No authority was ever saved there.
    #[error("the cluster has no authority")]
    Absent,
    /// A part of the authority is missing: restore it from a backup.
    #[error("the cluster's authority is incomplete: {missing} is absent")]
    Incomplete {
        /// The key that isn't there.
        missing: &'static str,
    },
    /// A value is not what it should be: restore it from a backup.
    #[error("parse {key}")]
    Malformed {
        /// Its key.
        key: String,
        /// What is wrong with it.
        #[source]
        source: FormatError,
    },
    /// The value is no Ed25519 key of 64 bytes, or its two halves don't belong together.
    #[error("{key} is no Ed25519 key of a seed and its public key")]
    MalformedKey {
        /// Its key in the store.
        key: &'static str,
    },
    /// The key and the certificate of the authority are not of one pair.
    #[error("{CA_KEY} is not the key of {CA}", CA_KEY = super::CA_KEY, CA = super::CA)]
    KeyMismatch,
    /// The certificate is not that of an authority: it may certify nobody, or another has signed it.
    #[error("the certificate in {key} is not that of an authority")]
    NotAnAuthority {
        /// Where it is.
        key: &'static str,
    },
    /// A certificate that should be the authority's own was issued by another.
    #[error("the certificate in {key} was not issued by this authority")]
    NotIssued {
        /// Where it is.
        key: String,
    },
    /// There is another authority already: this one was not saved, and must not be used.
    #[error("the cluster has another authority already")]
    Another,
    /// It has never issued a certificate to this name.
    #[error("no certificate was issued to {name}")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// Others changed the list of revoked certificates each time before this one could: try again.
    #[error("the list of revoked certificates changes too fast")]
    Contended,
    /// A key, a certificate or a list could not be made.
    #[error("make {what}")]
    Make {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: Source,
    },
    /// The list of revoked certificates could not be written to the disk. The old one is there.
    #[error("keep the list of revoked certificates")]
    Keep(#[source] PkiError),
}

impl AuthorityError {
    /// Whether the same call may succeed later, with nothing else done about it.
    pub fn is_retryable(&self) -> bool {
        match self {
            AuthorityError::Store { source, .. } => source.is_retryable(),
            AuthorityError::Contended | AuthorityError::Keep(_) => true,
            _ => false,
        }
    }

    pub(super) fn make(what: &'static str) -> impl FnOnce(Source) -> AuthorityError {
        move |source| AuthorityError::Make { what, source }
    }

    pub(super) fn store(operation: &'static str) -> impl FnOnce(KvError) -> AuthorityError {
        move |source| AuthorityError::Store { operation, source }
    }
}
