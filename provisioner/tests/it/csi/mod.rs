//! The CSI node plugin, called over its sockets as by the kubelet.

mod harness;
mod model;
mod publish;
mod real_images;
mod real_mount_kills;
mod real_mounts;
mod registration;
mod sanity;
