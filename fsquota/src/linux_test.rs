//! Tests on the host's kernel, which supports projects but not limits.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::{OpenError, ProjectQuota, tree};

/// An XFS in a file, mounted until this is dropped.
struct LoopMount {
    point: PathBuf,
    _scratch: tempfile::TempDir,
}

impl LoopMount {
    fn mount() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let (image, point) = (scratch.path().join("image"), scratch.path().join("mounted"));
        File::create(&image).unwrap().set_len(320 << 20).unwrap();
        fs::create_dir(&point).unwrap();
        testbed::command_output(Command::new("mkfs.xfs").arg("-q").arg(&image)).unwrap();
        testbed::command_output(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point)).unwrap();
        Self { point, _scratch: scratch }
    }

    fn open_file(&self, name: &str) -> File {
        File::open(self.point.join(name)).unwrap()
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        let unmounted = testbed::command_output(Command::new("umount").arg(&self.point));
        // A panic in a panic would hide the first one.
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

const TAG: ProjectTag = ProjectTag { project: 7, inherit: true };

#[test]
#[ignore = "needs root"]
fn a_project_is_written_read_inherited_and_removed() {
    let xfs = LoopMount::mount();
    fs::create_dir(xfs.point.join("dir")).unwrap();
    let dir = xfs.open_file("dir");
    assert_eq!(read_project_tag(dir.as_fd()).unwrap(), ProjectTag::default());
    write_project_tag(dir.as_fd(), TAG).unwrap();
    assert_eq!(read_project_tag(dir.as_fd()).unwrap(), TAG);
    fs::create_dir(xfs.point.join("dir/below")).unwrap();
    fs::write(xfs.point.join("dir/file"), "x").unwrap();
    assert_eq!(read_project_tag(xfs.open_file("dir/below").as_fd()).unwrap(), TAG);
    assert_eq!(
        read_project_tag(xfs.open_file("dir/file").as_fd()).unwrap(),
        ProjectTag { inherit: false, ..TAG }
    );
    write_project_tag(dir.as_fd(), ProjectTag::default()).unwrap();
    assert_eq!(read_project_tag(dir.as_fd()).unwrap(), ProjectTag::default());
}

#[test]
#[ignore = "needs root"]
fn a_tree_is_tagged_and_untagged_without_following_links() {
    let xfs = LoopMount::mount();
    let at = |name: &str| xfs.point.join(name);
    fs::create_dir_all(at("dir/a/b")).unwrap();
    for name in ["dir/a/file", "dir/a/b/file", "outside"] {
        fs::write(at(name), "x").unwrap();
    }
    std::os::unix::fs::symlink("../outside", at("dir/link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("dir/fifo"), rustix::fs::Mode::RUSR).unwrap();
    let of = |name: &str| read_project_tag(xfs.open_file(name).as_fd()).unwrap().project;
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), 0, 7).unwrap();
    assert_eq!((changed.changed, changed.special, changed.foreign), (4, 2, 0), "{changed:?}");
    assert_eq!((of("dir/a"), of("dir/a/b/file"), of("outside"), of("dir")), (7, 7, 0, 0));
    write_project_tag(xfs.open_file("dir/a/b").as_fd(), ProjectTag { project: 9, inherit: true }).unwrap();
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), 7, 0).unwrap();
    assert_eq!((changed.changed, changed.foreign), (2, 1), "{changed:?}");
    assert_eq!((of("dir/a"), of("dir/a/b"), of("dir/a/b/file")), (0, 9, 7));
}

#[test]
#[ignore = "needs root"]
fn a_tree_of_any_depth_needs_neither_descriptors_nor_stack() {
    const DEPTH: u64 = 20_000;
    let xfs = LoopMount::mount();
    fs::create_dir(xfs.point.join("dir")).unwrap();
    let mut at = OwnedFd::from(xfs.open_file("dir"));
    for _ in 0..DEPTH {
        rustix::fs::mkdirat(&at, "below", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        at = rustix::fs::openat(&at, "below", flags, rustix::fs::Mode::empty()).unwrap();
    }
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), 0, 7).unwrap();
    assert_eq!(changed.changed, DEPTH);
    assert_eq!(read_project_tag(at.as_fd()).unwrap(), TAG, "the tag of the deepest directory");
}

#[test]
#[ignore = "needs root"]
fn a_kernel_or_mount_without_quotas_is_an_open_error() {
    let xfs = LoopMount::mount();
    let error = ProjectQuota::open(&xfs.point).unwrap_err();
    let lacks = matches!(error, OpenError::NoKernelSupport { .. } | OpenError::AccountingOff { .. });
    assert!(lacks, "{error}");
}

#[test]
fn the_lock_is_exclusive_until_it_is_released() {
    let scratch = tempfile::tempdir().unwrap();
    let open = |path: &Path| LinuxKernel {
        root: File::open(path).unwrap().into(),
        device: None,
        kind: FileSystemKind::Xfs,
    };
    let (one, other) = (open(scratch.path()), open(scratch.path()));
    let is_free = || {
        let tried = rustix::fs::flock(&other.root, FlockOperation::NonBlockingLockExclusive);
        tried.is_ok_and(|()| rustix::fs::flock(&other.root, FlockOperation::Unlock).is_ok())
    };
    one.lock_allocation().unwrap();
    assert!(!is_free());
    one.unlock_allocation();
    assert!(is_free());
    one.lock_allocation().unwrap();
    drop(one);
    assert!(is_free(), "closing the descriptor releases the lock");
}
