//! An image store in memory, the conformance suite of stores, generated archives, and checks over arbitrary
//! input, which property tests and fuzz targets run.

mod archive_builder;
mod checks;
mod conformance;
mod memory;

pub use archive_builder::{ArchiveBuilder, BuiltArchiveFormat};
pub use checks::{fuzz_archive, fuzz_documents};
pub use conformance::conformance;
pub use memory::{MemStore, StoreCall};
