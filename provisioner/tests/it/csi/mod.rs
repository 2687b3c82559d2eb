//! The CSI node plugin, called over its sockets as by the kubelet.

mod harness;
mod model;
mod named_stores;
mod publish;
pub(crate) mod real_images;
mod real_mount_kills;
pub(crate) mod real_mounts;
mod registration;
mod sanity;
