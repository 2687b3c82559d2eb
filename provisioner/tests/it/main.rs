//! The provisioner as its users see it.

mod csi;
mod kills;
mod kube;
mod manifests;
mod parsers;
mod service;
mod stores;
