//! Handles: what placing yields.

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use super::commit;
use super::{LayoutProblem, Node, PlaceError, Shape, Spot};
use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::{Entry, FileKind, Mode};
use crate::placement::{OsPlacement, Placement};

/// A directory that is there.
#[derive(Clone)]
pub struct Directory {
    spot: Spot,
    declared: Shape,
}

impl Directory {
    /// Makes a directory in which this is declared. [`layout!`](crate::layout) calls it.
    ///
    /// # Errors
    /// [`PlaceError::Directory`], [`PlaceError::Commit`].
    #[doc(hidden)]
    pub fn of(spot: Spot, declared: Shape) -> Result<Directory, PlaceError> {
        spot.placement
            .create_dir(&spot.inner, spot.mode)
            .map_err(|source| PlaceError::Directory { path: spot.path.clone(), source })?;
        let directory = Directory { spot, declared };
        commit::complete(&directory)
            .map_err(|source| PlaceError::Commit { path: directory.path().to_owned(), source })?;
        Ok(directory)
    }

    /// Places what is declared by this name; [`layout!`](crate::layout) calls it.
    ///
    /// # Errors
    /// [`PlaceError`].
    #[doc(hidden)]
    pub fn place<T: Node>(&self, declared: &str, mode: Mode) -> Result<T, PlaceError> {
        let name =
            self.spot.names.fill(declared).map_err(|problem| PlaceError::Layout(problem.of(declared)))?;
        T::place(self.spot.below(&name, mode))
    }

    /// Places another layout in this directory, beside what is declared in it already.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use nodekeel_localstorage::mem::MemPlacement;
    /// # use nodekeel_localstorage::tree::{Data, Directory, Site};
    /// nodekeel_localstorage::layout! {
    ///     /// What my system keeps beside nodekeel's.
    ///     pub struct Mine {
    ///         /// Sensor readings.
    ///         pub readings: Directory = "readings", 0o750;
    ///     }
    /// }
    ///
    /// let data: Data = Site::new(Arc::new(MemPlacement::new()), "/data").place()?;
    /// let mine: Mine = data.extend()?;
    /// assert_eq!(mine.readings.path().to_str(), Some("/data/readings"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PlaceError::Layout`] where a name is in both, and those of [`Site::place`](super::Site::place).
    pub fn extend<T: Node>(&self) -> Result<T, PlaceError> {
        let names = &self.spot.names;
        T::SHAPE.validate(names, &self.spot.path).map_err(PlaceError::Layout)?;
        let filled =
            |shape: Shape| shape.children().iter().map(|one| names.fill(one.name)).collect::<Vec<_>>();
        let taken = filled(self.declared);
        if let Some(Ok(twice)) = filled(T::SHAPE).into_iter().find(|name| taken.contains(name)) {
            return Err(PlaceError::Layout(LayoutProblem::Duplicate.of(&twice)));
        }
        T::place(self.spot.clone())
    }

    /// The whole path, for programs that take nothing but a path.
    pub fn path(&self) -> &Path {
        &self.spot.path
    }

    /// What is in it, sorted by name.
    ///
    /// # Errors
    /// Those of [`Placement::list`].
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        self.spot.placement.list(&self.spot.inner)
    }

    /// Puts new contents in the place of several files' of this directory: all of them, or none.
    ///
    /// Whoever reads them through their handles after a crash finds all old or all new: one durable write of a record
    /// with all contents is the moment of the change; then the files themselves are written, and the record is removed.
    /// A record that a crash has left is completed when the directory is placed again.
    ///
    /// Files have the same paths before and after, since other programs are told them once; a program that reads while
    /// the files are being written may see some of either. One process commits to a directory at a time.
    ///
    /// It is not the step [journal](crate::journal): that one lives in a directory of the operating system, and this
    /// must hold on any [`Placement`], of which it takes nothing but the durable replacement of one file.
    ///
    /// # Errors
    /// Where the record can't be written: nothing has changed. Later: the change stands, and placing completes it.
    pub fn commit(&self, contents: &[(&File, &[u8])]) -> Result<(), Error> {
        commit::commit(self, contents)
    }

    pub(super) fn spot(&self) -> &Spot {
        &self.spot
    }
}

impl Node for Directory {
    const SHAPE: Shape = Shape::Directory(&[]);

    fn place(spot: Spot) -> Result<Directory, PlaceError> {
        Directory::of(spot, Self::SHAPE)
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({})", self.path().display())
    }
}

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
    /// Those of [`Placement::read`]; [`is_not_found`](Error::is_not_found) where it is absent, and only there.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        self.spot.placement.read(&self.spot.inner)
    }

    /// Its content, or none where it is absent.
    ///
    /// # Errors
    /// Those of [`Placement::read`]: what can't be read is never said to be absent.
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
    /// Those of [`Placement::write`].
    pub fn write(&self, content: &[u8]) -> Result<(), Error> {
        self.spot.placement.write(&self.spot.inner, content, self.spot.mode)
    }

    /// Whether there is something of its name: of whatever kind, also a link that leads nowhere.
    ///
    /// # Errors
    /// Those of [`Placement::kind`]: what can't be looked at is never said to be absent.
    pub fn exists(&self) -> Result<bool, Error> {
        exists(&self.spot)
    }

    /// Removes it; tells whether it was there.
    ///
    /// # Errors
    /// Those of [`Placement::remove`].
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

fn exists(spot: &Spot) -> Result<bool, Error> {
    spot.placement.kind(&spot.inner).map(|kind| kind.is_some())
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

/// Handles of what others make: a path, and whether something is there.
macro_rules! special {
    ($(#[$meta:meta])* $handle:ident: $kind:path) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $handle {
            spot: Spot,
        }

        impl $handle {
            /// The whole path.
            pub fn path(&self) -> &Path {
                &self.spot.path
            }

            /// Whether one is there.
            ///
            /// # Errors
            /// Those of [`Placement::kind`].
            pub fn exists(&self) -> Result<bool, Error> {
                Ok(self.spot.placement.kind(&self.spot.inner)? == Some($kind))
            }

            /// Removes what a killed process has left; tells whether there was one. What is of another kind stays.
            ///
            /// # Errors
            /// Those of [`Placement::kind`] and [`Placement::remove`].
            pub fn remove(&self) -> Result<bool, Error> {
                Ok(self.exists()? && self.spot.placement.remove(&self.spot.inner)?)
            }
        }

        impl Node for $handle {
            const SHAPE: Shape = Shape::$handle;

            fn place(spot: Spot) -> Result<$handle, PlaceError> {
                Ok($handle { spot })
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
    /// Where something listens; its path is known to fit into a socket's address.
    Socket: FileKind::Socket
);
special!(
    /// A named pipe.
    Fifo: FileKind::Fifo
);

/// A directory that something is mounted on: a path without contents, until it is.
pub struct MountPoint<T> {
    directory: Directory,
    contents: PhantomData<fn() -> T>,
}

impl<T: Node> MountPoint<T> {
    /// The whole path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Places `T` in what is mounted here. The directory is the mount's own, so that nothing reaches below the mount
    /// point, also once it is unmounted.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn enter(&self, mounted: Dir) -> Result<T, PlaceError> {
        self.enter_on(Arc::new(OsPlacement::new(mounted)))
    }

    /// Places `T` on what stands for the mount: another backend, or another directory.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn enter_on(&self, placement: Arc<dyn Placement>) -> Result<T, PlaceError> {
        T::place(self.directory.spot.at_top_of(placement))
    }

    /// Places `T` in the directory itself, where nothing is or will be mounted: an image being built, a test.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn enter_unmounted(&self) -> Result<T, PlaceError> {
        T::place(self.directory.spot.clone())
    }
}

impl<T: Node> Node for MountPoint<T> {
    const SHAPE: Shape = Shape::MountPoint(T::SHAPE.children());

    fn place(spot: Spot) -> Result<MountPoint<T>, PlaceError> {
        // A mount point is not searched for what a commit has left: that lies in what is mounted.
        let directory = Directory::of(spot, Directory::SHAPE)?;
        Ok(MountPoint { directory, contents: PhantomData })
    }
}

impl<T> Clone for MountPoint<T> {
    fn clone(&self) -> MountPoint<T> {
        MountPoint { directory: self.directory.clone(), contents: PhantomData }
    }
}

impl<T> fmt::Debug for MountPoint<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MountPoint({})", self.directory.path().display())
    }
}
