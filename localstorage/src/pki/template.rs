//! The contents of a self-signed certificate.

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    SerialNumber, date_time_ymd,
};
use rustix::rand::{GetRandomFlags, getrandom};
use zeroize::Zeroize as _;

use super::{Certificate, PkiError, PrivateKey};

/// The contents of a self-signed certificate. The default is that of a node: no other names, client and
/// server, no expiration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateTemplate {
    /// The subject.
    pub common_name: CommonName,
    /// Host names and addresses of a server.
    pub hosts: Vec<String>,
    /// True if it is valid for server authentication.
    pub server_auth: bool,
    /// True if it is valid for client authentication.
    pub client_auth: bool,
    /// True if it is a CA certificate.
    pub is_ca: bool,
}

/// The common name of a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommonName {
    /// This name.
    Exact(String),
    /// This prefix and [half of the public key](super::PublicKey::short_id), which makes the name unique.
    WithKeyId(String),
}

/// `nodekeel-` and half of the public key.
impl Default for CertificateTemplate {
    fn default() -> CertificateTemplate {
        CertificateTemplate {
            common_name: CommonName::WithKeyId("nodekeel-".into()),
            hosts: Vec::new(),
            server_auth: true,
            client_auth: true,
            is_ca: false,
        }
    }
}

impl CertificateTemplate {
    /// Creates a certificate of this key, signed with it, with a random serial number. It is valid from 1975
    /// until the end of 9999: the clock of a node may be wrong at its first use.
    ///
    /// # Errors
    /// [`PkiError::Generate`]; a retry helps if random numbers were unavailable, but not for an invalid host
    /// name.
    pub fn self_sign(&self, key: &PrivateKey) -> Result<Certificate, PkiError> {
        let params = self.build_params(key)?;
        let mut signer = key.to_key_pair()?;
        let signed = params.self_signed(&signer).map_err(PkiError::generate);
        signer.zeroize();
        // Only now, so that the signer is erased after an error, too.
        let signed = signed?;
        Certificate::from_der(signed.der()).map_err(PkiError::generate)
    }

    fn build_params(&self, key: &PrivateKey) -> Result<CertificateParams, PkiError> {
        let mut name = DistinguishedName::new();
        name.push(
            DnType::CommonName,
            match &self.common_name {
                CommonName::Exact(name) => name.clone(),
                CommonName::WithKeyId(prefix) => format!("{prefix}{}", key.public_key().short_id()),
            },
        );
        let mut params = CertificateParams::new(self.hosts.clone()).map_err(PkiError::generate)?;
        params.distinguished_name = name;
        params.serial_number = Some(random_serial()?);
        // RFC 5280, 4.1.2.5: "no well-defined expiration date" is the last second of 9999.
        params.not_after = date_time_ymd(9999, 12, 31) + std::time::Duration::from_secs(24 * 3600 - 1);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if self.server_auth {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        if self.client_auth {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        if self.is_ca {
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.key_usages.extend([KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign]);
        }
        Ok(params)
    }
}

/// A serial number of 127 random bits, never negative.
fn random_serial() -> Result<SerialNumber, PkiError> {
    let mut serial = [0; 16];
    // Up to 256 bytes are returned completely or not at all. *Source:* getrandom(2).
    getrandom(&mut serial, GetRandomFlags::empty()).map_err(PkiError::generate)?;
    serial[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&serial))
}
