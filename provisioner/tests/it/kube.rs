//! The whole service against a real control plane, over directories whose limits are kept in memory. Each test says what
//! events, the API and the directories show.
//!
//! Every provisioner here runs as the service account of deploy/rbac.yaml, so what it does shows that its rights are enough.

mod claims;
mod cluster;
mod harness;
mod refusals;
mod stored;
mod volumes;
