//! The node's services.

pub(crate) mod cluster;
pub(crate) mod containerd;
pub(crate) mod etcd;
mod kubelet_dir;
mod no_quota;
pub(crate) mod provisioner;
pub(crate) mod user;
