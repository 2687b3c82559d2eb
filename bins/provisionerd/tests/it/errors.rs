//! What it says where the directory of volumes can't be used, with limits that are only written down.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use testbed::Scratch;

/// Runs it on a directory in which it can't begin.
fn run(directory: &Path, wrapper: &[&str]) -> Output {
    let books = tempfile::tempdir().expect("a directory");
    let line =
        [wrapper, &[env!("CARGO_BIN_EXE_provisionerd"), "run", "--no-csi", "--listen=127.0.0.1:0"]].concat();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).arg("--directory").arg(directory).stdin(Stdio::null());
    command.env_clear().env("NODE_NAME", "node-a").env("PROVISIONERD_BOOKS", books.path());
    command.output().expect("it runs")
}

/// Asserts that it said why in one line, and what to do; and that it ended as for something missing.
fn assert_told(output: &Output, directory: &Path, advice: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{text}");
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("provisionerd: ")).collect();
    let [line] = lines[..] else { panic!("one line: {text}") };
    assert!(line.contains(&directory.display().to_string()), "{line}");
    assert!(line.contains(advice) && line.contains("--directory"), "{line}");
}

/// A tmpfs of the scratch directory's own, which undoes it.
fn mount(scratch: &Scratch, options: &str) {
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", options, "none"]).arg(scratch.path());
    assert!(command.status().expect("mount runs").success());
}

#[test]
fn a_link_in_the_way_is_told_and_its_target_left_alone() {
    let (base, target) =
        (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    symlink(target.path(), base.path().join("volumes")).expect("a link");
    assert_told(&run(base.path(), &[]), base.path(), "a symbolic link is in the way");
    assert_eq!(fs::read_dir(target.path()).expect("it is there").count(), 0);
}

#[test]
fn a_file_in_the_way_is_told() {
    let base = tempfile::tempdir().expect("a directory");
    fs::write(base.path().join("volumes"), "mine").expect("written");
    assert_told(&run(base.path(), &[]), base.path(), "remove what is in the way");
    assert_eq!(fs::read_to_string(base.path().join("volumes")).expect("it is there"), "mine");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_file_system_that_is_read_only_is_told() {
    let scratch = Scratch::new().expect("a directory");
    mount(&scratch, "ro");
    assert_told(&run(scratch.path(), &[]), scratch.path(), "mount its file system for writing");
}

#[test]
#[ignore = "needs root: it mounts"]
fn a_full_file_system_is_told() {
    let scratch = Scratch::new().expect("a directory");
    mount(&scratch, "size=64k,nr_inodes=1");
    assert_told(&run(scratch.path(), &[]), scratch.path(), "make room on its file system");
}

#[test]
#[ignore = "needs root and setpriv: it becomes somebody else"]
fn a_directory_that_may_not_be_written_to_or_read_is_told() {
    let base = tempfile::tempdir().expect("a directory");
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    for mode in [0o755, 0o700] {
        fs::set_permissions(base.path(), fs::Permissions::from_mode(mode)).expect("chmod");
        assert_told(&run(base.path(), &nobody), base.path(), "run as root");
    }
}
