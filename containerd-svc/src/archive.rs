//! Reads an archive in one pass: decompresses it, splits it into blobs and verifies their digests.
//!
//! No name in it is used as a path: names are looked up in maps, never in a file system.

mod compression;
mod error;
mod layer;
mod outline;
mod pax;
mod reader;
mod tar;

pub(crate) use compression::Compression;
pub use error::{ArchiveError, ArchiveLimitKind};
#[cfg_attr(not(feature = "client"), allow(unused_imports, reason = "MemStore unpacks nothing"))]
pub(crate) use layer::measure_layer;
pub(crate) use outline::read_outline;
pub(crate) use reader::{ArchiveContents, BlobSink, ReadError, StoredBlob, measure_archive, read_archive};
