//! A node's way into its cluster: consensus, the cluster's certificate authority, and who the node is there.
//!
//! ```text
//!  machine ──── found a cluster, join one, or start again: journalled steps, a pure machine that decides, a runnable
//!   │           that does what it says
//!   ├─ node ──── who a node is: its name, its record in the cluster, tickets, what it is told at first
//!   ├─ network ─ where it is reached: an address that is known, or an interface's
//!   │
//!  consensus ── what the members agree on, and who is a member: etcd as a supervised child, or one process' memory
//!   │
//!  pki ──────── the cluster's authority: certificates, the list of revoked ones, kept in the consensus
//! ```
//!
//! It knows nothing of Kubernetes but that a node may be a worker of it, and of volumes that there is one.
//!
//! # Bring your own
//! - [`network::Network`]: where the node is reached.
//! - [`consensus::Consensus`] and [`consensus::kv::KvStore`]: what the members agree on.
//! - `nodekeel_localstorage`'s `DataVolume`: what holds the node's data.
//!
//! # Features
//! - `etcd`: consensus by a supervised etcd; needs protoc to build.
//! - `netlink`: the address of an interface, as the kernel tells it.
//! - `testing`: contracts as checks, moments at which a test kills a node, checks over arbitrary input.
//!
//! # Where it comes from
//! Monogon's `core/cluster`, `core/consensus` and `enrolment.proto` of 2020: flows, keys and field numbers. What is
//! different is said where it is.

pub mod consensus;
pub mod machine;
pub mod network;
pub mod node;
pub mod pki;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
