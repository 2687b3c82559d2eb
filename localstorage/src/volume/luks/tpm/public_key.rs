//! The public key whose owner signs the PCR values of each system that may open a key.

use std::fmt;

use sha2::{Digest as _, Sha256};

use super::hex::to_hex;
use super::pcr::PcrSelection;
use super::wire::{object_name, signer_public_area};

/// The label of a PEM file with a public key of any kind. *Source:* RFC 7468, section 13.
const PEM_LABEL: &str = "PUBLIC KEY";
/// The largest PEM file, in bytes. One with a key of 4096 bits has 800.
const PEM_LIMIT: usize = 8192;
/// The algorithm `rsaEncryption` without parameters. *Source:* RFC 8017, appendix A.1.
const RSA_ALGORITHM: [u8; 15] = [0x30, 13, 6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1, 5, 0];
const DER_INTEGER: u8 = 0x02;
const DER_BIT_STRING: u8 = 0x03;
const DER_SEQUENCE: u8 = 0x30;

/// PCRs whose values may be any that the owner of a key has signed: those of each kernel that is released, so that an
/// upgrade needs no new seal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a signature is for PCRs, and by a key")]
pub struct SignedPcrs {
    /// The key that verifies the signatures.
    pub public_key: PcrPublicKey,
    /// The PCRs, exactly as in the signatures: 11 for a unified kernel image.
    pub pcrs: PcrSelection,
}

/// An RSA public key of 2048, 3072 or 4096 bits. Most TPMs have 2048 only.
#[derive(Clone, PartialEq, Eq)]
pub struct PcrPublicKey {
    /// The structure `RSAPublicKey` of RFC 8017, appendix A.1.1, in DER.
    der: Vec<u8>,
    modulus: Vec<u8>,
    exponent: u32,
}

/// The file has no RSA public key that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is not a PEM file with an RSA public key of 2048, 3072 or 4096 bits (\"-----BEGIN PUBLIC KEY-----\"): write it with \
     openssl rsa -pubout"
)]
#[non_exhaustive]
pub struct InvalidPublicKey;

impl PcrPublicKey {
    /// Reads a PEM file with one block `PUBLIC KEY`, as `openssl rsa -pubout` and `ukify genkey` write it.
    ///
    /// # Errors
    /// [`InvalidPublicKey`], for anything else.
    pub fn from_pem(pem: &[u8]) -> Result<PcrPublicKey, InvalidPublicKey> {
        if pem.len() > PEM_LIMIT {
            return Err(InvalidPublicKey);
        }
        let mut buffer = vec![0; pem.len()];
        let (label, der) = pem_rfc7468::decode(pem, &mut buffer).map_err(|_| InvalidPublicKey)?;
        let key = (label == PEM_LABEL).then(|| Self::from_subject_public_key_info(der)).flatten();
        key.ok_or(InvalidPublicKey)
    }

    /// *Source:* RFC 5280, 4.1 (`SubjectPublicKeyInfo`): the algorithm, and the key as a string of whole bytes.
    fn from_subject_public_key_info(der: &[u8]) -> Option<PcrPublicKey> {
        let info = only_element(der, DER_SEQUENCE)?;
        let key = only_element(info.strip_prefix(&RSA_ALGORITHM)?, DER_BIT_STRING)?;
        Self::from_der(key.strip_prefix(&[0])?)
    }

    pub(super) fn from_der(der: &[u8]) -> Option<PcrPublicKey> {
        let (modulus, rest) = split_element(only_element(der, DER_SEQUENCE)?, DER_INTEGER)?;
        // Numbers have a sign: a zero precedes the modulus, whose highest bit is set.
        let modulus =
            modulus.strip_prefix(&[0]).filter(|modulus| matches!(modulus.len(), 256 | 384 | 512))?;
        let exponent = only_element(rest, DER_INTEGER).filter(|bytes| (1..=4).contains(&bytes.len()))?;
        let exponent = exponent.iter().fold(0, |number, byte| number << 8 | u32::from(*byte));
        let is_valid = modulus[0] & 0x80 != 0 && exponent & 1 == 1;
        is_valid.then(|| PcrPublicKey { der: der.to_vec(), modulus: modulus.to_vec(), exponent })
    }

    pub(super) fn as_der(&self) -> &[u8] {
        &self.der
    }

    /// The SHA-256 of the key, as hexadecimal digits: `pkfp` in the files of `systemd-measure`.
    pub fn fingerprint(&self) -> String {
        to_hex(&Sha256::digest(&self.der))
    }

    /// The size of a signature, in bytes.
    pub(super) fn signature_bytes(&self) -> usize {
        self.modulus.len()
    }

    /// As `TPMT_PUBLIC`.
    pub(super) fn public_area(&self) -> Vec<u8> {
        signer_public_area(&self.modulus, self.exponent)
    }

    /// The name by which a TPM knows it.
    pub(super) fn name(&self) -> Vec<u8> {
        object_name(&self.public_area())
    }
}

impl fmt::Debug for PcrPublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PcrPublicKey({})", self.fingerprint())
    }
}

/// The contents of an element of DER with this tag, and what follows it.
fn split_element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (length, rest) = match *bytes.strip_prefix(&[tag])? {
        [length @ 0..=0x7f, ref rest @ ..] => (usize::from(length), rest),
        [0x81, length, ref rest @ ..] => (usize::from(length), rest),
        [0x82, high, low, ref rest @ ..] => (usize::from(high) << 8 | usize::from(low), rest),
        // An indefinite length is not DER, and no key is longer.
        _ => return None,
    };
    rest.split_at_checked(length)
}

fn only_element(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    split_element(bytes, tag).filter(|(_, rest)| rest.is_empty()).map(|(contents, _)| contents)
}

/// Checks that no file makes the parser of public keys panic, and that a key is written back unchanged.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub(super) fn fuzz_public_key(bytes: &[u8]) {
    for key in [PcrPublicKey::from_pem(bytes).ok(), PcrPublicKey::from_subject_public_key_info(bytes)] {
        let Some(key) = key else { continue };
        assert_eq!(PcrPublicKey::from_der(&key.der), Some(key.clone()), "a key is written back unchanged");
        assert_eq!(key.name().len(), 34, "a hash algorithm and a digest");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNER: &str = include_str!("../../../../testdata/tpm/signer.pem");

    // *Source:* systemd-measure sign of systemd 252 (`pkfp`), and tpm2_loadexternal of tpm2-tools 5.4.
    #[test]
    fn a_key_has_the_fingerprint_of_systemd_and_the_name_of_the_tpm() {
        let key = PcrPublicKey::from_pem(SIGNER.as_bytes()).unwrap();
        assert_eq!(key.fingerprint(), "a1cea00b6a607f641e0e7bfbd7402dd51454b394426161e177ee44ed665f5ad8");
        assert_eq!(
            to_hex(&key.name()),
            "000bad379d801987ea3c9e42c2c911429106e151a3d418c79cdfbe38fd9facb76668"
        );
        assert_eq!(PcrPublicKey::from_der(key.as_der()), Some(key));
    }

    #[test]
    fn anything_but_an_rsa_public_key_is_rejected() {
        let mut der = vec![0; SIGNER.len()];
        let der = pem_rfc7468::decode(SIGNER.as_bytes(), &mut der).unwrap().1;
        for length in 0..der.len() {
            assert_eq!(PcrPublicKey::from_subject_public_key_info(&der[..length]), None, "{length}");
        }
        let longer = [der, &[0]].concat();
        assert_eq!(PcrPublicKey::from_subject_public_key_info(&longer), None);
        let private = SIGNER.replace("PUBLIC", "PRIVATE");
        // *Source:* openssl ecparam -name prime256v1 -genkey | openssl ec -pubout
        let curve = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEL5/48gytDQX8ru0Sq01oYEqph0pD\nQycTWwVESTTqZGWS0Q3MB7nvRLRg0npgGOgkf0sqZH8WaISoFsgrYG9Tjg==\n-----END PUBLIC KEY-----\n";
        for text in ["", &SIGNER[1..], &private, curve, &SIGNER.repeat(20)] {
            assert_eq!(PcrPublicKey::from_pem(text.as_bytes()), Err(InvalidPublicKey), "{text}");
        }
        fuzz_public_key(SIGNER.as_bytes());
        fuzz_public_key(der);
    }
}
