//! Errors of an archive as a stream of files.

use std::fmt;
use std::io;

/// A limit that an archive exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArchiveLimitKind {
    /// Decompressed bytes: see [`ImportLimits::archive_bytes`](crate::ImportLimits::archive_bytes).
    Bytes,
    /// Files, directories and links: see [`ImportLimits::entries`](crate::ImportLimits::entries).
    Entries,
    /// Bytes of an index or manifest: see
    /// [`ImportLimits::document_bytes`](crate::ImportLimits::document_bytes).
    Document,
    /// Bytes of a name.
    Name,
    /// Bytes of all names together.
    Names,
}

impl fmt::Display for ArchiveLimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bytes => "bytes in the archive",
            Self::Entries => "files in the archive",
            Self::Document => "bytes in index.json or manifest.json",
            Self::Name => "bytes in a file name",
            Self::Names => "bytes in all file names",
        })
    }
}

/// Failure to read an archive. Positions count bytes of the decompressed archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// Reading the file failed: check its disk. A retry may help.
    #[error("can't read the image archive")]
    Io(#[source] io::Error),
    /// The compression is neither gzip nor zstd: recompress the archive.
    #[error(
        "the image archive has unsupported compression {found}: compress it again with gzip or zstd, or not \
         at all"
    )]
    Compression {
        /// The compression found.
        found: &'static str,
    },
    /// Decompressing needs more memory than [`ImportLimits::zstd_window`](crate::ImportLimits::zstd_window): compress the
    /// archive with a smaller window, or raise the limit.
    #[error(
        "zstd window at byte {at} of the image archive exceeds {} bytes: compress it again with `zstd \
         --long={log}`, or raise the limit of the window",
        1_u64 << log
    )]
    Window {
        /// The position.
        at: u64,
        /// The binary logarithm of the maximum.
        log: u32,
    },
    /// The compressed data are corrupt: copy or create the file again.
    #[error("corrupt compressed data at byte {at} of the image archive: copy or create the file again")]
    Decompress {
        /// The position.
        at: u64,
        /// The decompressor's error.
        #[source]
        source: io::Error,
    },
    /// The archive is truncated: copy the file again.
    #[error("image archive truncated at byte {at}: copy the file again")]
    Truncated {
        /// The position.
        at: u64,
    },
    /// The archive is not a tar, or it is corrupt.
    #[error(
        "the image archive is not a tar archive, or is corrupt: {what} at its byte {at}; copy or create the \
         file again"
    )]
    Tar {
        /// The position.
        at: u64,
        /// The invalid part.
        what: &'static str,
    },
    /// The archive exceeds a limit of [`ImportLimits`](crate::ImportLimits): it does not hold images, or the
    /// limit has to be raised.
    #[error(
        "archive exceeds the limit of {limit} {of}: check that it is an image archive, or raise the limit"
    )]
    Limit {
        /// The maximum.
        limit: u64,
        /// The quantity that is limited.
        of: ArchiveLimitKind,
    },
    /// The archive begins with many files that no image archive has: it is of something else, as a root file system.
    #[error(
        "archive of other files than images, such as {file:?}: save the images with `docker save` or `skopeo copy`"
    )]
    NotImages {
        /// One of the files.
        file: String,
    },
    /// A file name leads out of the archive. No tool creates such images; nothing was written to that path.
    #[error(
        "the image archive has an unsafe file name {name:?}, which leads out of it: create the archive again"
    )]
    PathTraversal {
        /// The name, or its start.
        name: String,
    },
}
