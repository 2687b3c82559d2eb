//! What tests of the plugin need: mounts in memory, the contract of [`Mounts`](super::Mounts) as a check, the
//! kubelet's part, and a check over arbitrary messages.

mod checks;
mod conformance;
mod kubelet;
mod mem_mounts;

pub use checks::check_request;
pub use conformance::{Ground, conformance};
pub use kubelet::{Kubelet, KubeletError, connect};
pub use mem_mounts::MemMounts;
