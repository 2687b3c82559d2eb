//! A file has its old content or its new one.

use std::cell::RefCell;
use std::fs;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::{Dir, FileMode};

use crate::fixture::{in_child_process, raw_names, scratch_dir};

const STALE_NAME: &str = ".nodekeel-0123456789abcdef.new";

#[test]
fn a_longer_stale_temp_file_leaves_no_trace_in_the_content() {
    let (temporary, dir) = scratch_dir();
    fs::write(temporary.path().join(STALE_NAME), "a stale file that is longer than the content").unwrap();
    dir.write("file", b"short", FileMode::PRIVATE_FILE).unwrap();
    assert_eq!(dir.read("file").unwrap(), b"short");
    assert_eq!(dir.list().unwrap().len(), 1, "a listing omits temporary files");
    assert_eq!(dir.remove_stale_files().unwrap(), 1);
    assert_eq!(raw_names(temporary.path()), ["file"]);
    assert_eq!(dir.remove_stale_files().expect("no stale files remain"), 0);
}

#[test]
fn only_stale_temp_files_are_removed() {
    let (temporary, dir) = scratch_dir();
    let like = [".nodekeel-0123.new", ".nodekeel-0123456789abcdef.new~", "nodekeel-0123456789abcdef.new"];
    for name in like {
        fs::write(temporary.path().join(name), "").unwrap();
    }
    fs::create_dir(temporary.path().join(STALE_NAME)).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", temporary.path().join(".nodekeel-0000000000000000.new"))
        .unwrap();
    assert_eq!(dir.remove_stale_files().unwrap(), 0, "neither a directory nor a link is anybody's");
    assert_eq!(raw_names(temporary.path()).len(), 5);
}

/// Removes stale files right before one of the calls of a write. Returns how many were removed.
fn remove_stale_before(call: &'static str) -> usize {
    let (temporary, dir) = scratch_dir();
    dir.write("file", b"old", FileMode::PRIVATE_FILE).unwrap();
    let removed = Rc::new(RefCell::new(None));
    let (cleaner, first) = (dir.try_clone().unwrap(), Rc::clone(&removed));
    let hook = move |next: &'static str| {
        if next == call && first.borrow().is_none() {
            *first.borrow_mut() = Some(cleaner.remove_stale_files().unwrap());
        }
        SyscallAction::Proceed
    };
    with_failpoint_hook(hook, || dir.write("file", b"new", FileMode::PRIVATE_FILE))
        .expect("the write succeeds despite the removal of stale files");
    assert_eq!(dir.read("file").unwrap(), b"new");
    assert_eq!(raw_names(temporary.path()), ["file"]);
    removed.take().expect("the call was made")
}

#[test]
fn removing_stale_files_spares_files_being_written() {
    // Between its creation and its lock a temporary file counts as stale, and its writer creates another one.
    assert_eq!(remove_stale_before("flock"), 1);
    for call in ["creat", "fstat", "fchmod", "pwrite", "fsync", "renameat2"] {
        assert_eq!(remove_stale_before(call), 0, "{call}");
    }
}

#[test]
fn content_is_durable_before_the_rename_and_the_rename_before_the_return() {
    let (_temporary, dir) = scratch_dir();
    let calls = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&calls);
    let hook = move |call| {
        seen.borrow_mut().push(call);
        SyscallAction::Proceed
    };
    with_failpoint_hook(hook, || dir.write("file", b"new", FileMode::PRIVATE_FILE)).unwrap();
    assert_eq!(
        *calls.borrow(),
        ["creat", "flock", "fstat", "fchmod", "pwrite", "fsync", "renameat2", "fstatfs", "fsync"]
    );
}

#[test]
fn concurrent_writers_never_collide_and_readers_see_complete_contents() {
    let (temporary, dir) = scratch_dir();
    dir.write("file", &[0; 100], FileMode::PRIVATE_FILE).unwrap();
    let is_stopped = AtomicBool::new(false);
    let read_uniform = |dir: &Dir| {
        let content = dir.read("file").expect("the file always exists");
        assert!(content.len() >= 100 && content.iter().all(|byte| *byte == content[0]), "{content:?}");
        content[0]
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..=8)
            .map(|writer: u8| {
                let dir = dir.try_clone().unwrap();
                scope.spawn(move || {
                    for round in 0..25 {
                        let content = vec![writer; 100 + usize::from(writer) * 1000 + round];
                        dir.write("file", &content, FileMode::PRIVATE_FILE).unwrap();
                    }
                })
            })
            .collect();
        let others = [
            scope.spawn(|| {
                while !is_stopped.load(Ordering::Relaxed) {
                    read_uniform(&dir);
                }
            }),
            scope.spawn(|| {
                while !is_stopped.load(Ordering::Relaxed) {
                    dir.remove_stale_files().unwrap();
                }
            }),
        ];
        for writer in writers {
            writer.join().expect("no writer fails");
        }
        is_stopped.store(true, Ordering::Relaxed);
        for other in others {
            other.join().expect("neither reader nor cleaner fails");
        }
    });
    assert!((1..=8).contains(&read_uniform(&dir)));
    assert_eq!(raw_names(temporary.path()), ["file"]);
}

#[test]
fn modes_are_exact_under_any_umask() {
    in_child_process(modes_are_exact_under_any_umask, || {
        let (_temporary, dir) = scratch_dir();
        for umask in [0o000, 0o022, 0o077, 0o777] {
            rustix::process::umask(umask.into());
            for bits in [0o600, 0o640, 0o644, 0o777, 0o400, 0o000] {
                let mode = FileMode::new(bits);
                dir.write("file", b"", mode).unwrap();
                assert_eq!(dir.metadata("file").unwrap().mode, mode, "umask {umask:o}");
            }
            for bits in [0o700, 0o755, 0o777, 0o1777, 0o2770] {
                let mode = FileMode::new(bits);
                dir.remove_tree("a").unwrap();
                for path in ["a/b/c", "a/b/c", "a"] {
                    dir.ensure_dir(path, mode).unwrap();
                    assert_eq!(dir.metadata(path).unwrap().mode, mode, "umask {umask:o}");
                }
                assert_eq!(dir.metadata("a/b").unwrap().mode, mode, "umask {umask:o}");
            }
        }
    });
}

#[test]
fn ensure_dir_sets_the_mode_of_an_existing_directory_and_not_of_its_parents() {
    let (_temporary, dir) = scratch_dir();
    dir.ensure_dir("a/b", FileMode::new(0o755)).unwrap();
    dir.ensure_dir("a/b", FileMode::new(0o700)).unwrap();
    let mode = |path: &str| dir.metadata(path).unwrap().mode;
    assert_eq!((mode("a"), mode("a/b")), (FileMode::new(0o755), FileMode::new(0o700)));
}

#[test]
fn a_read_limit_is_inclusive() {
    let (_temporary, dir) = scratch_dir();
    dir.write("file", &[7; 1000], FileMode::PRIVATE_FILE).unwrap();
    assert_eq!(dir.read_at_most("file", 1000).expect("the file is within the limit").len(), 1000);
    assert!(dir.read_at_most("file", 999).unwrap_err().is_too_large());
    assert!(dir.read_at_most("file", 0).unwrap_err().is_too_large());
    // Its reported size is 0.
    let proc = Dir::open("/proc/self").unwrap();
    assert!(proc.read_at_most("status", 10).unwrap_err().is_too_large());
}
