//! A store in memory, the suite that every store passes, archives made by hand, and checks over arbitrary input: property
//! tests run those on what proptest makes up, fuzz targets on what the fuzzer finds.

mod archive;
mod checks;
mod conformance;
mod memory;

pub use archive::{Archive, Shape};
pub use checks::{check_archive, check_documents};
pub use conformance::conformance;
pub use memory::{Call, MemStore};
