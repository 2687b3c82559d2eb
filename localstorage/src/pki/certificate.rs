//! Certificates and revocation lists.

use std::time::{Duration, SystemTime};

use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

use super::{PkiEncodingError, PublicKey, pem};

/// The PEM label of X.509 certificates.
const LABEL: &str = "CERTIFICATE";

/// An X.509 certificate of an Ed25519 key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    der_bytes: Vec<u8>,
    public_key: PublicKey,
    common_name: Option<String>,
    serial_number: Vec<u8>,
    is_ca: bool,
    not_after: SystemTime,
}

impl Certificate {
    /// Parses a certificate from exactly one PEM block.
    ///
    /// # Errors
    /// [`PkiEncodingError`].
    pub fn from_pem(text: &[u8]) -> Result<Certificate, PkiEncodingError> {
        Certificate::from_der(&pem::decode_block(text, LABEL)?)
    }

    /// Parses a certificate from DER.
    ///
    /// # Errors
    /// [`PkiEncodingError::Der`], [`PkiEncodingError::TrailingData`] and [`PkiEncodingError::NotEd25519`].
    pub fn from_der(der: &[u8]) -> Result<Certificate, PkiEncodingError> {
        let parsed = parse_certificate(der)?;
        if parsed.public_key().algorithm.algorithm != OID_SIG_ED25519 {
            return Err(PkiEncodingError::NotEd25519);
        }
        let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        // A date before 1970 is as expired as 1970.
        let not_after = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
        Ok(Certificate {
            public_key: PublicKey::try_new(&parsed.public_key().subject_public_key.data)?,
            common_name: name.map(str::to_owned),
            serial_number: parsed.raw_serial().to_vec(),
            is_ca: parsed.is_ca(),
            not_after: SystemTime::UNIX_EPOCH + Duration::from_secs(not_after),
            der_bytes: der.to_vec(),
        })
    }

    /// The certificate in PEM.
    pub fn to_pem(&self) -> String {
        pem::encode_block(LABEL, &self.der_bytes).to_string()
    }

    /// The certificate in DER.
    pub fn der_bytes(&self) -> &[u8] {
        &self.der_bytes
    }

    /// The certified public key.
    pub fn public_key(&self) -> PublicKey {
        self.public_key
    }

    /// The subject's common name, if it has one.
    pub fn common_name(&self) -> Option<&str> {
        self.common_name.as_deref()
    }

    /// The serial number, big endian.
    pub fn serial_number(&self) -> &[u8] {
        &self.serial_number
    }

    /// Returns whether it is marked as a CA certificate.
    pub fn is_ca(&self) -> bool {
        self.is_ca
    }

    /// The end of its validity. This crate does not compare it with a clock: a node's clock is correct only
    /// after the node has joined.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Returns whether `issuer` has signed it and is permitted to: it is a CA, or this same certificate.
    pub fn is_signed_by(&self, issuer: &Certificate) -> bool {
        let (Ok(parsed), Ok(by)) = (parse_certificate(&self.der_bytes), parse_certificate(&issuer.der_bytes))
        else {
            return false;
        };
        (issuer.is_ca || issuer.der_bytes == self.der_bytes)
            && parsed.issuer().as_raw() == by.subject().as_raw()
            && parsed.verify_signature(Some(by.public_key())).is_ok()
            && is_canonical_encoding(
                &self.der_bytes,
                parsed.tbs_certificate.as_ref(),
                &parsed.signature_value.data,
            )
    }
}

/// Returns whether this is the only encoding of the signed content with its Ed25519 signature. The bytes around the
/// two are not signed, and a parser may accept several encodings of them: then two files would be one
/// certificate.
fn is_canonical_encoding(der: &[u8], signed: &[u8], signature: &[u8]) -> bool {
    /// The algorithm, and the header of a bit string of 64 bytes. *Source:* RFC 8410, RFC 5280 section 4.1.
    const ED25519: [u8; 10] = [0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x41, 0x00];
    let body = [signed, &ED25519, signature].concat();
    let [.., high, low] = body.len().to_be_bytes();
    let header: &[u8] = match body.len() {
        0..=0x7f => &[0x30, low],
        0x80..=0xff => &[0x30, 0x81, low],
        0x100..=0xffff => &[0x30, 0x82, high, low],
        _ => return false,
    };
    signature.len() == 64 && der.strip_prefix(header) == Some(&body[..])
}

fn parse_certificate(der: &[u8]) -> Result<X509Certificate<'_>, PkiEncodingError> {
    match X509Certificate::from_der(der) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) => Err(PkiEncodingError::TrailingData),
        Err(_) => Err(PkiEncodingError::Der { what: "certificate" }),
    }
}

/// Parses a list without checking its signature, for checks that only need the parser. Returns the number of
/// entries.
#[cfg(any(test, feature = "testing"))]
pub(super) fn count_revoked(der: &[u8]) -> usize {
    CertificateRevocationList::from_der(der).map_or(0, |(_, list)| list.iter_revoked_certificates().count())
}

/// A certificate revocation list (CRL) of a CA.
///
/// Stored as DER, the only format that etcd reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    der_bytes: Vec<u8>,
    revoked: Vec<Vec<u8>>,
}

impl RevocationList {
    /// Parses a list and verifies that `ca` signed it.
    ///
    /// # Errors
    /// [`PkiEncodingError::Der`], [`PkiEncodingError::TrailingData`], and [`PkiEncodingError::Signature`] if another CA
    /// signed it.
    pub fn from_der(der: &[u8], ca: &Certificate) -> Result<RevocationList, PkiEncodingError> {
        let (rest, list) = CertificateRevocationList::from_der(der)
            .map_err(|_| PkiEncodingError::Der { what: "revocation list" })?;
        if !rest.is_empty() {
            return Err(PkiEncodingError::TrailingData);
        }
        let by = parse_certificate(&ca.der_bytes)?;
        let is_issuer = list.issuer().as_raw() == by.subject().as_raw()
            && is_canonical_encoding(der, list.tbs_cert_list.as_ref(), &list.signature_value.data);
        if !is_issuer || list.verify_signature(by.public_key()).is_err() {
            return Err(PkiEncodingError::Signature);
        }
        let revoked = list.iter_revoked_certificates().map(|entry| entry.raw_serial().to_vec()).collect();
        Ok(RevocationList { der_bytes: der.to_vec(), revoked })
    }

    /// The list in DER.
    pub fn der_bytes(&self) -> &[u8] {
        &self.der_bytes
    }

    /// Returns whether the list contains this certificate. The issuer is not compared: pass only certificates of
    /// the same CA.
    pub fn is_revoked(&self, certificate: &Certificate) -> bool {
        self.revoked.contains(&certificate.serial_number)
    }
}
