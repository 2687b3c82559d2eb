//! The names in a certificate.

use std::net::IpAddr;

use nodekeel_localstorage::pki::Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The names in a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubjectNames {
    /// The common name.
    pub common_name: Option<String>,
    /// DNS names.
    pub dns_names: Vec<String>,
    /// Addresses.
    pub ip_addresses: Vec<IpAddr>,
}

impl SubjectNames {
    /// Reads the names of a certificate. A malformed extension yields none.
    pub fn from_certificate(certificate: &Certificate) -> SubjectNames {
        let mut names = SubjectNames {
            common_name: certificate.common_name().map(str::to_owned),
            ..SubjectNames::default()
        };
        let Ok((_, parsed)) = X509Certificate::from_der(certificate.der_bytes()) else { return names };
        let Ok(Some(extension)) = parsed.subject_alternative_name() else { return names };
        for name in &extension.value.general_names {
            match name {
                GeneralName::DNSName(name) => names.dns_names.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => names.ip_addresses.extend(parse_address(bytes)),
                _ => {}
            }
        }
        names
    }

    /// Returns whether the certificate was issued to this name.
    pub fn is_named(&self, name: &str) -> bool {
        self.common_name.as_deref() == Some(name) || self.dns_names.iter().any(|dns| dns == name)
    }
}

fn parse_address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
