//! The CSI node plugin, called over its sockets as by the kubelet.

mod harness;
mod model;
mod publish;
mod real_mounts;
mod registration;
mod sanity;
