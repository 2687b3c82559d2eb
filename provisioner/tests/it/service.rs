//! The whole service against an API server in memory. Each test checks events, the API and the store.

mod ability;
mod agent;
mod audit;
mod capacity;
mod claims;
pub(crate) mod dir_node;
mod expansion;
mod foreign_store;
pub(crate) mod harness;
mod images;
mod lease;
mod lifecycle;
mod limits;
mod model;
mod named_stores;
mod node_label;
mod orphans;
mod recovery;
mod slow_copies;
mod snapshots;
mod store;
mod store_return;
mod store_snapshots;
mod volumes;
