//! Why a data directory can't be used, each with what to do about it.

use std::io;
use std::path::PathBuf;

use nodekeel_localstorage::Error as DirError;
use nodekeel_localstorage::tree::PlaceError;
use thiserror::Error;

use super::READ_ONLY;

/// Why the data directory can't be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// Another instance has it.
    #[error("data directory {} is used by {holder}; stop that one, or give another directory with --data", path.display())]
    InUse {
        /// The data directory.
        path: PathBuf,
        /// Who has it.
        holder: String,
    },
    /// It is a file, or below one, or a file is where one of its own directories has to be.
    #[error("{} is no directory; move it away, or give another directory with --data", path.display())]
    NotADirectory {
        /// What is in the way.
        path: PathBuf,
    },
    /// Something that is no file is where one of its own files has to be.
    #[error("{} is no file; move it away, or give another directory with --data", path.display())]
    NotAFile {
        /// What is in the way.
        path: PathBuf,
    },
    /// A symbolic link is where one of its own files or directories has to be.
    #[error(
        "{} is a symbolic link, and none is followed below the data directory; replace it by what it points to (a mount \
         serves as well), or give another directory with --data",
        path.display()
    )]
    Symlink {
        /// The link.
        path: PathBuf,
    },
    /// etcd's data is where noded kept it before its directories had their present names.
    #[error(
        "{} was made by an earlier noded, which kept etcd's data there; move it to its new place: mkdir -m 700 {} && mv {} {}",
        path.display(), to.display(), path.display(), to.display()
    )]
    Former {
        /// Where it is.
        path: PathBuf,
        /// Where it belongs.
        to: PathBuf,
    },
    /// This user may not write there.
    #[error(
        "no permission to write to {}; run noded as its owner or as root, or give another directory with --data",
        path.display()
    )]
    Permission {
        /// The directory that exists and can't be written to.
        path: PathBuf,
    },
    /// No file can be made there, whoever tries.
    #[error("nothing can be kept in {}: it is {why}; give another directory with --data", path.display())]
    Unfit {
        /// The directory that exists.
        path: PathBuf,
        /// What it is.
        why: &'static str,
    },
    /// The file system is full, or nearly.
    #[error(
        "no room on the disk of {}: {} MiB are free and {} MiB needed; free some, or give another directory with --data",
        path.display(), free >> 20, needed.div_ceil(1 << 20)
    )]
    Full {
        /// A directory on that file system.
        path: PathBuf,
        /// Bytes that are free.
        free: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// The lock could not be made, taken or written.
    #[error("lock {}", path.display())]
    Lock {
        /// The lock.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// Something in it could not be made, read or written.
    #[error("keep what a node keeps")]
    Keep(#[source] DirError),
    /// What has to be below it can't be placed there.
    #[error("place what a node keeps in {}", path.display())]
    Place {
        /// The data directory.
        path: PathBuf,
        /// Why not.
        #[source]
        source: PlaceError,
    },
}

/// What is in the way says what is to be done.
impl From<DirError> for DataError {
    fn from(error: DirError) -> Self {
        let path = error.path().to_owned();
        match () {
            () if error.is_symlink() => Self::Symlink { path },
            () if error.is_not_a_directory() => Self::NotADirectory { path },
            () if error.is_not_a_file() => Self::NotAFile { path },
            () if error.is_denied() => Self::Permission { path },
            () if error.is_read_only() => Self::Unfit { path, why: READ_ONLY },
            () => Self::Keep(error),
        }
    }
}
