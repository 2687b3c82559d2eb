//! Handles of directories.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use super::commit;
use super::{File, LayoutProblem, Node, PlaceError, Shape, Spot};
use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::{Entry, Mode};
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
    /// Where the record can't be written, or would be longer than [`READ_LIMIT`](crate::READ_LIMIT): nothing has changed.
    /// Later: the change stands, and placing completes it.
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
