//! A lock of a directory.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation};
use crate::syscalls;

/// The lock of a directory, until it is dropped or the process ends.
///
/// Dropping it releases the lock at once. Closing the descriptor would not: a child that another thread is starting
/// keeps a copy of it, and so the lock, until it executes its program.
#[derive(Debug)]
pub struct DirLock(OwnedFd);

impl Dir {
    /// Locks this directory against all other callers of this, in this process and in others; `None` if one of them
    /// has the lock. It changes nothing on disk, and does not wait.
    ///
    /// # Errors
    /// [`FileOperation::Lock`] if the file system has no locks, or the process has reached its limit of open files.
    ///
    /// *Source:* flock(2).
    pub fn try_lock(&self) -> Result<Option<DirLock>, Error> {
        // The lock belongs to the open file: duplicates of this descriptor would share it.
        let lock = || {
            let file = syscalls::open_beneath(self, Path::new("."), OPEN_DIR_FLAGS)?;
            Ok(syscalls::try_lock(&file)?.then_some(DirLock(file)))
        };
        lock().map_err(|source: rustix::io::Errno| Error::new(FileOperation::Lock, &self.path, source))
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        syscalls::unlock(&self.0);
    }
}
