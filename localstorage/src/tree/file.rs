//! Handles of files, sockets and pipes, and decoding of the contents of files.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{EntryLocation, EntryShape, LayoutEntry, LayoutError};
use crate::error::Error;
use crate::metadata::{FileKind, FileMode};

/// A declared file. It need not exist.
#[derive(Clone)]
pub struct LayoutFile {
    location: EntryLocation,
}

impl LayoutFile {
    /// The full path, for programs that need a path.
    pub fn path(&self) -> &Path {
        &self.location.path
    }

    /// The mode that it is written with.
    pub fn mode(&self) -> FileMode {
        self.location.mode
    }

    /// Reads its content.
    ///
    /// # Errors
    /// Those of [`FileStore::read`](crate::FileStore::read); [`is_not_found`](Error::is_not_found) only if it
    /// is absent.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        self.location.store.read(&self.location.store_path)
    }

    /// Reads its content; none if it is absent.
    ///
    /// # Errors
    /// Those of [`FileStore::read`](crate::FileStore::read): an unreadable file is never reported as absent.
    pub fn read_if_present(&self) -> Result<Option<Vec<u8>>, Error> {
        match self.read() {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces its content durably: after a crash it has the old content or the new one.
    ///
    /// # Errors
    /// Those of [`FileStore::write`](crate::FileStore::write).
    pub fn write(&self, content: &[u8]) -> Result<(), Error> {
        self.location.store.write(&self.location.store_path, content, self.location.mode)
    }

    /// Returns whether an entry of its name exists, of any kind, also a dangling link.
    ///
    /// # Errors
    /// Those of [`FileStore::file_kind`](crate::FileStore::file_kind): an inaccessible entry is never
    /// reported as absent.
    pub fn exists(&self) -> Result<bool, Error> {
        self.location.store.file_kind(&self.location.store_path).map(|kind| kind.is_some())
    }

    /// Removes it; returns whether it existed.
    ///
    /// # Errors
    /// Those of [`FileStore::remove`](crate::FileStore::remove).
    pub fn remove(&self) -> Result<bool, Error> {
        self.location.store.remove(&self.location.store_path)
    }

    /// Reads the file and decodes its content, for example a protobuf message or a sealed one.
    ///
    /// The error distinguishes four causes that need different reactions: only [`Absent`] means that a node
    /// is new. In the terms of Monogon: no sealed configuration, sealed configuration unavailable, sealed
    /// configuration corrupted, and the same for parameters, cluster directory and network configuration;
    /// plus the read error, which Monogon treats as absence.
    ///
    /// [`Absent`]: LoadError::Absent
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use nodekeel_localstorage::mem::MemFileStore;
    /// # use nodekeel_localstorage::tree::{DecodeError, IdentityDir, LayoutTarget, LoadError};
    /// # let target = LayoutTarget::new(Arc::new(MemFileStore::new()), "/data/node");
    /// # let node: IdentityDir = target.create_layout()?;
    /// let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(DecodeError::corrupted);
    /// assert!(matches!(node.roles.load_decoded(text), Err(LoadError::Absent { .. })));
    /// node.roles.write(b"\xff")?;
    /// assert!(matches!(node.roles.load_decoded(text), Err(LoadError::Corrupted { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load_decoded<T>(
        &self,
        decode: impl FnOnce(&[u8]) -> Result<T, DecodeError>,
    ) -> Result<T, LoadError> {
        let path = || self.path().to_owned();
        // An unreadable file is never reported as absent: the caller would take the node for a new one.
        let content = match self.read_if_present() {
            Ok(content) => content.ok_or_else(|| LoadError::Absent { path: path() })?,
            Err(source) => return Err(LoadError::Read { path: path(), source }),
        };
        decode(&content).map_err(|error| match error {
            DecodeError::Unavailable(source) => LoadError::Unavailable { path: path(), source },
            DecodeError::Corrupted(source) => LoadError::Corrupted { path: path(), source },
        })
    }

    pub(super) fn location(&self) -> &EntryLocation {
        &self.location
    }
}

impl LayoutEntry for LayoutFile {
    const SHAPE: EntryShape = EntryShape::File;

    fn create_at(location: EntryLocation) -> Result<LayoutFile, LayoutError> {
        match location.store.set_mode(&location.store_path, location.mode) {
            // A link has no mode. It belongs to an image, and reads and writes reject it.
            Err(error) if !error.is_symlink() => {
                Err(LayoutError::File { path: location.path.clone(), source: error })
            }
            _ => Ok(LayoutFile { location }),
        }
    }
}

impl fmt::Debug for LayoutFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({})", self.path().display())
    }
}

type BoxedSource = Box<dyn std::error::Error + Send + Sync>;

/// The reason why the content of a file could not be decoded.
#[derive(Debug)]
#[non_exhaustive]
pub enum DecodeError {
    /// The content may be valid, but a requirement is missing now, such as the TPM that it is sealed to.
    Unavailable(BoxedSource),
    /// The content is invalid.
    Corrupted(BoxedSource),
}

impl DecodeError {
    /// The content may be valid, but cannot be decoded now.
    pub fn unavailable(source: impl Into<BoxedSource>) -> DecodeError {
        DecodeError::Unavailable(source.into())
    }

    /// The content is invalid.
    pub fn corrupted(source: impl Into<BoxedSource>) -> DecodeError {
        DecodeError::Corrupted(source.into())
    }
}

/// A failure to load a file that is [decoded](LayoutFile::load_decoded).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file does not exist. This is certain, not a consequence of an error.
    #[error("file {} does not exist", .path.display())]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// The content cannot be decoded now: make the missing requirement available, and retry. Never replace
    /// the file.
    #[error(
        "can't decode file {} now, since something it needs is unavailable: provide that, and keep the file",
        .path.display()
    )]
    Unavailable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: BoxedSource,
    },
    /// The content is damaged: restore it.
    #[error("file {} is corrupt: restore it", .path.display())]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: BoxedSource,
    },
    /// The file cannot be read, and its content is unknown: a retry may help.
    #[error("can't read file {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Error,
    },
}

impl LoadError {
    /// The file.
    pub fn path(&self) -> &Path {
        match self {
            LoadError::Absent { path }
            | LoadError::Unavailable { path, .. }
            | LoadError::Corrupted { path, .. }
            | LoadError::Read { path, .. } => path,
        }
    }

    /// Treats an absent file as none.
    ///
    /// # Errors
    /// All but [`LoadError::Absent`].
    pub fn absent_as_none<T>(loaded: Result<T, LoadError>) -> Result<Option<T>, LoadError> {
        match loaded {
            Err(LoadError::Absent { .. }) => Ok(None),
            loaded => loaded.map(Some),
        }
    }
}

/// Defines a handle of an entry that other programs create: its path, and whether it exists.
macro_rules! special {
    ($(#[$meta:meta])* $handle:ident: $shape:ident, $kind:path) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $handle {
            location: EntryLocation,
        }

        impl $handle {
            /// The full path.
            pub fn path(&self) -> &Path {
                &self.location.path
            }

            /// Returns whether it exists.
            ///
            /// # Errors
            /// Those of [`FileStore::file_kind`](crate::FileStore::file_kind).
            pub fn exists(&self) -> Result<bool, Error> {
                Ok(self.location.store.file_kind(&self.location.store_path)? == Some($kind))
            }

            /// Removes the entry of a killed process; returns whether it existed. An entry of another kind
            /// stays.
            ///
            /// # Errors
            /// Those of [`FileStore::file_kind`](crate::FileStore::file_kind) and
            /// [`FileStore::remove`](crate::FileStore::remove).
            pub fn remove_stale(&self) -> Result<bool, Error> {
                Ok(self.exists()? && self.location.store.remove(&self.location.store_path)?)
            }
        }

        impl LayoutEntry for $handle {
            const SHAPE: EntryShape = EntryShape::$shape;

            fn create_at(location: EntryLocation) -> Result<$handle, LayoutError> {
                Ok($handle { location })
            }
        }

        impl fmt::Debug for $handle {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($handle), self.path().display())
            }
        }
    };
}

special!(
    /// A socket. Its path is known to fit into a socket address.
    LayoutSocket: Socket, FileKind::Socket
);
special!(
    /// A named pipe.
    LayoutFifo: Fifo, FileKind::Fifo
);
