//! What is wrong with an archive as a stream of files.

use std::fmt;
use std::io;

/// What an archive has too much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StreamLimit {
    /// Its bytes, decompressed: see [`Limits::archive_bytes`](crate::Limits::archive_bytes).
    Bytes,
    /// Files, directories and links: see [`Limits::entries`](crate::Limits::entries).
    Entries,
    /// Bytes of an index or manifest: see [`Limits::document_bytes`](crate::Limits::document_bytes).
    Document,
    /// Bytes of a name.
    Name,
}

impl fmt::Display for StreamLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes in the archive",
            Self::Entries => "files in the archive",
            Self::Document => "bytes in index.json or manifest.json",
            Self::Name => "bytes in a file's name",
        })
    }
}

/// Why an archive can't be read. Positions count bytes of the decompressed archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The file itself can't be read: look at its disk. A retry may help.
    #[error("read the file")]
    Io(#[source] io::Error),
    /// It is compressed by something else than gzip or zstd: recompress it.
    #[error("it is compressed by {found}; gzip, zstd and no compression are understood")]
    Compression {
        /// By what.
        found: &'static str,
    },
    /// The compressed data are damaged: copy or make the file again.
    #[error("the compressed data are damaged at byte {at} of the archive")]
    Decompress {
        /// Where.
        at: u64,
        /// What the decompressor says.
        #[source]
        source: io::Error,
    },
    /// It ends too early: copy the file again.
    #[error("it ends too early, at byte {at} of the archive")]
    Truncated {
        /// Where.
        at: u64,
    },
    /// It is no tar, or a damaged one.
    #[error("it is no tar, or a damaged one: {what} at byte {at} of the archive")]
    Tar {
        /// Where.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It has more than [`Limits`](crate::Limits) allow: it is none of ours, or they have to be raised.
    #[error("more than {limit} {of}")]
    Limit {
        /// How many are allowed.
        limit: u64,
        /// Of what.
        of: StreamLimit,
    },
    /// A file's name leads out of the archive. No tool makes such images; nothing was written to that place.
    #[error("a file is called {name:?}, which leads out of the archive")]
    Name {
        /// The name, or its beginning.
        name: String,
    },
}
