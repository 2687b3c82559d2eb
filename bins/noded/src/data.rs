//! The data directory: one noded at a time, everything below it reached through its descriptor.

mod error;

use std::fs::{File, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FcntlArg, OFlag, fcntl, openat};
use nix::libc;
use nix::sys::stat::Mode as CreationMode;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{AccessFlags, faccessat};
use nodekeel_localstorage::tree::PlaceError;
use nodekeel_localstorage::{Dir, Error as DirError, Mode};

use crate::layout::{self, Root};

pub use error::DataError;

/// The lock's name, as the layout declares it.
const LOCK: &str = "lock";

/// The mode of a data directory that has to be made; one that is there keeps its own.
const MODE: Mode = Mode::new(0o755);

const READ_ONLY: &str = "mounted read-only";

/// Says what would keep an instance from using the directory and these directories below it; touches nothing.
///
/// # Errors
/// See [`DataError`].
pub fn probe(data: &Path, below: &[String], needed: u64) -> Result<(), DataError> {
    let existing = data.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let dir = open(existing)?;
    if existing == data {
        probe_lock(&dir)?;
    }
    probe_directory(&dir)?;
    if existing == data {
        probe_below(&dir, below)?;
    }
    if let Ok(disk) = fstatvfs(&dir) {
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        if free < needed {
            return Err(DataError::Full { path: existing.to_owned(), free, needed });
        }
    }
    Ok(())
}

fn probe_below(data: &Dir, below: &[String]) -> Result<(), DataError> {
    for name in below {
        match data.open_dir(name) {
            Ok(dir) => probe_directory(&dir)?,
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    if below.iter().any(|name| name == "etcd") && data.exists("etcd/member").unwrap_or_default() {
        let etcd = data.path().join("etcd");
        return Err(DataError::Former { path: etcd.join("member"), to: etcd.join("data") });
    }
    Ok(())
}

/// Opens a directory of the operator's, through whatever links lead to it.
pub(crate) fn open(path: &Path) -> Result<Dir, DataError> {
    // A link that leads nowhere is there, and is no directory.
    let is_gone = |error: &DirError| error.is_not_found() || error.is_not_a_directory();
    Dir::open(path).map_err(|error| match is_gone(&error) {
        true => DataError::NotADirectory { path: path.to_owned() },
        false => error.into(),
    })
}

fn probe_lock(data: &Dir) -> Result<(), DataError> {
    match data.open_file(LOCK) {
        Ok(mut lock) => {
            let mut found = whole(libc::F_WRLCK);
            // Asks only: for as long as a probe held it, no node could start.
            let asked = fcntl(&lock, FcntlArg::F_OFD_GETLK(&mut found));
            asked.map_err(|errno| DataError::Lock { path: data.path().join(LOCK), source: errno.into() })?;
            match i32::from(found.l_type) {
                libc::F_UNLCK => Ok(()),
                _ => Err(DataError::InUse { path: data.path().to_owned(), holder: holder(&mut lock) }),
            }
        }
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Says what would keep this user from making files in a directory.
pub(crate) fn probe_directory(dir: &Dir) -> Result<(), DataError> {
    let path = dir.path().to_owned();
    // Root is told that it may write everywhere.
    let kind = fstatfs(dir).map(|system| system.filesystem_type());
    if let Ok(PROC_SUPER_MAGIC | SYSFS_MAGIC | CGROUP2_SUPER_MAGIC) = kind {
        return Err(DataError::Unfit { path, why: "a view of the kernel, not a disk" });
    }
    match faccessat(dir, ".", AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::empty()) {
        Ok(()) => Ok(()),
        Err(Errno::EROFS) => Err(DataError::Unfit { path, why: READ_ONLY }),
        Err(_) => Err(DataError::Permission { path }),
    }
}

/// The data directory while this instance has it; the lock goes with the value, or with the process.
#[derive(Debug)]
pub struct DataDir {
    root: Root,
    lock: File,
}

impl DataDir {
    /// Creates the directory, whose path is absolute, if it is absent, and takes it.
    ///
    /// # Errors
    /// See [`DataError`].
    pub fn take(path: &Path) -> Result<Self, DataError> {
        let dir = make(path)?;
        let lock = lock(&dir)?;
        let root = layout::place(dir).map_err(|error| placed(path, error))?;
        Ok(Self { root, lock })
    }

    /// What lies in it.
    pub(crate) fn root(&self) -> &Root {
        &self.root
    }
}

impl Drop for DataDir {
    /// A child that another thread has just forked has the file open too, until it executes its program.
    fn drop(&mut self) {
        let _ = fcntl(&self.lock, FcntlArg::F_OFD_SETLK(&whole(libc::F_UNLCK)));
    }
}

/// What could not be placed in the data directory.
pub(crate) fn placed(data: &Path, error: PlaceError) -> DataError {
    match error {
        PlaceError::Directory { source, .. }
        | PlaceError::File { source, .. }
        | PlaceError::Commit { source, .. } => source.into(),
        source => DataError::Place { path: data.to_owned(), source },
    }
}

/// Opens the directory. What is missing of its path is made, and survives a power cut.
fn make(path: &Path) -> Result<Dir, DataError> {
    let existing = path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let dir = open(existing)?;
    match path.strip_prefix(existing) {
        Ok(missing) if !missing.as_os_str().is_empty() => Ok(dir.ensure_dir(missing, MODE)?),
        _ => Ok(dir),
    }
}

fn lock(dir: &Dir) -> Result<File, DataError> {
    let path = dir.path().join(LOCK);
    let failed = |source| DataError::Lock { path: path.clone(), source };
    // One name in a directory that is open, and no link: as `Dir` would, which has no way to open what may be absent.
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    // Whoever may open it may lock it, and so keep the node from starting.
    let opened = openat(dir, LOCK, flags, CreationMode::S_IRUSR | CreationMode::S_IWUSR);
    let mut lock: File = match opened {
        Ok(fd) => fd.into(),
        Err(Errno::ELOOP) => return Err(DataError::Symlink { path }),
        Err(Errno::EISDIR) => return Err(DataError::NotAFile { path }),
        Err(Errno::EACCES) => return Err(DataError::Permission { path }),
        Err(errno) => return Err(failed(errno.into())),
    };
    lock.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
    match fcntl(&lock, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK))) {
        Ok(_) => {}
        Err(Errno::EAGAIN | Errno::EACCES) => {
            return Err(DataError::InUse { path: dir.path().to_owned(), holder: holder(&mut lock) });
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    lock.set_len(0).map_err(failed)?;
    writeln!(lock, "{}", std::process::id()).map_err(failed)?;
    Ok(lock)
}

/// A lock of a whole file, which belongs to the open file.
///
/// *Source:* fcntl_locking(2), "Open file description locks": the pid is to be 0.
fn whole(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
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
    use std::fs;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn below(names: &[&str]) -> Vec<String> {
        names.iter().copied().map(String::from).collect()
    }

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
    fn whoever_asks_keeps_no_node_from_starting() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path();
        drop(DataDir::take(data).expect("free"));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| {
                let mut asked = 0;
                while asked == 0 || !is_over.load(Ordering::Relaxed) {
                    let _ = probe(data, &[], 0);
                    asked += 1;
                }
            });
            let refused = (0..1_000).find_map(|_| DataDir::take(data).err());
            is_over.store(true, Ordering::Relaxed);
            asks.join().expect("it asks");
            assert!(refused.is_none(), "{refused:?}");
        });
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
        let foreign = File::options().write(true).open(&path).expect("there");
        fcntl(&foreign, FcntlArg::F_OFD_SETLK(&whole(libc::F_WRLCK))).expect("free");
        let error = DataDir::take(scratch.path()).expect_err("locked").to_string();
        assert!(error.contains("is used by another program;"), "{error}");
        // And of no child that another test has just forked.
        fcntl(&foreign, FcntlArg::F_OFD_SETLK(&whole(libc::F_UNLCK))).expect("it was locked");
        let _data = DataDir::take(scratch.path()).expect("free");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_is_in_the_way_below_is_said() {
        let scratch = tempfile::tempdir().expect("a directory");
        let etcd = scratch.path().join("etcd");
        fs::write(&etcd, "").expect("written");
        probe(scratch.path(), &below(&["run"]), 0).expect("run can be made");
        assert!(
            matches!(probe(scratch.path(), &below(&["run", "etcd"]), 0), Err(DataError::NotADirectory { path }) if path == etcd)
        );
        let kernel = probe(Path::new("/proc/x/y"), &[], 0).expect_err("not even root can").to_string();
        assert!(kernel.contains("nothing can be kept in /proc: it is a view of the kernel"), "{kernel}");
    }

    #[test]
    fn a_symbolic_link_in_the_way_is_named_and_nothing_is_made_behind_it() {
        let elsewhere = tempfile::tempdir().expect("a directory");
        for name in ["lock", "run", "etcd"] {
            let scratch = tempfile::tempdir().expect("a directory");
            let link = scratch.path().join(name);
            std::os::unix::fs::symlink(elsewhere.path(), &link).expect("linked");
            let error = probe(scratch.path(), &below(&["run", "etcd"]), 0).expect_err("a link");
            assert!(matches!(&error, DataError::Symlink { path } if *path == link), "{error}");
            assert!(error.to_string().contains("replace it by what it points to"), "{error}");
            if name != "etcd" {
                let error = DataDir::take(scratch.path()).expect_err("a link");
                assert!(matches!(&error, DataError::Symlink { path } if *path == link), "{error}");
            }
            assert_eq!(fs::read_dir(elsewhere.path()).expect("there").count(), 0);
        }
        // A link that leads to the directory is its owner's affair.
        let link = elsewhere.path().join("link");
        let scratch = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(scratch.path(), &link).expect("linked");
        probe(&link, &below(&["run"]), 0).expect("followed");
        DataDir::take(&link).expect("followed");
        assert!(scratch.path().join("run").is_dir());
    }

    #[test]
    fn etcd_data_of_the_former_layout_is_refused_with_the_command_that_moves_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(scratch.path().join("etcd/member")).expect("made");
        probe(scratch.path(), &below(&["run"]), 0).expect("without etcd it is nobody's");
        let error =
            probe(scratch.path(), &below(&["run", "etcd", "etcd/data"]), 0).expect_err("it is the old one");
        let (_, command) = error
            .to_string()
            .split_once("new place: ")
            .map(|(a, b)| (a.to_owned(), b.to_owned()))
            .expect("a command");
        let status = std::process::Command::new("/bin/sh").args(["-c", &command]).status().expect("run");
        assert!(status.success() && scratch.path().join("etcd/data/member").is_dir(), "{command}");
        probe(scratch.path(), &below(&["run", "etcd", "etcd/data"]), 0).expect("it is moved");
    }
}
