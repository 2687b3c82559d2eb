//! The cluster's CA: it certifies members and clients, and revokes certificates.
//!
//! The CA's private key, its certificate, the list of revoked certificates and every issued certificate are
//! stored in the root keys of the consensus. The private key is sealed: to read these keys is not to have it. No file holds
//! the private key, except while a cluster is being bootstrapped.
//!
//! ```text
//!  /etcd-ca/ca.der             the CA's certificate, X.509 in DER
//!  /etcd-ca/seal/ca-key.age    the CA's private key, as a file of age
//!  /etcd-ca/seal/voters/NAME   the key of a voter, signed by its member
//!  /etcd-ca/seal/erase/NAME    a voter whose database may have a private key in its history that was not sealed
//!  /etcd-ca/crl.der            the list of revoked certificates, in DER
//!  /etcd-ca/certs/SERIAL       an issued certificate; the serial number in hexadecimal
//!  /etcd-ca/peer-name          the name of members' certificates, once the peer ports require it
//!  /etcd-ca/ca-key.der         the private key before it was sealed: 64 bytes, the Ed25519 seed and the public key
//! ```
//!
//! Each [`Voter`] has a key of its own, in a file that nobody else reads. [`CaSealing`] seals the private key to the keys of all voters,
//! and to the recovery key if one is configured: `age -d -i KEY` opens it for that one. A node that becomes a voter
//! waits until another voter has sealed the private key to it. A removed node is left out from its removal on; what it could open
//! before, it may have kept.
//!
//! A cluster of an earlier release, whose private key is not sealed, goes on as before until each of its voters runs this release and
//! has published its key. Then one transaction seals the private key, and the voters erase the history of their databases. Voters of
//! the earlier release do not start from then on.
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
mod peer_name;
mod pending_ca;
mod revoke;
mod sealing;
mod signer;
mod stored;
mod subject_names;
mod voter;

pub use ca::ClusterCa;
pub use certificate_spec::{CertificateSpec, CertificateUsage};
pub use crl_sync::sync_revocation_list;
pub use error::CaError;
pub(crate) use peer_name::PEER_NAME_PATH;
pub use peer_name::peer_name;
#[cfg(feature = "etcd")]
pub(crate) use peer_name::{CA_PREFIX, has_peer_name};
pub use pending_ca::PendingCa;
pub use sealing::CaSealing;
pub use stored::{CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, ISSUED_PREFIX, SEAL_PREFIX, SEALED_KEY_PATH};
pub use subject_names::SubjectNames;
pub use voter::Voter;

#[cfg(any(test, feature = "testing"))]
pub(crate) use stored::check_arbitrary_values;
