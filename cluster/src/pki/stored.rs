//! What of the authority is stored, and how.

use nodekeel_localstorage::pki::{Certificate, FormatError, PrivateKey, RevocationList};
use x509_parser::prelude::{CertificateRevocationList, FromDer as _};
use zeroize::Zeroizing;

use super::AuthorityError;
use super::signer::{Revoked, Signer};
use crate::consensus::kv::KeyValue;

/// The key of the authority's certificate.
pub const CA: &str = "/etcd-ca/ca.der";
/// The key of the authority's private key.
pub const CA_KEY: &str = "/etcd-ca/ca-key.der";
/// The key of the list of revoked certificates.
pub const REVOKED: &str = "/etcd-ca/crl.der";
/// What the keys of certificates begin with that were issued.
pub const CERTIFICATES: &str = "/etcd-ca/certs/";

/// What a key in PKCS #8 begins with, of either version, once its outer length and version are set.
///
/// *Source:* RFC 8410, section 7.
const PKCS8: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// The authority's values, as they were stored at one moment.
#[derive(Debug, Default)]
pub(super) struct Values {
    pub(super) ca: Option<KeyValue>,
    pub(super) key: Option<KeyValue>,
    pub(super) revoked: Option<KeyValue>,
    pub(super) certificates: Vec<KeyValue>,
}

impl Values {
    /// Sorts what was read by its keys.
    pub(super) fn collect(read: impl IntoIterator<Item = KeyValue>) -> Values {
        let mut values = Values::default();
        for kv in read {
            match std::str::from_utf8(&kv.key) {
                Ok(CA) => values.ca = Some(kv),
                Ok(CA_KEY) => values.key = Some(kv),
                Ok(REVOKED) => values.revoked = Some(kv),
                _ => values.certificates.push(kv),
            }
        }
        values
    }

    /// The authority and its list, checked.
    pub(super) fn signer(self) -> Result<(Signer, RevocationList), AuthorityError> {
        if self.ca.is_none() && self.key.is_none() {
            return Err(AuthorityError::Absent);
        }
        let missing = |missing| move || AuthorityError::Incomplete { missing };
        let ca = certificate(CA, &self.ca.ok_or_else(missing(CA))?.value)?;
        let key = key_from_raw(&Zeroizing::new(self.key.ok_or_else(missing(CA_KEY))?.value))?;
        let signer = Signer::new(key, ca)?;
        let list = list(&self.revoked.ok_or_else(missing(REVOKED))?.value, signer.certificate())?;
        Ok((signer, list))
    }
}

/// Where a certificate is kept.
pub(super) fn key_of(certificate: &Certificate) -> String {
    let serial = certificate.serial();
    let significant = serial.iter().position(|byte| *byte != 0).unwrap_or(serial.len());
    let digits = serial[significant..].iter().map(|byte| format!("{byte:02x}"));
    digits.fold(CERTIFICATES.to_owned(), |key, digits| key + &digits)
}

pub(super) fn certificate(key: &str, der: &[u8]) -> Result<Certificate, AuthorityError> {
    Certificate::from_der(der).map_err(|source| malformed(key, source))
}

/// The list, checked to be this authority's.
pub(super) fn list(der: &[u8], ca: &Certificate) -> Result<RevocationList, AuthorityError> {
    RevocationList::from_der(der, ca).map_err(|source| malformed(REVOKED, source))
}

fn malformed(key: &str, source: FormatError) -> AuthorityError {
    AuthorityError::Malformed { key: key.to_owned(), source }
}

/// The number of a list, and who is on it.
pub(super) fn entries(list: &RevocationList) -> Result<(u64, Vec<Revoked>), AuthorityError> {
    parse_entries(list.der()).ok_or_else(|| malformed(REVOKED, FormatError::Der { what: "revocation list" }))
}

/// A number that is beyond what is counted here begins anew: nobody compares it.
fn parse_entries(der: &[u8]) -> Option<(u64, Vec<Revoked>)> {
    let (_, parsed) = CertificateRevocationList::from_der(der).ok()?;
    let digits = parsed.crl_number().map(|number| number.to_u64_digits()).unwrap_or_default();
    let number = if let [number] = digits[..] { number } else { 0 };
    let revoked = parsed.iter_revoked_certificates().map(|entry| Revoked {
        serial: entry.raw_serial().to_vec(),
        at: entry.revocation_date.timestamp().try_into().unwrap_or(0),
    });
    Some((number, revoked.collect()))
}

/// The key as it is stored: the seed, and the public half. *Source:* Go's `ed25519.PrivateKey`.
pub(super) fn key_to_raw(key: &PrivateKey) -> Result<Zeroizing<Vec<u8>>, AuthorityError> {
    let pkcs8 = key.expose_pkcs8();
    let seed = pkcs8.get(PKCS8.len()..PKCS8.len() + 32).filter(|_| pkcs8[5..16] == PKCS8[5..16]);
    let seed =
        seed.ok_or_else(|| AuthorityError::make("a key to be stored")("it has another form".into()))?;
    let mut raw = Zeroizing::new(Vec::with_capacity(64));
    raw.extend_from_slice(seed);
    raw.extend_from_slice(key.public().as_bytes());
    Ok(raw)
}

pub(super) fn key_from_raw(raw: &[u8]) -> Result<PrivateKey, AuthorityError> {
    let malformed = || AuthorityError::MalformedKey { key: CA_KEY };
    if raw.len() != 64 {
        return Err(malformed());
    }
    let (seed, public) = raw.split_at(32);
    let mut pkcs8 = Zeroizing::new(Vec::with_capacity(PKCS8.len() + 32));
    pkcs8.extend_from_slice(&PKCS8);
    pkcs8.extend_from_slice(seed);
    let key = PrivateKey::from_pkcs8(&pkcs8).map_err(|_| malformed())?;
    match key.public().as_bytes() == public {
        true => Ok(key),
        false => Err(malformed()),
    }
}

/// Takes any bytes for each of the values.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn arbitrary(bytes: &[u8]) {
    if let Ok(key) = key_from_raw(bytes) {
        assert_eq!(
            key_to_raw(&key).expect("it was read").as_slice(),
            bytes,
            "a key is stored as it was read"
        );
    }
    if let Ok(certificate) = certificate(CA, bytes) {
        let _ = super::SubjectNames::of(&certificate);
        let _ = list(bytes, &certificate);
        assert!(key_of(&certificate).starts_with(CERTIFICATES));
    }
    let _ = parse_entries(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_stored_as_go_stores_it() {
        // *Source:* RFC 8410, section 10.3: the seed and its public key.
        let raw = b"\xd4\xee\x72\xdb\xf9\x13\x58\x4a\xd5\xb6\xd8\xf1\xf7\x69\xf8\xad\x3a\xfe\x7c\x28\xcb\xf1\xd4\xfb\xe0\x97\xa8\x8f\x44\x75\x58\x42\
            \x19\xbf\x44\x09\x69\x84\xcd\xfe\x85\x41\xba\xc1\x67\xdc\x3b\x96\xc8\x50\x86\xaa\x30\xb6\xb6\xcb\x0c\x5c\x38\xad\x70\x31\x66\xe1";
        let key = key_from_raw(raw).unwrap();
        assert_eq!(key.public().short_id(), "19bf44096984cdfe8541bac167dc3b96");
        assert_eq!(*key_to_raw(&key).unwrap(), raw);
        for len in 0..raw.len() {
            assert!(matches!(key_from_raw(&raw[..len]), Err(AuthorityError::MalformedKey { key: CA_KEY })));
        }
        let mut other = *raw;
        other[63] ^= 1;
        assert!(key_from_raw(&other).is_err(), "the public half is another's");
    }

    #[test]
    fn a_new_key_has_the_same_form() {
        let key = PrivateKey::generate().unwrap();
        let again = key_from_raw(&key_to_raw(&key).unwrap()).unwrap();
        assert_eq!(again.public(), key.public());
    }
}
