//! What our placements promise.

use std::path::Path;

use nodekeel_localstorage::mem::{Fault, MemPlacement};
use nodekeel_localstorage::{Dir, Mode, OsPlacement, Placement, testing};

#[test]
fn a_directory_of_the_operating_system_conforms() {
    let temporary = tempfile::tempdir().expect("a directory");
    testing::conformance(&OsPlacement::new(Dir::open(temporary.path()).expect("it opens")));
    assert_eq!(std::fs::read_dir(temporary.path()).expect("it is there").count(), 0);
}

#[test]
fn memory_conforms() {
    testing::conformance(&MemPlacement::default());
}

/// Makes, replaces and removes.
fn work(placement: &dyn Placement) -> Result<(), nodekeel_localstorage::Error> {
    placement.create_dir(Path::new("a/b"), Mode::PRIVATE_DIR)?;
    placement.write(Path::new("a/b/file"), b"old", Mode::PRIVATE_FILE)?;
    placement.write(Path::new("a/b/file"), b"new", Mode::PRIVATE_FILE)?;
    placement.remove(Path::new("a/b"))?;
    placement.write(Path::new("a/last"), b"done", Mode::PRIVATE_FILE)
}

#[test]
fn a_failure_at_any_operation_leaves_what_can_be_done_again() {
    for fault in [Fault::Full, Fault::Device, Fault::CrashBefore, Fault::CrashAfter] {
        for nth in 1..=5 {
            let placement = MemPlacement::default();
            placement.fail(nth, fault);
            let error = work(&placement).expect_err("one operation fails");
            assert_eq!(error.is_full(), fault == Fault::Full);
            let is_down = matches!(fault, Fault::CrashBefore | Fault::CrashAfter);
            assert_eq!(placement.list(Path::new("")).is_err(), is_down, "{fault:?} at {nth}");
            assert!(!placement.restart(), "the failure has come");
            work(&placement).expect("nothing fails any more");
            assert_eq!(placement.read(Path::new("a/last")).expect("it was written"), b"done");
        }
    }
}

#[test]
fn a_failure_beyond_the_last_operation_never_comes() {
    let placement = MemPlacement::default();
    placement.fail(6, Fault::Device);
    work(&placement).expect("nothing fails");
    assert!(placement.restart());
}
