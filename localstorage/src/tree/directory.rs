//! Handles of directories.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use super::commit;
use super::{DeclaredEntry, EntryLocation, EntryShape, LayoutEntry, LayoutError, LayoutFile, LayoutProblem};
use crate::dir::Dir;
use crate::error::Error;
use crate::file_store::{FileStore, OsFileStore};
use crate::metadata::{DirEntry, FileMode};

/// A directory of the layout, created on disk.
#[derive(Clone)]
pub struct LayoutDir {
    location: EntryLocation,
    shape: EntryShape,
}

impl LayoutDir {
    /// Creates a directory with the declared shape. [`layout!`](crate::layout) calls it.
    ///
    /// # Errors
    /// [`LayoutError::Directory`], [`LayoutError::Commit`].
    #[doc(hidden)]
    pub fn create_with_shape(location: EntryLocation, shape: EntryShape) -> Result<LayoutDir, LayoutError> {
        location
            .store
            .create_dir(&location.store_path, location.mode)
            .map_err(|source| LayoutError::Directory { path: location.path.clone(), source })?;
        let directory = LayoutDir { location, shape };
        // Before the handles of its files exist: no reader sees half of an interrupted commit.
        commit::complete_commit(&directory)
            .map_err(|source| LayoutError::Commit { path: directory.path().to_owned(), source })?;
        Ok(directory)
    }

    /// Creates the entry declared by this name; [`layout!`](crate::layout) calls it.
    ///
    /// # Errors
    /// [`LayoutError`].
    #[doc(hidden)]
    pub fn create_entry<T: LayoutEntry>(&self, declared: &str, mode: FileMode) -> Result<T, LayoutError> {
        let name = self
            .location
            .brand_names
            .expand(declared)
            .map_err(|problem| LayoutError::InvalidLayout(problem.at_entry(declared)))?;
        T::create_at(self.location.child(&name, mode))
    }

    /// Creates another layout in this directory, next to its declared entries.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use nodekeel_localstorage::mem::MemFileStore;
    /// # use nodekeel_localstorage::tree::{LayoutDir, LayoutTarget};
    /// nodekeel_localstorage::layout! {
    ///     /// Files of my system.
    ///     pub struct WeatherStation {
    ///         /// Sensor readings.
    ///         pub readings: LayoutDir = "readings", 0o750;
    ///     }
    /// }
    ///
    /// let target = LayoutTarget::new(Arc::new(MemFileStore::new()), "/data");
    /// let data: LayoutDir = target.create_layout()?;
    /// let station: WeatherStation = data.add_layout()?;
    /// assert_eq!(station.readings.path().to_str(), Some("/data/readings"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`LayoutError::InvalidLayout`] if both have an entry of the same name, and those of
    /// [`LayoutTarget::create_layout`](super::LayoutTarget::create_layout).
    pub fn add_layout<T: LayoutEntry>(&self) -> Result<T, LayoutError> {
        let names = &self.location.brand_names;
        T::SHAPE.validate_at(names, &self.location.path).map_err(LayoutError::InvalidLayout)?;
        let expand_names = |shape: EntryShape| {
            shape.child_entries().iter().map(|one| names.expand(one.name)).collect::<Vec<_>>()
        };
        // Compared after the expansion: two different declarations may yield one name.
        let existing = expand_names(self.shape);
        if let Some(Ok(duplicate)) = expand_names(T::SHAPE).into_iter().find(|name| existing.contains(name)) {
            return Err(LayoutError::InvalidLayout(LayoutProblem::Duplicate.at_entry(&duplicate)));
        }
        T::create_at(self.location.clone())
    }

    /// Creates an entry whose name and mode are known at run time only, as from a configuration.
    ///
    /// ```
    /// # use nodekeel_localstorage::mem::MemFileStore;
    /// # use nodekeel_localstorage::tree::{LayoutDir, LayoutFile, LayoutTarget};
    /// # use nodekeel_localstorage::FileMode;
    /// # let target = LayoutTarget::new(std::sync::Arc::new(MemFileStore::new()), "/data");
    /// let data: LayoutDir = target.create_layout()?;
    /// let station: LayoutDir = data.create_child("station-7", FileMode::new(0o750))?;
    /// let readings: LayoutFile = station.create_child("readings", FileMode::PRIVATE_FILE)?;
    /// assert_eq!(readings.path().to_str(), Some("/data/station-7/readings"));
    /// assert!(data.create_child::<LayoutDir>("..", FileMode::PRIVATE_DIR).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`LayoutError::InvalidLayout`] for an invalid name, or that of a declared entry, before any change; those of
    /// [`LayoutTarget::create_layout`](super::LayoutTarget::create_layout).
    pub fn create_child<T: LayoutEntry>(&self, name: &str, mode: FileMode) -> Result<T, LayoutError> {
        let names = &self.location.brand_names;
        let is_declared = |declared: &DeclaredEntry| names.expand(declared.name).is_ok_and(|one| one == name);
        if self.shape.child_entries().iter().any(is_declared) {
            return Err(LayoutError::InvalidLayout(LayoutProblem::Duplicate.at_entry(name)));
        }
        let child = self.location.child(name, mode);
        T::SHAPE.validate_entry_at(names, &child.path, name, mode).map_err(LayoutError::InvalidLayout)?;
        T::create_at(child)
    }

    /// Opens the directory itself, for what its handle does not have: owners, locks, and content that is not in memory.
    ///
    /// # Errors
    /// Those of [`FileStore::open_dir`]: in a store that is not of the operating system, always.
    pub fn open(&self) -> Result<Dir, Error> {
        self.location.store.open_dir(&self.location.store_path)
    }

    /// The full path, for programs that need a path.
    pub fn path(&self) -> &Path {
        &self.location.path
    }

    /// Lists the directory, sorted by name.
    ///
    /// # Errors
    /// Those of [`FileStore::list`].
    pub fn list(&self) -> Result<Vec<DirEntry>, Error> {
        self.location.store.list(&self.location.store_path)
    }

    /// Lists a directory below this one that is not of the layout, sorted by name.
    ///
    /// # Errors
    /// Those of [`FileStore::list`]: that it does not exist, or that the path leads out.
    pub fn list_below(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>, Error> {
        self.location.store.list(&self.location.store_path.join(path))
    }

    /// Replaces the contents of several files of this directory: all of them, or none.
    ///
    /// After a crash, a reader finds all old or all new contents through their handles: one durable write of
    /// a record with all contents is the commit; then the files themselves are written, and the record is
    /// removed. If a crash leaves the record, the next creation of the directory completes the commit.
    ///
    /// Files keep their paths, since other programs are configured with them. A program that reads during the
    /// commit may see a mix of old and new files. One process commits to a directory at a time.
    ///
    /// This is not the [step journal](crate::step_journal), which needs a directory of the operating system:
    /// a commit must work on any [`FileStore`], and uses only the durable replacement of one file.
    ///
    /// # Errors
    /// If the record cannot be written, or would be longer than [`READ_LIMIT`](crate::READ_LIMIT), nothing
    /// has changed. After a later error the commit stands, and the next creation of the directory completes
    /// it.
    pub fn commit_files(&self, contents: &[(&LayoutFile, &[u8])]) -> Result<(), Error> {
        commit::commit_files(self, contents)
    }

    pub(super) fn location(&self) -> &EntryLocation {
        &self.location
    }
}

impl LayoutEntry for LayoutDir {
    const SHAPE: EntryShape = EntryShape::Directory(&[]);

    fn create_at(location: EntryLocation) -> Result<LayoutDir, LayoutError> {
        LayoutDir::create_with_shape(location, Self::SHAPE)
    }
}

impl fmt::Debug for LayoutDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({})", self.path().display())
    }
}

/// A mount point: a path without contents until a file system is mounted on it.
pub struct MountPoint<T> {
    directory: LayoutDir,
    contents: PhantomData<fn() -> T>,
}

impl<T: LayoutEntry> MountPoint<T> {
    /// The full path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Creates `T` in the mounted file system. `mounted` is its open root directory, so that no file is
    /// written below the mount point, also after an unmount.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn create_layout_in(&self, mounted: Dir) -> Result<T, LayoutError> {
        self.create_layout_on(Arc::new(OsFileStore::new(mounted)))
    }

    /// Creates `T` in a file store that stands for the mount: another backend or another directory.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn create_layout_on(&self, store: Arc<dyn FileStore>) -> Result<T, LayoutError> {
        T::create_at(self.directory.location.at_root_of(store))
    }

    /// Creates `T` in the directory itself, if no file system is or will be mounted: in an image build or a
    /// test.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn create_layout_unmounted(&self) -> Result<T, LayoutError> {
        T::create_at(self.directory.location.clone())
    }
}

impl<T: LayoutEntry> LayoutEntry for MountPoint<T> {
    const SHAPE: EntryShape = EntryShape::MountPoint(T::SHAPE.child_entries());

    fn create_at(location: EntryLocation) -> Result<MountPoint<T>, LayoutError> {
        // The directory below a mount point has no pending commit: that is in the mounted file system.
        let directory = LayoutDir::create_with_shape(location, LayoutDir::SHAPE)?;
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
