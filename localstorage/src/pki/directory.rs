//! The three files, as one.

use std::fmt;

use zeroize::Zeroizing;

use super::{Certificate, PkiError, PrivateKey, RevocationList, Template};
use crate::tree::commit::committed;
use crate::tree::{Etcd, File, Pki};

/// A key, its certificate, and the certificate of who issued that.
///
/// Those that were [loaded](Pki::load) fit together.
#[derive(Debug)]
pub struct Credentials {
    /// The private key.
    pub key: PrivateKey,
    /// Its certificate.
    pub certificate: Certificate,
    /// The authority's; of a self-signed certificate, itself.
    pub ca: Certificate,
}

/// How often files that change meanwhile are read again; what was read last is checked in any case.
const READS: usize = 8;

/// Which of the three files are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Presence {
    /// The authority's certificate.
    pub ca: bool,
    /// The certificate.
    pub certificate: bool,
    /// The private key.
    pub key: bool,
}

impl Presence {
    /// All of them are there.
    pub fn is_all(self) -> bool {
        self.ca && self.certificate && self.key
    }

    /// None of them is there.
    pub fn is_none(self) -> bool {
        !self.ca && !self.certificate && !self.key
    }
}

impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |is_there| if is_there { "present" } else { "absent" };
        let Presence { ca, certificate, key } = *self;
        write!(f, "CA {}, certificate {}, key {}", word(ca), word(certificate), word(key))
    }
}

/// What the three files hold, as far as they are there.
#[derive(PartialEq)]
struct Contents {
    ca: Option<Zeroizing<Vec<u8>>>,
    certificate: Option<Zeroizing<Vec<u8>>>,
    key: Option<Zeroizing<Vec<u8>>>,
}

impl Contents {
    fn presence(&self) -> Presence {
        let Contents { ca, certificate, key } = self;
        Presence { ca: ca.is_some(), certificate: certificate.is_some(), key: key.is_some() }
    }
}

/// With the feature `pki`: the files of credentials, kept together.
///
/// A change is one [commit](crate::tree::Directory::commit): the old three or the new three, whatever happens between.
impl Pki {
    /// Which of the files are there.
    ///
    /// # Errors
    /// [`PkiError::Read`]: what can't be read is never said to be absent.
    pub fn presence(&self) -> Result<Presence, PkiError> {
        Ok(self.contents()?.presence())
    }

    /// The credentials, checked: each file is what it should be, the certificate is the key's, and the authority has
    /// issued it. None where all three are absent.
    ///
    /// Validity in time is not looked at: a node's clock may be wrong when it loads them.
    ///
    /// # Errors
    /// All but [`PkiError::Write`] and [`PkiError::Generate`]. The files stay as they are.
    pub fn load(&self) -> Result<Option<Credentials>, PkiError> {
        let contents = self.contents()?;
        let presence = contents.presence();
        let (Some(ca), Some(certificate), Some(key)) = (contents.ca, contents.certificate, contents.key)
        else {
            return match presence.is_none() {
                true => Ok(None),
                false => Err(PkiError::Incomplete { directory: self.path().to_owned(), presence }),
            };
        };
        let credentials = Credentials {
            key: parse(&self.key, &key, PrivateKey::from_pem)?,
            certificate: parse(&self.certificate, &certificate, Certificate::from_pem)?,
            ca: parse(&self.ca, &ca, Certificate::from_pem)?,
        };
        self.check(&credentials)?;
        Ok(Some(credentials))
    }

    /// The private key alone; none where it is absent. A node that waits for its certificate has nothing else.
    ///
    /// # Errors
    /// [`PkiError::Read`], [`PkiError::Malformed`].
    pub fn load_key(&self) -> Result<Option<PrivateKey>, PkiError> {
        let key = self.contents()?.key;
        key.map(|key| parse(&self.key, &key, PrivateKey::from_pem)).transpose()
    }

    /// The private key, which is made where all three files are absent.
    ///
    /// # Errors
    /// Those of [`load_key`](Self::load_key), and [`PkiError::Incomplete`] where there are certificates without a key:
    /// a new one would not be theirs.
    pub fn ensure_key(&self) -> Result<PrivateKey, PkiError> {
        if let Some(key) = self.load_key()? {
            return Ok(key);
        }
        let presence = self.presence()?;
        if !presence.is_none() {
            return Err(PkiError::Incomplete { directory: self.path().to_owned(), presence });
        }
        let key = PrivateKey::generate()?;
        self.write(&[(&self.key, key.to_pem().as_bytes())])?;
        Ok(key)
    }

    /// The credentials that are there; where there are none, new ones whose certificate is signed with its own key, and
    /// is its own authority. A key without certificates is kept and certified.
    ///
    /// # Errors
    /// All of [`PkiError`]. Nothing that could not be read, parsed or matched is made anew: an error of the disk costs
    /// a retry, and no identity.
    pub fn ensure_self_signed(&self, template: &Template) -> Result<Credentials, PkiError> {
        let presence = self.presence()?;
        if presence.ca || presence.certificate {
            let none = || PkiError::Incomplete { directory: self.path().to_owned(), presence };
            return self.load()?.ok_or_else(none);
        }
        let key = self.ensure_key()?;
        let certificate = template.self_sign(&key)?;
        let credentials = Credentials { key, ca: certificate.clone(), certificate };
        self.store(&credentials)?;
        Ok(credentials)
    }

    /// Puts these in the place of those that are there: all three at once, and only if they fit together.
    ///
    /// # Errors
    /// [`PkiError::KeyMismatch`], [`PkiError::NotIssued`] before anything is touched; [`PkiError::Write`].
    pub fn store(&self, credentials: &Credentials) -> Result<(), PkiError> {
        self.check(credentials)?;
        let Credentials { key, certificate, ca } = credentials;
        let (key, certificate, ca) = (key.to_pem(), certificate.to_pem(), ca.to_pem());
        self.write(&[
            (&self.ca, ca.as_bytes()),
            (&self.certificate, certificate.as_bytes()),
            (&self.key, key.as_bytes()),
        ])
    }

    fn check(&self, Credentials { key, certificate, ca }: &Credentials) -> Result<(), PkiError> {
        let path = |file: &File| file.path().to_owned();
        if certificate.public() != key.public() {
            return Err(PkiError::KeyMismatch { key: path(&self.key), certificate: path(&self.certificate) });
        }
        if !certificate.is_signed_by(ca) {
            return Err(PkiError::NotIssued { certificate: path(&self.certificate), ca: path(&self.ca) });
        }
        Ok(())
    }

    fn write(&self, contents: &[(&File, &[u8])]) -> Result<(), PkiError> {
        self.commit(contents).map_err(|source| PkiError::Write { directory: self.path().to_owned(), source })
    }

    /// The three files as they are once the last commit is complete.
    fn contents(&self) -> Result<Contents, PkiError> {
        let mut contents = self.read_each()?;
        // While another thread commits, some may be read before and some after. What is read twice is of one time.
        for _ in 0..READS {
            let again = self.read_each()?;
            if again == contents {
                break;
            }
            contents = again;
        }
        Ok(contents)
    }

    fn read_each(&self) -> Result<Contents, PkiError> {
        let read = |file: &File| {
            let content = match committed(self, file) {
                Ok(None) => file.read_if_present().map(|content| content.map(Zeroizing::new)),
                committed => committed,
            };
            content.map_err(|source| PkiError::Read { directory: self.path().to_owned(), source })
        };
        Ok(Contents { ca: read(&self.ca)?, certificate: read(&self.certificate)?, key: read(&self.key)? })
    }
}

/// With the feature `pki`: the list of members no longer trusted.
impl Etcd {
    /// The list, checked to be of the authority that peers are known by; none where there is none.
    ///
    /// # Errors
    /// [`PkiError::Read`], [`PkiError::Malformed`].
    pub fn load_revoked(&self, ca: &Certificate) -> Result<Option<RevocationList>, PkiError> {
        let content = self
            .peer_crl
            .read_if_present()
            .map_err(|source| PkiError::Read { directory: self.path().to_owned(), source })?;
        let parsed = content.map(|der| parse(&self.peer_crl, &der, |der| RevocationList::from_der(der, ca)));
        parsed.transpose()
    }

    /// Puts a list in the place of the one that is there.
    ///
    /// # Errors
    /// [`PkiError::Write`].
    pub fn store_revoked(&self, list: &RevocationList) -> Result<(), PkiError> {
        self.peer_crl
            .write(list.der())
            .map_err(|source| PkiError::Write { directory: self.path().to_owned(), source })
    }
}

fn parse<T>(
    file: &File,
    content: &[u8],
    parse: impl FnOnce(&[u8]) -> Result<T, super::FormatError>,
) -> Result<T, PkiError> {
    parse(content).map_err(|source| PkiError::Malformed { file: file.path().to_owned(), source })
}
