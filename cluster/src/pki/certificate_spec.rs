//! The content of certificates.

use std::net::IpAddr;

use nodekeel_localstorage::pki::{Certificate, PublicKey};
use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType,
    SerialNumber, date_time_ymd,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::{CaError, peer_name};
use crate::consensus::MemberName;

/// The role that a certificate permits its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CertificateUsage {
    /// A consensus member: server and client, to the other members. Its certificate has the [`peer_name()`], too.
    Member,
    /// A consensus client, at any address.
    Client,
}

/// The content of a certificate. Certificates never expire: a node's clock may be wrong, and expelled nodes
/// are revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateSpec {
    /// The subject's name; for servers also their DNS name.
    pub name: MemberName,
    /// The addresses of a server. If the holder is a client too, servers may require connections to come from
    /// these addresses: etcd does.
    pub addresses: Vec<IpAddr>,
    /// The permitted role.
    pub usage: CertificateUsage,
}

impl CertificateSpec {
    /// The certificate of a member at this address.
    pub fn for_member(name: MemberName, address: IpAddr) -> CertificateSpec {
        CertificateSpec { name, addresses: vec![address], usage: CertificateUsage::Member }
    }

    /// The certificate of a client.
    ///
    /// It names no host: etcd would require a client whose certificate names hosts to connect from one of
    /// them.
    pub fn for_client(name: MemberName) -> CertificateSpec {
        CertificateSpec { name, addresses: Vec::new(), usage: CertificateUsage::Client }
    }

    /// *Source:* RFC 5280; the organizational unit is that of Monogon's `consensus/ca`.
    pub(super) fn to_params(&self, ca: &Certificate) -> Result<CertificateParams, CaError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, self.name.as_str());
        params.distinguished_name.push(DnType::OrganizationalUnitName, "etcd");
        params.serial_number = Some(random_serial()?);
        // The last second of 9999: RFC 5280, section 4.1.2.5, "no well-defined expiration date".
        params.not_after = date_time_ymd(9999, 12, 31) + std::time::Duration::from_secs(24 * 3600 - 1);
        // An Ed25519 key only signs. *Source:* RFC 8410, section 5.
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let (server, client) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        params.extended_key_usages = match self.usage {
            CertificateUsage::Member => vec![client, server],
            CertificateUsage::Client => vec![client],
        };
        // A client's certificate names no host: see `for_client`.
        if self.usage != CertificateUsage::Client {
            for name in [self.name.as_str(), &peer_name(ca)] {
                let name = Ia5String::try_from(name);
                let name = name.map_err(|error| CaError::create_error("a certificate")(error.into()))?;
                params.subject_alt_names.push(SanType::DnsName(name));
            }
            params.subject_alt_names.extend(self.addresses.iter().copied().map(SanType::IpAddress));
        }
        Ok(params)
    }
}

/// 127 random bits, never negative.
fn random_serial() -> Result<SerialNumber, CaError> {
    let mut serial = [0; 16];
    // Up to 256 bytes come at once or not at all. *Source:* getrandom(2).
    getrandom(&mut serial, GetRandomFlags::empty())
        .map_err(|error| CaError::create_error("a serial number")(error.into()))?;
    // A serial number is a positive integer of at most 20 bytes. *Source:* RFC 5280, section 4.1.2.2.
    serial[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&serial))
}

/// A public key in the format of certificates. *Source:* RFC 8410, section 4.
pub(super) fn subject_public_key(public: PublicKey) -> Result<rcgen::SubjectPublicKeyInfo, CaError> {
    const ED25519: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    rcgen::SubjectPublicKeyInfo::from_der(&[&ED25519[..], public.as_bytes()].concat())
        .map_err(|error| CaError::create_error("a certificate")(error.into()))
}
