//! Where a tree of directories and files is placed.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use crate::calls;
use crate::dir::Dir;
use crate::error::{Error, Operation};
use crate::metadata::{Entry, FileKind, Metadata, Mode};
use crate::name;

/// Where a tree of directories and files is placed: a directory of the operating system ([`OsPlacement`]), memory
/// ([`MemPlacement`](crate::mem::MemPlacement)), or what a reader brings.
///
/// # Contract
/// - A path is relative, one or more [names](crate::Name) with a slash between them. Any other gives an error with
///   [`is_invalid_path`](Error::is_invalid_path), and nothing happens. The empty path is the top, for
///   [`create_dir`](Self::create_dir) and [`list`](Self::list) alone.
/// - No symbolic link is followed anywhere: [`is_symlink`](Error::is_symlink).
/// - What something would be in is missing: [`is_not_found`](Error::is_not_found). It is no directory:
///   [`is_not_a_directory`](Error::is_not_a_directory).
/// - A change is durable when its call returns. One that fails, or is killed, has happened or has not; a content that is
///   old and new in part is never seen. It can be made again.
/// - Calls may come from several threads. They block.
///
/// `testing::conformance` (feature `testing`) checks it.
pub trait Placement: Debug + Send + Sync {
    /// The content of a file, of at most [`READ_LIMIT`](crate::READ_LIMIT).
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found), [`is_not_a_file`](Error::is_not_a_file), or the backend's.
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error>;

    /// Puts a content in the place of a file's, or makes the file. It has exactly that mode, where modes are kept.
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found) where its directory is missing, [`is_not_a_file`](Error::is_not_a_file)
    /// where a directory has the name, [`is_full`](Error::is_full) with the old content in place, or the backend's.
    fn write(&self, path: &Path, content: &[u8], mode: Mode) -> Result<(), Error>;

    /// Makes a directory, and those above it that are missing. One that is there keeps what is in it, and gets the
    /// mode; those above it keep theirs.
    ///
    /// # Errors
    /// [`is_not_a_directory`](Error::is_not_a_directory) where something else has the name, or the backend's.
    fn create_dir(&self, path: &Path, mode: Mode) -> Result<(), Error>;

    /// What is in a directory, sorted by name.
    ///
    /// # Errors
    /// [`is_not_found`](Error::is_not_found), [`is_not_a_directory`](Error::is_not_a_directory), or the backend's.
    fn list(&self, path: &Path) -> Result<Vec<Entry>, Error>;

    /// Removes a file, or a directory with all that is in it; tells whether there was something.
    ///
    /// # Errors
    /// The backend's. What was removed of a directory stays removed, and a call with the same path goes on.
    fn remove(&self, path: &Path) -> Result<bool, Error>;

    /// What has that name, if anything has.
    ///
    /// # Errors
    /// Those of [`list`](Self::list), but for a directory that is missing.
    fn kind(&self, path: &Path) -> Result<Option<FileKind>, Error> {
        let (parent, name) =
            name::split(path).map_err(|invalid| Error::new(Operation::Inspect, path, invalid))?;
        match self.list(parent) {
            Ok(entries) => {
                Ok(entries.iter().find(|entry| entry.name.as_os_str() == name).map(|entry| entry.kind))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives a file exactly this mode, where modes are kept, and tells whether there is one. Its content stays.
    ///
    /// # Errors
    /// Those of [`read`](Self::read) and [`write`](Self::write), but for a file that is missing.
    fn set_mode(&self, path: &Path, mode: Mode) -> Result<bool, Error> {
        match self.read(path) {
            Ok(content) => self.write(path, &content, mode).map(|()| true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A directory of the operating system. Making a directory also [sweeps](Dir::sweep) it.
#[derive(Debug)]
pub struct OsPlacement {
    dir: Dir,
}

impl OsPlacement {
    /// Places in this directory.
    pub fn new(dir: Dir) -> Self {
        Self { dir }
    }

    /// The directory at the top.
    pub fn dir(&self) -> &Dir {
        &self.dir
    }

    /// The path of something below, for programs that take nothing but a path.
    pub fn path(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.dir.path().to_owned() } else { self.dir.path().join(path) }
    }
}

impl Placement for OsPlacement {
    fn read(&self, path: &Path) -> Result<Vec<u8>, Error> {
        self.dir.read(path)
    }

    fn write(&self, path: &Path, content: &[u8], mode: Mode) -> Result<(), Error> {
        self.dir.write(path, content, mode)
    }

    fn create_dir(&self, path: &Path, mode: Mode) -> Result<(), Error> {
        // A restart begins with its directories: what the last run was killed at writing goes now.
        self.dir.ensure_dir(path, mode)?.sweep()?;
        Ok(())
    }

    fn list(&self, path: &Path) -> Result<Vec<Entry>, Error> {
        self.dir.open_dir(path)?.list()
    }

    fn remove(&self, path: &Path) -> Result<bool, Error> {
        self.dir.remove_tree(path)
    }

    fn set_mode(&self, path: &Path, mode: Mode) -> Result<bool, Error> {
        let file = match self.dir.open_file(path) {
            Err(error) if error.is_not_found() => return Ok(false),
            file => file?,
        };
        let wrong = |source: rustix::io::Errno| Error::new(Operation::Write, self.path(path), source);
        // Not where it has the mode: the file system may be read-only.
        if Metadata::of(&calls::stat(&file).map_err(wrong)?).mode != mode {
            calls::set_mode(&file, mode.raw()).map_err(wrong)?;
            calls::sync(&file).map_err(wrong)?;
        }
        Ok(true)
    }
}
