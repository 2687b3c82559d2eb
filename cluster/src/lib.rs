//! Enrols a node in its cluster: consensus, the cluster's CA, and the node's identity.
//!
//! The crate knows nothing of Kubernetes except that a node may be a worker, and nothing of volumes except that a
//! node has one.
//!
//! ```text
//!  enrolment ── bootstrap a cluster, join one, or restart: journalled steps, a pure state machine that
//!   │           decides, a runnable that performs its actions
//!   ├─ node ──── the node's identity: its name, its record in the cluster, tickets, enrolment configuration
//!   ├─ network ─ the node's address: static, or that of an interface
//!   │
//!  consensus ── the store that the members agree on, and its members: a supervised etcd, or in memory
//!   ├─ pki ───── the cluster's CA: certificates and their revocation, stored in the consensus
//!   └─ backup ── snapshots of the consensus, encrypted for the holder of a key
//! ```
//!
//! A node that bootstraps a cluster of one in memory:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nodekeel_cluster::consensus::memory::MemoryConsensus;
//! use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
//! use nodekeel_cluster::network::{NodeAddress, StaticNetwork};
//! use nodekeel_cluster::node::{EnrolmentSources, LocalNames};
//! use nodekeel_localstorage::volume::DirectoryVolume;
//! use nodekeel_localstorage::{Dir, FileMode};
//! use nodekeel_supervisor::Supervisor;
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let scratch = tempfile::tempdir()?;
//!     let disk = Dir::open(scratch.path())?;
//!     let deps = Deps {
//!         journal_dir: disk.ensure_dir("esp", FileMode::PRIVATE_DIR)?,
//!         enrolment: EnrolmentSources::default(),
//!         network: Arc::new(StaticNetwork::new(NodeAddress::try_new("192.0.2.7".parse()?)?)),
//!         volume: Arc::new(DirectoryVolume::new(disk.ensure_dir("data", FileMode::PRIVATE_DIR)?)),
//!         consensus: ConsensusFactory::without_volume(Arc::new(MemoryConsensus::new())),
//!         local_names: LocalNames::default(),
//!         enroller: None,
//!     };
//!     let mut settings = EnrolmentSettings::default();
//!     settings.bootstrap = true;
//!     let node = ClusterNode::new(deps, settings);
//!     let supervisor = Supervisor::builder().start(node.clone());
//!     let identity = node.wait_finished().await?;
//!     println!("node {} is in cluster {}", identity.node_id, identity.cluster_id);
//!     node.namespaced_kv("example", "greetings")?.put(b"/hello", b"world").await?;
//!     supervisor.shutdown().await;
//!     Ok(())
//! }
//! ```
//!
//! # Bring your own
//! - [`network::Network`]: the node's address.
//! - [`consensus::Consensus`] and [`consensus::kv::KvStore`]: the store that the members agree on.
//! - `nodekeel_localstorage`'s `DataVolume`: the volume that holds the node's data.
//!
//! # Features
//! - `etcd`: consensus by a supervised etcd; needs protoc to build.
//! - `netlink`: the address of an interface, from the kernel.
//! - `testing`: contracts as conformance checks, points at which a test kills a node, checks over arbitrary
//!   input.
//!
//! # Where it comes from
//! Monogon's `core/cluster`, `core/consensus` and `enrolment.proto` of 2020: flows, keys and field numbers.
//! Differences are documented where they occur.

mod age;
pub mod backup;
pub mod consensus;
pub mod enrolment;
pub mod network;
pub mod node;
pub mod pki;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

/// The cause of an error from an implementation of a trait.
type BoxError = Box<dyn std::error::Error + Send + Sync>;
