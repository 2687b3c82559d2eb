//! No path leads out of a directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::{Dir, Error, FileMode, RenameMode};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::fixture::{raw_names, scratch_dir};

/// All operations that take a path, with their names.
fn path_operations(dir: &Dir, path: &Path) -> [(&'static str, Result<(), Error>); 12] {
    [
        ("read", dir.read(path).map(drop)),
        ("open_file", dir.open_file(path).map(drop)),
        ("open_file_to_write", dir.open_file_to_write(path).map(drop)),
        ("write", dir.write(path, b"changed", FileMode::PRIVATE_FILE)),
        ("open_dir", dir.open_dir(path).map(drop)),
        ("ensure_dir", dir.ensure_dir(path, FileMode::new(0o711)).map(drop)),
        ("metadata", dir.metadata(path).map(drop)),
        ("rename from", dir.rename(path, dir, "renamed", RenameMode::Replace)),
        ("rename to", dir.rename("here", dir, path, RenameMode::Replace)),
        ("remove_file", dir.remove_file(path).map(drop)),
        ("remove_tree", dir.remove_tree(path).map(drop)),
        ("exists", dir.exists(path).map(drop)),
    ]
}

#[test]
fn hostile_paths_are_rejected_before_the_kernel_sees_them() {
    let (temporary, outer) = scratch_dir();
    let dir = outer.ensure_dir("in", FileMode::PRIVATE_DIR).unwrap();
    dir.write("here", b"kept", FileMode::PRIVATE_FILE).unwrap();
    let (name, path) = ("x".repeat(4096), "x/".repeat(2048));
    let hostile = [
        "..",
        "../in",
        "../out",
        "a/../../out",
        "/",
        "/etc/passwd",
        "//",
        "a//b",
        "a/",
        ".",
        "./here",
        "here\0",
        "\0",
        &name,
        &path,
        "here/..",
        ".nodekeel-0123456789abcdef.new",
    ];
    for path in hostile {
        for (operation, result) in path_operations(&dir, Path::new(path)) {
            let error = result.expect_err(operation);
            assert!(error.is_invalid_path(), "{operation} {path:?}: {error:?}");
        }
    }
    assert_eq!(raw_names(temporary.path()), ["in"]);
    assert_eq!(dir.read("here").unwrap(), b"kept");
}

#[test]
fn a_path_longer_than_path_max_is_rejected() {
    let (_temporary, dir) = scratch_dir();
    let error = dir.read(["x"; 2100].join("/")).expect_err("the kernel takes 4,096 bytes");
    assert!(error.is_invalid_path(), "{error:?}");
}

/// Creates a tree `a/b/c/file` outside, and one inside with a symlink to the outer one as one component.
fn tree_with_symlink_at(depth: usize) -> (tempfile::TempDir, Dir, PathBuf) {
    let temporary = tempfile::tempdir().unwrap();
    let (outside, inside) = (temporary.path().join("outside"), temporary.path().join("inside"));
    fs::create_dir_all(outside.join("a/b/c")).unwrap();
    fs::write(outside.join("a/b/c/file"), "kept").unwrap();
    let components = ["a", "b", "c", "file"];
    let above: PathBuf = components[..depth].iter().collect();
    fs::create_dir_all(inside.join(&above)).unwrap();
    symlink(outside.join(&above).join(components[depth]), inside.join(&above).join(components[depth]))
        .unwrap();
    let dir = Dir::open(&inside).unwrap();
    (temporary, dir, outside)
}

#[test]
fn a_symlink_at_any_component_is_not_followed() {
    for depth in 0..3 {
        let (_temporary, dir, outside) = tree_with_symlink_at(depth);
        dir.write("here", b"here", FileMode::PRIVATE_FILE).unwrap();
        for path in ["a/b/c/file", "a/b/c/new"] {
            for (operation, result) in path_operations(&dir, Path::new(path)) {
                let error = result.expect_err(operation);
                assert!(error.is_symlink(), "{operation} {path} with a link at {depth}: {error:?}");
            }
        }
        assert_eq!(raw_names(&outside.join("a/b/c")), ["file"]);
        assert_eq!(fs::read(outside.join("a/b/c/file")).unwrap(), b"kept");
    }
}

type RemovalFn = fn(&Dir) -> Result<bool, Error>;

#[test]
fn a_symlink_as_the_last_component_is_itself_replaced_or_removed() {
    let (_temporary, dir, outside) = tree_with_symlink_at(3);
    let path = "a/b/c/file";
    for error in [dir.read(path).unwrap_err(), dir.open_dir(path).unwrap_err()] {
        assert!(error.is_symlink(), "{error:?}");
    }
    assert!(dir.exists(path).unwrap());
    dir.write(path, b"new", FileMode::PRIVATE_FILE).expect("the write replaces the link");
    assert_eq!(dir.read(path).expect("the path is a regular file"), b"new");
    let removals: [RemovalFn; 2] = [|dir| dir.remove_file("link"), |dir| dir.remove_tree("link")];
    for remove in removals {
        symlink(outside.join(path), dir.path().join("link")).unwrap();
        assert!(remove(&dir).unwrap());
    }
    assert_eq!(fs::read(outside.join(path)).unwrap(), b"kept");
}

#[test]
fn magic_links_are_not_followed() {
    let proc = Dir::open("/proc/self").unwrap();
    for error in [
        proc.open_dir("root").unwrap_err(),
        proc.open_dir("cwd").unwrap_err(),
        proc.read("exe").unwrap_err(),
        proc.read("root/etc/passwd").unwrap_err(),
        proc.read("fd/0").unwrap_err(),
    ] {
        assert!(error.is_symlink(), "{error:?}");
    }
    assert!(!proc.read("stat").expect("the file is readable despite its size of 0").is_empty());
}

#[test]
fn a_pipe_or_directory_is_not_read_and_does_not_block() {
    let (temporary, dir) = scratch_dir();
    rustix::fs::mknodat(CWD, temporary.path().join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .unwrap();
    dir.ensure_dir("dir", FileMode::PRIVATE_DIR).unwrap();
    for name in ["pipe", "dir"] {
        let error = dir.read(name).unwrap_err();
        assert!(error.is_not_a_file(), "{error:?}");
    }
    assert!(Dir::open("/dev").unwrap().read("null").unwrap_err().is_not_a_file());
}

/// Stops other threads on drop, also on panic.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Another thread exchanges a directory and a symlink to the outside all the time.
#[test]
fn a_directory_swapped_for_a_symlink_never_leads_outside() {
    let (temporary, dir) = scratch_dir();
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("file"), "kept").unwrap();
    let (real, link) = (temporary.path().join("real"), temporary.path().join("link"));
    fs::create_dir(&real).unwrap();
    fs::write(real.join("file"), "inside").unwrap();
    symlink(outside.path(), &link).unwrap();
    let is_stopped = AtomicBool::new(false);
    let (mut through, mut rejected) = (0, 0);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_stopped);
        scope.spawn(|| {
            while !is_stopped.load(Ordering::Relaxed) {
                renameat_with(CWD, &real, CWD, &link, RenameFlags::EXCHANGE)
                    .expect("the entries are exchanged");
            }
        });
        while through.min(rejected) < 100 {
            let results = [
                dir.read("real/file").map(|content| assert_ne!(content, b"kept")),
                dir.write("real/file", b"inside", FileMode::PRIVATE_FILE),
                dir.ensure_dir("real/dir", FileMode::PRIVATE_DIR).map(drop),
                dir.remove_tree("real/dir").map(drop),
            ];
            for result in results {
                match result {
                    Ok(()) => through += 1,
                    Err(error) => {
                        assert!(error.is_symlink(), "{error:?}");
                        rejected += 1;
                    }
                }
            }
        }
    });
    assert_eq!(raw_names(outside.path()), ["file"]);
    assert_eq!(fs::read(outside.path().join("file")).unwrap(), b"kept");
}
