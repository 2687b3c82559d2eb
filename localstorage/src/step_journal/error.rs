//! Errors of step journals.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::record::MAX_CONTENT_BYTES;
use crate::file_name::InvalidName;

/// A failure to read or write a step journal.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The name is not a valid file name, or too long for four more bytes.
    #[error("invalid step journal name {name:?}")]
    InvalidName {
        /// The requested name.
        name: String,
        /// The defect.
        source: InvalidName,
    },
    /// The journal cannot be opened, created or read.
    #[error("can't open step journal {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process, or another part of this one, has it open.
    #[error("step journal {} is in use by another process: stop that process", .path.display())]
    InUse {
        /// The locked file.
        path: PathBuf,
    },
    /// Both records are damaged, empty or missing. A crash cannot cause this: the disk did, or another program.
    /// Nothing was changed. Restore the files, or remove both to start over, if the steps may be started over.
    #[error(
        "both copies (.0 and .1) of step journal {} are damaged: restore both files, or remove both to start \
         over",
        .path.display()
    )]
    Damaged {
        /// The file with the first record; the name of the second differs in its last byte.
        path: PathBuf,
    },
    /// A newer release has written it: run that release.
    #[error(
        "step journal {} was written by a newer release (format {version}): run that release",
        .path.display()
    )]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// The format version.
        version: u32,
    },
    /// The journal cannot be written. The state is the old one or the new one; a retry may help.
    #[error("can't write step journal {}", .path.display())]
    Commit {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A record is longer than [`MAX_CONTENT_BYTES`].
    #[error(
        "can't write {length} bytes into step journal {}: its records are limited to {MAX_CONTENT_BYTES} \
         bytes",
        .path.display()
    )]
    RecordTooLong {
        /// The file.
        path: PathBuf,
        /// The length of the record.
        length: usize,
    },
    /// The files cannot be removed. Its state is removed all the same; a retry may help.
    #[error("can't remove step journal {}", .path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl JournalError {
    /// The file system or the quota has no free space. A retry helps after something was removed.
    pub fn is_full(&self) -> bool {
        let (Self::Open { source, .. } | Self::Commit { source, .. }) = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Another process, or another part of this one, has it open. A retry helps after it was closed.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}
