//! Who may call a node from another machine: by an Ed25519 key, with the rights of a role.
//!
//! A key is an identity by itself: no certificate vouches for it, and no clock has a part in the decision. The node knows the
//! public keys of its operators, and an operator knows the node's. [`least_role`] is the only place that says what a role may do.

mod key;
mod methods;
mod role;
mod tls;

pub use key::{InvalidKey, PrivateKey, PublicKey};
pub use methods::{METHODS, least_role};
pub use role::{InvalidRole, Role};
pub use tls::RemoteNode;
#[cfg(feature = "node")]
pub(crate) use tls::{AdmittedKeys, proved_key, server_config};
pub(crate) use tls::{ClientTls, MismatchedKey};
