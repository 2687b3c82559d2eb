//! The node's services.

pub(crate) mod containerd;
pub(crate) mod etcd;
pub(crate) mod user;
