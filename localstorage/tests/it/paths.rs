//! No path leads out of a directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::{Dir, Error, Mode, Rename};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::bed::{raw_names, scratch};

/// All that takes a path, under a name.
fn operations(dir: &Dir, path: &Path) -> [(&'static str, Result<(), Error>); 11] {
    [
        ("read", dir.read(path).map(drop)),
        ("open_file", dir.open_file(path).map(drop)),
        ("write", dir.write(path, b"changed", Mode::PRIVATE_FILE)),
        ("open_dir", dir.open_dir(path).map(drop)),
        ("ensure_dir", dir.ensure_dir(path, Mode::new(0o711)).map(drop)),
        ("metadata", dir.metadata(path).map(drop)),
        ("rename from", dir.rename(path, dir, "renamed", Rename::Replace)),
        ("rename to", dir.rename("here", dir, path, Rename::Replace)),
        ("remove_file", dir.remove_file(path).map(drop)),
        ("remove_tree", dir.remove_tree(path).map(drop)),
        ("exists", dir.exists(path).map(drop)),
    ]
}

#[test]
fn hostile_paths_are_refused_before_the_kernel_sees_them() {
    let (temporary, outer) = scratch();
    let dir = outer.ensure_dir("in", Mode::PRIVATE_DIR).expect("it is made");
    dir.write("here", b"kept", Mode::PRIVATE_FILE).expect("it is written");
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
        for (operation, result) in operations(&dir, Path::new(path)) {
            let error = result.expect_err(operation);
            assert!(error.is_invalid_path(), "{operation} {path:?}: {error:?}");
        }
    }
    assert_eq!(raw_names(temporary.path()), ["in"]);
    assert_eq!(dir.read("here").expect("it is there"), b"kept");
}

#[test]
fn a_path_that_is_too_long_as_a_whole_is_refused() {
    let (_temporary, dir) = scratch();
    let error = dir.read(["x"; 2100].join("/")).expect_err("the kernel takes 4,096 bytes");
    assert!(error.is_invalid_path(), "{error:?}");
}

/// A tree `a/b/c/file` outside, and one inside with a link to the outer one in the place of one component.
fn with_link_at(depth: usize) -> (tempfile::TempDir, Dir, PathBuf) {
    let temporary = tempfile::tempdir().expect("a directory");
    let (outside, inside) = (temporary.path().join("outside"), temporary.path().join("inside"));
    fs::create_dir_all(outside.join("a/b/c")).expect("it is made");
    fs::write(outside.join("a/b/c/file"), "kept").expect("it is written");
    let components = ["a", "b", "c", "file"];
    let above: PathBuf = components[..depth].iter().collect();
    fs::create_dir_all(inside.join(&above)).expect("it is made");
    symlink(outside.join(&above).join(components[depth]), inside.join(&above).join(components[depth]))
        .expect("it is made");
    let dir = Dir::open(&inside).expect("it opens");
    (temporary, dir, outside)
}

#[test]
fn a_link_at_any_component_is_not_followed() {
    for depth in 0..3 {
        let (_temporary, dir, outside) = with_link_at(depth);
        dir.write("here", b"here", Mode::PRIVATE_FILE).expect("it is written");
        for path in ["a/b/c/file", "a/b/c/new"] {
            for (operation, result) in operations(&dir, Path::new(path)) {
                let error = result.expect_err(operation);
                assert!(error.is_symlink(), "{operation} {path} with a link at {depth}: {error:?}");
            }
        }
        assert_eq!(raw_names(&outside.join("a/b/c")), ["file"]);
        assert_eq!(fs::read(outside.join("a/b/c/file")).expect("it is there"), b"kept");
    }
}

type Removal = fn(&Dir) -> Result<bool, Error>;

#[test]
fn a_link_as_the_last_name_is_replaced_or_removed_itself() {
    let (_temporary, dir, outside) = with_link_at(3);
    let path = "a/b/c/file";
    for error in [dir.read(path).unwrap_err(), dir.open_dir(path).unwrap_err()] {
        assert!(error.is_symlink(), "{error:?}");
    }
    assert!(dir.exists(path).expect("it is there"));
    dir.write(path, b"new", Mode::PRIVATE_FILE).expect("it takes the link's place");
    assert_eq!(dir.read(path).expect("it is a file now"), b"new");
    let removals: [Removal; 2] = [|dir| dir.remove_file("link"), |dir| dir.remove_tree("link")];
    for remove in removals {
        symlink(outside.join(path), dir.path().join("link")).expect("it is made");
        assert!(remove(&dir).expect("it is removed"));
    }
    assert_eq!(fs::read(outside.join(path)).expect("it is there"), b"kept");
}

#[test]
fn magic_links_are_not_followed() {
    let proc = Dir::open("/proc/self").expect("it is mounted");
    for error in [
        proc.open_dir("root").unwrap_err(),
        proc.open_dir("cwd").unwrap_err(),
        proc.read("exe").unwrap_err(),
        proc.read("root/etc/passwd").unwrap_err(),
        proc.read("fd/0").unwrap_err(),
    ] {
        assert!(error.is_symlink(), "{error:?}");
    }
    assert!(!proc.read("stat").expect("it is a file that has no size").is_empty());
}

#[test]
fn what_is_no_file_is_not_read_and_holds_nobody_up() {
    let (temporary, dir) = scratch();
    rustix::fs::mknodat(CWD, temporary.path().join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
        .expect("it is made");
    dir.ensure_dir("dir", Mode::PRIVATE_DIR).expect("it is made");
    for name in ["pipe", "dir"] {
        let error = dir.read(name).unwrap_err();
        assert!(error.is_not_a_file(), "{error:?}");
    }
    assert!(Dir::open("/dev").expect("it is there").read("null").unwrap_err().is_not_a_file());
}

/// Ends other threads when this is dropped, also by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Somebody puts a link to the outside in a directory's place and back, all the time.
#[test]
fn a_directory_that_becomes_a_link_under_way_leads_nowhere() {
    let (temporary, dir) = scratch();
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("file"), "kept").expect("it is written");
    let (real, link) = (temporary.path().join("real"), temporary.path().join("link"));
    fs::create_dir(&real).expect("it is made");
    fs::write(real.join("file"), "inside").expect("it is written");
    symlink(outside.path(), &link).expect("it is made");
    let is_over = AtomicBool::new(false);
    let (mut through, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let _over = Over(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                renameat_with(CWD, &real, CWD, &link, RenameFlags::EXCHANGE).expect("they change places");
            }
        });
        while through.min(refused) < 100 {
            let results = [
                dir.read("real/file").map(|content| assert_ne!(content, b"kept")),
                dir.write("real/file", b"inside", Mode::PRIVATE_FILE),
                dir.ensure_dir("real/dir", Mode::PRIVATE_DIR).map(drop),
                dir.remove_tree("real/dir").map(drop),
            ];
            for result in results {
                match result {
                    Ok(()) => through += 1,
                    Err(error) => {
                        assert!(error.is_symlink(), "{error:?}");
                        refused += 1;
                    }
                }
            }
        }
    });
    assert_eq!(raw_names(outside.path()), ["file"]);
    assert_eq!(fs::read(outside.path().join("file")).expect("it is there"), b"kept");
}
