//! The CSI node plugin: what gives a volume to a pod, and tells the kubelet that there is a driver.
//!
//! It makes and destroys no volumes: that is the [`VolumeStore`](crate::VolumeStore)'s. It has no controller service
//! (volumes are made by the [`Provisioner`](crate::Provisioner) beside it), no staging, and no block volumes.
//!
//! ```text
//!   kubelet ── plugins_registry/<driver>@reg.sock ── registration: here is a driver, and there is its socket
//!      │
//!      └────── plugins/<driver>/csi.sock ─────────── node: publish, unpublish, stats
//!                                                      │
//!                     OpenVolume::open ── descriptor ──┴── Mounts::mount ── pods/<uid>/volumes/…/mount
//! ```
//!
//! # Duties
//! - Every RPC parses its volume id into a [`VolumeId`](crate::VolumeId) and its path into a [`Target`]: nothing else
//!   ever reaches the disk. Volumes are bound by descriptor, targets are reached beneath the kubelet's directory without
//!   following a symbolic link.
//! - A publish that is repeated, also after a restart of the kubelet or of this program, finds the mount and leaves it.
//! - What is under way for a volume makes a second call for it fail with `ABORTED`; the kubelet comes again.
//! - A pod's mount has `nosuid` and `nodev` unless the PersistentVolume's `mountOptions` say `suid` or `dev`. It has no
//!   `noexec` unless they say so: runc before 1.2 lets a container's mount inherit the flags of the host's, so that
//!   nothing in the volume could be executed. Later ones use the container's own flags.
//!
//! # Where it comes from
//! Monogon's `metropolis/node/kubernetes/csi.go`; the CSI specification 1.13; the kubelet's `pluginregistration` v1.

mod guard;
mod identity;
mod locks;
mod mounts;
mod node;
mod os_mounts;
mod plugin;
#[cfg(not(feature = "testing"))]
mod proto;
#[cfg(feature = "testing")]
pub mod proto;
mod registration;
mod request;
mod socket;
mod stats;
mod sys;
mod target;
#[cfg(feature = "testing")]
pub mod testing;

pub use mounts::{Conflict, FileId, MountError, MountFlags, Mounted, Mounts};
pub use os_mounts::OsMounts;
pub use plugin::{Plugin, PluginDeps, PluginError};
pub use socket::SocketError;
pub use target::{Target, TargetError};
