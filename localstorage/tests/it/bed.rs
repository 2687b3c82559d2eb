//! What the tests share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use nodekeel_localstorage::Dir;
use tempfile::TempDir;

/// What a program of its own is to do.
const TASK: &str = "NODEKEEL_LOCALSTORAGE_TASK";

/// In memory where that can be: a process that is killed loses nothing that the kernel has, so a disk would only take
/// longer. The tests in the guest use disks.
pub(crate) fn base() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    match tempfile::tempdir_in(&memory) {
        Ok(_) => memory,
        Err(_) => std::env::temp_dir(),
    }
}

pub(crate) fn scratch() -> (TempDir, Dir) {
    scratch_in(&base())
}

/// For what older kernels have on disks alone.
pub(crate) fn scratch_on_disk() -> (TempDir, Dir) {
    scratch_in(&std::env::temp_dir())
}

fn scratch_in(base: &Path) -> (TempDir, Dir) {
    let temporary = tempfile::tempdir_in(base).expect("a directory");
    let dir = Dir::open(temporary.path()).expect("it opens");
    (temporary, dir)
}

/// The name of every entry below, with siblings and all.
pub(crate) fn raw_names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).expect("it is a directory");
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.map(|entry| name(entry.expect("an entry"))).collect();
    names.sort();
    names
}

/// What this process is to do, where it was started for a test of another one.
pub(crate) fn task() -> Option<String> {
    std::env::var(TASK).ok()
}

/// Held to read by whoever starts a process, and to write by whoever unmounts: a child has all that is open here until it
/// executes its program, and what is open can't be unmounted.
static FORKS: RwLock<()> = RwLock::new(());

/// As long as it is held, no other thread starts a process.
pub(crate) fn no_forks() -> RwLockWriteGuard<'static, ()> {
    FORKS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one test of this program again, in a process of its own that is told what to do.
pub(crate) fn run_alone(test: &str, task: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("it has a path"));
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(TASK, task).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = {
        let _forks = FORKS.read().unwrap_or_else(PoisonError::into_inner);
        // It is back when the child executes its program.
        command.spawn().expect("it starts")
    };
    child.wait().expect("it ends")
}

/// Does a test's work in a process of its own: for what all threads of a process share.
pub(crate) fn alone(test: &str, work: impl FnOnce()) {
    if task().is_some() {
        return work();
    }
    let status = run_alone(test, "alone");
    assert!(status.success(), "{status}");
}
