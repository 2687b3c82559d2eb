//! The file stores of this crate keep their contract.

use std::path::Path;

use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
use nodekeel_localstorage::{Dir, FileMode, FileStore, OsFileStore, testing};

#[test]
fn the_os_file_store_conforms() {
    let temporary = tempfile::tempdir().unwrap();
    testing::file_store_conformance(&OsFileStore::new(Dir::open(temporary.path()).unwrap()));
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn the_memory_file_store_conforms() {
    testing::file_store_conformance(&MemFileStore::default());
}

/// Creates, replaces and removes entries.
fn write_and_remove(store: &dyn FileStore) -> Result<(), nodekeel_localstorage::Error> {
    store.create_dir(Path::new("a/b"), FileMode::PRIVATE_DIR)?;
    store.write(Path::new("a/b/file"), b"old", FileMode::PRIVATE_FILE)?;
    store.write(Path::new("a/b/file"), b"new", FileMode::PRIVATE_FILE)?;
    store.remove(Path::new("a/b"))?;
    store.write(Path::new("a/last"), b"done", FileMode::PRIVATE_FILE)
}

#[test]
fn a_failure_at_any_operation_can_be_retried() {
    for fault in [
        InjectedFault::NoSpace,
        InjectedFault::IoError,
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
    ] {
        for nth in 1..=5 {
            let store = MemFileStore::default();
            store.fail_nth(nth, fault);
            let error = write_and_remove(&store).expect_err("one operation fails");
            assert_eq!(error.is_full(), fault == InjectedFault::NoSpace);
            let is_down = matches!(fault, InjectedFault::CrashBefore | InjectedFault::CrashAfter);
            assert_eq!(store.list(Path::new("")).is_err(), is_down, "{fault:?} at {nth}");
            assert!(!store.clear_fault(), "the fault has fired");
            write_and_remove(&store).expect("no later call fails");
            assert_eq!(store.read(Path::new("a/last")).unwrap(), b"done");
        }
    }
}

#[test]
fn a_fault_beyond_the_last_operation_never_fires() {
    let store = MemFileStore::default();
    store.fail_nth(6, InjectedFault::IoError);
    write_and_remove(&store).unwrap();
    assert!(store.clear_fault());
}
