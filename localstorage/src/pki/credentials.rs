//! Credentials: three files that are replaced together.

use std::fmt;

use zeroize::Zeroizing;

use super::{Certificate, CertificateTemplate, PkiError, PrivateKey, RevocationList};
use crate::tree::commit::committed_content;
use crate::tree::{EtcdDir, LayoutFile, PkiDir};

/// A key, its certificate, and the CA certificate that issued it.
///
/// [Loaded](PkiDir::load_credentials) credentials match each other.
#[derive(Debug)]
pub struct Credentials {
    /// The private key.
    pub key: PrivateKey,
    /// The certificate.
    pub certificate: Certificate,
    /// The CA certificate; for a self-signed certificate, the certificate itself.
    pub ca: Certificate,
}

/// The number of times that changing files are read again. The last read is checked in any case.
const MAX_READS: usize = 8;

/// The presence of each of the three files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CredentialPresence {
    /// The CA certificate.
    pub ca: bool,
    /// The certificate.
    pub certificate: bool,
    /// The private key.
    pub key: bool,
}

impl CredentialPresence {
    /// Returns whether all files are present.
    pub fn is_complete(self) -> bool {
        self.ca && self.certificate && self.key
    }

    /// Returns whether all files are absent.
    pub fn is_absent(self) -> bool {
        !self.ca && !self.certificate && !self.key
    }
}

impl fmt::Display for CredentialPresence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |is_present| if is_present { "present" } else { "absent" };
        let CredentialPresence { ca, certificate, key } = *self;
        write!(f, "CA {}, certificate {}, key {}", word(ca), word(certificate), word(key))
    }
}

/// The contents of the three files; none for an absent file.
#[derive(PartialEq)]
struct CredentialFiles {
    ca: Option<Zeroizing<Vec<u8>>>,
    certificate: Option<Zeroizing<Vec<u8>>>,
    key: Option<Zeroizing<Vec<u8>>>,
}

impl CredentialFiles {
    fn presence(&self) -> CredentialPresence {
        let CredentialFiles { ca, certificate, key } = self;
        CredentialPresence { ca: ca.is_some(), certificate: certificate.is_some(), key: key.is_some() }
    }
}

/// With the feature `pki`: credentials, replaced together.
///
/// A change is one [commit](crate::tree::LayoutDir::commit_files): after a crash all three files are old or
/// all are new.
impl PkiDir {
    /// Reports which of the files are present.
    ///
    /// # Errors
    /// [`PkiError::Read`]: an unreadable file is never reported as absent.
    pub fn credential_presence(&self) -> Result<CredentialPresence, PkiError> {
        Ok(self.read_files()?.presence())
    }

    /// Loads the credentials and checks them: each file is valid, the certificate belongs to the key, and the
    /// CA has issued it. None if all three files are absent.
    ///
    /// The period of validity is not checked: a node's clock may be wrong at this time.
    ///
    /// # Errors
    /// All but [`PkiError::Write`] and [`PkiError::Generate`]. The files stay unchanged.
    pub fn load_credentials(&self) -> Result<Option<Credentials>, PkiError> {
        let contents = self.read_files()?;
        let presence = contents.presence();
        let (Some(ca), Some(certificate), Some(key)) = (contents.ca, contents.certificate, contents.key)
        else {
            return match presence.is_absent() {
                true => Ok(None),
                false => Err(PkiError::Incomplete { directory: self.path().to_owned(), presence }),
            };
        };
        let credentials = Credentials {
            key: parse_file(&self.key, &key, PrivateKey::from_pem)?,
            certificate: parse_file(&self.certificate, &certificate, Certificate::from_pem)?,
            ca: parse_file(&self.ca, &ca, Certificate::from_pem)?,
        };
        self.check_credentials(&credentials)?;
        Ok(Some(credentials))
    }

    /// Loads only the private key; none if it is absent. A node that waits for its certificate has only the
    /// key.
    ///
    /// # Errors
    /// [`PkiError::Read`], [`PkiError::Malformed`].
    pub fn load_key(&self) -> Result<Option<PrivateKey>, PkiError> {
        let key = self.read_files()?.key;
        key.map(|key| parse_file(&self.key, &key, PrivateKey::from_pem)).transpose()
    }

    /// Loads the private key, or generates it if all three files are absent.
    ///
    /// # Errors
    /// Those of [`load_key`](Self::load_key), and [`PkiError::Incomplete`] for certificates without a key: a
    /// new key would not match them.
    pub fn ensure_key(&self) -> Result<PrivateKey, PkiError> {
        if let Some(key) = self.load_key()? {
            return Ok(key);
        }
        let presence = self.credential_presence()?;
        if !presence.is_absent() {
            return Err(PkiError::Incomplete { directory: self.path().to_owned(), presence });
        }
        let key = PrivateKey::generate()?;
        self.write_files(&[(&self.key, key.to_pem().as_bytes())])?;
        Ok(key)
    }

    /// Loads the credentials, or creates self-signed ones if all files are absent. A key without certificates
    /// is kept and gets a certificate.
    ///
    /// # Errors
    /// All of [`PkiError`]. Files that could not be read, parsed or matched are never replaced: a disk error
    /// costs a retry, not the identity.
    pub fn ensure_self_signed(&self, template: &CertificateTemplate) -> Result<Credentials, PkiError> {
        let presence = self.credential_presence()?;
        if presence.ca || presence.certificate {
            let none = || PkiError::Incomplete { directory: self.path().to_owned(), presence };
            return self.load_credentials()?.ok_or_else(none);
        }
        // The key is durable before it is certified: a crash in between keeps the identity.
        let key = self.ensure_key()?;
        let certificate = template.self_sign(&key)?;
        let credentials = Credentials { key, ca: certificate.clone(), certificate };
        self.store_credentials(&credentials)?;
        Ok(credentials)
    }

    /// Replaces the credentials: all three files at once, and only if they match each other.
    ///
    /// # Errors
    /// [`PkiError::KeyMismatch`], [`PkiError::NotIssued`] before any change; [`PkiError::Write`].
    pub fn store_credentials(&self, credentials: &Credentials) -> Result<(), PkiError> {
        self.check_credentials(credentials)?;
        let Credentials { key, certificate, ca } = credentials;
        let (key, certificate, ca) = (key.to_pem(), certificate.to_pem(), ca.to_pem());
        self.write_files(&[
            (&self.ca, ca.as_bytes()),
            (&self.certificate, certificate.as_bytes()),
            (&self.key, key.as_bytes()),
        ])
    }

    fn check_credentials(&self, Credentials { key, certificate, ca }: &Credentials) -> Result<(), PkiError> {
        let path = |file: &LayoutFile| file.path().to_owned();
        if certificate.public_key() != key.public_key() {
            return Err(PkiError::KeyMismatch { key: path(&self.key), certificate: path(&self.certificate) });
        }
        if !certificate.is_signed_by(ca) {
            return Err(PkiError::NotIssued { certificate: path(&self.certificate), ca: path(&self.ca) });
        }
        Ok(())
    }

    fn write_files(&self, contents: &[(&LayoutFile, &[u8])]) -> Result<(), PkiError> {
        self.commit_files(contents)
            .map_err(|source| PkiError::Write { directory: self.path().to_owned(), source })
    }

    /// Reads the three files as they are after the pending commit.
    fn read_files(&self) -> Result<CredentialFiles, PkiError> {
        let mut contents = self.read_each_file()?;
        // While another thread commits, some files may be read before the commit and some after. Two equal
        // reads are consistent.
        for _ in 0..MAX_READS {
            let again = self.read_each_file()?;
            if again == contents {
                break;
            }
            contents = again;
        }
        Ok(contents)
    }

    fn read_each_file(&self) -> Result<CredentialFiles, PkiError> {
        let read = |file: &LayoutFile| {
            // A commit that is not replayed yet counts as done: the next creation of the directory completes it.
            let content = match committed_content(self, file) {
                Ok(None) => file.read_if_present().map(|content| content.map(Zeroizing::new)),
                committed => committed,
            };
            content.map_err(|source| PkiError::Read { directory: self.path().to_owned(), source })
        };
        Ok(CredentialFiles {
            ca: read(&self.ca)?,
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
        })
    }
}

/// With the feature `pki`: the revocation list of members.
impl EtcdDir {
    /// Loads the list and verifies that the CA of the peers signed it; none if it is absent.
    ///
    /// # Errors
    /// [`PkiError::Read`], [`PkiError::Malformed`].
    pub fn load_revocation_list(&self, ca: &Certificate) -> Result<Option<RevocationList>, PkiError> {
        let content = self
            .peer_crl
            .read_if_present()
            .map_err(|source| PkiError::Read { directory: self.path().to_owned(), source })?;
        let parsed =
            content.map(|der| parse_file(&self.peer_crl, &der, |der| RevocationList::from_der(der, ca)));
        parsed.transpose()
    }

    /// Replaces the list.
    ///
    /// # Errors
    /// [`PkiError::Write`].
    pub fn store_revocation_list(&self, list: &RevocationList) -> Result<(), PkiError> {
        self.peer_crl
            .write(list.der_bytes())
            .map_err(|source| PkiError::Write { directory: self.path().to_owned(), source })
    }
}

fn parse_file<T>(
    file: &LayoutFile,
    content: &[u8],
    parse: impl FnOnce(&[u8]) -> Result<T, super::PkiEncodingError>,
) -> Result<T, PkiError> {
    parse(content).map_err(|source| PkiError::Malformed { file: file.path().to_owned(), source })
}
