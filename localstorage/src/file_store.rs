//! Stores for the directories and files of a layout.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use crate::dir::Dir;
use crate::error::{Error, FileOperation, RejectReason};
use crate::file_name;
use crate::metadata::{DirEntry, FileKind, FileMode};

/// Storage for directories and files: a directory of the operating system ([`OsFileStore`]), memory
/// ([`MemFileStore`](crate::mem::MemFileStore)), or your implementation.
///
/// # Contract
/// - A path is relative: one or more [names](crate::FileName) separated by slashes. Any other path is an
///   error with [`is_invalid_path`](Error::is_invalid_path), and nothing changes. The empty path is the root,
///   in [`create_dir`](Self::create_dir) and [`list`](Self::list) only.
/// - No symbolic link is followed anywhere: [`is_symlink`](Error::is_symlink).
/// - A missing parent is [`is_not_found`](Error::is_not_found). A parent of another kind is
///   [`is_not_a_directory`](Error::is_not_a_directory).
/// - A change is durable when its call returns. A call that fails or is killed has changed all or nothing; a
///   reader never sees a mix of old and new content. The call can be repeated.
/// - Calls may come from several threads. They block.
///
/// `testing::conformance` (feature `testing`) checks it.
pub trait FileStore: Debug + Send + Sync {
    /// Reads a file of at most [`READ_LIMIT`](crate::READ_LIMIT) bytes.
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found), [`is_not_a_file`](Error::is_not_a_file), or a backend error.
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error>;

    /// Creates a file or replaces its content. The file has exactly this mode, if the store keeps modes.
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found) if its directory is missing,
    /// [`is_not_a_file`](Error::is_not_a_file) if a directory has the name, [`is_full`](Error::is_full) with
    /// the old content unchanged, or a backend error.
    fn write(&self, path: &Path, content: &[u8], mode: FileMode) -> Result<(), Error>;

    /// Creates a directory and its missing parents. An existing directory keeps its entries and gets the
    /// mode; existing parents keep their modes.
    ///
    /// # Errors
    /// [`is_not_a_directory`](Error::is_not_a_directory) if something else has the name, or a backend error.
    fn create_dir(&self, path: &Path, mode: FileMode) -> Result<(), Error>;

    /// Lists a directory, sorted by name.
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found), [`is_not_a_directory`](Error::is_not_a_directory), or a backend
    /// error.
    fn list(&self, path: &Path) -> Result<Vec<DirEntry>, Error>;

    /// Removes a file, or a directory with everything in it. Returns whether it existed.
    ///
    /// # Errors
    /// A backend error. Removed entries of a directory stay removed, and a call with the same path resumes.
    fn remove(&self, path: &Path) -> Result<bool, Error>;

    /// The kind of the entry, or none if it does not exist.
    ///
    /// # Errors
    /// Those of [`list`](Self::list), except for a missing directory.
    fn file_kind(&self, path: &Path) -> Result<Option<FileKind>, Error> {
        let (parent, name) = file_name::split_last(path)
            .map_err(|invalid| Error::new(FileOperation::Inspect, path, invalid))?;
        match self.list(parent) {
            Ok(entries) => {
                Ok(entries.iter().find(|entry| entry.name.as_os_str() == name).map(|entry| entry.kind))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives a file exactly this mode, if the store keeps modes. Returns whether the file exists. Its content
    /// stays.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and [`write`](Self::write), except for a missing file.
    fn set_mode(&self, path: &Path, mode: FileMode) -> Result<bool, Error> {
        match self.read(path) {
            // The trait has no other call that changes a mode: the file is replaced by itself.
            Ok(content) => self.write(path, &content, mode).map(|()| true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Opens a directory, if it is one of the operating system.
    ///
    /// # Errors
    /// Those of [`list`](Self::list); by default, that the store has no such directories.
    fn open_dir(&self, path: &Path) -> Result<Dir, Error> {
        Err(Error::new(FileOperation::Open, path, RejectReason::NoDirectory))
    }
}

/// A directory of the operating system. Creating a directory also [removes its stale
/// files](Dir::remove_stale_files).
#[derive(Debug)]
pub struct OsFileStore {
    dir: Dir,
    keeps_root_mode: bool,
}

impl OsFileStore {
    /// Stores files in this directory.
    pub fn new(dir: Dir) -> Self {
        Self { dir, keeps_root_mode: false }
    }

    /// Leaves the mode of the directory itself to its owner. By default, creating a layout sets it.
    #[must_use]
    pub fn keep_root_mode(self) -> Self {
        Self { keeps_root_mode: true, ..self }
    }

    /// The root directory.
    pub fn dir(&self) -> &Dir {
        &self.dir
    }

    /// The full path of an entry, for programs that need a path.
    pub fn full_path(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.dir.path().to_owned() } else { self.dir.path().join(path) }
    }
}

impl FileStore for OsFileStore {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.dir.read(path)
    }

    fn write(&self, path: &Path, content: &[u8], mode: FileMode) -> Result<(), Error> {
        self.dir.write(path, content, mode)
    }

    fn create_dir(&self, path: &Path, mode: FileMode) -> Result<(), Error> {
        // A restart creates its directories first: this removes what the last incarnation was killed while writing.
        match self.keeps_root_mode && path.as_os_str().is_empty() {
            true => self.dir.remove_stale_files()?,
            false => self.dir.ensure_dir(path, mode)?.remove_stale_files()?,
        };
        Ok(())
    }

    fn list(&self, path: &Path) -> Result<Vec<DirEntry>, Error> {
        self.open_dir(path)?.list()
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.dir.remove_tree(path)
    }

    fn open_dir(&self, path: &Path) -> Result<Dir, Error> {
        self.dir.open_dir(path)
    }

    fn set_mode(&self, path: &Path, mode: FileMode) -> Result<bool, Error> {
        match self.dir.metadata(path) {
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
            Ok(metadata) => match metadata.kind {
                // For a link, this call returns the error that names it as one.
                FileKind::File | FileKind::Symlink => self.dir.set_mode(path, mode).map(|()| true),
                _ => Err(Error::new(FileOperation::SetMode, self.full_path(path), RejectReason::NotAFile)),
            },
        }
    }
}
