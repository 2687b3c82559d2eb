//! Test doubles: a store and an API server in memory, sample objects, and the conformance suite of
//! [`VolumeStore`](crate::VolumeStore).

mod checks;
mod conformance;
mod fake_api;
mod image_conformance;
mod mem_snapshots;
mod mem_store;
pub mod objects;
mod snapshot_conformance;

pub use checks::{fuzz_handle, fuzz_kind_mark, fuzz_quantity, fuzz_trash_entry};
pub use conformance::conformance;
pub use fake_api::{FakeApi, ObjectKind, RequestFault, RequestVerb, ResponseBody};
pub use image_conformance::image_conformance;
pub use mem_store::MemStore;
pub use snapshot_conformance::snapshot_conformance;
