//! The data directory: used by one noded at a time; everything below it is reached through its descriptor.

mod error;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, FcntlArg, fcntl};
use nix::libc;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, PROC_SUPER_MAGIC, SYSFS_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{AccessFlags, faccessat};
use nodekeel_localstorage::tree::LayoutError;
use nodekeel_localstorage::{Dir, Error as DirError, FileMode};

use crate::layout::{self, DataLayout};
use crate::program_name::program_name;

pub use error::DataError;

/// Name of the lock file, as the layout declares it.
const LOCK_FILE: &str = "lock";

/// The most bytes of the lock file that are read: a pid has ten digits at most.
const PID_BYTES: u64 = 32;

/// Mode of a new data directory; an existing one keeps its mode.
const DATA_DIR_MODE: FileMode = FileMode::new(0o755);

const READ_ONLY: &str = "mounted read-only";

/// How long a start waits for the lock of a noded that was killed: the kernel releases it when the process has exited, and
/// when the child that it was starting executes its program, or exits because its parent is gone.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Checks whether an instance could use the directory and these directories below it, and, before its first start, has
/// these free bytes on its data volume; changes nothing.
///
/// # Errors
/// See [`DataError`].
pub(crate) fn check_data_dir(data: &Path, below: &[String], needed: u64) -> Result<(), DataError> {
    // The nearest existing ancestor decides whether the rest can be created.
    let existing = data.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let dir = open_directory(existing)?;
    // Before anything that it contains is believed.
    if existing == data {
        dir.check_owner_and_parents()?
    } else {
        dir.check_parent()?
    }
    check_writable(&dir)?;
    if existing == data {
        check_subdirectories(&dir, below)?;
        // A node that has run starts on a full disk, too: its health reports what is full.
        if has_run(data) {
            return Ok(());
        }
    }
    // A file system may be mounted on the directory of the volume.
    let disk = dir.open_dir(layout::VOLUME_DIR).ok().filter(|_| existing == data).unwrap_or(dir);
    // A file system that does not report its size is not refused for it.
    if let Ok(space) = fstatvfs(&disk) {
        let free = space.blocks_available().saturating_mul(space.fragment_size());
        if free < needed {
            return Err(DataError::DiskFull { path: disk.path().to_owned(), free, needed });
        }
    }
    Ok(())
}

/// Returns whether a node has run in the directory.
pub(crate) fn has_run(data: &Path) -> bool {
    data.join(LOCK_FILE).symlink_metadata().is_ok()
}

fn check_subdirectories(data: &Dir, below: &[String]) -> Result<(), DataError> {
    for name in below {
        match data.open_dir(name) {
            Ok(dir) => {
                dir.check_owner()?;
                check_writable(&dir)?;
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Opens a directory of the operator; follows symbolic links.
pub(crate) fn open_directory(path: &Path) -> Result<Dir, DataError> {
    // A dangling link exists, and is not a directory.
    let is_gone = |error: &DirError| error.is_not_found() || error.is_not_a_directory();
    Dir::open(path).map_err(|error| {
        if is_gone(&error) { DataError::NotADirectory { path: path.to_owned() } } else { error.into() }
    })
}

/// Opens a directory of the operator that nobody but root and the user of this process can change or replace.
pub(crate) fn open_trusted_directory(path: &Path) -> Result<Dir, DataError> {
    let dir = open_directory(path)?;
    dir.check_owner_and_parents()?;
    Ok(dir)
}

/// Checks that no other instance uses the directory. It comes before all other checks but that of the owner, whose lock is
/// no other user's word; their answers do not matter then. It waits for what a killed one has left in the kernel: with the lock, its sockets go.
///
/// # Errors
/// See [`DataError`].
pub(crate) fn check_lock(data: &Path) -> Result<(), DataError> {
    if data.symlink_metadata().is_err() {
        return Ok(());
    }
    let data = open_trusted_directory(data)?;
    match data.open_file(LOCK_FILE) {
        Ok(mut lock) => {
            let mut found = whole_file_lock(libc::F_WRLCK);
            // F_OFD_GETLK does not lock: while a check held the lock, no node could start.
            let result = fcntl(&lock, FcntlArg::F_OFD_GETLK(&mut found));
            result.map_err(|errno| DataError::Lock {
                path: data.path().join(LOCK_FILE),
                source: errno.into(),
            })?;
            // The kernel returns the conflicting lock, or sets the type to F_UNLCK if there is none.
            match i32::from(found.l_type) {
                libc::F_UNLCK => Ok(()),
                // It locks now, for a moment for which a start waits.
                _ if lock_in_time(&lock, libc::F_RDLCK).is_ok() => Ok(()),
                _ => Err(DataError::InUse { path: data.path().to_owned(), holder: lock_holder(&mut lock) }),
            }
        }
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Checks whether this user can create files in a directory.
pub(crate) fn check_writable(dir: &Dir) -> Result<(), DataError> {
    let path = dir.path().to_owned();
    // faccessat reports to root that it may write everywhere.
    let kind = fstatfs(dir).map(|system| system.filesystem_type());
    if let Ok(PROC_SUPER_MAGIC | SYSFS_MAGIC | CGROUP2_SUPER_MAGIC) = kind {
        return Err(DataError::Unusable { path, why: "a kernel file system, not a disk" });
    }
    match faccessat(dir, ".", AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::empty()) {
        Ok(()) => Ok(()),
        // EROFS comes before the permission: root gets it too, and another user would not help.
        Err(Errno::EROFS) => Err(DataError::Unusable { path, why: READ_ONLY }),
        Err(_) => Err(DataError::Permission { path }),
    }
}

/// The locked data directory; dropping the value, or the exit of the process, releases the lock.
#[derive(Debug)]
pub(crate) struct DataDir {
    root: DataLayout,
    lock: File,
}

impl DataDir {
    /// Acquires the directory: creates it if it is absent, locks it and places the layout. The path must be
    /// absolute.
    ///
    /// # Errors
    /// See [`DataError`].
    pub(crate) fn acquire(path: &Path) -> Result<Self, DataError> {
        // Before the lock is held, only missing directories and the lock file are created.
        let dir = create_directory(path)?;
        // It may have been created by another user since it was checked.
        dir.check_owner_and_parents()?;
        let lock = acquire_lock(&dir)?;
        // The layout is placed under the lock: otherwise two instances would create the same files.
        let root = layout::place_layout(dir).map_err(|error| placement_error(path, error))?;
        Ok(Self { root, lock })
    }

    /// Releases the lock, while other owners of this value may still exist.
    pub(crate) fn unlock(&self) {
        // This fails only for a closed descriptor, and the lock ends with the process anyway.
        let _ = fcntl(&self.lock, FcntlArg::F_OFD_SETLK(&whole_file_lock(libc::F_UNLCK)));
    }

    /// The layout of the directory.
    pub(crate) fn root(&self) -> &DataLayout {
        &self.root
    }
}

impl Drop for DataDir {
    /// Unlocks explicitly: a child that another thread has just forked has the file open too, until it
    /// executes its program.
    fn drop(&mut self) {
        self.unlock();
    }
}

/// The error of a part of the layout that can't be placed.
pub(crate) fn placement_error(data: &Path, error: LayoutError) -> DataError {
    match error {
        // These have a hint of their own for the file or directory in their way.
        LayoutError::Directory { source, .. }
        | LayoutError::File { source, .. }
        | LayoutError::Commit { source, .. } => source.into(),
        source => DataError::PlaceLayout { path: data.to_owned(), source },
    }
}

/// Opens the directory. Creates missing components of its path durably.
fn create_directory(path: &Path) -> Result<Dir, DataError> {
    let existing = path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    let dir = open_directory(existing)?;
    match path.strip_prefix(existing) {
        // The new directories are synced, so that a crash does not take the data directory away from a node that
        // has started.
        Ok(missing) if !missing.as_os_str().is_empty() => Ok(dir.ensure_dir(missing, DATA_DIR_MODE)?),
        _ => Ok(dir),
    }
}

fn acquire_lock(dir: &Dir) -> Result<File, DataError> {
    let path = dir.path().join(LOCK_FILE);
    let failed = |source| DataError::Lock { path: path.clone(), source };
    // A user that can open the file can lock it, and so keep the node from starting: hence mode 0600.
    let mut lock = dir.open_or_create_file(LOCK_FILE, FileMode::PRIVATE_FILE)?;
    // Not the lock of the directory: a check finds out the holder of this one without locking.
    match lock_in_time(&lock, libc::F_WRLCK) {
        Ok(()) => {}
        // fcntl_locking(2) allows either error for a conflicting lock.
        Err(Errno::EAGAIN | Errno::EACCES) => {
            return Err(DataError::InUse { path: dir.path().to_owned(), holder: lock_holder(&mut lock) });
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    // The pid is only for messages. It replaces the former one in place, which needs no block of a full disk.
    let pid = format!("{}\n", std::process::id());
    match lock.write_all_at(pid.as_bytes(), 0) {
        Ok(()) => lock.set_len(pid.len() as u64).map_err(failed)?,
        // The pid of another process would be worse than none.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => lock.set_len(0).map_err(failed)?,
        Err(error) => return Err(failed(error)),
    }
    Ok(lock)
}

/// Locks a file. Waits for the kernel to release the lock of a process that was killed.
fn lock_in_time(file: &File, kind: libc::c_int) -> Result<(), Errno> {
    let conflict = match fcntl(file, FcntlArg::F_OFD_SETLK(&whole_file_lock(kind))) {
        Ok(_) => return Ok(()),
        Err(errno @ (Errno::EAGAIN | Errno::EACCES)) => errno,
        Err(errno) => return Err(errno),
    };
    // The lock belongs to the open file, so a thread can wait for it. It ends with the process at the latest.
    let Ok(waiting) = file.try_clone() else { return Err(conflict) };
    let (locked, wait) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = locked.send(fcntl(&waiting, FcntlArg::F_OFD_SETLKW(&whole_file_lock(kind))));
    });
    wait.recv_timeout(LOCK_TIMEOUT).map_err(|_| conflict)?.map(drop)
}

/// A lock of a whole file that belongs to the open file description.
///
/// *Source:* fcntl_locking(2), "Open file description locks": the pid is to be 0.
fn whole_file_lock(kind: libc::c_int) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// The process that wrote the lock file, if it is running; another process may have locked it.
fn lock_holder(lock: &mut File) -> String {
    match lock_pid(lock) {
        Some(pid) => format!("another {} (pid {pid})", program_name()),
        None => "another program".into(),
    }
}

fn lock_pid(lock: &mut File) -> Option<u32> {
    let mut text = String::new();
    let read = lock.take(PID_BYTES).read_to_string(&mut text);
    let pid = read.ok().and_then(|_| text.trim().parse::<u32>().ok());
    // The file keeps the pid of the last noded. It is not named if no such process runs.
    pid.filter(|pid| Path::new("/proc").join(pid.to_string()).exists())
}

/// The process of the node that uses the directory; `None` if it can't be told.
pub(crate) fn running_node(data: &Path) -> Option<u32> {
    lock_pid(&mut open_trusted_directory(data).ok()?.open_file(LOCK_FILE).ok()?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Seek as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn subdirectories(names: &[&str]) -> Vec<String> {
        names.iter().copied().map(String::from).collect()
    }

    #[test]
    fn a_second_instance_is_rejected_until_the_first_has_exited() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path().join("a/b");
        check_data_dir(&data, &[], 0).expect("it can be made");
        assert!(!scratch.path().join("a").exists(), "probing touches nothing");
        // A sticky directory, as /tmp is, can have a data directory, and can't be one.
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o1777)).expect("set");
        check_data_dir(&data, &[], 0).expect("it can be made");
        let error = check_data_dir(scratch.path(), &[], 0).expect_err("others can write");
        assert!(matches!(error, DataError::Untrusted(_)), "{error}");
        let first = DataDir::acquire(&data).expect("free");
        for error in [check_lock(&data).expect_err("in use"), DataDir::acquire(&data).expect_err("in use")] {
            assert!(error.to_string().contains(&format!("(pid {})", std::process::id())), "{error}");
        }
        drop(first);
        check_lock(&data).expect("free again");
        check_data_dir(&data, &[], 0).expect("usable");
        DataDir::acquire(&data).expect("free again");
    }

    #[test]
    fn a_check_never_keeps_a_node_from_starting() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path();
        drop(DataDir::acquire(data).expect("free"));
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let checks = scope.spawn(|| {
                let mut count = 0;
                while count == 0 || !is_done.load(Ordering::Relaxed) {
                    let _ = check_lock(data);
                    count += 1;
                }
            });
            let refused = (0..1_000).find_map(|_| DataDir::acquire(data).err());
            is_done.store(true, Ordering::Relaxed);
            checks.join().expect("the checks end");
            assert!(refused.is_none(), "{refused:?}");
        });
    }

    #[test]
    fn an_unusable_directory_is_reported_before_anything_is_touched() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("file");
        fs::write(&file, "").expect("written");
        assert!(
            matches!(check_data_dir(&file.join("x"), &[], 0), Err(DataError::NotADirectory { path }) if path == file)
        );
        let full =
            check_data_dir(scratch.path(), &[], u64::MAX).expect_err("larger than any disk").to_string();
        assert!(full.contains("not enough disk space for"), "{full}");
    }

    #[test]
    fn only_the_owner_can_lock_the_directory_and_only_a_running_holder_is_named() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("lock");
        // No process has a pid this high.
        fs::write(&path, "4194305\n").expect("written");
        let foreign = File::options().write(true).open(&path).expect("there");
        fcntl(&foreign, FcntlArg::F_OFD_SETLK(&whole_file_lock(libc::F_WRLCK))).expect("free");
        let error = DataDir::acquire(scratch.path()).expect_err("locked").to_string();
        assert!(error.contains("is in use by another program:"), "{error}");
        // Also in a child that another test has just forked.
        fcntl(&foreign, FcntlArg::F_OFD_SETLK(&whole_file_lock(libc::F_UNLCK))).expect("it was locked");
        let _data = DataDir::acquire(scratch.path()).expect("free");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn the_lock_of_a_directory_that_others_can_change_is_not_believed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let _data = DataDir::acquire(scratch.path()).expect("free");
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).expect("set");
        let error = check_lock(scratch.path()).expect_err("others can write");
        assert!(matches!(error, DataError::Untrusted(_)), "{error}");
    }

    #[test]
    fn of_a_lock_file_no_more_is_read_than_a_pid() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("lock");
        let pid = std::process::id().to_string();
        fs::write(&path, format!("{pid}{}", " ".repeat(PID_BYTES as usize))).expect("written");
        let mut lock = File::open(&path).expect("there");
        assert_eq!(lock_holder(&mut lock), format!("another noded (pid {pid})"));
        assert_eq!(lock.stream_position().expect("known"), PID_BYTES);
    }

    #[test]
    fn a_lock_that_the_kernel_is_about_to_release_is_waited_for() {
        let scratch = tempfile::tempdir().expect("a directory");
        drop(DataDir::acquire(scratch.path()).expect("free"));
        // The open file of a noded that was killed, in a child that has not executed its program yet.
        let open = || File::options().write(true).open(scratch.path().join("lock")).expect("there");
        let inode = format!(":{} ", fs::metadata(scratch.path().join("lock")).expect("there").ino());
        type Start = fn(&Path) -> Result<(), DataError>;
        let acquire: Start = |path| DataDir::acquire(path).map(drop);
        for start in [check_lock, acquire] {
            let left = open();
            // It waits, too: a process that another test forks has the lock until it executes its program.
            fcntl(&left, FcntlArg::F_OFD_SETLKW(&whole_file_lock(libc::F_WRLCK))).expect("free");
            std::thread::scope(|scope| {
                let started = scope.spawn(|| start(scratch.path()));
                // The kernel lists who waits for a lock.
                let waits = |line: &str| line.contains("-> OFDLCK") && line.contains(&inode);
                let is_waiting = || fs::read_to_string("/proc/locks").expect("/proc").lines().any(waits);
                while !started.is_finished() && !is_waiting() {
                    std::thread::yield_now();
                }
                fcntl(&left, FcntlArg::F_OFD_SETLK(&whole_file_lock(libc::F_UNLCK))).expect("locked");
                started.join().expect("no panic").expect("the lock was released in time");
            });
        }
    }

    #[test]
    fn a_conflict_below_the_directory_is_reported() {
        let scratch = tempfile::tempdir().expect("a directory");
        let etcd = scratch.path().join("etcd");
        fs::write(&etcd, "").expect("written");
        check_data_dir(scratch.path(), &subdirectories(&["run"]), 0).expect("run can be made");
        assert!(
            matches!(check_data_dir(scratch.path(), &subdirectories(&["run", "etcd"]), 0), Err(DataError::NotADirectory { path }) if path == etcd)
        );
        let kernel =
            check_data_dir(Path::new("/proc/x/y"), &[], 0).expect_err("a kernel file system").to_string();
        assert!(kernel.contains("can't store data in /proc: it is a kernel file system"), "{kernel}");
    }

    #[test]
    fn a_symbolic_link_below_the_directory_is_reported_and_nothing_is_created_behind_it() {
        let elsewhere = tempfile::tempdir().expect("a directory");
        for name in ["lock", "run", "etcd"] {
            let scratch = tempfile::tempdir().expect("a directory");
            let link = scratch.path().join(name);
            std::os::unix::fs::symlink(elsewhere.path(), &link).expect("linked");
            let checked = check_lock(scratch.path());
            let checked =
                checked.and_then(|()| check_data_dir(scratch.path(), &subdirectories(&["run", "etcd"]), 0));
            let error = checked.expect_err("a link");
            assert!(matches!(&error, DataError::Symlink { path } if *path == link), "{error}");
            assert!(error.to_string().contains("replace it by its target"), "{error}");
            if name != "etcd" {
                let error = DataDir::acquire(scratch.path()).expect_err("a link");
                assert!(matches!(&error, DataError::Symlink { path } if *path == link), "{error}");
            }
            assert_eq!(fs::read_dir(elsewhere.path()).expect("there").count(), 0);
        }
        // A link to the data directory itself is followed.
        let link = elsewhere.path().join("link");
        let scratch = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(scratch.path(), &link).expect("linked");
        check_data_dir(&link, &subdirectories(&["run"]), 0).expect("followed");
        DataDir::acquire(&link).expect("followed");
        assert!(scratch.path().join("run").is_dir());
    }
}
