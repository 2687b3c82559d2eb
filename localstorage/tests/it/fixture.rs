//! Helpers shared by the tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::{Mounter as _, OsMounter};
use nodekeel_localstorage::volume::{
    CryptsetupProgram, FileSeal, KeyPolicy, LuksVolumeConfig, VolumeEncryption,
};
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
    let temporary = tempfile::tempdir_in(base).unwrap();
    let dir = Dir::open(temporary.path()).unwrap();
    (temporary, dir)
}

/// The names of all entries, including temporary files.
pub(crate) fn raw_names(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).unwrap();
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

/// The task of this process, if a test of another process started it.
pub(crate) fn assigned_task() -> Option<String> {
    std::env::var(TASK_VARIABLE).ok()
}

/// One test of this program, with a task, for a child process.
pub(crate) fn test_command(test: &str, task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the executable has a path"));
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(TASK_VARIABLE, task).stdin(Stdio::null());
    command
}

/// Runs one test of this program again, with a task, in a child process.
pub(crate) fn run_in_child(test: &str, task: &str) -> ExitStatus {
    test_command(test, task).stdout(Stdio::null()).status().unwrap()
}

/// Runs the work of this test function in a child process: for state that all threads of a process share. So is every
/// open file while another thread starts a process, which has it until it executes its program: a file system with
/// open files cannot be unmounted.
pub(crate) fn in_child_process<T: Fn()>(_test: T, work: impl FnOnce()) {
    if assigned_task().is_some() {
        return work();
    }
    let (_, test) = std::any::type_name::<T>().split_once("::").expect("a test has a module");
    let child = test_command(test, "alone").output().expect("the child runs");
    let [output, errors] = [&child.stdout, &child.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    println!("{output}{errors}");
    assert!(child.status.success() && output.contains("1 passed"), "{test}: {}", child.status);
}

/// The directories of a node next to its disk: mount points, and a directory in memory. A power cut takes them.
pub(crate) struct NodeDirs {
    temporary: TempDir,
}

impl NodeDirs {
    pub(crate) fn new() -> Self {
        Self::new_in(&std::env::temp_dir())
    }

    pub(crate) fn new_in(base: &Path) -> Self {
        let temporary = tempfile::tempdir_in(base).unwrap();
        for name in ["data", "esp", "run", "mappings"] {
            fs::create_dir(temporary.path().join(name)).unwrap();
        }
        Self { temporary }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.temporary.path().canonicalize().unwrap().join(name)
    }

    pub(crate) fn dir(&self, name: &str) -> Dir {
        Dir::open(self.path(name)).unwrap()
    }

    /// A volume on this device that the key on the ESP opens, by the real cryptsetup and real mounts.
    pub(crate) fn luks_config(&self, device: &Path, encryption: VolumeEncryption) -> LuksVolumeConfig {
        LuksVolumeConfig {
            device: device.to_owned(),
            target: self.path("data"),
            encryption,
            keys: KeyPolicy::Local,
            journal: self.dir("esp"),
            runtime: self.dir("run"),
            seal: Arc::new(FileSeal::new(self.dir("esp"))),
            mounter: Arc::new(OsMounter),
            cryptsetup: Arc::new(CryptsetupProgram::default()),
        }
    }

    /// Unmounts and closes what a failed test has left open.
    pub(crate) fn close_volume(&self, mapping_name: &str) {
        let _ = OsMounter.unmount(&self.path("data"));
        let mut close = Command::new("cryptsetup");
        let _ = close.args(["close", mapping_name]).env("DM_DISABLE_UDEV", "1").output();
    }
}

/// Writes a script that runs mkfs.xfs for a small log, next to a link to `xfs_growfs`; returns its path. Emulated
/// processors would have to encrypt each byte of the usual log of 64 MiB.
///
/// *Source:* mkfs/xfs_mkfs.c of xfsprogs 6.1: with these variables, it makes file systems that only tests have.
pub(crate) fn write_mkfs(directory: &Path, before: &str) -> PathBuf {
    let (mkfs, growfs) = (directory.join("mkfs"), directory.join("xfs_growfs"));
    let variables = "TEST_DIR=/ TEST_DEV=/ QA_CHECK_FS=1";
    let script = format!("#!/bin/sh\n{before}\n{variables} exec mkfs.xfs -l size=16m \"$@\"\n");
    testbed::write_program(&mkfs, &script).expect("the script is written");
    std::os::unix::fs::symlink("/usr/sbin/xfs_growfs", growfs).unwrap();
    mkfs
}

/// Whether tests in a guest, which takes half a second for each process, run whole counts instead of samples.
pub(crate) fn runs_whole_counts() -> bool {
    std::env::var("NODEKEEL_KILLS").is_ok_and(|count| count == "all")
}
