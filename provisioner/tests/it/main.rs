//! The provisioner as its users see it.

mod csi;
mod manifests;
mod service;
mod stores;
