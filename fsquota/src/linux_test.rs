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
        // A child of another test has the files of this process until it executes its program.
        let unmounted = testbed::command_output(Command::new("umount").arg("--lazy").arg(&self.point));
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
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), &[0], 7).unwrap();
    assert_eq!((changed.changed, changed.special, changed.foreign), (4, 2, 0), "{changed:?}");
    assert_eq!((of("dir/a"), of("dir/a/b/file"), of("outside"), of("dir")), (7, 7, 0, 0));
    write_project_tag(xfs.open_file("dir/a/b").as_fd(), ProjectTag { project: 9, inherit: true }).unwrap();
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), &[7], 0).unwrap();
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
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), &[0], 7).unwrap();
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
#[ignore = "needs root"]
fn a_bind_mount_in_a_tree_is_a_border() {
    let xfs = LoopMount::mount();
    let at = |name: &str| xfs.point.join(name);
    for name in ["dir/below", "dir/mounted", "elsewhere/below"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    for name in ["dir/file", "elsewhere/file", "elsewhere/below/file"] {
        fs::write(at(name), "x").unwrap();
    }
    rustix::mount::mount_bind(at("elsewhere"), at("dir/mounted")).unwrap();
    rustix::mount::mount_bind(at("elsewhere/file"), at("dir/file")).unwrap();
    let changed = tree::retag_tree(xfs.open_file("dir").as_fd(), &[0], 7).unwrap();
    assert_eq!((changed.changed, changed.foreign), (1, 2), "{changed:?}");
    let before = SystemTime::now() + Duration::from_secs(1);
    let counted = tree::count_tree(xfs.open_file("dir").as_fd(), 0, before).unwrap();
    assert_eq!(counted, 1, "the directory itself");
    for mounted in ["dir/mounted", "dir/file"] {
        rustix::mount::unmount(at(mounted), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
    let of = |name: &str| read_project_tag(xfs.open_file(name).as_fd()).unwrap().project;
    assert_eq!((of("elsewhere"), of("elsewhere/file"), of("elsewhere/below/file")), (0, 0, 0));
    assert_eq!((of("dir/below"), of("dir/mounted"), of("dir/file")), (7, 0, 0));
}

#[test]
#[ignore = "needs root"]
fn a_tree_counts_each_inode_of_its_project_once() {
    let xfs = LoopMount::mount();
    let at = |name: &str| xfs.point.join(name);
    fs::create_dir(at("dir")).unwrap();
    write_project_tag(xfs.open_file("dir").as_fd(), TAG).unwrap();
    fs::create_dir_all(at("dir/a/b")).unwrap();
    for name in ["dir/one", "dir/a/b/two"] {
        fs::write(at(name), "x").unwrap();
    }
    fs::hard_link(at("dir/one"), at("dir/a/also-one")).unwrap();
    std::os::unix::fs::symlink("one", at("dir/link")).unwrap();
    let start = SystemTime::now();
    let count_before = |name: &str, before| tree::count_tree(xfs.open_file(name).as_fd(), 7, before).unwrap();
    let count = |name: &str| count_before(name, start + Duration::from_secs(1));
    assert_eq!(count("dir"), 5, "without the link, whose project can't be read");
    assert_eq!(count("dir/a"), 4);
    assert_eq!(count_before("dir", start - Duration::from_secs(60)), 0, "nothing is that old");
    let foreign = ProjectTag { project: 9, inherit: true };
    write_project_tag(xfs.open_file("dir/a").as_fd(), foreign).unwrap();
    std::os::unix::fs::symlink("one", at("dir/a/link")).unwrap();
    assert_eq!(count("dir"), 4);
}

#[test]
#[ignore = "needs root"]
fn a_mark_names_its_own_inode_and_is_worth_nothing_on_another() {
    let xfs = LoopMount::mount();
    for name in ["dir", "copy"] {
        fs::create_dir(xfs.point.join(name)).unwrap();
    }
    let (dir, copy) = (xfs.open_file("dir"), xfs.open_file("copy"));
    assert_eq!(read_owner_mark(dir.as_fd()).unwrap(), None);
    let mark = OwnerMark { project: 7, previous: Some(9) };
    write_owner_mark(dir.as_fd(), Some(mark)).unwrap();
    assert_eq!(read_owner_mark(dir.as_fd()).unwrap(), Some(mark));
    let mut value = [0; 256];
    let length = rustix::fs::fgetxattr(&dir, OWNER_ATTRIBUTE, &mut value).unwrap();
    for foreign in [&value[..length], &[b'x'; 1000]] {
        rustix::fs::fsetxattr(&copy, OWNER_ATTRIBUTE, foreign, XattrFlags::empty()).unwrap();
        assert_eq!(read_owner_mark(copy.as_fd()).unwrap(), None);
        assert_eq!(read_owner_attribute(copy.as_fd()).unwrap(), OwnerAttribute::Foreign);
    }
    write_owner_mark(copy.as_fd(), None).unwrap();
    write_owner_mark(copy.as_fd(), None).unwrap();
    write_owner_mark(copy.as_fd(), Some(mark)).unwrap();
    assert_eq!(read_owner_mark(copy.as_fd()).unwrap(), Some(mark));
}

/// Since Linux 6.17; before, the kernel tells no project of them.
#[test]
#[ignore = "needs root"]
fn special_files_have_a_project_where_the_kernel_tells_it() {
    let xfs = LoopMount::mount();
    fs::write(xfs.point.join("file"), "x").unwrap();
    std::os::unix::fs::symlink("file", xfs.point.join("link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, xfs.point.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
    let root = File::open(&xfs.point).unwrap();
    for name in [c"link", c"fifo"] {
        let Some(tag) = read_special_tag(root.as_fd(), name).unwrap() else { return };
        assert_eq!(tag, ProjectTag::default());
        write_special_tag(root.as_fd(), name, TAG).unwrap();
        assert_eq!(read_special_tag(root.as_fd(), name).unwrap().unwrap().project, TAG.project);
    }
    assert_eq!(read_project_tag(xfs.open_file("file").as_fd()).unwrap().project, 0, "no link is followed");
    assert_eq!(read_special_tag(root.as_fd(), c"missing").unwrap(), None);
}

/// As `open_file_system`, for a directory on any file system.
fn kernel_at(path: &Path) -> LinuxKernel {
    let root = File::open(path).unwrap().into();
    LinuxKernel::new(root, None, FileSystemKind::Xfs, path.to_owned())
}

fn try_lock(kernel: &LinuxKernel) -> Result<(), Error> {
    kernel.lock_allocation(Instant::now())
}

#[test]
fn the_lock_is_exclusive_until_it_is_released_or_its_holder_ends() {
    let scratch = tempfile::tempdir().unwrap();
    let (one, other) = (kernel_at(scratch.path()), kernel_at(scratch.path()));
    let is_free = || try_lock(&other).map(|()| other.unlock_allocation()).is_ok();
    try_lock(&one).unwrap();
    assert!(!is_free());
    one.unlock_allocation();
    assert!(is_free());
    try_lock(&one).unwrap();
    drop(one);
    assert!(is_free(), "closing the descriptor releases the lock");
}

#[test]
fn a_held_lock_is_an_error_at_the_deadline_that_names_the_file() {
    let scratch = tempfile::tempdir().unwrap();
    let (one, other) = (kernel_at(scratch.path()), kernel_at(scratch.path()));
    try_lock(&one).unwrap();
    let error = other.lock_allocation(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::LockTimeout { .. }) && error.is_retryable(), "{error:?}");
    let path = scratch.path().join(LOCK_FILE);
    assert!(error.to_string().contains(&format!("fuser -v {}", path.display())), "{error}");
}

#[test]
fn a_lock_that_others_can_open_or_that_is_no_file_is_rejected() {
    use std::os::unix::fs::PermissionsExt as _;
    let scratch = tempfile::tempdir().unwrap();
    let (kernel, path) = (kernel_at(scratch.path()), scratch.path().join(LOCK_FILE));
    try_lock(&kernel).unwrap();
    kernel.unlock_allocation();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let is_rejected = || matches!(try_lock(&kernel), Err(Error::UnsafeLock { .. }));
    assert!(is_rejected());
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert!(is_rejected() && !scratch.path().join("elsewhere").exists());
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(is_rejected());
    fs::remove_dir(&path).unwrap();
    try_lock(&kernel).unwrap();
}

#[test]
fn a_removed_lock_file_is_no_longer_a_lock() {
    let scratch = tempfile::tempdir().unwrap();
    let (one, other) = (kernel_at(scratch.path()), kernel_at(scratch.path()));
    try_lock(&one).unwrap();
    let lock = one.open_lock().unwrap();
    assert!(one.is_current(&lock).unwrap());
    fs::remove_file(scratch.path().join(LOCK_FILE)).unwrap();
    assert!(!one.is_current(&lock).unwrap(), "a process that locks it now tries again");
    try_lock(&other).unwrap();
    assert!(!one.is_current(&lock).unwrap());
}

#[test]
fn the_lock_file_alone_leaves_a_mount_point_empty() {
    let scratch = tempfile::tempdir().unwrap();
    let kernel = kernel_at(scratch.path());
    let dir = File::open(scratch.path()).unwrap();
    assert_eq!(kernel.lock_inode(dir.as_fd()), None);
    try_lock(&kernel).unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(scratch.path().join(LOCK_FILE)).unwrap());
    assert_eq!(kernel.lock_inode(dir.as_fd()), Some(inode));
    fs::create_dir(scratch.path().join("below")).unwrap();
    assert_eq!(kernel.lock_inode(File::open(scratch.path().join("below")).unwrap().as_fd()), None);
}
