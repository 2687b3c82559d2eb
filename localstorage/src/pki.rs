//! Credentials in their directories: a key, its certificate and the CA certificate, which always match.
//!
//! Keys are Ed25519 in PKCS #8; certificates are X.509; both are PEM, one block per file. Any other content
//! is an error that names the file, and an unreadable file is never replaced by a new one.

mod certificate;
mod credentials;
mod key;
mod pem;
mod template;

use std::path::PathBuf;

use thiserror::Error;

use crate::error::Error;

pub use certificate::{Certificate, RevocationList};
pub use credentials::{CredentialPresence, Credentials};
pub use key::{PrivateKey, PublicKey};
pub use template::{CertificateTemplate, CommonName};

/// A defect of the bytes of a key, a certificate or a revocation list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PkiEncodingError {
    /// The first line is not that of a PEM block.
    #[error("not PEM: the BEGIN line is missing")]
    NoPem,
    /// The block has another label, for example that of a key instead of a certificate.
    #[error("the PEM label is {found:?}, but a file of label {expected:?} is expected")]
    WrongLabel {
        /// The label in the file.
        found: String,
        /// The expected label.
        expected: &'static str,
    },
    /// The line that ends a PEM block is missing: the file was truncated.
    #[error("PEM is truncated: the END line is missing")]
    Truncated,
    /// The content of the block is not base64.
    #[error("invalid base64 in PEM")]
    Base64,
    /// More data follows.
    #[error("unexpected data after the end of the PEM or DER value")]
    TrailingData,
    /// The content does not have the expected structure.
    #[error("the content is not a {what} in DER")]
    Der {
        /// The expected structure.
        what: &'static str,
    },
    /// The key is of another algorithm.
    #[error("the key is not an Ed25519 key, and no other kind is supported")]
    NotEd25519,
    /// Another CA signed it, or it is a forgery.
    #[error("the certificate or revocation list is not signed by the CA")]
    Signature,
}

/// A failure to read, check, create or write credentials.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A file could not be read. Its content is unknown, so it is not replaced: retry.
    #[error("can't read the credentials (CA certificate, certificate, key) in {}", .directory.display())]
    Read {
        /// The directory.
        directory: PathBuf,
        /// The cause, which names the file.
        #[source]
        source: Error,
    },
    /// Some of the files are missing: restore them, or remove the others by hand.
    #[error(
        "the credentials in {} are incomplete: {}; restore the absent files",
        .directory.display(), .presence
    )]
    Incomplete {
        /// The directory.
        directory: PathBuf,
        /// The files that are present.
        presence: CredentialPresence,
    },
    /// The content of a file is invalid. The file stays unchanged.
    #[error("can't parse credential file {}", .file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The cause.
        #[source]
        source: PkiEncodingError,
    },
    /// The certificate belongs to another key.
    #[error(
        "private key {} does not belong to certificate {}: restore the file that was replaced",
        .key.display(), .certificate.display()
    )]
    KeyMismatch {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        certificate: PathBuf,
    },
    /// Another CA issued the certificate, or none did.
    #[error(
        "certificate {} was not issued by CA {}: restore the file that was replaced",
        .certificate.display(), .ca.display()
    )]
    NotIssued {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the CA certificate.
        ca: PathBuf,
    },
    /// A key or certificate could not be generated.
    #[error("can't generate a key or certificate")]
    Generate(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Files could not be written: either all old files are in effect, or all new ones.
    #[error("can't write credentials in {}", .directory.display())]
    Write {
        /// The directory.
        directory: PathBuf,
        /// The cause, which names the file.
        #[source]
        source: Error,
    },
}

impl PkiError {
    fn generate(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> PkiError {
        PkiError::Generate(source.into())
    }
}

/// Checks that the parsers of credential files never panic, and that a parsed credential is printed to the
/// same one.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_credentials_file(bytes: &[u8]) {
    if let Ok(key) = PrivateKey::from_pem(bytes) {
        let again = PrivateKey::from_pem(key.to_pem().as_bytes()).expect("a printed key is PEM");
        assert_eq!(again.public_key(), key.public_key(), "a printed key is parsed back");
    }
    let certificates = [Certificate::from_pem(bytes), Certificate::from_der(bytes)];
    for certificate in certificates.into_iter().flatten() {
        let again = Certificate::from_pem(certificate.to_pem().as_bytes());
        assert_eq!(again.as_ref(), Ok(&certificate), "a printed certificate is parsed back");
        // Any result is correct, except a panic.
        let _ = certificate.is_signed_by(&certificate);
        let _ = RevocationList::from_der(bytes, &certificate);
    }
    let _ = PrivateKey::from_pkcs8(bytes);
    let _ = certificate::count_revoked(bytes);
}
