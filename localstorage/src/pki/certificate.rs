//! Certificates and lists of revoked ones.

use std::time::{Duration, SystemTime};

use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::{CertificateRevocationList, FromDer as _, X509Certificate};

use super::{FormatError, PublicKey, pem};

/// The label of X.509 certificates.
const LABEL: &str = "CERTIFICATE";

/// An X.509 certificate of an Ed25519 key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    der: Vec<u8>,
    public: PublicKey,
    common_name: Option<String>,
    serial: Vec<u8>,
    is_ca: bool,
    not_after: SystemTime,
}

impl Certificate {
    /// Reads a certificate in PEM, exactly one block of it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_pem(text: &[u8]) -> Result<Certificate, FormatError> {
        Certificate::from_der(&pem::decode(text, LABEL)?)
    }

    /// Reads a certificate in DER.
    ///
    /// # Errors
    /// [`FormatError::Der`], [`FormatError::TrailingData`] and [`FormatError::NotEd25519`].
    pub fn from_der(der: &[u8]) -> Result<Certificate, FormatError> {
        let parsed = parse(der)?;
        if parsed.public_key().algorithm.algorithm != OID_SIG_ED25519 {
            return Err(FormatError::NotEd25519);
        }
        let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let not_after = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or(0);
        Ok(Certificate {
            public: PublicKey::try_new(&parsed.public_key().subject_public_key.data)?,
            common_name: name.map(str::to_owned),
            serial: parsed.raw_serial().to_vec(),
            is_ca: parsed.is_ca(),
            not_after: SystemTime::UNIX_EPOCH + Duration::from_secs(not_after),
            der: der.to_vec(),
        })
    }

    /// The certificate in PEM.
    pub fn to_pem(&self) -> String {
        pem::encode(LABEL, &self.der).to_string()
    }

    /// The certificate in DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Whose key it certifies.
    pub fn public(&self) -> PublicKey {
        self.public
    }

    /// The subject's common name, if it has one.
    pub fn common_name(&self) -> Option<&str> {
        self.common_name.as_deref()
    }

    /// The serial number, big endian.
    pub fn serial(&self) -> &[u8] {
        &self.serial
    }

    /// Whether it says of itself that it certifies others.
    pub fn is_ca(&self) -> bool {
        self.is_ca
    }

    /// The end of its validity. Nothing here compares it with a clock: a node's clock is right only after it has joined.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whether `issuer` has signed it, and may: it is a CA, or it is this very certificate.
    pub fn is_signed_by(&self, issuer: &Certificate) -> bool {
        let (Ok(parsed), Ok(by)) = (parse(&self.der), parse(&issuer.der)) else { return false };
        (issuer.is_ca || issuer.der == self.der)
            && parsed.issuer().as_raw() == by.subject().as_raw()
            && parsed.verify_signature(Some(by.public_key())).is_ok()
            && is_canonical(&self.der, parsed.tbs_certificate.as_ref(), &parsed.signature_value.data)
    }
}

/// Whether this is the only way to write what was signed with its Ed25519 signature. What lies around the two is signed
/// by nobody, and a parser may take more than one form of it: then two files would be one certificate.
fn is_canonical(der: &[u8], signed: &[u8], signature: &[u8]) -> bool {
    /// The algorithm, and the beginning of a bit string of 64 bytes. *Source:* RFC 8410, RFC 5280 section 4.1.
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

fn parse(der: &[u8]) -> Result<X509Certificate<'_>, FormatError> {
    match X509Certificate::from_der(der) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) => Err(FormatError::TrailingData),
        Err(_) => Err(FormatError::Der { what: "certificate" }),
    }
}

/// Parses a list whoever has signed it: for what only asks whether parsing holds.
#[cfg(any(test, feature = "testing"))]
pub(super) fn any_list(der: &[u8]) -> usize {
    CertificateRevocationList::from_der(der).map_or(0, |(_, list)| list.iter_revoked_certificates().count())
}

/// A list of certificates that an authority has revoked.
///
/// It is kept as DER, the only form that etcd reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevocationList {
    der: Vec<u8>,
    revoked: Vec<Vec<u8>>,
}

impl RevocationList {
    /// Reads a list, and checks that `ca` has signed it.
    ///
    /// # Errors
    /// [`FormatError::Der`], [`FormatError::TrailingData`], and [`FormatError::Signature`] where it is another's.
    pub fn from_der(der: &[u8], ca: &Certificate) -> Result<RevocationList, FormatError> {
        let (rest, list) = CertificateRevocationList::from_der(der)
            .map_err(|_| FormatError::Der { what: "revocation list" })?;
        if !rest.is_empty() {
            return Err(FormatError::TrailingData);
        }
        let by = parse(&ca.der)?;
        let is_ours = list.issuer().as_raw() == by.subject().as_raw()
            && is_canonical(der, list.tbs_cert_list.as_ref(), &list.signature_value.data);
        if !is_ours || list.verify_signature(by.public_key()).is_err() {
            return Err(FormatError::Signature);
        }
        let revoked = list.iter_revoked_certificates().map(|one| one.raw_serial().to_vec()).collect();
        Ok(RevocationList { der: der.to_vec(), revoked })
    }

    /// The list in DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// Whether this certificate is on it. The issuer is not compared: ask of certificates of the same authority.
    pub fn revokes(&self, certificate: &Certificate) -> bool {
        self.revoked.contains(&certificate.serial)
    }
}
