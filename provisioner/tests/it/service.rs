//! The whole service against an API server in memory. Each test checks events, the API and the store.

mod agent;
mod audit;
mod capacity;
mod claims;
mod expansion;
pub(crate) mod harness;
mod lifecycle;
mod model;
mod node_label;
mod orphans;
mod recovery;
mod snapshots;
mod store;
mod volumes;
