//! The data directory: one noded at a time, everything below it.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};
use thiserror::Error;

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
    /// It is a file, or below one.
    #[error("{} is no directory; give another with --data", path.display())]
    NotADirectory {
        /// What is in the way.
        path: PathBuf,
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
    /// Something could not be created or written.
    #[error("write {}", path.display())]
    Write {
        /// What.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Says what would keep an instance from using the directory; touches nothing.
///
/// # Errors
/// See [`DataError`].
pub fn probe(data: &Path, needed: u64) -> Result<(), DataError> {
    let lock_path = data.join("lock");
    if let Ok(mut lock) = OpenOptions::new().read(true).open(&lock_path)
        && matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock))
    {
        return Err(DataError::InUse { path: data.to_owned(), holder: holder(&mut lock) });
    }
    let existing = data.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if !existing.is_dir() {
        return Err(DataError::NotADirectory { path: existing.to_owned() });
    }
    if access(existing, AccessFlags::W_OK | AccessFlags::X_OK).is_err() {
        return Err(DataError::Permission { path: existing.to_owned() });
    }
    if let Ok(disk) = statvfs(existing) {
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        if free < needed {
            return Err(DataError::Full { path: existing.to_owned(), free, needed });
        }
    }
    Ok(())
}

/// The data directory while this instance has it; the lock goes with the value, or with the process.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if it is absent, and takes it.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn take(path: &Path) -> Result<Self, DataError> {
        make(path, 0o755)?;
        let lock_path = path.join("lock");
        let failed = |source| DataError::Write { path: lock_path.clone(), source };
        let mut options = OpenOptions::new();
        let mut lock =
            options.read(true).write(true).create(true).truncate(false).open(&lock_path).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(DataError::InUse { path: path.to_owned(), holder: holder(&mut lock) });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        lock.set_len(0).map_err(failed)?;
        writeln!(lock, "{}", std::process::id()).map_err(failed)?;
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// A directory below it, created if it is absent; one that exists keeps its mode.
    ///
    /// # Errors
    /// [`DataError::Write`].
    pub fn directory(&self, name: &str, mode: u32) -> Result<PathBuf, DataError> {
        let path = self.path.join(name);
        make(&path, mode)?;
        Ok(path)
    }
}

fn make(path: &Path, mode: u32) -> Result<(), DataError> {
    let failed = |source| DataError::Write { path: path.to_owned(), source };
    DirBuilder::new().recursive(true).mode(mode).create(path).map_err(failed)
}

/// Writes a file of the node's own as a whole.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), DataError> {
    fs::write(path, text).map_err(|source| DataError::Write { path: path.to_owned(), source })
}

/// Who wrote the lock file.
fn holder(lock: &mut File) -> String {
    let mut pid = String::new();
    match lock.read_to_string(&mut pid) {
        Ok(_) if !pid.trim().is_empty() => format!("another noded (pid {})", pid.trim()),
        _ => "another noded".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_instance_is_refused_until_the_first_is_gone() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path().join("a/b");
        probe(&data, 0).expect("it can be made");
        assert!(!scratch.path().join("a").exists(), "probing touches nothing");
        let first = DataDir::take(&data).expect("free");
        for error in [probe(&data, 0).expect_err("in use"), DataDir::take(&data).expect_err("in use")] {
            assert!(error.to_string().contains(&format!("(pid {})", std::process::id())), "{error}");
        }
        drop(first);
        probe(&data, 0).expect("free again");
        DataDir::take(&data).expect("free again");
    }

    #[test]
    fn what_can_not_work_is_said_before_anything_is_touched() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(matches!(probe(&file.join("x"), 0), Err(DataError::NotADirectory { path }) if path == file));
        let full = probe(scratch.path(), u64::MAX).expect_err("no disk is so large").to_string();
        assert!(full.contains("no room on the disk of"), "{full}");
    }
}
