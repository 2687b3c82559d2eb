//! Credentials in their directories: a key, its certificate and the authority's, which are right together or not at all.
//!
//! Keys are Ed25519, as PKCS #8; certificates are X.509; both lie in PEM, one block to a file. Whatever else a file
//! holds is an error that names it, and nothing is ever made anew in the place of what could not be read.

mod certificate;
mod directory;
mod key;
mod pem;
mod template;

use std::path::PathBuf;

use thiserror::Error;

use crate::error::Error;

pub use certificate::{Certificate, RevocationList};
pub use directory::{Credentials, Presence};
pub use key::{PrivateKey, PublicKey};
pub use template::{CommonName, Template};

/// What is wrong with the bytes of a key, a certificate or a list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// It doesn't begin with the line that begins PEM.
    #[error("it does not begin as PEM")]
    NoPem,
    /// The block of another thing, for example of a key where a certificate should be.
    #[error("it is a PEM block of {found:?}, not {expected:?}")]
    WrongLabel {
        /// What it says to be.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// The line that ends PEM is missing: it was cut.
    #[error("it is cut off")]
    Truncated,
    /// What is in the block is not base64.
    #[error("it is not base64")]
    Base64,
    /// Something follows.
    #[error("something follows its end")]
    TrailingData,
    /// The block has not the structure that it should have.
    #[error("it is no {what} in DER")]
    Der {
        /// What it should be.
        what: &'static str,
    },
    /// A key of another algorithm.
    #[error("its key is not Ed25519")]
    NotEd25519,
    /// It is another authority's, or a forgery.
    #[error("the authority has not signed it")]
    Signature,
}

/// Why credentials could not be read, checked, made or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PkiError {
    /// A file could not be read. Nothing is known of it, so nothing takes its place: try again.
    #[error("read credentials in {}", .directory.display())]
    Read {
        /// The directory.
        directory: PathBuf,
        /// Why; it names the file.
        #[source]
        source: Error,
    },
    /// Some of the files are there and some are not: restore those that are missing, or remove the others by hand.
    #[error("credentials in {} are incomplete: {}", .directory.display(), .presence)]
    Incomplete {
        /// The directory.
        directory: PathBuf,
        /// Which are there.
        presence: Presence,
    },
    /// The content of a file is not what it should be. It stays as it is.
    #[error("parse {}", .file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        #[source]
        source: FormatError,
    },
    /// The certificate is one of another key.
    #[error("{} is not the key of {}", .key.display(), .certificate.display())]
    KeyMismatch {
        /// The key's file.
        key: PathBuf,
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// The certificate is of another authority, or of none.
    #[error("{} was not issued by {}", .certificate.display(), .ca.display())]
    NotIssued {
        /// The certificate's file.
        certificate: PathBuf,
        /// The authority's file.
        ca: PathBuf,
    },
    /// No key or certificate could be made.
    #[error("generate credentials")]
    Generate(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Files could not be written: those that were there still hold, or all the new ones do.
    #[error("write credentials in {}", .directory.display())]
    Write {
        /// The directory.
        directory: PathBuf,
        /// Why; it names the file.
        #[source]
        source: Error,
    },
}

impl PkiError {
    fn generate(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> PkiError {
        PkiError::Generate(source.into())
    }
}

/// What files of credentials may hold: never panics, and what is read prints to what is read again.
///
/// # Panics
/// Where that isn't so.
#[cfg(any(test, feature = "testing"))]
pub fn credentials_file(bytes: &[u8]) {
    if let Ok(key) = PrivateKey::from_pem(bytes) {
        let again = PrivateKey::from_pem(key.to_pem().as_bytes()).expect("what was printed is PEM");
        assert_eq!(again.public(), key.public(), "a key is read as it was printed");
    }
    let certificates = [Certificate::from_pem(bytes), Certificate::from_der(bytes)];
    for certificate in certificates.into_iter().flatten() {
        let again = Certificate::from_pem(certificate.to_pem().as_bytes());
        assert_eq!(again.as_ref(), Ok(&certificate), "a certificate is read as it was printed");
        // Any answer is right; a panic is not.
        let _ = certificate.is_signed_by(&certificate);
        let _ = RevocationList::from_der(bytes, &certificate);
    }
    let _ = PrivateKey::from_pkcs8(bytes);
    let _ = certificate::any_list(bytes);
}
