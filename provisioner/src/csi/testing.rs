//! Test doubles for the plugin: a mounter in memory, the conformance suite of
//! [`VolumeMounter`](super::VolumeMounter), a fake kubelet, and a check of arbitrary messages.

mod checks;
mod conformance;
mod fake_kubelet;
mod mem_mounter;

pub use checks::fuzz_request;
pub use conformance::{ConformanceSetup, conformance};
pub use fake_kubelet::{FakeKubelet, KubeletError, connect_socket};
pub use mem_mounter::MemMounter;
