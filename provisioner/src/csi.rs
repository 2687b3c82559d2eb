//! The CSI node plugin: mounts volumes into pods, and registers the driver with the kubelet.
//!
//! The plugin does not create or delete volumes: the [`Provisioner`](crate::Provisioner) does, in a
//! [`VolumeStore`](crate::VolumeStore). So it has no controller service. It does not support staging.
//!
//! ```text
//!   kubelet ── plugins_registry/<driver>@reg.sock ── registration: the driver's name and the path of csi.sock
//!      │
//!      └────── plugins/<driver>/csi.sock ─────────── node: publish, unpublish, stats
//!                                               │
//!              VolumeOpener::open ── descriptor ──┴── VolumeMounter::mount ── pods/<uid>/volumes/…/mount
//!                                                                        └─ plugins/kubernetes.io/csi/volumeDevices/publish/…
//! ```
//!
//! # Behaviour
//! - Every RPC parses its volume id into a [`VolumeId`](crate::VolumeId) and its path into a [`TargetPath`]:
//!   no other text reaches the file system. Volumes are bind-mounted by descriptor; target paths are opened
//!   beneath the kubelet's directory without following symbolic links.
//! - A repeated publish, also after a restart of the kubelet or of this program, finds the mount and keeps
//!   it.
//! - A block volume is a loop device with direct IO over the volume's file, attached while it is published. It is
//!   read-only or writable, for all pods on the node. The file system of a strict volume is mounted from such a device,
//!   which disappears with the last mount. Nothing of both is kept in memory, and what a killed process leaves attached is
//!   used again, or released by the unpublish, by the next start, or with the volume.
//! - While a call for a volume is in flight, a second one fails with `ABORTED`; the kubelet retries.
//! - A pod's mount has `nosuid` and `nodev` unless the PersistentVolume's `mountOptions` contain `suid` or
//!   `dev`. It has `noexec` only if they contain it: with runc before 1.2, a container's mount inherits the
//!   flags of the host's, so that no file in the volume could be executed. Later versions use the container's
//!   flags.
//!
//! # Origin
//! Monogon's `metropolis/node/kubernetes/csi.go`; the CSI specification 1.13; the kubelet's
//! `pluginregistration` v1.

mod bind_mounter;
mod guard;
mod identity;
mod mount_source;
mod mounter;
mod node;
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
mod target_list;
mod target_path;
mod target_state;
#[cfg(feature = "testing")]
pub mod testing;

pub use bind_mounter::BindMounter;
pub use mounter::{FileId, MountRestrictions, TargetConflict, TargetMount, TargetMountError, VolumeMounter};
pub use plugin::{DriverLock, NodePlugin, PluginDeps, PluginError};
pub use socket::SocketError;
pub use target_path::{TargetError, TargetPath};
