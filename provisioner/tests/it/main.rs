//! The provisioner as its users see it.

mod csi;
mod kills;
mod kube;
mod manifests;
mod service;
mod stores;
