//! What tests need: a store in memory, and the contract of [`VolumeStore`](crate::VolumeStore) as a check.

mod conformance;
mod mem_store;

pub use conformance::conformance;
pub use mem_store::MemStore;
