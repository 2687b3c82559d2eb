//! The name of the certificates that open the peer ports of a cluster.

use nodekeel_localstorage::pki::Certificate;

#[cfg(feature = "etcd")]
use super::SubjectNames;

/// Prefix of all keys of the CA.
#[cfg(feature = "etcd")]
pub(crate) const CA_PREFIX: &str = "/etcd-ca/";
/// Key of the name that the peer ports require: it is stored once each member and each unused ticket has it.
pub(crate) const PEER_NAME_PATH: &str = "/etcd-ca/peer-name";

/// The DNS name that this CA gives to the certificates of members, and to no others.
pub fn peer_name(ca: &Certificate) -> String {
    format!("etcd-peer.{}", ca.public_key().short_id())
}

/// Returns whether a certificate has this name.
#[cfg(feature = "etcd")]
pub(crate) fn has_peer_name(certificate: &Certificate, name: &str) -> bool {
    SubjectNames::from_certificate(certificate).dns_names.iter().any(|dns| dns == name)
}
