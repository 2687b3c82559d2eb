#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::sys::hold_write_lease;

/// Notes what it visits, and calls a hook before each visit.
struct Notes<'a> {
    visited: Vec<PathBuf>,
    failed: Vec<PathBuf>,
    leased: Vec<PathBuf>,
    /// Number of directories that have been entered and not left; the walk itself enters the first.
    depth: usize,
    before: &'a mut dyn FnMut(&Path),
}

impl<'a> Notes<'a> {
    fn new(before: &'a mut dyn FnMut(&Path)) -> Self {
        Self { visited: Vec::new(), failed: Vec::new(), leased: Vec::new(), depth: 1, before }
    }
}

impl TreeVisitor for Notes<'_> {
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
        let path = (entry.path)();
        (self.before)(&path);
        self.depth += usize::from(entry.is_directory);
        self.visited.push(path);
        Ok(true)
    }

    fn visit_leased(&mut self, entry: NamedEntry<'_>) -> io::Result<()> {
        self.leased.push((entry.path)());
        Ok(())
    }

    fn visit_failed(&mut self, path: PathBuf, _: io::Error) -> io::Result<()> {
        self.failed.push(path);
        Ok(())
    }

    fn leave_directory(&mut self) {
        self.depth -= 1;
    }
}

/// A tree whose paths are random names, and whose last names are files.
fn create_tree(root: &Path, paths: &[Vec<u8>]) {
    for path in paths {
        let names: Vec<String> = path.iter().map(|name| format!("d{name}")).collect();
        let dir = root.join(names.join("/"));
        fs::create_dir_all(&dir).unwrap();
        File::create(dir.join("file")).unwrap();
    }
}

fn all_entries(root: &Path, below: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(root.join(below)).unwrap() {
        let entry = entry.unwrap();
        let path = below.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            all_entries(root, &path, found);
        }
        found.insert(path);
    }
}

/// A directory is moved away, or removed, before a visit.
#[derive(Clone, Debug)]
struct Change {
    at_visit: usize,
    directory: prop::sample::Index,
    is_removal: bool,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = (0..20_usize, any::<prop::sample::Index>(), any::<bool>());
    let change =
        change.prop_map(|(at_visit, directory, is_removal)| Change { at_visit, directory, is_removal });
    prop::collection::vec(change, 0..4)
}

proptest! {
    /// The walk ends, leaves what it has entered, visits all that stays where it is, and reports what it has entered
    /// and not visited whole.
    #[test]
    fn a_walk_goes_on_where_directories_are_moved_away_or_removed(
        paths in prop::collection::vec(prop::collection::vec(0..2_u8, 1..6), 1..6),
        changes in changes(),
    ) {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("root");
        fs::create_dir(&root).unwrap();
        create_tree(&root, &paths);
        let mut all = BTreeSet::new();
        all_entries(&root, Path::new(""), &mut all);
        let directories: Vec<PathBuf> = all.iter().filter(|path| root.join(path).is_dir()).cloned().collect();
        let (mut visits, mut moved, mut removed) = (0, BTreeSet::new(), BTreeSet::new());
        let mut before = |_: &Path| {
            for (number, change) in changes.iter().enumerate().filter(|(_, change)| change.at_visit == visits) {
                let path = change.directory.get(&directories);
                if change.is_removal {
                    let _ = fs::remove_dir_all(root.join(path));
                    removed.insert(path.clone());
                } else if fs::rename(root.join(path), scratch.path().join(number.to_string())).is_ok() {
                    moved.insert(path.clone());
                }
            }
            visits += 1;
        };
        let mut notes = Notes::new(&mut before);
        walk_tree(File::open(&root).unwrap().as_fd(), &mut notes).unwrap();
        let Notes { visited, failed, depth, .. } = notes;
        prop_assert_eq!(depth, 0, "each directory is left once");
        let visited: BTreeSet<PathBuf> = visited.into_iter().collect();
        prop_assert!(visited.is_subset(&all));
        let is_below = |path: &Path, tops: &BTreeSet<PathBuf>| tops.iter().any(|top| path.starts_with(top));
        let is_gone = |path: &Path| is_below(path, &moved) || is_below(path, &removed);
        prop_assert!(failed.iter().all(|path| is_gone(path)), "{failed:?}, {moved:?}, {removed:?}");
        for path in all.difference(&visited) {
            prop_assert!(is_gone(path), "{path:?} of {all:?}, {moved:?}, {removed:?}");
            let was_moved_before = moved.iter().any(|top| path.starts_with(top) && !visited.contains(top));
            if !was_moved_before && !is_below(path, &removed) {
                prop_assert!(!failed.is_empty(), "{path:?} of {all:?}, {moved:?}");
            }
        }
    }
}

#[test]
fn a_directory_that_was_left_in_part_ends_a_walk_that_must_be_complete() {
    struct Complete<'a>(&'a mut dyn FnMut());

    impl TreeVisitor for Complete<'_> {
        fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool> {
            if (entry.path)() == Path::new("a/b/c") {
                (self.0)();
            }
            Ok(true)
        }
    }

    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    fs::create_dir_all(at("root/a/b/c")).unwrap();
    let mut moves = || {
        fs::rename(at("root/a/b"), at("b")).unwrap();
        fs::rename(at("root/a"), at("a")).unwrap();
    };
    let top = File::open(at("root")).unwrap();
    let (path, error) = walk_tree(top.as_fd(), &mut Complete(&mut moves)).unwrap_err();
    assert_eq!((path.as_path(), error.raw_os_error()), (Path::new("a"), Some(libc::EAGAIN)));
}

#[test]
fn a_leased_file_does_not_end_a_walk() {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["a", "leased", "z"] {
        File::create(scratch.path().join(name)).unwrap();
    }
    symlink("a", scratch.path().join("link")).unwrap();
    let leased = File::options().write(true).open(scratch.path().join("leased")).unwrap();
    hold_write_lease(leased.as_fd()).unwrap();
    let mut before = |_: &Path| {};
    let mut notes = Notes::new(&mut before);
    walk_tree(File::open(scratch.path()).unwrap().as_fd(), &mut notes).unwrap();
    notes.visited.sort();
    assert_eq!(notes.visited, ["a", "z"].map(PathBuf::from));
    assert_eq!(notes.leased, [PathBuf::from("leased")]);
}

#[test]
fn what_has_replaced_a_file_is_not_opened() {
    let scratch = tempfile::tempdir().unwrap();
    // To open a socket fails.
    drop(UnixListener::bind(scratch.path().join("socket")).unwrap());
    let mut before = |_: &Path| {};
    let mut notes = Notes::new(&mut before);
    let top = File::open(scratch.path()).unwrap();
    visit_entry(&TreeWalk::open(top).unwrap(), &mut notes, OsStr::new("socket")).unwrap();
    assert_eq!(notes.visited, Vec::<PathBuf>::new());
}
