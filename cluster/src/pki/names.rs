//! Whom a certificate names.

use std::net::IpAddr;

use nodekeel_localstorage::pki::Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// Whom a certificate names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubjectNames {
    /// The common name.
    pub common: Option<String>,
    /// DNS names.
    pub dns: Vec<String>,
    /// Addresses.
    pub addresses: Vec<IpAddr>,
}

impl SubjectNames {
    /// The names in a certificate. A malformed extension names nobody.
    pub fn of(certificate: &Certificate) -> SubjectNames {
        let mut names =
            SubjectNames { common: certificate.common_name().map(str::to_owned), ..SubjectNames::default() };
        let Ok((_, parsed)) = X509Certificate::from_der(certificate.der()) else { return names };
        let Ok(Some(extension)) = parsed.subject_alternative_name() else { return names };
        for name in &extension.value.general_names {
            match name {
                GeneralName::DNSName(name) => names.dns.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => names.addresses.extend(address(bytes)),
                _ => {}
            }
        }
        names
    }

    /// Whether it was issued to this name.
    pub fn is_named(&self, name: &str) -> bool {
        self.common.as_deref() == Some(name) || self.dns.iter().any(|dns| dns == name)
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}
