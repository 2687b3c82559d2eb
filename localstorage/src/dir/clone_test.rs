use std::fs;
use std::os::unix::net::UnixListener;

use super::*;
use crate::FileMode;
use crate::testing::{DataCloner, SyscallAction, with_failpoint_hook};

/// A directory with an empty `source` and an empty `target`.
fn scratch() -> (tempfile::TempDir, [Dir; 2]) {
    let scratch = tempfile::tempdir().unwrap();
    let top = Dir::open(scratch.path()).unwrap();
    let dirs = ["source", "target"].map(|name| top.ensure_dir(name, FileMode::PRIVATE_DIR).unwrap());
    (scratch, dirs)
}

#[test]
fn links_beyond_the_memory_for_them_are_separate_files() {
    let (scratch, [source, target]) = scratch();
    let at = |tree: &str, name: &str| scratch.path().join(tree).join(name);
    let files = ["a", "b", "c"];
    for name in files {
        fs::write(at("source", name), name).unwrap();
        fs::hard_link(at("source", name), at("source", &format!("{name}-again"))).unwrap();
    }
    // Room for none.
    let none = LinkTable::new(0);
    let summary = source.clone_tree_with(&target, &DataCloner, &|| false, none).unwrap();
    assert_eq!((summary.entries, summary.separate_files), (7, 6));
    for name in files {
        assert_eq!(fs::read_to_string(at("target", name)).unwrap(), name);
        assert_eq!(fs::read_to_string(at("target", &format!("{name}-again"))).unwrap(), name);
    }
}

#[test]
fn a_link_too_deep_for_a_path_is_cloned() {
    let (_scratch, [source, target]) = scratch();
    let name = "d".repeat(255);
    let mut dir = source.try_clone().unwrap();
    for _ in 0..20 {
        dir = dir.ensure_dir(&name, FileMode::PRIVATE_DIR).unwrap();
    }
    dir.write("first", b"data", FileMode::PRIVATE_FILE).unwrap();
    let [first, again] = ["first", "again"].map(OsStr::new);
    calls::link(&dir, Path::new(first), entry_at(dir.as_fd(), again)).unwrap();
    let summary = source.clone_tree(&target, &DataCloner, &|| false).unwrap();
    assert_eq!(summary.separate_files, 2);
    let mut found = target;
    for _ in 0..20 {
        found = found.open_dir(&name).unwrap();
    }
    assert_eq!([first, again].map(|name| found.read(name).unwrap()), [b"data", b"data"]);
}

#[test]
fn a_file_that_becomes_a_socket_is_not_opened() {
    let (scratch, [source, target]) = scratch();
    let path = scratch.path().join("source/file");
    fs::write(&path, "data").unwrap();
    let mut is_listed = false;
    let replace = move |call: &'static str| {
        match call {
            "fstatat" => is_listed = true,
            // To open a socket fails, unless only its path is opened.
            "openat2" if std::mem::take(&mut is_listed) => {
                fs::remove_file(&path).unwrap();
                drop(UnixListener::bind(&path).unwrap());
            }
            _ => {}
        }
        SyscallAction::Proceed
    };
    let clone = || source.clone_tree(&target, &DataCloner, &|| false);
    let summary = with_failpoint_hook(replace, clone).unwrap();
    assert_eq!(summary.entries, 1, "the directory");
    assert!(target.is_empty().unwrap());
}

#[test]
fn the_error_of_a_deep_entry_shows_no_endless_path() {
    let (scratch, [source, target]) = scratch();
    let mut dir = source.try_clone().unwrap();
    for number in 0..20 {
        dir = dir.ensure_dir(format!("l{number}"), FileMode::PRIVATE_DIR).unwrap();
    }
    dir.write("file", b"data", FileMode::PRIVATE_FILE).unwrap();
    let fail = |call: &'static str| match call {
        "creat" => SyscallAction::Fail(Errno::IO.raw_os_error()),
        _ => SyscallAction::Proceed,
    };
    let clone = || source.clone_tree(&target, &DataCloner, &|| false);
    let text = with_failpoint_hook(fail, clone).unwrap_err().to_string();
    let shown = scratch.path().join("source/…/l12/l13/l14/l15/l16/l17/l18/l19/file");
    assert_eq!(text, format!("can't clone {}", shown.display()));
}
