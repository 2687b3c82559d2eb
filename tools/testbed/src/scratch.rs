//! A private directory that is removed afterwards.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::leftovers;

const PREFIX: &str = "nodekeel-testbed-";

/// A directory of the system's temporary one, private to this process (mode 0700).
///
/// Dropping it kills the processes that name it, unmounts what is mounted below it, and removes it. The
/// directory is locked while its owner runs; the next [`ScratchDir::new`] removes those of killed owners.
#[derive(Debug)]
pub struct ScratchDir {
    path: PathBuf,
    /// Holds the lock, which the kernel releases with the process however that ends. A PID in a file would
    /// not do: tests run in PID namespaces, too.
    _lock: File,
}

impl ScratchDir {
    /// Removes the directories of killed owners, then creates a new one.
    ///
    /// # Errors
    /// The temporary directory can't be written.
    pub fn new() -> Result<Self> {
        Self::new_in(&std::env::temp_dir())
    }

    fn new_in(parent: &Path) -> Result<Self> {
        sweep_directories(parent);
        loop {
            let only_mine = fs::Permissions::from_mode(0o700);
            let made = tempfile::Builder::new().prefix(PREFIX).permissions(only_mine).tempdir_in(parent);
            let path = made.with_context(|| format!("create a directory in {}", parent.display()))?.keep();
            // Another process may remove the directory between its creation and its lock.
            if let Some(lock) = try_lock(&path)? {
                return Ok(Self { path, _lock: lock });
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it now and reports what could not be removed.
    ///
    /// # Errors
    /// What [`leftovers::remove_directory`] could not do.
    pub fn close(self) -> Result<()> {
        leftovers::remove_directory(&self.path)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = leftovers::remove_directory(&self.path) {
            eprintln!("testbed: {error:#}");
        }
    }
}

/// Removes the directories whose owners have ended. A directory that can't be removed (another user's) is
/// left.
fn sweep_directories(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    for path in ours.map(|entry| entry.path()) {
        if let Ok(Some(_lock)) = try_lock(&path)
            && let Err(error) = leftovers::remove_directory(&path)
        {
            eprintln!("testbed: {error:#}");
        }
    }
}

/// Acquires the directory's lock; `None` where another process holds it or the directory is missing.
fn try_lock(path: &Path) -> Result<Option<File>> {
    let directory = match File::open(path) {
        Ok(directory) => directory,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("open {}", path.display())),
    };
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("lock {}", path.display())),
    }
    let locked = directory.metadata().with_context(|| format!("stat {}", path.display()))?;
    let is_same =
        fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (locked.dev(), locked.ino()));
    Ok(is_same.then_some(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_directory_is_private_and_removed_on_drop() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = ScratchDir::new_in(parent.path()).unwrap();
        let path = scratch.path().to_owned();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        fs::create_dir_all(path.join("a/b")).unwrap();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn the_directory_of_a_dead_owner_is_removed_and_a_live_one_stays() {
        let parent = tempfile::tempdir().unwrap();
        let live = ScratchDir::new_in(parent.path()).unwrap();
        let dead = parent.path().join("nodekeel-testbed-dead");
        let foreign = parent.path().join("somebody-elses");
        fs::create_dir_all(dead.join("inside")).unwrap();
        fs::create_dir(&foreign).unwrap();
        let _new = ScratchDir::new_in(parent.path()).unwrap();
        assert!(!dead.exists() && foreign.exists() && live.path().exists());
    }
}
