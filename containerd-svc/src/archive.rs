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
pub(crate) use layer::measure_layer;
pub(crate) use outline::{ArchiveOutline, FilePlace, read_outline};
pub(crate) use reader::{
    ArchiveContents, BlobSink, ReadError, StoredBlob, WantedFiles, digest_from_name, measure_archive,
    read_archive,
};
