//! Errors of a CA.

use nodekeel_localstorage::pki::{PkiEncodingError, PkiError};
use thiserror::Error;

use crate::BoxError;
use crate::consensus::kv::KvError;

/// A failure to create, load or use a CA. Stored values stay unchanged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaError {
    /// The store did not answer, or rejected the call. A retry may help, and is harmless.
    #[error("can't {operation}")]
    Store {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: KvError,
    },
    /// No CA was ever saved there.
    #[error("the cluster's etcd has no CA: none was ever stored there")]
    NotFound,
    /// A value of the CA is missing: restore it from a backup.
    #[error("the cluster's CA is incomplete: key {missing} is missing in etcd; restore it from a backup")]
    Incomplete {
        /// The missing key.
        missing: &'static str,
    },
    /// A value is invalid: restore it from a backup.
    #[error("can't parse the value of key {key} in the cluster's etcd: restore it from a backup")]
    Malformed {
        /// The key.
        key: String,
        /// The defect.
        #[source]
        source: PkiEncodingError,
    },
    /// The value is not an Ed25519 key of 64 bytes, or its two halves do not match.
    #[error(
        "the cluster CA's private key, stored in etcd at {key}, is not a 64-byte Ed25519 key: restore it \
         from a backup"
    )]
    MalformedKey {
        /// The key in the store.
        key: &'static str,
    },
    /// The private key is sealed, and not to this voter. A voter that can open it seals it to this one while both run.
    #[error(
        "the private key of the cluster's CA is not sealed to this node, which so can't sign: start the other voters, which seal it \
         to a new voter within seconds; if they run, this node has lost the voter key that it joined with: replace it by \
         `nodectl cluster replace NODE` on another voter"
    )]
    Sealed,
    /// The sealed private key is damaged: restore it from a backup.
    #[error(
        "the sealed private key of the cluster's CA, stored in etcd at {key}, is damaged: restore it from a backup"
    )]
    MalformedSeal {
        /// The key in the store.
        key: &'static str,
        /// The defect.
        #[source]
        source: BoxError,
    },
    /// The file with this voter's key is damaged.
    #[error(
        "the file with this voter's key, voter_key beside its credentials, is damaged: replace this node by `nodectl cluster replace NODE` on another voter"
    )]
    MalformedVoterKey,
    /// The list of members could not be read, or the history of this member's database not erased. A retry may help.
    #[error("can't seal the private key of the cluster's CA to its voters")]
    Members {
        /// Whether the same call may succeed later.
        is_retryable: bool,
        /// The cause.
        source: BoxError,
    },
    /// The private key and the certificate of the CA do not match.
    #[error(
        "the cluster CA's private key at {} or {} does not belong to its certificate at {} in etcd: restore both \
         from a backup",
        super::CA_KEY_PATH,
        super::SEALED_KEY_PATH,
        super::CA_CERT_PATH
    )]
    KeyMismatch,
    /// The certificate is not a CA certificate, or is not self-signed.
    #[error("the certificate in etcd at {key} is not a self-signed CA certificate: restore it from a backup")]
    NotACa {
        /// The key in the store.
        key: &'static str,
    },
    /// A certificate in the CA's store was issued by another CA.
    #[error("the certificate in etcd at {key} was not issued by the cluster's CA: restore it from a backup")]
    NotIssued {
        /// The key in the store.
        key: String,
    },
    /// The cluster already has another CA: this one was not saved, and must not be used.
    #[error("can't store this CA: the cluster's etcd already has another one, which stays")]
    AnotherCa,
    /// The CA has never issued a certificate to this name.
    #[error("no certificate was issued to {name}")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// Concurrent changes of the list of revoked certificates preceded every attempt: try again.
    #[error("can't update the list of revoked certificates: too many concurrent changes; try again")]
    Contended,
    /// A key, a certificate or a list could not be created.
    #[error("the cluster's CA can't create {what}")]
    Create {
        /// The object.
        what: &'static str,
        /// The cause.
        #[source]
        source: BoxError,
    },
    /// The list of revoked certificates could not be written to the disk. The previous one remains.
    #[error("can't write the list of revoked certificates to this node's disk")]
    WriteRevocationList(#[source] PkiError),
}

impl CaError {
    /// Returns whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        match self {
            CaError::Store { source, .. } => source.is_retryable(),
            CaError::Members { is_retryable, .. } => *is_retryable,
            // Another voter seals the key to this one.
            CaError::Sealed | CaError::Contended | CaError::WriteRevocationList(_) => true,
            _ => false,
        }
    }

    pub(super) fn create_error(what: &'static str) -> impl FnOnce(BoxError) -> CaError {
        move |source| CaError::Create { what, source }
    }

    pub(super) fn store_error(operation: &'static str) -> impl FnOnce(KvError) -> CaError {
        move |source| CaError::Store { operation, source }
    }
}
