//! A clone of a tree has the same entries, and its source is not changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nodekeel_localstorage::testing::{DataCloner, SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::{Dir, FileCloner, Reflink};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, lgetxattr, mknodat, setxattr};
use testbed::guest::disk::{FileSystem, GuestDisk};

/// An entry of a random tree; the numbers choose among what exists already.
#[derive(Clone, Debug)]
enum RandomEntry {
    Dir(u8, u32),
    File(u8, Vec<u8>, u32),
    Sparse(u8, u64),
    Symlink(u8, String),
    HardLink(u8, u8),
    Fifo(u8),
}

fn entries() -> impl Strategy<Value = Vec<RandomEntry>> {
    let (at, mode) = (any::<u8>, || prop::sample::select(vec![0o600, 0o644, 0o755, 0o4711, 0o777, 0o400]));
    let one = prop_oneof![
        3 => (at(), prop::sample::select(vec![0o700, 0o755, 0o1777, 0o500])).prop_map(|(at, mode)| RandomEntry::Dir(at, mode)),
        4 => (at(), prop::collection::vec(any::<u8>(), 0..9000), mode())
            .prop_map(|(at, data, mode)| RandomEntry::File(at, data, mode)),
        1 => (at(), 0..1_u64 << 32).prop_map(|(at, size)| RandomEntry::Sparse(at, size)),
        1 => (at(), "[a-z/.]{1,40}").prop_map(|(at, target)| RandomEntry::Symlink(at, target)),
        2 => (at(), any::<u8>()).prop_map(|(at, of)| RandomEntry::HardLink(at, of)),
        1 => at().prop_map(RandomEntry::Fifo),
    ];
    prop::collection::vec(one, 0..40)
}

/// Creates a tree; the modes of directories come last, since they may forbid to create.
fn create_tree(top: &Path, entries: &[RandomEntry]) {
    let (mut dirs, mut files, mut modes) = (vec![top.to_owned()], Vec::new(), Vec::new());
    for (number, entry) in entries.iter().enumerate() {
        let place = |at: u8| dirs[usize::from(at) % dirs.len()].join(format!("n{number}"));
        match entry {
            RandomEntry::Dir(at, mode) => {
                let path = place(*at);
                fs::create_dir(&path).unwrap();
                modes.push((path.clone(), *mode));
                dirs.push(path);
            }
            RandomEntry::File(at, data, mode) => {
                let path = place(*at);
                fs::write(&path, data).unwrap();
                let value = format!("value {number}");
                setxattr(&path, "user.nodekeel", value.as_bytes(), XattrFlags::empty()).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).unwrap();
                files.push(path);
            }
            RandomEntry::Sparse(at, size) => {
                fs::File::create(place(*at)).unwrap().set_len(*size % (8 << 20)).unwrap()
            }
            RandomEntry::Symlink(at, target) => symlink(target, place(*at)).unwrap(),
            RandomEntry::HardLink(at, of) if !files.is_empty() => {
                fs::hard_link(&files[usize::from(*of) % files.len()], place(*at)).unwrap();
            }
            RandomEntry::HardLink(..) => {}
            RandomEntry::Fifo(at) => {
                mknodat(CWD, place(*at), FileType::Fifo, Mode::from_raw_mode(0o640), 0).unwrap();
            }
        }
    }
    for (number, dir) in (1..).zip(&dirs) {
        let time = UNIX_EPOCH + Duration::new(1_000_000 + number, 123_456_789);
        fs::File::open(dir).unwrap().set_times(fs::FileTimes::new().set_modified(time)).unwrap();
    }
    for (path, mode) in modes.into_iter().rev() {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// What is compared of an entry.
#[derive(Debug, PartialEq, Eq)]
struct EntryFacts {
    mode: u32,
    owner: (u32, u32),
    links: Option<u64>,
    size: Option<u64>,
    modified: (i64, i64),
    content: Option<Vec<u8>>,
    attribute: Option<Vec<u8>>,
    /// The first path of the same file.
    first_name: Option<PathBuf>,
}

fn describe(top: &Path) -> BTreeMap<PathBuf, EntryFacts> {
    let (mut all, mut pending) = (BTreeMap::new(), vec![PathBuf::new()]);
    let mut names: BTreeMap<u64, PathBuf> = BTreeMap::new();
    while let Some(path) = pending.pop() {
        let full = top.join(&path);
        let stat = fs::symlink_metadata(&full).unwrap();
        if stat.is_dir() {
            let mut below: Vec<_> =
                fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())).collect();
            below.sort();
            pending.extend(below.into_iter().rev());
        }
        let content = if stat.is_file() {
            Some(fs::read(&full).unwrap())
        } else if stat.is_symlink() {
            Some(fs::read_link(&full).unwrap().as_os_str().as_bytes().to_vec())
        } else {
            None
        };
        let mut value = [0; 64];
        let attribute =
            lgetxattr(&full, "user.nodekeel", &mut value).ok().map(|length| value[..length].to_vec());
        let first_name =
            (!stat.is_dir()).then(|| names.entry(stat.ino()).or_insert_with(|| path.clone()).clone());
        let facts = EntryFacts {
            mode: stat.mode(),
            owner: (stat.uid(), stat.gid()),
            links: (!stat.is_dir()).then(|| stat.nlink()),
            size: (!stat.is_dir()).then(|| stat.size()),
            modified: (stat.mtime(), stat.mtime_nsec()),
            content,
            attribute,
            first_name,
        };
        all.insert(path, facts);
    }
    all
}

fn clone(source: &Path, target: &Path, cloner: &dyn FileCloner) -> Result<u64, nodekeel_localstorage::Error> {
    fs::create_dir(target).unwrap();
    let to = Dir::open(target)?;
    Dir::open(source)?.clone_tree(&to, cloner, &|| false).map(|summary| summary.entries)
}

/// Checks random trees in a directory.
fn check_random_trees(base: &Path, cloner: &dyn FileCloner, cases: u32) {
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let checked = runner.run(&entries(), |entries| {
        let scratch = tempfile::tempdir_in(base).unwrap();
        let (source, target) = (scratch.path().join("source"), scratch.path().join("target"));
        fs::create_dir(&source).unwrap();
        create_tree(&source, &entries);
        let before = describe(&source);
        let entries = clone(&source, &target, cloner).unwrap();
        prop_assert_eq!(describe(&target), before, "the clone");
        let before = describe(&source);
        prop_assert_eq!(describe(&source), before, "the source");
        prop_assert!(entries >= 1);
        // Independent of each other: the clone is removed, however its modes are.
        Dir::open(scratch.path()).unwrap().remove_tree("target").unwrap();
        prop_assert_eq!(describe(&source), describe(&source));
        Dir::open(scratch.path()).unwrap().remove_tree("source").unwrap();
        Ok(())
    });
    checked.unwrap();
}

#[test]
fn a_clone_equals_its_source() {
    let scratch = tempfile::tempdir().unwrap();
    check_random_trees(scratch.path(), &DataCloner, 40);
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn a_clone_by_reflink_equals_its_source_and_shares_its_blocks() {
    let disk =
        GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "")).expect("a disk");
    let base = disk.mount_point();
    Dir::open(base).unwrap().check_cloner(&Reflink).unwrap();
    check_random_trees(base, &Reflink, 20);
    let free = || rustix::fs::statvfs(base).unwrap().f_bavail;
    fs::create_dir(base.join("large")).unwrap();
    fs::write(base.join("large/file"), vec![7; 64 << 20]).unwrap();
    rustix::fs::sync();
    let before = free();
    clone(&base.join("large"), &base.join("copy"), &Reflink).unwrap();
    rustix::fs::sync();
    let used = (before - free()) * 4096;
    assert!(used < 2 << 20, "a clone of 64 MiB takes {used} bytes");
    fs::write(base.join("large/file"), b"changed").unwrap();
    assert_eq!(fs::read(base.join("copy/file")).unwrap(), vec![7; 64 << 20], "the clone keeps its content");
}

#[test]
fn a_file_system_without_reflinks_is_refused_and_keeps_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = Dir::open(scratch.path()).unwrap();
    match dir.check_cloner(&Reflink) {
        Ok(()) => println!("this file system has reflinks"),
        Err(error) => assert!(error.is_clone_unsupported(), "{error:?}"),
    }
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn deep_trees_and_late_links_are_cloned() {
    let scratch = tempfile::tempdir().unwrap();
    let top = Dir::open(scratch.path()).unwrap();
    let mut dir = top.ensure_dir("source", nodekeel_localstorage::FileMode::PRIVATE_DIR).unwrap();
    for _ in 0..1500 {
        dir = dir.ensure_dir("d", nodekeel_localstorage::FileMode::PRIVATE_DIR).unwrap();
    }
    dir.write("deep", b"data", nodekeel_localstorage::FileMode::PRIVATE_FILE).unwrap();
    let target = top.ensure_dir("target", nodekeel_localstorage::FileMode::PRIVATE_DIR).unwrap();
    let summary = top.open_dir("source").unwrap().clone_tree(&target, &DataCloner, &|| false).unwrap();
    assert_eq!(summary.entries, 1502, "1501 directories and a file");
    let mut found = target;
    for _ in 0..1500 {
        found = found.open_dir("d").unwrap();
    }
    assert_eq!(found.read("deep").unwrap(), b"data");
}

#[test]
fn a_clone_stops_when_it_is_canceled() {
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir(scratch.path().join("source")).unwrap();
    fs::create_dir(scratch.path().join("target")).unwrap();
    for name in ["a", "b", "c"] {
        fs::write(scratch.path().join("source").join(name), name).unwrap();
    }
    let dir = Dir::open(scratch.path()).unwrap();
    let calls = std::cell::Cell::new(0);
    let is_canceled = || calls.replace(calls.get() + 1) == 1;
    let (source, target) = (dir.open_dir("source").unwrap(), dir.open_dir("target").unwrap());
    let error = source.clone_tree(&target, &DataCloner, &is_canceled).unwrap_err();
    assert!(error.is_stopped(), "{error:?}");
    assert_eq!(fs::read_dir(scratch.path().join("target")).unwrap().count(), 1);
}

/// Each call fails once: the clone fails, or is complete; the source is not changed.
#[test]
fn a_failing_call_fails_the_clone_and_not_its_source() {
    let scratch = tempfile::tempdir().unwrap();
    let source = scratch.path().join("source");
    fs::create_dir(&source).unwrap();
    let entries = [
        RandomEntry::Dir(0, 0o755),
        RandomEntry::File(1, b"data".to_vec(), 0o640),
        RandomEntry::HardLink(0, 0),
        RandomEntry::Symlink(1, "file".to_owned()),
        RandomEntry::Fifo(0),
    ];
    create_tree(&source, &entries);
    let whole = describe(&source);
    for number in 0.. {
        let target = scratch.path().join(format!("target-{number}"));
        let mut seen = 0;
        let hook = move |_: &'static str| {
            seen += 1;
            if seen == number + 1 {
                SyscallAction::Fail(rustix::io::Errno::IO.raw_os_error())
            } else {
                SyscallAction::Proceed
            }
        };
        let cloned = with_failpoint_hook(hook, || clone(&source, &target, &DataCloner));
        assert_eq!(describe(&source), whole, "call {number}");
        match cloned {
            Err(_) => assert!(number < 500, "it ends"),
            Ok(_) => {
                assert_eq!(describe(&target), whole, "call {number}");
                assert!(number > 30, "only {number} calls pass a failpoint");
                break;
            }
        }
    }
}
