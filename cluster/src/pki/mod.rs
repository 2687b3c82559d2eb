//! The cluster's authority: who may be a member or a client, and who no longer.
//!
//! Its key, its certificate, the list of revoked certificates and every certificate that it has issued lie in the root
//! keys of the consensus. Whoever may read these is the authority; no file has its key but while a cluster is being made.
//!
//! ```text
//!  /etcd-ca/ca.der             its certificate, X.509 in DER
//!  /etcd-ca/ca-key.der         its key: 64 bytes, the Ed25519 seed and the public key
//!  /etcd-ca/crl.der            the list of revoked certificates, in DER
//!  /etcd-ca/certs/SERIAL       a certificate that it has issued; the serial number in hexadecimal
//! ```
//!
//! A cluster's first member needs a certificate before there is a consensus to keep the authority in. So a
//! [`NewAuthority`] issues in memory, and is [saved](NewAuthority::save) as soon as there is one: once, whoever is killed
//! between, and never over another.
//!
//! Keys are [`PrivateKey`](nodekeel_localstorage::pki::PrivateKey)s, which can't be printed and are wiped when dropped.
//! Whatever is loaded is checked: that the key is the certificate's, that the authority has issued what is said to be its,
//! that it has signed the list. Times are not: a node's clock may be wrong when it first looks.
//!
//! *Source:* the layout is that of Monogon's `consensus/ca` of 2020.

mod authority;
mod error;
mod keep;
mod leaf;
mod names;
mod new;
mod revoke;
mod signer;
mod stored;

pub use authority::Authority;
pub use error::AuthorityError;
pub use keep::keep_revoked;
pub use leaf::{Leaf, Usage};
pub use names::SubjectNames;
pub use new::NewAuthority;
pub use stored::{CA, CA_KEY, CERTIFICATES, REVOKED};

#[cfg(any(test, feature = "testing"))]
pub(crate) use stored::arbitrary;
