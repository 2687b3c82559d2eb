//! The stored values of the CA, and their formats.

use nodekeel_localstorage::pki::{Certificate, PkiEncodingError, PrivateKey, RevocationList};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _};
use zeroize::Zeroizing;

use super::CaError;
use super::signer::{CaSigner, RevokedEntry};
use super::voter::{SealedKey, Voter};
use crate::consensus::kv::KeyValue;

/// Key of the CA's certificate.
pub const CA_CERT_PATH: &str = "/etcd-ca/ca.der";
/// Key of the CA's private key as an earlier release has stored it, or a store in memory: not sealed.
pub const CA_KEY_PATH: &str = "/etcd-ca/ca-key.der";
/// Prefix of the keys of the sealed private key, and of those to whom it is sealed.
pub const SEAL_PREFIX: &str = "/etcd-ca/seal/";
/// Key of the CA's private key, sealed to the voters: a file of age.
pub const SEALED_KEY_PATH: &str = "/etcd-ca/seal/ca-key.age";
/// Key of the list of revoked certificates.
pub const CRL_PATH: &str = "/etcd-ca/crl.der";
/// Prefix of the keys of issued certificates.
pub const ISSUED_PREFIX: &str = "/etcd-ca/certs/";

/// Prefix of a PKCS #8 key, of either version, once its outer length and version are set.
///
/// *Source:* RFC 8410, section 7.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// The private key, as it is stored.
#[derive(Debug)]
pub(super) enum KeyState {
    /// Not sealed.
    Plain(PrivateKey),
    /// Sealed, and opened.
    Opened(SealedKey),
    /// Sealed, and not to this voter.
    Closed,
}

/// The CA's values, as stored at one moment.
#[derive(Debug, Default)]
pub(super) struct StoredValues {
    pub(super) ca: Option<KeyValue>,
    pub(super) key: Option<KeyValue>,
    pub(super) sealed: Option<KeyValue>,
    pub(super) revoked: Option<KeyValue>,
    pub(super) certificates: Vec<KeyValue>,
}

impl StoredValues {
    /// Sorts values by their keys.
    pub(super) fn from_key_values(read: impl IntoIterator<Item = KeyValue>) -> StoredValues {
        let mut values = StoredValues::default();
        for kv in read {
            match std::str::from_utf8(&kv.key) {
                Ok(CA_CERT_PATH) => values.ca = Some(kv),
                Ok(CA_KEY_PATH) => values.key = Some(kv),
                Ok(SEALED_KEY_PATH) => values.sealed = Some(kv),
                Ok(CRL_PATH) => values.revoked = Some(kv),
                _ => values.certificates.push(kv),
            }
        }
        values
    }

    /// The CA's certificate, and its signer if this voter can open the private key; its list, checked.
    pub(super) fn into_ca(self, voter: Option<&Voter>) -> Result<(Certificate, Option<CaSigner>), CaError> {
        if self.ca.is_none() && self.key.is_none() && self.sealed.is_none() {
            return Err(CaError::NotFound);
        }
        let ca = self.certificate()?;
        let signer = match self.key_state(voter)? {
            KeyState::Plain(key) | KeyState::Opened(SealedKey { key, .. }) => {
                Some(CaSigner::new(key, ca.clone())?)
            }
            KeyState::Closed => None,
        };
        self.revocation_list(&ca)?;
        Ok((ca, signer))
    }

    /// The CA's certificate, checked.
    pub(super) fn certificate(&self) -> Result<Certificate, CaError> {
        let stored = self.ca.as_ref().ok_or(CaError::Incomplete { missing: CA_CERT_PATH })?;
        let ca = parse_certificate(CA_CERT_PATH, &stored.value)?;
        CaSigner::check_certificate(&ca)?;
        Ok(ca)
    }

    /// The list of this CA, checked.
    pub(super) fn revocation_list(&self, ca: &Certificate) -> Result<RevocationList, CaError> {
        let stored = self.revoked.as_ref().ok_or(CaError::Incomplete { missing: CRL_PATH })?;
        parse_revocation_list(&stored.value, ca)
    }

    /// The private key, as far as this voter can open it.
    pub(super) fn key_state(&self, voter: Option<&Voter>) -> Result<KeyState, CaError> {
        match (&self.sealed, &self.key, voter) {
            // Nobody needs the other any more.
            (Some(sealed), _, Some(voter)) => {
                Ok(voter.open(&sealed.value)?.map_or(KeyState::Closed, KeyState::Opened))
            }
            (Some(_), _, None) => Ok(KeyState::Closed),
            (None, Some(plain), _) => key_from_raw(&Zeroizing::new(plain.value.clone())).map(KeyState::Plain),
            (None, None, _) => Err(CaError::Incomplete { missing: SEALED_KEY_PATH }),
        }
    }
}

/// The key under which a certificate is stored.
pub(super) fn issued_path(certificate: &Certificate) -> String {
    let serial = certificate.serial_number();
    // DER may prefix a zero byte, to keep a number positive: the key in the store has the digits alone.
    let significant = serial.iter().position(|byte| *byte != 0).unwrap_or(serial.len());
    let digits = serial[significant..].iter().map(|byte| format!("{byte:02x}"));
    digits.fold(ISSUED_PREFIX.to_owned(), |key, digits| key + &digits)
}

pub(super) fn parse_certificate(key: &str, der: &[u8]) -> Result<Certificate, CaError> {
    Certificate::from_der(der).map_err(|source| malformed_value(key, source))
}

/// Parses the list, and checks that this CA has signed it.
pub(super) fn parse_revocation_list(der: &[u8], ca: &Certificate) -> Result<RevocationList, CaError> {
    RevocationList::from_der(der, ca).map_err(|source| malformed_value(CRL_PATH, source))
}

fn malformed_value(key: &str, source: PkiEncodingError) -> CaError {
    CaError::Malformed { key: key.to_owned(), source }
}

/// The number of a list, and its entries.
pub(super) fn revoked_entries(list: &RevocationList) -> Result<(u64, Vec<RevokedEntry>), CaError> {
    parse_entries(list.der_bytes())
        .ok_or_else(|| malformed_value(CRL_PATH, PkiEncodingError::Der { what: "revocation list" }))
}

/// A number that exceeds `u64` restarts at 0: nothing compares it.
fn parse_entries(der: &[u8]) -> Option<(u64, Vec<RevokedEntry>)> {
    let (_, parsed) = CertificateRevocationList::from_der(der).ok()?;
    let digits = parsed.crl_number().map(|number| number.to_u64_digits()).unwrap_or_default();
    let number = if let [number] = digits[..] { number } else { 0 };
    let revoked = parsed.iter_revoked_certificates().map(|entry| RevokedEntry {
        serial: entry.raw_serial().to_vec(),
        at: entry.revocation_date.timestamp().try_into().unwrap_or(0),
    });
    Some((number, revoked.collect()))
}

/// The private key as it is stored: the seed, and the public half. *Source:* Go's `ed25519.PrivateKey`.
pub(super) fn key_to_raw(key: &PrivateKey) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let pkcs8 = key.expose_pkcs8();
    // The first five bytes differ between the two versions of PKCS #8, the others do not.
    let seed = pkcs8.get(PKCS8.len()..PKCS8.len() + 32).filter(|_| pkcs8[5..16] == PKCS8[5..16]);
    let seed = seed.ok_or_else(|| {
        CaError::create_error("the stored form of a key")("unexpected PKCS #8 layout".into())
    })?;
    let mut raw = Zeroizing::new(Vec::with_capacity(64));
    raw.extend_from_slice(seed);
    raw.extend_from_slice(key.public_key().as_bytes());
    Ok(raw)
}

pub(super) fn key_from_raw(raw: &[u8]) -> Result<PrivateKey, CaError> {
    let malformed = || CaError::MalformedKey { key: CA_KEY_PATH };
    if raw.len() != 64 {
        return Err(malformed());
    }
    let (seed, public) = raw.split_at(32);
    let mut pkcs8 = Zeroizing::new(Vec::with_capacity(PKCS8.len() + 32));
    pkcs8.extend_from_slice(&PKCS8);
    pkcs8.extend_from_slice(seed);
    let key = PrivateKey::from_pkcs8(&pkcs8).map_err(|_| malformed())?;
    // The seed alone would do; a public half that does not belong to it shows damage.
    if key.public_key().as_bytes() == public { Ok(key) } else { Err(malformed()) }
}

/// Arbitrary bytes as each of the values.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_values(bytes: &[u8]) {
    if let Ok(key) = key_from_raw(bytes) {
        assert_eq!(key_to_raw(&key).expect("a parsed key").as_slice(), bytes, "a key survives a round trip");
    }
    if let Ok(certificate) = parse_certificate(CA_CERT_PATH, bytes) {
        let _ = super::SubjectNames::from_certificate(&certificate);
        let _ = parse_revocation_list(bytes, &certificate);
        assert!(issued_path(&certificate).starts_with(ISSUED_PREFIX));
    }
    let _ = parse_entries(bytes);
    super::voter::check_arbitrary_seal(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ca_key_is_stored_in_gos_ed25519_format() {
        // *Source:* RFC 8410, section 10.3: the seed and its public key.
        let raw = b"\xd4\xee\x72\xdb\xf9\x13\x58\x4a\xd5\xb6\xd8\xf1\xf7\x69\xf8\xad\x3a\xfe\x7c\x28\xcb\xf1\xd4\xfb\xe0\x97\xa8\x8f\x44\x75\x58\x42\
            \x19\xbf\x44\x09\x69\x84\xcd\xfe\x85\x41\xba\xc1\x67\xdc\x3b\x96\xc8\x50\x86\xaa\x30\xb6\xb6\xcb\x0c\x5c\x38\xad\x70\x31\x66\xe1";
        let key = key_from_raw(raw).unwrap();
        assert_eq!(key.public_key().short_id(), "19bf44096984cdfe8541bac167dc3b96");
        assert_eq!(*key_to_raw(&key).unwrap(), raw);
        for len in 0..raw.len() {
            assert!(matches!(key_from_raw(&raw[..len]), Err(CaError::MalformedKey { key: CA_KEY_PATH })));
        }
        let mut other = *raw;
        other[63] ^= 1;
        assert!(key_from_raw(&other).is_err(), "a public half that does not match");
    }

    #[test]
    fn a_generated_key_survives_a_round_trip() {
        let key = PrivateKey::generate().unwrap();
        let again = key_from_raw(&key_to_raw(&key).unwrap()).unwrap();
        assert_eq!(again.public_key(), key.public_key());
    }
}
