//! The whole service against an API server in memory. Each test checks events, the API and the store.

mod audit;
mod claims;
pub(crate) mod harness;
mod lifecycle;
mod model;
mod orphans;
mod store;
mod volumes;
