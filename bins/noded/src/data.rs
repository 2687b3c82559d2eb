//! The data directory: one noded at a time, everything below it.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, PROC_SUPER_MAGIC, SYSFS_MAGIC, statfs};
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
    /// It is a file, or below one, or a file is where one of its own directories has to be.
    #[error("{} is no directory; move it away, or give another directory with --data", path.display())]
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
    /// No file can be made there, whoever tries.
    #[error("nothing can be kept in {}: it is {why}; give another directory with --data", path.display())]
    Unfit {
        /// The directory that exists.
        path: PathBuf,
        /// What it is.
        why: &'static str,
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

/// Says what would keep an instance from using the directory and these directories below it; touches nothing.
///
/// # Errors
/// See [`DataError`].
pub fn probe(data: &Path, below: &[&str], needed: u64) -> Result<(), DataError> {
    probe_lock(data)?;
    let existing = data.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    probe_directory(existing)?;
    for path in below.iter().map(|name| data.join(name)).filter(|path| path.symlink_metadata().is_ok()) {
        probe_directory(&path)?;
    }
    if let Ok(disk) = statvfs(existing) {
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        if free < needed {
            return Err(DataError::Full { path: existing.to_owned(), free, needed });
        }
    }
    Ok(())
}

fn probe_lock(data: &Path) -> Result<(), DataError> {
    let path = data.join("lock");
    match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(mut lock) if matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)) => {
            Err(DataError::InUse { path: data.to_owned(), holder: holder(&mut lock) })
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(DataError::Permission { path }),
        _ => Ok(()),
    }
}

/// Says what would keep this user from making files in a directory that exists.
pub(crate) fn probe_directory(path: &Path) -> Result<(), DataError> {
    let path = path.to_owned();
    if !path.is_dir() {
        return Err(DataError::NotADirectory { path });
    }
    // Root is told that it may write everywhere.
    let kind = statfs(&path).map(|system| system.filesystem_type());
    if let Ok(PROC_SUPER_MAGIC | SYSFS_MAGIC | CGROUP2_SUPER_MAGIC) = kind {
        return Err(DataError::Unfit { path, why: "a view of the kernel, not a disk" });
    }
    match access(&path, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => Ok(()),
        Err(Errno::EROFS) => Err(DataError::Unfit { path, why: "mounted read-only" }),
        Err(_) => Err(DataError::Permission { path }),
    }
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
        // Whoever may open it may lock it, and so keep the node from starting.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut lock = options.open(&lock_path).map_err(failed)?;
        lock.set_permissions(fs::Permissions::from_mode(0o600)).map_err(failed)?;
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

/// Who wrote the lock file, if that process lives; somebody else may have locked it.
fn holder(lock: &mut File) -> String {
    let mut text = String::new();
    let pid = lock.read_to_string(&mut text).ok().and_then(|_| text.trim().parse::<u32>().ok());
    match pid.filter(|pid| Path::new("/proc").join(pid.to_string()).exists()) {
        Some(pid) => format!("another noded (pid {pid})"),
        None => "another program".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_instance_is_refused_until_the_first_is_gone() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path().join("a/b");
        probe(&data, &[], 0).expect("it can be made");
        assert!(!scratch.path().join("a").exists(), "probing touches nothing");
        let first = DataDir::take(&data).expect("free");
        for error in [probe(&data, &[], 0).expect_err("in use"), DataDir::take(&data).expect_err("in use")] {
            assert!(error.to_string().contains(&format!("(pid {})", std::process::id())), "{error}");
        }
        drop(first);
        probe(&data, &[], 0).expect("free again");
        DataDir::take(&data).expect("free again");
    }

    #[test]
    fn what_can_not_work_is_said_before_anything_is_touched() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(
            matches!(probe(&file.join("x"), &[], 0), Err(DataError::NotADirectory { path }) if path == file)
        );
        let full = probe(scratch.path(), &[], u64::MAX).expect_err("no disk is so large").to_string();
        assert!(full.contains("no room on the disk of"), "{full}");
    }

    #[test]
    fn only_its_owner_can_lock_it_and_a_pid_is_named_while_it_lives() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("lock");
        // No process has so high a number.
        fs::write(&path, "4194305\n").expect("written");
        let foreign = File::open(&path).expect("there");
        foreign.lock().expect("free");
        let error = DataDir::take(scratch.path()).expect_err("locked").to_string();
        assert!(error.contains("is used by another program;"), "{error}");
        drop(foreign);
        let _data = DataDir::take(scratch.path()).expect("free");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_is_in_the_way_below_is_said() {
        let scratch = tempfile::tempdir().expect("a directory");
        let etcd = scratch.path().join("etcd");
        fs::write(&etcd, "").expect("written");
        probe(scratch.path(), &["run"], 0).expect("run can be made");
        assert!(
            matches!(probe(scratch.path(), &["run", "etcd"], 0), Err(DataError::NotADirectory { path }) if path == etcd)
        );
        let kernel = probe(Path::new("/proc/x/y"), &[], 0).expect_err("not even root can").to_string();
        assert!(kernel.contains("nothing can be kept in /proc: it is a view of the kernel"), "{kernel}");
    }
}
