//! Private keys.

use std::fmt;

use rcgen::{KeyPair, PKCS_ED25519};
use zeroize::{Zeroize as _, Zeroizing};

use super::{PkiEncodingError, PkiError, pem};

/// The PEM label of PKCS #8.
const LABEL: &str = "PRIVATE KEY";

/// An Ed25519 private key.
///
/// The memory is wiped on drop, the `Debug` prints nothing of it, and it implements neither `Display` nor
/// `Clone`.
pub struct PrivateKey {
    pkcs8: Zeroizing<Vec<u8>>,
    public_key: PublicKey,
}

/// The raw bytes of an Ed25519 public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    pub(super) fn try_new(raw: &[u8]) -> Result<PublicKey, PkiEncodingError> {
        raw.try_into().map(PublicKey).map_err(|_| PkiEncodingError::NotEd25519)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first 16 bytes in hexadecimal, from which a node gets its name.
    pub fn short_id(&self) -> String {
        self.0[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({}…)", self.short_id())
    }
}

impl PrivateKey {
    /// Generates a key from random numbers of the system.
    ///
    /// # Errors
    /// [`PkiError::Generate`] if random numbers are unavailable.
    pub fn generate() -> Result<PrivateKey, PkiError> {
        let mut pair = KeyPair::generate_for(&PKCS_ED25519).map_err(PkiError::generate)?;
        let der = to_version_1(pair.serialized_der());
        // Dropping the pair would not erase its copy of the key.
        pair.zeroize();
        PrivateKey::from_pkcs8(&der).map_err(PkiError::generate)
    }

    /// Parses PKCS #8 from exactly one PEM block.
    ///
    /// # Errors
    /// [`PkiEncodingError`], which contains no bytes of the key.
    pub fn from_pem(text: &[u8]) -> Result<PrivateKey, PkiEncodingError> {
        PrivateKey::from_pkcs8(&pem::decode_block(text, LABEL)?)
    }

    /// Parses PKCS #8 from DER.
    ///
    /// # Errors
    /// [`PkiEncodingError::Der`], and [`PkiEncodingError::NotEd25519`] for a valid key of another algorithm.
    pub fn from_pkcs8(der: &[u8]) -> Result<PrivateKey, PkiEncodingError> {
        let mut pair = KeyPair::try_from(der).map_err(|_| PkiEncodingError::Der { what: "private key" })?;
        let public = match pair.algorithm() == &PKCS_ED25519 {
            true => PublicKey::try_new(pair.public_key_raw()),
            false => Err(PkiEncodingError::NotEd25519),
        };
        pair.zeroize();
        Ok(PrivateKey { pkcs8: Zeroizing::new(der.to_vec()), public_key: public? })
    }

    /// The key as PKCS #8 in PEM; wiped on drop.
    pub fn to_pem(&self) -> Zeroizing<String> {
        pem::encode_block(LABEL, &self.pkcs8)
    }

    /// The key itself, as PKCS #8 in DER, for signing. Do not keep copies.
    pub fn expose_pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The public key.
    pub fn public_key(&self) -> PublicKey {
        self.public_key
    }

    /// The key pair that signs certificates.
    pub(super) fn to_key_pair(&self) -> Result<KeyPair, PkiError> {
        KeyPair::try_from(&self.pkcs8[..]).map_err(PkiError::generate)
    }
}

/// The same key in version 1 of PKCS #8, without the public key: OpenSSL reads version 2 only from 3.5 on.
///
/// *Source:* RFC 5958 section 2, RFC 8410 section 7: both versions have the seed at the same place.
fn to_version_1(der: &[u8]) -> Zeroizing<Vec<u8>> {
    const SEED: std::ops::Range<usize> = 16..48;
    let mut version_1 = Zeroizing::new(Vec::with_capacity(SEED.end));
    version_1.extend_from_slice(der.get(..SEED.end).unwrap_or(der));
    if let [_, length, _, _, version, ..] = version_1.as_mut_slice() {
        // Without the public key, the outer sequence has 46 bytes.
        (*length, *version) = (0x2e, 0);
    }
    version_1
}

/// Prints nothing of the key, not even its length.
impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivateKey").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generated_key_is_pkcs8_version_1_which_every_openssl_reads() {
        let key = PrivateKey::generate().unwrap();
        // What `openssl genpkey -algorithm ed25519 -outform DER` of OpenSSL 3.0 starts with.
        let head = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        assert_eq!((&key.expose_pkcs8()[..16], key.expose_pkcs8().len()), (&head[..], 48));
        let again = PrivateKey::from_pem(key.to_pem().as_bytes()).unwrap();
        assert_eq!(again.public_key(), key.public_key());
    }

    #[test]
    fn a_key_in_version_2_is_read_and_keeps_its_bytes() {
        let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let version_2 = pair.serialized_der();
        assert_eq!(version_2[4], 1, "the library writes version 2");
        let key = PrivateKey::from_pkcs8(version_2).unwrap();
        // The digest of a ticket covers its keys.
        assert_eq!(key.expose_pkcs8(), version_2);
        let rewritten = PrivateKey::from_pkcs8(&to_version_1(version_2)).unwrap();
        assert_eq!(rewritten.public_key(), key.public_key());
    }
}
