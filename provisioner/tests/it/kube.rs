//! The whole service against a real control plane, in directories whose limits are kept in memory. Each test
//! checks events, the API and the directories.
//!
//! Every provisioner here runs as the service account of deploy/rbac.yaml, which proves that its permissions
//! suffice.

mod claims;
mod cluster;
mod expansion;
mod harness;
mod rejections;
mod snapshots;
mod stored;
mod volumes;
