//! What tests of the plugin need: mounts in memory, the contract of [`Mounts`](super::Mounts) as a check, and the
//! kubelet's part.

mod conformance;
mod kubelet;
mod mem_mounts;

pub use conformance::{Ground, conformance};
pub use kubelet::{Kubelet, KubeletError, connect};
pub use mem_mounts::MemMounts;
