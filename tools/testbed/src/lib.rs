//! The base of the workspace's tests, benches and tasks: real daemons in private directories, scratch
//! directories that are removed whatever happens, guests, and bench rows.
//!
//! It depends on no member of the workspace, and needs neither tokio nor protoc.
//!
//! ```no_run
//! let kube = testbed::Kube::start()?;
//! kube.create_fake_node(&testbed::FakeNode::new("a"))?;
//! assert_eq!(kube.list_objects("node")?.len(), 1);
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! Processes that a test starts end with it: by `Drop`, or, where the test itself was killed, by a keeper
//! process that detects its exit. The next [`ScratchDir::new`] removes the directories of killed owners.

mod apt;
mod containerd;
mod daemon;
mod exit;
mod flood;
mod hung_disk;
mod json;
mod kill_tally;
mod kube;
mod kubeconfig;
mod port;
mod private_network;
mod program;
mod scratch;
mod software_tpm;
mod table;
mod tang;
mod wait;

pub mod bench;
pub mod cache;
pub mod command_line;
pub mod gotool;
pub mod guest;
pub mod leftovers;
pub mod noded;
pub mod power_cut;
pub mod process_cost;
pub mod tools;

pub use apt::AptClient;
pub use containerd::Containerd;
pub use daemon::{Daemon, command_output};
pub use exit::{end_group, wait_exit};
pub use flood::{ConnectionFlood, Stranger};
pub use guest::Guest;
pub use hung_disk::HungDisk;
pub use json::merge_patch;
pub use kill_tally::{KillPlace, KillTally};
pub use kube::{
    BUSYBOX_IMAGE, ContainerImage, FakeNode, GUEST_NODE, GuestNode, GuestNodeBuilder, Kube, KubeBuilder,
    KubeDaemon, KubePrograms, KubeUser, ObjectChange, ObjectWatch, SharedKube,
};
pub use kubeconfig::UNREACHABLE_KUBECONFIG;
pub use port::{ReservedPort, reserve_port};
pub use power_cut::PowerCut;
pub use private_network::PrivateNetwork;
pub use program::{copy_program, write_program};
pub use scratch::ScratchDir;
pub use software_tpm::SoftwareTpm;
pub use table::Table;
pub use tang::TangServer;
pub use wait::wait_until;
