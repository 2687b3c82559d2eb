//! The cluster's CA: it certifies members and clients, and revokes certificates.
//!
//! The CA's private key, its certificate, the list of revoked certificates and every issued certificate are
//! stored in the root keys of the consensus. Read access to these keys is control of the CA; no file holds
//! the private key, except while a cluster is being bootstrapped.
//!
//! ```text
//!  /etcd-ca/ca.der             the CA's certificate, X.509 in DER
//!  /etcd-ca/ca-key.der         the CA's private key: 64 bytes, the Ed25519 seed and the public key
//!  /etcd-ca/crl.der            the list of revoked certificates, in DER
//!  /etcd-ca/certs/SERIAL       an issued certificate; the serial number in hexadecimal
//! ```
//!
//! A cluster's first member needs a certificate before any consensus can store the CA. So a [`PendingCa`]
//! issues in memory, and is [saved](PendingCa::save_to) as soon as a consensus runs: exactly once, even if
//! the process is killed in between, and never over another CA.
//!
//! Private keys are [`PrivateKey`](nodekeel_localstorage::pki::PrivateKey)s, which can't be printed and are
//! wiped when dropped. Everything that is loaded is checked: that key and certificate of the CA match, and
//! that the CA has issued the certificates and signed the list. Validity times are not checked: the clock of
//! a starting node may be wrong.
//!
//! *Source:* the layout is that of Monogon's `consensus/ca` of 2020.

mod ca;
mod certificate_spec;
mod crl_sync;
mod error;
mod pending_ca;
mod revoke;
mod signer;
mod stored;
mod subject_names;

pub use ca::ClusterCa;
pub use certificate_spec::{CertificateSpec, CertificateUsage};
pub use crl_sync::sync_revocation_list;
pub use error::CaError;
pub use pending_ca::PendingCa;
pub use stored::{CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, ISSUED_PREFIX};
pub use subject_names::SubjectNames;

#[cfg(any(test, feature = "testing"))]
pub(crate) use stored::check_arbitrary_values;
