//! Removal of trees.

use std::fs;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use nodekeel_localstorage::{Dir, Mode};
use rustix::fs::{IFlags, Mode as RawMode, OFlags, ioctl_getflags, ioctl_setflags, mkdirat, openat};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::bed::{alone, raw_names, scratch, scratch_on_disk};

/// A directory so far below that no path reaches it, with a file in every tenth of those on the way.
fn deep(dir: &Dir, levels: usize) {
    let mut fd: OwnedFd = dir.as_fd().try_clone_to_owned().expect("a copy");
    for level in 0..levels {
        let name = format!("level-{level}-{}", "x".repeat(level % 200));
        mkdirat(&fd, &name, RawMode::RWXU).expect("it is made");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        fd = openat(&fd, &name, flags, RawMode::empty()).expect("it opens");
        if level % 10 == 0 {
            openat(&fd, "file", OFlags::CREATE | OFlags::WRONLY, RawMode::RWXU).expect("it is written");
        }
    }
}

#[test]
fn a_tree_of_2000_levels_takes_40_descriptors_and_no_stack() {
    alone("removal::a_tree_of_2000_levels_takes_40_descriptors_and_no_stack", || {
        let (temporary, dir) = scratch();
        deep(&dir.ensure_dir("deep", Mode::PRIVATE_DIR).expect("it is made"), 2000);
        let used = fs::read_dir("/proc/self/fd").expect("it is mounted").count() as u64;
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(used + 40), ..limit }).expect("it may be less");
        let small = std::thread::Builder::new().stack_size(128 << 10);
        let remover = small.spawn(move || dir.remove_tree("deep")).expect("a thread");
        assert!(remover.join().expect("no overflow").expect("it is removed"));
        setrlimit(Resource::Nofile, limit).expect("it may be as before");
        assert_eq!(raw_names(temporary.path()), [""; 0]);
    });
}

#[test]
fn a_wide_and_deep_tree_is_removed_whole() {
    let (temporary, dir) = scratch();
    let top = dir.ensure_dir("top", Mode::PRIVATE_DIR).expect("it is made");
    for branch in 0..5 {
        deep(&top.ensure_dir(format!("branch-{branch}"), Mode::PRIVATE_DIR).expect("it is made"), 70);
        for file in 0..100 {
            fs::write(top.path().join(format!("file-{branch}-{file}")), "").expect("it is written");
        }
    }
    let mut removed = 0;
    let mut count = |so_far: nodekeel_localstorage::Removed| {
        removed = so_far.entries;
        ControlFlow::Continue(())
    };
    assert!(dir.remove_tree_with("top", &mut count).expect("it is removed"));
    assert_eq!(removed, 1 + 5 * (1 + 70 + 7 + 100));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn a_removal_that_was_stopped_goes_on() {
    let (temporary, dir) = scratch();
    deep(&dir.ensure_dir("deep", Mode::PRIVATE_DIR).expect("it is made"), 100);
    let mut rounds = 0;
    loop {
        rounds += 1;
        // Five entries at a time.
        let mut stop = |removed: nodekeel_localstorage::Removed| match removed.entries {
            5 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        };
        match dir.remove_tree_with("deep", &mut stop) {
            Ok(was_there) => break assert!(was_there),
            Err(error) => assert!(error.is_stopped(), "{error:?}"),
        }
    }
    assert_eq!(rounds, 111_u32.div_ceil(5));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn links_are_removed_and_what_they_point_to_stays() {
    let (temporary, dir) = scratch();
    let (outside, _) = scratch();
    fs::create_dir(outside.path().join("dir")).expect("it is made");
    fs::write(outside.path().join("dir/file"), "kept").expect("it is written");
    let tree = dir.ensure_dir("tree/below", Mode::PRIVATE_DIR).expect("it is made");
    symlink(outside.path(), tree.path().join("to-a-directory")).expect("it is made");
    symlink(outside.path().join("dir/file"), tree.path().join("to-a-file")).expect("it is made");
    symlink("../..", tree.path().join("up")).expect("it is made");
    symlink("nowhere", tree.path().join("to-nothing")).expect("it is made");
    fs::hard_link(outside.path().join("dir/file"), tree.path().join("second-name")).expect("it is made");
    assert!(dir.remove_tree("tree").expect("it is removed"));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
    assert_eq!(fs::read(outside.path().join("dir/file")).expect("it is there"), b"kept");
}

#[test]
fn a_removal_says_whether_there_was_something() {
    let (_temporary, dir) = scratch();
    dir.write("file", b"", Mode::PRIVATE_FILE).expect("it is written");
    assert!(dir.remove_tree("file").expect("a file is a tree"));
    assert!(!dir.remove_tree("file").expect("it is gone"));
    assert!(!dir.remove_tree("file/below/nothing").expect("nothing is below"));
}

fn mark(path: &Path, marks: IFlags) {
    let file = fs::File::open(path).expect("it opens");
    let flags = ioctl_getflags(&file).expect("the file system has marks");
    ioctl_setflags(&file, flags | marks).expect("it may be marked");
}

#[test]
#[ignore = "needs root"]
fn marked_files_and_directories_are_removed() {
    let (temporary, dir) = scratch_on_disk();
    for (name, marks) in [("immutable", IFlags::IMMUTABLE), ("append", IFlags::APPEND)] {
        let below = dir.ensure_dir(format!("tree/{name}/below"), Mode::PRIVATE_DIR).expect("it is made");
        fs::write(below.path().join("file"), "").expect("it is written");
        for path in [below.path().join("file"), below.path().to_owned(), below.path().join("..")] {
            mark(&path, marks);
        }
        assert!(fs::remove_file(below.path().join("file")).is_err(), "the mark works here");
    }
    assert!(dir.remove_tree("tree").expect("it is removed"));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn the_mark_of_the_directory_that_a_tree_is_in_stays() {
    let (_temporary, dir) = scratch_on_disk();
    let top = dir.ensure_dir("top", Mode::PRIVATE_DIR).expect("it is made");
    top.ensure_dir("tree/below", Mode::PRIVATE_DIR).expect("it is made");
    mark(top.path(), IFlags::APPEND);
    let error = top.remove_tree("tree").expect_err("its owner wants nothing removed from it");
    assert!(error.is_denied(), "{error:?}");
    assert!(ioctl_getflags(&top).expect("it has marks").contains(IFlags::APPEND));
    ioctl_setflags(&top, IFlags::empty()).expect("it may be unmarked");
    assert!(top.remove_tree("tree").expect("it is removed"));
}

#[test]
#[ignore = "needs a plain user: root passes every check"]
fn directories_that_shut_out_their_owner_are_removed() {
    let (temporary, dir) = scratch();
    for mode in [0o000, 0o300, 0o500, 0o400] {
        let below = dir.ensure_dir(format!("tree/{mode}/below"), Mode::PRIVATE_DIR).expect("it is made");
        below.write("file", b"", Mode::new(0o000)).expect("it is written");
        for path in [below.path(), below.path().parent().expect("it has one")] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is its owner's");
        }
    }
    assert!(dir.remove_tree("tree").expect("it is removed"));
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn a_mount_point_stops_a_removal_and_is_named() {
    let (_temporary, dir) = scratch();
    let below = dir.ensure_dir("tree/below", Mode::PRIVATE_DIR).expect("it is made");
    let mounted = Mounted::tmpfs(below.path(), "64k");
    fs::write(below.path().join("file"), "kept").expect("it is written");
    for tree in ["tree", "tree/below"] {
        let error = dir.remove_tree(tree).unwrap_err();
        assert!(error.is_mount_point(), "{error:?}");
    }
    assert_eq!(fs::read(below.path().join("file")).expect("it is there"), b"kept");
    drop(mounted);
    assert!(dir.remove_tree("tree").expect("nothing is mounted any more"));
}

/// A file system in memory, unmounted when this is dropped.
pub(crate) struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    pub(crate) fn tmpfs(path: &'a Path, size: &str) -> Self {
        let data = std::ffi::CString::new(format!("size={size}")).expect("no NUL");
        rustix::mount::mount(
            "none",
            path,
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            Some(data.as_c_str()),
        )
        .expect("root may mount");
        Self(path)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).expect("it is unmounted");
    }
}

#[test]
#[ignore = "needs root"]
fn a_full_file_system_keeps_the_old_content() {
    let temporary = tempfile::tempdir().expect("a directory");
    let mounted = Mounted::tmpfs(temporary.path(), "256k");
    crate::matrix::stays_whole_when_full(&Dir::open(temporary.path()).expect("it opens"), 1 << 20);
    drop(mounted);
}
