//! Handles of files, and what is read through them.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{Node, PlaceError, Shape, Spot};
use crate::error::Error;
use crate::metadata::Mode;

/// A file that is declared. It need not be there.
#[derive(Clone)]
pub struct File {
    spot: Spot,
}

impl File {
    /// The whole path, for programs that take nothing but a path.
    pub fn path(&self) -> &Path {
        &self.spot.path
    }

    /// The permissions that it is written with.
    pub fn mode(&self) -> Mode {
        self.spot.mode
    }

    /// Its content.
    ///
    /// # Errors
    /// Those of [`Placement::read`](crate::Placement::read); [`is_not_found`](Error::is_not_found) where it is absent, and only there.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        self.spot.placement.read(&self.spot.inner)
    }

    /// Its content, or none where it is absent.
    ///
    /// # Errors
    /// Those of [`Placement::read`](crate::Placement::read): what can't be read is never said to be absent.
    pub fn read_if_present(&self) -> Result<Option<Vec<u8>>, Error> {
        match self.read() {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Replaces its content durably: after a crash it is the old or the new one.
    ///
    /// # Errors
    /// Those of [`Placement::write`](crate::Placement::write).
    pub fn write(&self, content: &[u8]) -> Result<(), Error> {
        self.spot.placement.write(&self.spot.inner, content, self.spot.mode)
    }

    /// Whether there is something of its name: of whatever kind, also a link that leads nowhere.
    ///
    /// # Errors
    /// Those of [`Placement::kind`](crate::Placement::kind): what can't be looked at is never said to be absent.
    pub fn exists(&self) -> Result<bool, Error> {
        self.spot.placement.kind(&self.spot.inner).map(|kind| kind.is_some())
    }

    /// Removes it; tells whether it was there.
    ///
    /// # Errors
    /// Those of [`Placement::remove`](crate::Placement::remove).
    pub fn remove(&self) -> Result<bool, Error> {
        self.spot.placement.remove(&self.spot.inner)
    }

    /// Reads it and decodes what was read: a protobuf message, a sealed one.
    ///
    /// The four ways in which that fails are told apart, because they ask for different things: only [`Absent`] means
    /// that a node is new. In the terms of the original: no sealed configuration, sealed configuration unavailable,
    /// sealed configuration corrupted; and the same of parameters, cluster directory and network configuration, with the
    /// read error that it took for absence.
    ///
    /// [`Absent`]: LoadError::Absent
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use nodekeel_localstorage::mem::MemPlacement;
    /// # use nodekeel_localstorage::tree::{Esp, LoadError, Site, Undecodable};
    /// # let esp: Esp = Site::new(Arc::new(MemPlacement::new()), "/esp").place()?;
    /// let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(Undecodable::corrupted);
    /// assert!(matches!(esp.node.parameters.load(text), Err(LoadError::Absent { .. })));
    /// esp.node.parameters.write(b"\xff")?;
    /// assert!(matches!(esp.node.parameters.load(text), Err(LoadError::Corrupted { .. })));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn load<T>(&self, decode: impl FnOnce(&[u8]) -> Result<T, Undecodable>) -> Result<T, LoadError> {
        let path = || self.path().to_owned();
        let content = match self.read_if_present() {
            Ok(content) => content.ok_or_else(|| LoadError::Absent { path: path() })?,
            Err(source) => return Err(LoadError::Read { path: path(), source }),
        };
        decode(&content).map_err(|undecodable| match undecodable {
            Undecodable::Unavailable(source) => LoadError::Unavailable { path: path(), source },
            Undecodable::Corrupted(source) => LoadError::Corrupted { path: path(), source },
        })
    }

    pub(super) fn spot(&self) -> &Spot {
        &self.spot
    }
}

impl Node for File {
    const SHAPE: Shape = Shape::File;

    fn place(spot: Spot) -> Result<File, PlaceError> {
        match spot.placement.set_mode(&spot.inner, spot.mode) {
            // A link has no mode. It is what an image put there, and is refused when it is read or written.
            Err(error) if !error.is_symlink() => {
                Err(PlaceError::File { path: spot.path.clone(), source: error })
            }
            _ => Ok(File { spot }),
        }
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "File({})", self.path().display())
    }
}

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why the content of a file means nothing here.
#[derive(Debug)]
#[non_exhaustive]
pub enum Undecodable {
    /// It may be good: what is needed to read it is missing at the moment, as the TPM that it is sealed to.
    Unavailable(Source),
    /// It is no such thing, and will never be.
    Corrupted(Source),
}

impl Undecodable {
    /// It may be good, for all that can be told.
    pub fn unavailable(source: impl Into<Source>) -> Undecodable {
        Undecodable::Unavailable(source.into())
    }

    /// It is no such thing.
    pub fn corrupted(source: impl Into<Source>) -> Undecodable {
        Undecodable::Corrupted(source.into())
    }
}

/// Why a file could not be [loaded](File::load).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no such file, and nothing kept it from being seen.
    #[error("{} is absent", .path.display())]
    Absent {
        /// The file.
        path: PathBuf,
    },
    /// It can't be decoded now: make what it needs available, and try again. Never write a new one in its place.
    #[error("{} is unavailable", .path.display())]
    Unavailable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Source,
    },
    /// Its content is damaged: restore it.
    #[error("{} is corrupted", .path.display())]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Source,
    },
    /// It can't be read, and nothing is known of it: a retry may help.
    #[error("load {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
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

    /// For a file that need not be there.
    ///
    /// # Errors
    /// All others than [`LoadError::Absent`].
    pub fn optional<T>(loaded: Result<T, LoadError>) -> Result<Option<T>, LoadError> {
        match loaded {
            Err(LoadError::Absent { .. }) => Ok(None),
            loaded => loaded.map(Some),
        }
    }
}
