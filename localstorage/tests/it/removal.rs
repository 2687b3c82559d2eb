//! Removal of trees.

use std::fs;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use nodekeel_localstorage::{Dir, FileMode};
use rustix::fs::{IFlags, Mode as RawMode, OFlags, ioctl_getflags, ioctl_setflags, mkdirat, openat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::fixture::{in_child_process, raw_names, scratch_dir, scratch_dir_on_disk};

/// Creates directories so deep that their path exceeds PATH_MAX, with a file in every tenth level.
fn create_deep_tree(dir: &Dir, levels: usize) {
    let mut fd: OwnedFd = dir.as_fd().try_clone_to_owned().unwrap();
    for level in 0..levels {
        let name = format!("level-{level}-{}", "x".repeat(level % 200));
        mkdirat(&fd, &name, RawMode::RWXU).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        fd = openat(&fd, &name, flags, RawMode::empty()).unwrap();
        if level % 10 == 0 {
            openat(&fd, "file", OFlags::CREATE | OFlags::WRONLY, RawMode::RWXU).unwrap();
        }
    }
}

#[test]
fn a_tree_of_2000_levels_takes_40_descriptors_and_no_stack() {
    in_child_process(a_tree_of_2000_levels_takes_40_descriptors_and_no_stack, || {
        let (temporary, dir) = scratch_dir();
        create_deep_tree(&dir.ensure_dir("deep", FileMode::PRIVATE_DIR).unwrap(), 2000);
        let used = fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(used + 40), ..limit })
            .expect("the limit is lowered");
        let small = std::thread::Builder::new().stack_size(128 << 10);
        let remover = small.spawn(move || dir.remove_tree("deep")).expect("a thread");
        assert!(remover.join().expect("the stack does not overflow").unwrap());
        setrlimit(Resource::Nofile, limit).expect("the limit is restored");
        assert_eq!(raw_names(temporary.path()), [""; 0]);
    });
}

#[test]
fn a_wide_and_deep_tree_is_removed_completely() {
    let (temporary, dir) = scratch_dir();
    let top = dir.ensure_dir("top", FileMode::PRIVATE_DIR).unwrap();
    for branch in 0..5 {
        create_deep_tree(&top.ensure_dir(format!("branch-{branch}"), FileMode::PRIVATE_DIR).unwrap(), 70);
        for file in 0..100 {
            fs::write(top.path().join(format!("file-{branch}-{file}")), "").unwrap();
        }
    }
    let mut removed = 0;
    let mut count = |so_far: nodekeel_localstorage::RemovalProgress| {
        removed = so_far.entries;
        ControlFlow::Continue(())
    };
    assert!(dir.remove_tree_with("top", &mut count).unwrap());
    assert_eq!(removed, 1 + 5 * (1 + 70 + 7 + 100));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn a_stopped_removal_resumes() {
    let (temporary, dir) = scratch_dir();
    create_deep_tree(&dir.ensure_dir("deep", FileMode::PRIVATE_DIR).unwrap(), 100);
    let mut calls = 0;
    loop {
        calls += 1;
        // Five entries per call.
        let mut stop = |removed: nodekeel_localstorage::RemovalProgress| match removed.entries {
            5 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        match dir.remove_tree_with("deep", &mut stop) {
            Ok(was_there) => break assert!(was_there),
            Err(error) => assert!(error.is_stopped(), "{error:?}"),
        }
    }
    assert_eq!(calls, 111_u32.div_ceil(5));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn links_are_removed_and_their_targets_stay() {
    let (temporary, dir) = scratch_dir();
    let (outside, _) = scratch_dir();
    fs::create_dir(outside.path().join("dir")).unwrap();
    fs::write(outside.path().join("dir/file"), "kept").unwrap();
    let tree = dir.ensure_dir("tree/below", FileMode::PRIVATE_DIR).unwrap();
    symlink(outside.path(), tree.path().join("to-a-directory")).unwrap();
    symlink(outside.path().join("dir/file"), tree.path().join("to-a-file")).unwrap();
    symlink("../..", tree.path().join("up")).unwrap();
    symlink("nowhere", tree.path().join("to-nothing")).unwrap();
    fs::hard_link(outside.path().join("dir/file"), tree.path().join("second-name")).unwrap();
    assert!(dir.remove_tree("tree").unwrap());
    assert_eq!(raw_names(temporary.path()), [""; 0]);
    assert_eq!(fs::read(outside.path().join("dir/file")).unwrap(), b"kept");
}

#[test]
fn a_removal_reports_whether_anything_existed() {
    let (_temporary, dir) = scratch_dir();
    dir.write("file", b"", FileMode::PRIVATE_FILE).unwrap();
    assert!(dir.remove_tree("file").expect("a file is removed as a tree"));
    assert!(!dir.remove_tree("file").expect("the removal of a missing entry succeeds"));
    assert!(!dir.remove_tree("file/below/nothing").expect("a missing path is not an error"));
}

fn set_inode_flags(path: &Path, marks: IFlags) {
    let file = fs::File::open(path).unwrap();
    let flags = ioctl_getflags(&file).expect("the file system supports inode flags");
    ioctl_setflags(&file, flags | marks).expect("the flags are set");
}

#[test]
#[ignore = "needs root"]
fn immutable_and_append_only_entries_are_removed() {
    let (temporary, dir) = scratch_dir_on_disk();
    for (name, marks) in [("immutable", IFlags::IMMUTABLE), ("append", IFlags::APPEND)] {
        let below = dir.ensure_dir(format!("tree/{name}/below"), FileMode::PRIVATE_DIR).unwrap();
        fs::write(below.path().join("file"), "").unwrap();
        for path in [below.path().join("file"), below.path().to_owned(), below.path().join("..")] {
            set_inode_flags(&path, marks);
        }
        assert!(fs::remove_file(below.path().join("file")).is_err(), "the file system enforces the flag");
    }
    assert!(dir.remove_tree("tree").unwrap());
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn the_inode_flags_of_the_parent_directory_stay() {
    let (_temporary, dir) = scratch_dir_on_disk();
    let top = dir.ensure_dir("top", FileMode::PRIVATE_DIR).unwrap();
    top.ensure_dir("tree/below", FileMode::PRIVATE_DIR).unwrap();
    set_inode_flags(top.path(), IFlags::APPEND);
    let error = top.remove_tree("tree").expect_err("the directory is append-only");
    assert!(error.is_denied(), "{error:?}");
    assert!(ioctl_getflags(&top).expect("the directory has inode flags").contains(IFlags::APPEND));
    ioctl_setflags(&top, IFlags::empty()).expect("the flags are cleared");
    assert!(top.remove_tree("tree").unwrap());
}

#[test]
#[ignore = "needs a plain user: root passes every check"]
fn directories_without_owner_permissions_are_removed() {
    let (temporary, dir) = scratch_dir();
    for mode in [0o000, 0o300, 0o500, 0o400] {
        let below = dir.ensure_dir(format!("tree/{mode}/below"), FileMode::PRIVATE_DIR).unwrap();
        below.write("file", b"", FileMode::new(0o000)).unwrap();
        for path in [below.path(), below.path().parent().expect("the path has a parent")] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the owner changes the mode");
        }
    }
    assert!(dir.remove_tree("tree").unwrap());
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn a_mount_point_stops_a_removal_and_is_reported() {
    let (_temporary, dir) = scratch_dir();
    let below = dir.ensure_dir("tree/below", FileMode::PRIVATE_DIR).unwrap();
    let mounted = TmpfsMount::mount_tmpfs(below.path(), "64k");
    fs::write(below.path().join("file"), "kept").unwrap();
    for tree in ["tree", "tree/below"] {
        let error = dir.remove_tree(tree).unwrap_err();
        assert!(error.is_mount_point(), "{error:?}");
    }
    assert_eq!(fs::read(below.path().join("file")).unwrap(), b"kept");
    drop(mounted);
    assert!(dir.remove_tree("tree").expect("the tree has no mount point"));
}

/// A tmpfs mount, unmounted on drop.
pub(crate) struct TmpfsMount<'a>(&'a Path);

impl<'a> TmpfsMount<'a> {
    pub(crate) fn mount_tmpfs(path: &'a Path, size: &str) -> Self {
        let data = std::ffi::CString::new(format!("size={size}")).expect("no NUL");
        rustix::mount::mount(
            "none",
            path,
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            Some(data.as_c_str()),
        )
        .expect("root can mount");
        Self(path)
    }
}

impl Drop for TmpfsMount<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

#[test]
#[ignore = "needs root"]
fn a_full_file_system_keeps_the_old_content() {
    let temporary = tempfile::tempdir().unwrap();
    let mounted = TmpfsMount::mount_tmpfs(temporary.path(), "256k");
    crate::matrix::check_full_file_system(&Dir::open(temporary.path()).unwrap(), 1 << 20);
    drop(mounted);
}
