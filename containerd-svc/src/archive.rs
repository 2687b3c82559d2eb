//! Reading an archive once, from its beginning to its end: decompressed, taken apart, digests verified.
//!
//! Nothing of it is a path: a name that it holds is looked up in maps, and never in a file system.

mod compression;
mod error;
mod pax;
mod reader;
mod tar;

pub(crate) use compression::Compression;
pub use error::{StreamError, StreamLimit};
pub(crate) use reader::{Contents, ReadError, Sink, Stored, read};
