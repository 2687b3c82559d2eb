//! A node's way into its cluster: consensus, the cluster's certificate authority, and who the node is there.
//!
//! ```text
//!  consensus ── what the members agree on, and who is a member: etcd as a supervised child, or one process' memory
//!   │
//!  pki ──────── the cluster's authority: certificates, the list of revoked ones, kept in the consensus
//! ```

pub mod consensus;
pub mod pki;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
