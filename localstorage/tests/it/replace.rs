//! A file has its old content or its new one.

use std::cell::RefCell;
use std::fs;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::testing::{Verdict, with_hook};
use nodekeel_localstorage::{Dir, Mode};

use crate::bed::{alone, raw_names, scratch};

const STALE: &str = ".nodekeel-0123456789abcdef.new";

#[test]
fn a_longer_stale_sibling_leaves_no_trace_in_the_content() {
    let (temporary, dir) = scratch();
    fs::write(temporary.path().join(STALE), "a stale sibling that is longer than the content")
        .expect("written");
    dir.write("file", b"short", Mode::PRIVATE_FILE).expect("it is written");
    assert_eq!(dir.read("file").expect("it is there"), b"short");
    assert_eq!(dir.list().expect("it is listed").len(), 1, "a listing has no siblings");
    assert_eq!(dir.sweep().expect("it is swept"), 1);
    assert_eq!(raw_names(temporary.path()), ["file"]);
    assert_eq!(dir.sweep().expect("nothing is left"), 0);
}

#[test]
fn only_stale_siblings_are_swept() {
    let (temporary, dir) = scratch();
    let like = [".nodekeel-0123.new", ".nodekeel-0123456789abcdef.new~", "nodekeel-0123456789abcdef.new"];
    for name in like {
        fs::write(temporary.path().join(name), "").expect("it is written");
    }
    fs::create_dir(temporary.path().join(STALE)).expect("it is made");
    std::os::unix::fs::symlink("/etc/passwd", temporary.path().join(".nodekeel-0000000000000000.new"))
        .expect("made");
    assert_eq!(dir.sweep().expect("it is swept"), 0, "neither a directory nor a link is anybody's");
    assert_eq!(raw_names(temporary.path()).len(), 5);
}

/// What a sweep removes when it comes right before one of the calls of a write.
fn sweep_before(call: &'static str) -> usize {
    let (temporary, dir) = scratch();
    dir.write("file", b"old", Mode::PRIVATE_FILE).expect("it is written");
    let swept = Rc::new(RefCell::new(None));
    let (sweeper, first) = (dir.try_clone().expect("a copy"), Rc::clone(&swept));
    let hook = move |next: &'static str| {
        if next == call && first.borrow().is_none() {
            *first.borrow_mut() = Some(sweeper.sweep().expect("it sweeps"));
        }
        Verdict::Go
    };
    with_hook(hook, || dir.write("file", b"new", Mode::PRIVATE_FILE))
        .expect("it is written whatever is swept");
    assert_eq!(dir.read("file").expect("it is there"), b"new");
    assert_eq!(raw_names(temporary.path()), ["file"]);
    swept.take().expect("the call was made")
}

#[test]
fn a_sweep_spares_what_is_being_written() {
    // Between its creation and its lock a sibling is nobody's, and its writer takes another one.
    assert_eq!(sweep_before("flock"), 1);
    for call in ["creat", "fstat", "fchmod", "pwrite", "fsync", "renameat2"] {
        assert_eq!(sweep_before(call), 0, "{call}");
    }
}

#[test]
fn a_content_is_durable_before_it_has_the_name_and_the_name_before_the_return() {
    let (_temporary, dir) = scratch();
    let calls = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&calls);
    let hook = move |call| {
        seen.borrow_mut().push(call);
        Verdict::Go
    };
    with_hook(hook, || dir.write("file", b"new", Mode::PRIVATE_FILE)).expect("it is written");
    assert_eq!(
        *calls.borrow(),
        ["creat", "flock", "fstat", "fchmod", "pwrite", "fsync", "renameat2", "fsync"]
    );
}

#[test]
fn writers_of_one_file_never_collide_and_readers_see_whole_contents() {
    let (temporary, dir) = scratch();
    dir.write("file", &[0; 100], Mode::PRIVATE_FILE).expect("it is written");
    let is_over = AtomicBool::new(false);
    let whole = |dir: &Dir| {
        let content = dir.read("file").expect("it is always there");
        assert!(content.len() >= 100 && content.iter().all(|byte| *byte == content[0]), "{content:?}");
        content[0]
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (1..=8)
            .map(|writer: u8| {
                let dir = dir.try_clone().expect("a copy");
                scope.spawn(move || {
                    for round in 0..25 {
                        let content = vec![writer; 100 + usize::from(writer) * 1000 + round];
                        dir.write("file", &content, Mode::PRIVATE_FILE).expect("it is written");
                    }
                })
            })
            .collect();
        let others = [
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    whole(&dir);
                }
            }),
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    dir.sweep().expect("it sweeps");
                }
            }),
        ];
        for writer in writers {
            writer.join().expect("no writer fails");
        }
        is_over.store(true, Ordering::Relaxed);
        for other in others {
            other.join().expect("neither reader nor sweeper fails");
        }
    });
    assert!((1..=8).contains(&whole(&dir)));
    assert_eq!(raw_names(temporary.path()), ["file"]);
}

#[test]
fn modes_are_exact_under_any_umask() {
    alone("replace::modes_are_exact_under_any_umask", || {
        let (_temporary, dir) = scratch();
        for umask in [0o000, 0o022, 0o077, 0o777] {
            rustix::process::umask(umask.into());
            for bits in [0o600, 0o640, 0o644, 0o777, 0o400, 0o000] {
                let mode = Mode::new(bits);
                dir.write("file", b"", mode).expect("it is written");
                assert_eq!(dir.metadata("file").expect("it is there").mode, mode, "umask {umask:o}");
            }
            for bits in [0o700, 0o755, 0o777, 0o1777, 0o2770] {
                let mode = Mode::new(bits);
                dir.remove_tree("a").expect("it is removed");
                for path in ["a/b/c", "a/b/c", "a"] {
                    dir.ensure_dir(path, mode).expect("it is made");
                    assert_eq!(dir.metadata(path).expect("it is there").mode, mode, "umask {umask:o}");
                }
                assert_eq!(dir.metadata("a/b").expect("it is there").mode, mode, "umask {umask:o}");
            }
        }
    });
}

#[test]
fn an_existing_directory_gets_the_mode_and_those_above_keep_theirs() {
    let (_temporary, dir) = scratch();
    dir.ensure_dir("a/b", Mode::new(0o755)).expect("it is made");
    dir.ensure_dir("a/b", Mode::new(0o700)).expect("it is there");
    let mode = |path: &str| dir.metadata(path).expect("it is there").mode;
    assert_eq!((mode("a"), mode("a/b")), (Mode::new(0o755), Mode::new(0o700)));
}

#[test]
fn a_limit_is_the_last_size_that_is_read() {
    let (_temporary, dir) = scratch();
    dir.write("file", &[7; 1000], Mode::PRIVATE_FILE).expect("it is written");
    assert_eq!(dir.read_at_most("file", 1000).expect("it is as large as it may be").len(), 1000);
    assert!(dir.read_at_most("file", 999).unwrap_err().is_too_large());
    assert!(dir.read_at_most("file", 0).unwrap_err().is_too_large());
    // Its size is none until it is read.
    let proc = Dir::open("/proc/self").expect("it is mounted");
    assert!(proc.read_at_most("status", 10).unwrap_err().is_too_large());
}
