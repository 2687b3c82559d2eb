//! Tests of the crate as others see it.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[cfg(feature = "etcd")]
mod etcd;
mod follow;
mod machine;
mod memory;
#[cfg(feature = "netlink")]
mod network;
mod node;
mod nodes;
mod pki;
