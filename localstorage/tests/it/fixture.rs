//! Helpers shared by the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use nodekeel_localstorage::Dir;
use tempfile::TempDir;

/// The environment variable with the task of a child process.
const TASK_VARIABLE: &str = "NODEKEEL_LOCALSTORAGE_TASK";

/// The parent of temporary directories: in memory if possible. A killed process loses no data that the kernel
/// has, so a disk would only be slower. The tests in the guest use disks.
pub(crate) fn temp_base() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    match tempfile::tempdir_in(&memory) {
        Ok(_) => memory,
        Err(_) => std::env::temp_dir(),
    }
}

pub(crate) fn scratch_dir() -> (TempDir, Dir) {
    scratch_dir_in(&temp_base())
}

/// For features that older kernels support only on disks.
pub(crate) fn scratch_dir_on_disk() -> (TempDir, Dir) {
    scratch_dir_in(&std::env::temp_dir())
}

fn scratch_dir_in(base: &Path) -> (TempDir, Dir) {
    let temporary = tempfile::tempdir_in(base).expect("a temporary directory");
    let dir = Dir::open(temporary.path()).expect("the open succeeds");
    (temporary, dir)
}

/// The names of all entries, including temporary files.
pub(crate) fn raw_names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).expect("the directory is readable");
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.map(|entry| name(entry.expect("the entry is readable"))).collect();
    names.sort();
    names
}

/// The task of this process, if a test of another process started it.
pub(crate) fn assigned_task() -> Option<String> {
    std::env::var(TASK_VARIABLE).ok()
}

/// Held for reading while a process starts, and for writing during an unmount: a child has all open files of
/// this process until it executes its program, and a file system with open files cannot be unmounted.
static FORK_LOCK: RwLock<()> = RwLock::new(());

/// While it is held, no other thread starts a process.
pub(crate) fn block_forks() -> RwLockWriteGuard<'static, ()> {
    FORK_LOCK.write().unwrap_or_else(PoisonError::into_inner)
}

/// Runs one test of this program again, with a task, in a child process.
pub(crate) fn run_in_child(test: &str, task: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("the executable has a path"));
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(TASK_VARIABLE, task).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = {
        let _forks = FORK_LOCK.read().unwrap_or_else(PoisonError::into_inner);
        // spawn returns when the child executes its program.
        command.spawn().expect("the run starts")
    };
    child.wait().expect("the child exits")
}

/// Runs the work of a test in a child process: for state that all threads of a process share.
pub(crate) fn in_child_process(test: &str, work: impl FnOnce()) {
    if assigned_task().is_some() {
        return work();
    }
    let status = run_in_child(test, "alone");
    assert!(status.success(), "{status}");
}
