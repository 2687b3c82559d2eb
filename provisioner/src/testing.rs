//! What tests need: a store in memory, and the contract of [`VolumeStore`](crate::VolumeStore) as a check.

mod api;
mod checks;
mod conformance;
mod mem_store;
pub mod objects;

pub use api::{AnyBody, FakeApi, Fault, Kind, Verb};
pub use checks::{check_grave, check_handle, check_quantity};
pub use conformance::conformance;
pub use mem_store::MemStore;
