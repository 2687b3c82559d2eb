//! The whole service against an API server in memory. Each test says what events, the API and the store show.

mod claims;
pub(crate) mod harness;
mod life;
mod model;
mod orphans;
mod volumes;
