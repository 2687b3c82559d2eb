//! What a self-signed certificate says.

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    SerialNumber, date_time_ymd,
};
use rustix::rand::{GetRandomFlags, getrandom};
use zeroize::Zeroize as _;

use super::{Certificate, PkiError, PrivateKey};

/// What a self-signed certificate says. The default is that of a node: no other names, client and server, for ever.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Template {
    /// The subject.
    pub common_name: CommonName,
    /// Names and addresses that a server is reached by.
    pub hosts: Vec<String>,
    /// Whether it may be a server.
    pub server: bool,
    /// Whether it may be a client.
    pub client: bool,
    /// Whether it may certify others.
    pub ca: bool,
}

/// How a subject is named.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommonName {
    /// As is.
    Is(String),
    /// This, and [half of the public key](super::PublicKey::short_id): nobody else has the name.
    WithKey(String),
}

/// `nodekeel-` and half of the public key.
impl Default for Template {
    fn default() -> Template {
        Template {
            common_name: CommonName::WithKey("nodekeel-".into()),
            hosts: Vec::new(),
            server: true,
            client: true,
            ca: false,
        }
    }
}

impl Template {
    /// A certificate of this key, signed with it, with a random serial number, valid from 1975 until the end of 9999: a
    /// node's clock may be wrong when it first uses it.
    ///
    /// # Errors
    /// [`PkiError::Generate`]; a retry helps where random numbers were missing, and not where a host is no name.
    pub fn self_sign(&self, key: &PrivateKey) -> Result<Certificate, PkiError> {
        let params = self.params(key)?;
        let mut signer = key.signer()?;
        let signed = params.self_signed(&signer).map_err(PkiError::generate);
        signer.zeroize();
        let signed = signed?;
        Certificate::from_der(signed.der()).map_err(PkiError::generate)
    }

    fn params(&self, key: &PrivateKey) -> Result<CertificateParams, PkiError> {
        let mut name = DistinguishedName::new();
        name.push(
            DnType::CommonName,
            match &self.common_name {
                CommonName::Is(name) => name.clone(),
                CommonName::WithKey(prefix) => format!("{prefix}{}", key.public().short_id()),
            },
        );
        let mut params = CertificateParams::new(self.hosts.clone()).map_err(PkiError::generate)?;
        params.distinguished_name = name;
        params.serial_number = Some(serial()?);
        // RFC 5280, 4.1.2.5: "no well-defined expiration date" is the last second of 9999.
        params.not_after = date_time_ymd(9999, 12, 31) + std::time::Duration::from_secs(24 * 3600 - 1);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        if self.server {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        if self.client {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
        }
        if self.ca {
            params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.key_usages.extend([KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign]);
        }
        Ok(params)
    }
}

/// 127 random bits, never negative.
fn serial() -> Result<SerialNumber, PkiError> {
    let mut serial = [0; 16];
    // Up to 256 bytes come at once or not at all. *Source:* getrandom(2).
    getrandom(&mut serial, GetRandomFlags::empty()).map_err(PkiError::generate)?;
    serial[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&serial))
}
