use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use proptest::prelude::*;

use super::*;
use crate::testing::{SyscallAction, with_failpoint_hook};

/// The events of a walk that enters everything.
#[derive(Debug, Default)]
struct WalkRecord {
    /// The number of events of each path.
    entries: BTreeMap<PathBuf, u32>,
    entered: BTreeMap<PathBuf, u32>,
    left: BTreeMap<PathBuf, u32>,
    /// Directories that were moved or removed while the walk was in them.
    moved: BTreeSet<PathBuf>,
}

/// Walks, and calls a hook after each event.
fn record_walk(mut walk: TreeWalk, mut after: impl FnMut()) -> io::Result<WalkRecord> {
    let mut record = WalkRecord::default();
    while let Some(event) = walk.next_event()? {
        let path = |name: &OsStr| walk.path(Some(name));
        match event {
            WalkEvent::Entry { name, .. } => *record.entries.entry(path(&name)).or_default() += 1,
            WalkEvent::Directory { name } => {
                if let OpenOutcome::Opened(dir) = walk.open_dir(&name)? {
                    *record.entered.entry(path(&name)).or_default() += 1;
                    walk.enter(&name, dir)?;
                }
            }
            WalkEvent::Leave { name, .. } => *record.left.entry(path(&name)).or_default() += 1,
            WalkEvent::Moved { name, levels } => {
                assert!(levels > 1, "one directory is left as usual");
                record.moved.insert(path(&name));
            }
        }
        after();
    }
    assert_eq!((walk.depth(), walk.failure.is_none()), (0, true));
    Ok(record)
}

/// An entry of a random tree, in one of the directories that exist already.
#[derive(Clone, Copy, Debug)]
enum RandomEntry {
    Dir,
    File,
    /// To a directory with entries outside.
    Symlink,
    Socket,
}

type RandomTree = Vec<(prop::sample::Index, RandomEntry)>;

fn trees() -> impl Strategy<Value = RandomTree> {
    let entry = prop_oneof![
        4 => Just(RandomEntry::Dir),
        2 => Just(RandomEntry::File),
        1 => Just(RandomEntry::Symlink),
        1 => Just(RandomEntry::Socket),
    ];
    prop::collection::vec((any::<prop::sample::Index>(), entry), 0..40)
}

/// A directory `root` with the tree, next to `outside`.
fn create_tree(tree: &RandomTree) -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    fs::create_dir_all(scratch.path().join("outside/secret")).unwrap();
    let mut dirs = vec![scratch.path().join("root")];
    fs::create_dir(&dirs[0]).unwrap();
    for (number, (at, entry)) in tree.iter().enumerate() {
        let path = at.get(&dirs).join(number.to_string());
        match entry {
            RandomEntry::Dir => {
                fs::create_dir(&path).unwrap();
                dirs.push(path);
            }
            RandomEntry::File => fs::write(&path, "").unwrap(),
            RandomEntry::Symlink => symlink(scratch.path().join("outside"), &path).unwrap(),
            // By its descriptor: the path of a socket has 108 bytes at most.
            RandomEntry::Socket => {
                let dir = File::open(path.parent().unwrap()).unwrap();
                let short = format!("/proc/self/fd/{}/{number}", std::os::fd::AsRawFd::as_raw_fd(&dir));
                drop(UnixListener::bind(short).unwrap());
            }
        }
    }
    scratch
}

/// The entries and the directories below a path, by plain recursion.
fn list_recursively(root: &Path, below: &Path, found: &mut [BTreeSet<PathBuf>; 2]) {
    for entry in fs::read_dir(root.join(below)).unwrap().flatten() {
        let (path, is_dir) = (below.join(entry.file_name()), entry.file_type().unwrap().is_dir());
        found[usize::from(is_dir)].insert(path.clone());
        if is_dir {
            list_recursively(root, &path, found);
        }
    }
}

fn walk_of(root: &Path) -> TreeWalk {
    TreeWalk::open(File::open(root).unwrap()).unwrap()
}

fn once(paths: &BTreeSet<PathBuf>) -> BTreeMap<PathBuf, u32> {
    paths.iter().map(|path| (path.clone(), 1)).collect()
}

/// A change of a directory or another entry while a walk is under way.
#[derive(Clone, Debug)]
enum Change {
    Remove,
    MoveOut,
    /// Into the top, so that the walk may meet it again.
    MoveUp,
    ReplaceBySymlink,
    AddBelow,
}

impl Change {
    fn apply(&self, scratch: &Path, path: &Path, number: usize) {
        let (root, place) = (scratch.join("root"), scratch.join("root").join(path));
        let _ = match self {
            Self::Remove => fs::remove_dir_all(&place).or_else(|_| fs::remove_file(&place)),
            Self::MoveOut => fs::rename(&place, scratch.join(format!("moved-{number}"))),
            Self::MoveUp => fs::rename(&place, root.join(format!("new-{number}"))),
            Self::ReplaceBySymlink => fs::rename(&place, scratch.join(format!("moved-{number}")))
                .and_then(|()| symlink(scratch.join("outside"), &place)),
            Self::AddBelow => fs::create_dir_all(place.join(format!("new-{number}/new"))),
        };
    }
}

fn changes() -> impl Strategy<Value = Vec<(usize, prop::sample::Index, Change)>> {
    let change = prop_oneof![
        Just(Change::Remove),
        Just(Change::MoveOut),
        Just(Change::MoveUp),
        Just(Change::ReplaceBySymlink),
        Just(Change::AddBelow),
    ];
    prop::collection::vec((0..40_usize, any::<prop::sample::Index>(), change), 0..6)
}

proptest! {
    #[test]
    fn a_walk_meets_what_a_recursion_meets_once(tree in trees()) {
        let scratch = create_tree(&tree);
        let root = scratch.path().join("root");
        let mut found = [BTreeSet::new(), BTreeSet::new()];
        list_recursively(&root, Path::new(""), &mut found);
        let record = record_walk(walk_of(&root), || {}).unwrap();
        let [entries, directories] = &found;
        prop_assert_eq!(record.entries, once(entries));
        prop_assert_eq!(&record.entered, &once(directories));
        let mut left = record.left;
        prop_assert_eq!(left.remove(Path::new("")), Some(1), "the top is left last");
        prop_assert_eq!(left, record.entered);
        prop_assert!(record.moved.is_empty());
    }

    /// The walk ends, follows no link, and meets and leaves all that stays where it is, also while others change the tree.
    #[test]
    fn a_walk_goes_on_while_others_change_the_tree(tree in trees(), changes in changes()) {
        let scratch = create_tree(&tree);
        let root = scratch.path().join("root");
        let mut before = [BTreeSet::new(), BTreeSet::new()];
        list_recursively(&root, Path::new(""), &mut before);
        let [entries, directories] = &before;
        let all: Vec<_> = entries.union(directories).cloned().collect();
        let (changed, mut events) = (RefCell::new(BTreeSet::new()), 0);
        let after = || {
            for (number, (_, at, change)) in changes.iter().enumerate().filter(|(_, change)| change.0 == events) {
                let Some(path) = (!all.is_empty()).then(|| at.get(&all)) else { continue };
                change.apply(scratch.path(), path, number);
                if !matches!(change, Change::AddBelow) {
                    changed.borrow_mut().insert(path.clone());
                }
            }
            events += 1;
        };
        let record = record_walk(walk_of(&root), after).unwrap();
        let changed = changed.into_inner();
        let stays = |path: &&PathBuf| !changed.iter().any(|top| path.starts_with(top));
        for path in entries.iter().filter(stays) {
            prop_assert_eq!(record.entries.get(path), Some(&1), "{:?}: {:?}", path, record);
        }
        for path in directories.iter().filter(stays) {
            let count = |paths: &BTreeMap<PathBuf, u32>| paths.get(path).copied();
            prop_assert_eq!((count(&record.entered), count(&record.left)), (Some(1), Some(1)), "{:?}: {:?}", path, record);
        }
        prop_assert!(record.moved.iter().all(|path| !stays(&path)), "{:?}, {:?}", record, changed);
        let mut met = record.entries.keys().chain(record.entered.keys());
        prop_assert!(met.all(|path| !path.ends_with("secret")), "{:?}", record);
    }
}

#[test]
fn a_directory_that_has_replaced_another_one_is_not_taken_for_it() {
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("root");
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    let mut walk = walk_of(&root);
    for name in ["a", "b", "c"].map(OsStr::new) {
        assert!(matches!(walk.next_event(), Ok(Some(WalkEvent::Directory { .. }))));
        let OpenOutcome::Opened(dir) = walk.open_dir(name).unwrap() else { panic!("it exists") };
        walk.enter(name, dir).unwrap();
    }
    for (name, gone) in [("a/b/c", "c"), ("a/b", "b")] {
        fs::rename(root.join(name), scratch.path().join(gone)).unwrap();
    }
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    let moved = walk.next_event().unwrap();
    assert!(matches!(&moved, Some(WalkEvent::Moved { name, levels: 2 }) if name == "b"), "{moved:?}");
    assert_eq!((walk.depth(), walk.path(None)), (2, PathBuf::from("a")));
    for name in ["a", ""] {
        let left = walk.next_event().unwrap();
        assert!(matches!(&left, Some(WalkEvent::Leave { name: left, .. }) if left == name), "{left:?}");
    }
    assert!(matches!(walk.next_event(), Ok(None)));
}

/// A tree of directories below each other, deeper than any path; each has a file.
fn create_deep_tree(root: &Path, depth: usize) {
    let mut at = OwnedFd::from(File::open(root).unwrap());
    for _ in 0..depth {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
        at = syscalls::open_on_same_mount(&at, OsStr::new("d"), OPEN_DIR_FLAGS).unwrap();
        syscalls::create_new_file(&at, OsStr::new("f")).unwrap();
    }
}

#[test]
fn a_deep_tree_needs_four_descriptors_and_no_stack() {
    const DEPTH: usize = 5000;
    let scratch = tempfile::tempdir().unwrap();
    create_deep_tree(scratch.path(), DEPTH);
    let walk = walk_of(scratch.path());
    let small = std::thread::Builder::new().stack_size(64 << 10);
    let visit = move || {
        let (mut walk, mut entries) = (walk, 0);
        while let Some(event) = walk.next_event().unwrap() {
            match event {
                WalkEvent::Entry { .. } => entries += 1,
                WalkEvent::Directory { name } => {
                    let OpenOutcome::Opened(dir) = walk.open_dir(&name).unwrap() else { panic!("it exists") };
                    let held =
                        |walk: &TreeWalk| walk.levels.iter().filter(|level| level.listing.is_some()).count();
                    assert_eq!(held(&walk), 0, "beside the top, the lowest and the opened one");
                    walk.enter(&name, dir).unwrap();
                    assert_eq!(held(&walk), 1, "beside the top and the lowest one");
                }
                WalkEvent::Leave { .. } | WalkEvent::Moved { .. } => {}
            }
        }
        entries
    };
    assert_eq!(small.spawn(visit).unwrap().join().unwrap(), DEPTH);
    crate::Dir::open(scratch.path().parent().unwrap())
        .and_then(|parent| parent.remove_tree(scratch.path().file_name().unwrap()))
        .unwrap();
}

#[test]
fn a_directory_keeps_the_names_of_a_part_of_many_subdirectories() {
    let scratch = tempfile::tempdir().unwrap();
    for number in 0..10 * MAX_PENDING {
        fs::create_dir(scratch.path().join(number.to_string())).unwrap();
    }
    let (mut walk, mut met) = (walk_of(scratch.path()), 0);
    while let Some(event) = walk.next_event().unwrap() {
        assert!(walk.levels.iter().all(|level| level.pending.len() <= MAX_PENDING));
        met += usize::from(matches!(event, WalkEvent::Directory { .. }));
    }
    assert_eq!(met, 10 * MAX_PENDING);
}

#[test]
fn nothing_is_opened_that_is_mounted_in_the_tree_or_that_a_link_names() {
    // Where tests run, procfs is mounted.
    let walk = walk_of(Path::new("/"));
    assert!(matches!(walk.open_dir(OsStr::new("proc")), Ok(OpenOutcome::MountPoint)));
    assert!(matches!(walk.open_path(OsStr::new("proc")), Ok(OpenOutcome::MountPoint)));
    let scratch = tempfile::tempdir().unwrap();
    symlink("/", scratch.path().join("link")).unwrap();
    let walk = walk_of(scratch.path());
    assert!(matches!(walk.open_dir(OsStr::new("link")), Ok(OpenOutcome::Vanished)));
    assert!(matches!(walk.open_dir(OsStr::new("missing")), Ok(OpenOutcome::Vanished)));
    let Ok(OpenOutcome::Opened(link)) = walk.open_path(OsStr::new("link")) else { panic!("the link itself") };
    assert_eq!(Metadata::from_stat(&syscalls::stat(&link).unwrap()).kind, FileKind::Symlink);
}

#[test]
fn a_walk_goes_on_after_an_error_and_reports_it() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["a", "b", "c"] {
        fs::create_dir(scratch.path().join(name)).unwrap();
        fs::write(scratch.path().join(name).join("file"), "").unwrap();
    }
    // A directory can't be listed, and the second one not be left.
    for (call, nth) in [("getdents64", 9), ("openat", 2)] {
        let mut calls = 0;
        let fail = move |made: &'static str| {
            calls += u32::from(made == call);
            match made == call && calls == nth {
                true => SyscallAction::Fail(Errno::IO.raw_os_error()),
                false => SyscallAction::Proceed,
            }
        };
        let walk_all = || {
            let (mut walk, mut left, mut errors) = (walk_of(scratch.path()), 0, 0);
            loop {
                match walk.next_event() {
                    Ok(None) => return (left, errors),
                    Ok(Some(WalkEvent::Directory { name })) => {
                        let OpenOutcome::Opened(dir) = walk.open_dir(&name).unwrap() else {
                            panic!("it exists")
                        };
                        walk.enter(&name, dir).unwrap();
                    }
                    Ok(Some(WalkEvent::Leave { .. })) => left += 1,
                    Ok(Some(_)) => {}
                    Err(error) => {
                        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
                        errors += 1;
                    }
                }
            }
        };
        assert_eq!(with_failpoint_hook(fail, walk_all), (4, 1), "{call}");
    }
}

#[test]
fn the_path_of_an_error_in_a_deep_tree_has_no_middle() {
    let scratch = tempfile::tempdir().unwrap();
    let mut walk = walk_of(scratch.path());
    let top = Path::new("/t");
    assert_eq!(walk.display_path((top, 1), None), top);
    for number in 1..20 {
        walk.enter(OsStr::new(&format!("l{number}")), File::open(scratch.path()).unwrap().into()).unwrap();
    }
    let shown = Path::new("/t/…/l12/l13/l14/l15/l16/l17/l18/l19");
    assert_eq!(walk.display_path((top, 1), None), shown);
    assert_eq!(walk.display_path((top, 1), Some(OsStr::new("file"))), shown.join("file"));
}
