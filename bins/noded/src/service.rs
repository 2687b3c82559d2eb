//! The node's services.

pub(crate) mod cluster;
pub(crate) mod containerd;
pub(crate) mod etcd;
mod no_quota;
pub(crate) mod provisioner;
pub(crate) mod user;
