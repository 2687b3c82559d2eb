//! What a certificate is to say.

use std::net::IpAddr;

use nodekeel_localstorage::pki::PublicKey;
use rcgen::string::Ia5String;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType,
    SerialNumber, date_time_ymd,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::AuthorityError;
use crate::consensus::MemberName;

/// What the holder of a certificate may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Usage {
    /// A member of the consensus: server and client, to the other members and to its own clients.
    Member,
    /// A client of the consensus, at any address.
    Client,
    /// A node to other nodes: a server.
    Node,
}

/// What a certificate is to say. All are valid for ever: a node's clock may be wrong, and who is expelled is revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaf {
    /// The subject's name; for servers also the DNS name that they are reached by.
    pub name: MemberName,
    /// The addresses that a server is reached at. Where it is a client too, its servers may want to see that it comes from
    /// there: etcd does, of its clients.
    pub addresses: Vec<IpAddr>,
    /// What it may be.
    pub usage: Usage,
}

impl Leaf {
    /// The certificate of a member at this address.
    pub fn member(name: MemberName, address: IpAddr) -> Leaf {
        Leaf { name, addresses: vec![address], usage: Usage::Member }
    }

    /// The certificate of a client.
    ///
    /// It names no host: of a client that does, etcd wants to see it come from there.
    pub fn client(name: MemberName) -> Leaf {
        Leaf { name, addresses: Vec::new(), usage: Usage::Client }
    }

    /// The certificate of a node.
    pub fn node(name: MemberName, addresses: Vec<IpAddr>) -> Leaf {
        Leaf { name, addresses, usage: Usage::Node }
    }

    /// *Source:* RFC 5280; the organizational unit is that of Monogon's `consensus/ca`.
    pub(super) fn params(&self) -> Result<CertificateParams, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, self.name.as_str());
        if self.usage != Usage::Node {
            params.distinguished_name.push(DnType::OrganizationalUnitName, "etcd");
        }
        params.serial_number = Some(serial()?);
        // The last second of 9999: RFC 5280, section 4.1.2.5, "no well-defined expiration date".
        params.not_after = date_time_ymd(9999, 12, 31) + std::time::Duration::from_secs(24 * 3600 - 1);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let (server, client) = (ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth);
        params.extended_key_usages = match self.usage {
            Usage::Member => vec![client, server],
            Usage::Client => vec![client],
            Usage::Node => vec![server],
        };
        if self.usage != Usage::Client {
            let name = Ia5String::try_from(self.name.as_str());
            let name = name.map_err(|error| AuthorityError::make("a certificate")(error.into()))?;
            let addresses = self.addresses.iter().copied().map(SanType::IpAddress);
            params.subject_alt_names = std::iter::once(SanType::DnsName(name)).chain(addresses).collect();
        }
        Ok(params)
    }
}

/// 127 random bits, never negative.
fn serial() -> Result<SerialNumber, AuthorityError> {
    let mut serial = [0; 16];
    // Up to 256 bytes come at once or not at all. *Source:* getrandom(2).
    getrandom(&mut serial, GetRandomFlags::empty())
        .map_err(|error| AuthorityError::make("a serial number")(error.into()))?;
    serial[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&serial))
}

/// A public key as certificates have it. *Source:* RFC 8410, section 4.
pub(super) fn subject_key(public: PublicKey) -> Result<rcgen::SubjectPublicKeyInfo, AuthorityError> {
    const ED25519: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    rcgen::SubjectPublicKeyInfo::from_der(&[&ED25519[..], public.as_bytes()].concat())
        .map_err(|error| AuthorityError::make("a certificate")(error.into()))
}
