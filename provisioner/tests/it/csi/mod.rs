//! The CSI node plugin, as the kubelet sees it: over its sockets.

mod harness;
mod model;
mod publish;
mod real_mounts;
mod registration;
mod sanity;
