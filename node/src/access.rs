//! Who may call a node from another machine: by an Ed25519 key, with the rights of a role, or as another node of its cluster;
//! or as a stranger, who may enrol.
//!
//! A key is an identity by itself: no certificate vouches for it, and no clock has a part in the decision. The node knows the
//! public keys of its operators and of the other nodes, and each of them knows the node's. Two tables alone say who may call each
//! method.

mod key;
#[cfg(feature = "node")]
mod methods;
mod role;
mod tls;

pub use key::{InvalidKey, PrivateKey, PublicKey};
#[cfg(feature = "node")]
pub use methods::{Callers, METHODS, NODE_METHODS};
#[cfg(feature = "node")]
pub(crate) use methods::{Principal, callers_of};
pub use role::{InvalidRole, Role};
pub use tls::RemoteNode;
#[cfg(feature = "node")]
pub(crate) use tls::{AdmittedKeys, ServerTls, is_enrolling, proved_key};
pub(crate) use tls::{ClientTls, MismatchedKey};
