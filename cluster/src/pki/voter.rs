//! A voter, and the key by which it opens the CA's private key.

use std::collections::BTreeMap;
use std::fmt;

use nodekeel_localstorage::pki::{Certificate, Credentials, PrivateKey, PublicKey, RevocationList};
use prost::Message as _;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use zeroize::Zeroizing;

use super::{CaError, SEALED_KEY_PATH, SubjectNames};
use crate::age::{Encryptor, Identity, OpenError, Recipient};
use crate::consensus::MemberName;

/// The start of what a voter signs.
const SIGNED_PREFIX: &[u8] = b"nodekeel: the CA's private key may be sealed to this key of a voter\0";
/// The lines with the recipients, before the private key.
const VOTER_LINE: &str = "voter ";
const RECOVERY_LINE: &str = "recovery ";
const PEM_START: &str = "-----BEGIN ";

/// A voter with its private key, which opens the private key of the CA. It is kept in a file of the voter that nobody else reads,
/// and is never printed.
pub struct Voter {
    name: MemberName,
    identity: Identity,
    recovery: Option<Recipient>,
}

impl Voter {
    /// A voter with a new key.
    ///
    /// # Errors
    /// [`CaError::Create`].
    pub fn generate(name: MemberName) -> Result<Voter, CaError> {
        let identity = Identity::generate()
            .map_err(|_| CaError::create_error("a voter's key")("no random numbers".into()))?;
        Ok(Voter { name, identity, recovery: None })
    }

    /// The voter whose key is in this file.
    ///
    /// # Errors
    /// [`CaError::MalformedVoterKey`].
    pub fn from_file(name: MemberName, content: &[u8]) -> Result<Voter, CaError> {
        let identity = Identity::from_file(content).ok_or(CaError::MalformedVoterKey)?;
        Ok(Voter { name, identity, recovery: None })
    }

    /// The content of the file with its key: an identity of age.
    pub fn to_file(&self) -> Zeroizing<Vec<u8>> {
        self.identity.to_file()
    }

    /// The same voter, which seals the CA's private key to this recipient, too.
    #[must_use]
    pub fn with_recovery(self, recovery: Option<Recipient>) -> Voter {
        Voter { recovery, ..self }
    }

    /// The name of its member.
    pub fn name(&self) -> &MemberName {
        &self.name
    }

    /// Its public key.
    pub fn recipient(&self) -> &Recipient {
        self.identity.recipient()
    }

    pub(super) fn recovery(&self) -> Option<&Recipient> {
        self.recovery.as_ref()
    }

    /// Only this voter, and the recovery key.
    pub(super) fn alone(&self) -> Recipients {
        let voters = BTreeMap::from([(self.name.to_string(), self.recipient().clone())]);
        Recipients { voters, recovery: self.recovery.clone() }
    }

    /// Opens the CA's private key; `None` if it is not sealed to this voter.
    pub(crate) fn open(&self, sealed: &[u8]) -> Result<Option<SealedKey>, CaError> {
        let content = match self.identity.open(sealed) {
            Ok(content) => content,
            Err(OpenError::OtherRecipients) => return Ok(None),
            Err(source) => {
                return Err(CaError::MalformedSeal { key: SEALED_KEY_PATH, source: source.into() });
            }
        };
        let malformed = || CaError::MalformedSeal { key: SEALED_KEY_PATH, source: "no key in it".into() };
        SealedKey::from_content(&content).map(Some).ok_or_else(malformed)
    }

    /// The record of its key, signed by the key of its member's certificate.
    pub(super) fn sign_record(&self, member: &Credentials) -> Result<Vec<u8>, CaError> {
        let failed = |_| CaError::create_error("the record of a voter's key")("the member's key".into());
        let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(member.key.expose_pkcs8()).map_err(failed)?;
        let recipient = self.recipient().to_string();
        let record = VoterRecord {
            signature: pair.sign(&signed_bytes(self.name.as_str(), &recipient)).as_ref().to_vec(),
            certificate: member.certificate.der_bytes().to_vec(),
            recipient,
        };
        Ok(record.encode_to_vec())
    }
}

impl fmt::Debug for Voter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Voter").field("name", &self.name).field("key", &self.identity).finish_non_exhaustive()
    }
}

/// The stored record of a voter's key.
#[derive(Clone, PartialEq, prost::Message)]
struct VoterRecord {
    #[prost(string, tag = "1")]
    recipient: String,
    #[prost(bytes = "vec", tag = "2")]
    certificate: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    signature: Vec<u8>,
}

fn signed_bytes(name: &str, recipient: &str) -> Vec<u8> {
    [SIGNED_PREFIX, name.as_bytes(), b"\0", recipient.as_bytes()].concat()
}

/// The key in the record of a voter of this name, and the certificate of its member, if that has signed it: the CA must have
/// certified the member, and not have revoked the certificate since.
pub(super) fn verify_record(
    name: &str,
    record: &[u8],
    ca: &Certificate,
    revoked: &RevocationList,
) -> Result<(Recipient, Certificate), &'static str> {
    let record = VoterRecord::decode(record).map_err(|_| "it is damaged")?;
    let certificate = Certificate::from_der(&record.certificate).map_err(|_| "its certificate is damaged")?;
    if !certificate.is_signed_by(ca) {
        return Err("another CA has issued its certificate");
    }
    if revoked.is_revoked(&certificate) {
        return Err("its certificate is revoked");
    }
    if SubjectNames::from_certificate(&certificate).common_name.as_deref() != Some(name) {
        return Err("its certificate is another member's");
    }
    let key: PublicKey = certificate.public_key();
    UnparsedPublicKey::new(&ED25519, key.as_bytes())
        .verify(&signed_bytes(name, &record.recipient), &record.signature)
        .map_err(|_| "its member has not signed it")?;
    let recipient = record.recipient.parse().map_err(|_| "its key is damaged")?;
    Ok((recipient, certificate))
}

/// To whom the CA's private key is sealed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Recipients {
    /// By the names of their members.
    pub(super) voters: BTreeMap<String, Recipient>,
    pub(super) recovery: Option<Recipient>,
}

impl Recipients {
    /// Seals the CA's private key, with a list of the recipients: only who has the key can have written the list.
    pub(super) fn seal(&self, key: &PrivateKey) -> Result<Vec<u8>, CaError> {
        let mut content = Zeroizing::new(String::with_capacity(4096));
        for (name, recipient) in &self.voters {
            content.extend([VOTER_LINE, name, " ", &recipient.to_string(), "\n"]);
        }
        if let Some(recovery) = &self.recovery {
            content.extend([RECOVERY_LINE, &recovery.to_string(), "\n"]);
        }
        content.push_str(&key.to_pem());
        let failed =
            |_| CaError::create_error("the sealed private key")("a recipient is no usable key".into());
        let all = self.voters.values().chain(&self.recovery);
        let (mut encryptor, mut file) = Encryptor::new(all).map_err(failed)?;
        file.extend(encryptor.push(content.as_bytes()).map_err(failed)?);
        file.extend(encryptor.finish().map_err(failed)?);
        Ok(file)
    }
}

/// The content of the sealed file.
#[derive(Debug)]
pub(crate) struct SealedKey {
    pub(super) key: PrivateKey,
    pub(super) recipients: Recipients,
}

impl SealedKey {
    fn from_content(content: &[u8]) -> Option<SealedKey> {
        let text = std::str::from_utf8(content).ok()?;
        let (lines, pem) = text.split_at(text.find(PEM_START)?);
        let mut recipients = Recipients::default();
        for line in lines.lines() {
            if let Some(voter) = line.strip_prefix(VOTER_LINE) {
                let (name, recipient) = voter.split_once(' ')?;
                recipients.voters.insert(name.to_owned(), recipient.parse().ok()?);
            } else {
                recipients.recovery = Some(line.strip_prefix(RECOVERY_LINE)?.parse().ok()?);
            }
        }
        Some(SealedKey { key: PrivateKey::from_pem(pem.as_bytes()).ok()?, recipients })
    }
}

/// Arbitrary bytes as the content of the sealed file, and as a voter's record: never panics.
#[cfg(any(test, feature = "testing"))]
pub(super) fn check_arbitrary_seal(bytes: &[u8]) {
    let _ = SealedKey::from_content(bytes);
    let _ = VoterRecord::decode(bytes);
    crate::age::check_arbitrary_file(bytes);
}
