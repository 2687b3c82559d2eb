//! The half of it that this machine's own kernel can do: projects without limits.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::*;
use crate::{OpenError, ProjectQuota, tree};

/// An XFS in a file, mounted until this is dropped.
struct Loop {
    point: PathBuf,
    _scratch: tempfile::TempDir,
}

impl Loop {
    fn mount() -> Self {
        let scratch = tempfile::tempdir().unwrap();
        let (image, point) = (scratch.path().join("image"), scratch.path().join("mounted"));
        File::create(&image).unwrap().set_len(320 << 20).unwrap();
        fs::create_dir(&point).unwrap();
        testbed::output(Command::new("mkfs.xfs").arg("-q").arg(&image)).unwrap();
        testbed::output(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point)).unwrap();
        Self { point, _scratch: scratch }
    }

    fn open(&self, name: &str) -> File {
        File::open(self.point.join(name)).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let unmounted = testbed::output(Command::new("umount").arg(&self.point));
        // A panic in a panic would hide the first one.
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

const TAG: Tag = Tag { project: 7, inherit: true };

#[test]
#[ignore = "needs root"]
fn a_project_is_written_read_passed_on_and_taken_back() {
    let xfs = Loop::mount();
    fs::create_dir(xfs.point.join("dir")).unwrap();
    let dir = xfs.open("dir");
    assert_eq!(tag(dir.as_fd()).unwrap(), Tag::default());
    set_tag(dir.as_fd(), TAG).unwrap();
    assert_eq!(tag(dir.as_fd()).unwrap(), TAG);
    fs::create_dir(xfs.point.join("dir/below")).unwrap();
    fs::write(xfs.point.join("dir/file"), "x").unwrap();
    assert_eq!(tag(xfs.open("dir/below").as_fd()).unwrap(), TAG);
    assert_eq!(tag(xfs.open("dir/file").as_fd()).unwrap(), Tag { inherit: false, ..TAG });
    set_tag(dir.as_fd(), Tag::default()).unwrap();
    assert_eq!(tag(dir.as_fd()).unwrap(), Tag::default());
}

#[test]
#[ignore = "needs root"]
fn a_tree_gets_a_project_and_loses_it_and_no_link_is_followed() {
    let xfs = Loop::mount();
    let at = |name: &str| xfs.point.join(name);
    fs::create_dir_all(at("dir/a/b")).unwrap();
    for name in ["dir/a/file", "dir/a/b/file", "outside"] {
        fs::write(at(name), "x").unwrap();
    }
    std::os::unix::fs::symlink("../outside", at("dir/link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, at("dir/fifo"), rustix::fs::Mode::RUSR).unwrap();
    let of = |name: &str| tag(xfs.open(name).as_fd()).unwrap().project;
    let changed = tree::change(xfs.open("dir").as_fd(), 0, 7).unwrap();
    assert_eq!((changed.changed, changed.special, changed.foreign), (4, 2, 0), "{changed:?}");
    assert_eq!((of("dir/a"), of("dir/a/b/file"), of("outside"), of("dir")), (7, 7, 0, 0));
    set_tag(xfs.open("dir/a/b").as_fd(), Tag { project: 9, inherit: true }).unwrap();
    let changed = tree::change(xfs.open("dir").as_fd(), 7, 0).unwrap();
    assert_eq!((changed.changed, changed.foreign), (2, 1), "{changed:?}");
    assert_eq!((of("dir/a"), of("dir/a/b"), of("dir/a/b/file")), (0, 9, 7));
}

#[test]
#[ignore = "needs root"]
fn a_tree_of_any_depth_takes_neither_descriptors_nor_stack() {
    const DEPTH: u64 = 20_000;
    let xfs = Loop::mount();
    fs::create_dir(xfs.point.join("dir")).unwrap();
    let mut at = OwnedFd::from(xfs.open("dir"));
    for _ in 0..DEPTH {
        rustix::fs::mkdirat(&at, "below", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        at = rustix::fs::openat(&at, "below", flags, rustix::fs::Mode::empty()).unwrap();
    }
    let changed = tree::change(xfs.open("dir").as_fd(), 0, 7).unwrap();
    assert_eq!(changed.changed, DEPTH);
    assert_eq!(tag(at.as_fd()).unwrap(), TAG, "the lowest one's");
}

#[test]
#[ignore = "needs root"]
fn a_kernel_or_a_mount_without_quotas_is_told() {
    let xfs = Loop::mount();
    let error = ProjectQuota::open(&xfs.point).unwrap_err();
    let lacks = matches!(error, OpenError::NoKernelSupport { .. } | OpenError::NotMounted { .. });
    assert!(lacks, "{error}");
}

#[test]
fn one_lock_excludes_another_until_it_is_let_go() {
    let scratch = tempfile::tempdir().unwrap();
    let open = |path: &Path| Linux { root: File::open(path).unwrap().into(), device: None, kind: Kind::Xfs };
    let (one, other) = (open(scratch.path()), open(scratch.path()));
    let is_free = || {
        let tried = rustix::fs::flock(&other.root, FlockOperation::NonBlockingLockExclusive);
        tried.is_ok_and(|()| rustix::fs::flock(&other.root, FlockOperation::Unlock).is_ok())
    };
    one.lock().unwrap();
    assert!(!is_free());
    one.unlock();
    assert!(is_free());
    one.lock().unwrap();
    drop(one);
    assert!(is_free(), "it goes with the descriptor");
}
