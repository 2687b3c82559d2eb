//! Directories of a data volume that several crates use.

use super::{LayoutDir, LayoutFile};

crate::layout! {
    /// The node's member of the cluster's etcd.
    pub struct EtcdDir {
        /// The credentials by which members authenticate each other.
        pub peer_pki: PkiDir = "peer_pki", 0o700;
        /// Members that are no longer trusted: a certificate revocation list in DER.
        pub peer_crl: LayoutFile = "peer_crl", 0o400;
        /// The database.
        pub data: LayoutDir = "data", 0o700;
    }

    /// A certificate with its key and its CA certificate.
    ///
    /// With the feature `pki` it has methods that replace the three together.
    pub struct PkiDir {
        /// The CA certificate.
        pub ca: LayoutFile = "ca.pem", 0o600;
        /// The certificate.
        pub certificate: LayoutFile = "cert.pem", 0o600;
        /// The private key.
        pub key: LayoutFile = "cert-key.pem", 0o600;
    }

    /// The identity of the node.
    pub struct IdentityDir {
        /// The credentials in the cluster.
        pub credentials: PkiDir = "credentials", 0o700;
        /// The roles last assigned to it, as protobuf.
        pub roles: LayoutFile = "roles.pb", 0o400;
    }
}
