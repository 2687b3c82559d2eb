//! What the contract of `QuotaSetter` says, tried out.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use crate::{Bytes, Change, Error, Inodes, Limit, LimitError, Limits, ProjectId, QuotaSetter, Status};

/// Checks the contract of [`QuotaSetter`] with directories made in `scratch`, an empty directory without limits on a
/// file system that the implementation takes. They are removed again, and their projects released.
///
/// # Panics
/// When something does not hold, or a directory can't be made.
pub fn conformance(setter: &dyn QuotaSetter, scratch: &Path) {
    let bench = Bench { setter, scratch };
    bench.limits_are_set_and_read();
    bench.each_limit_changes_by_itself();
    bench.bytes_are_rounded_up_and_impossible_limits_refused();
    bench.usage_is_counted();
    bench.projects_are_never_shared();
    bench.only_empty_directories_begin_and_end();
    bench.what_is_inside_counts_for_the_outer_one();
    bench.what_is_no_directory_is_refused();
    bench.removed_directories_let_go();
    bench.threads_get_different_projects();
    let left = fs::read_dir(scratch).expect("scratch is readable").count();
    assert_eq!(left, 0, "the suite removes what it has made");
}

struct Bench<'a> {
    setter: &'a dyn QuotaSetter,
    scratch: &'a Path,
}

/// Of a file system. *Source:* xfs(5), ext4(5).
const LARGEST_BLOCK: u64 = 65_536;
const MIB: Bytes = Bytes(1 << 20);

fn at(bytes: Bytes, inodes: u64) -> Change {
    Change { bytes: Limit::At(bytes), inodes: Limit::At(Inodes(inodes)) }
}

fn limits(bytes: Option<Bytes>, inodes: Option<u64>) -> Limits {
    Limits { bytes, inodes: inodes.map(Inodes) }
}

impl Bench<'_> {
    fn make(&self, name: &str) -> (PathBuf, File) {
        let path = self.scratch.join(name);
        fs::create_dir(&path).expect("a directory can be made");
        let dir = File::open(&path).expect("it can be opened");
        (path, dir)
    }

    fn set(&self, dir: &File, change: Change) -> Status {
        self.setter.set(dir.as_fd(), change).expect("the limits are set")
    }

    fn status(&self, dir: &File) -> Option<Status> {
        self.setter.status(dir.as_fd()).expect("the status is read")
    }

    fn remove(&self, path: &Path, dir: File) {
        let project = self.status(&dir).map(|status| status.project);
        fs::remove_dir_all(path).expect("a directory can be removed");
        drop(dir);
        if let Some(project) = project {
            self.release(project);
        }
    }

    /// A child that another thread has forked holds what was open then until it executes its program: a removed directory
    /// is counted as long.
    fn release(&self, project: ProjectId) {
        for _ in 0..10_000 {
            match self.setter.release(project) {
                Err(error) if error.is_retryable() => std::thread::yield_now(),
                result => return result.expect("nothing belongs to the project any more"),
            }
        }
        panic!("project {project} is in use though nothing belongs to it");
    }

    fn limits_are_set_and_read(&self) {
        let (path, dir) = self.make("read");
        assert_eq!(self.status(&dir), None, "a new directory has no limits");
        let set = self.set(&dir, at(MIB, 100));
        assert_eq!(set.limits, limits(Some(MIB), Some(100)));
        assert_eq!(set.usage.inodes, Inodes(1), "the directory itself is counted");
        assert!(!set.over_limit());
        assert_eq!(self.status(&dir), Some(set), "what was set is read back");
        assert_eq!(self.set(&dir, at(MIB, 100)), set, "the same again changes nothing");
        self.setter.clear(dir.as_fd()).expect("the limits are lifted");
        assert_eq!(self.status(&dir), None, "a cleared directory has no limits");
        self.setter.clear(dir.as_fd()).expect("clearing again is nothing");
        let again = self.set(&dir, at(MIB, 7));
        assert_eq!(again.limits, limits(Some(MIB), Some(7)), "a cleared directory can begin again");
        self.remove(&path, dir);
    }

    fn each_limit_changes_by_itself(&self) {
        let (path, dir) = self.make("each");
        let change = |bytes, inodes| self.set(&dir, Change { bytes, inodes });
        let first = change(Limit::At(MIB), Limit::Keep);
        assert_eq!(first.limits, limits(Some(MIB), None), "what is kept of nothing is no limit");
        let both = change(Limit::Keep, Limit::At(Inodes(50)));
        assert_eq!(both.limits, limits(Some(MIB), Some(50)));
        assert_eq!(change(Limit::Keep, Limit::Keep), both);
        assert_eq!(change(Limit::Unlimited, Limit::Keep).limits, limits(None, Some(50)));
        assert_eq!(change(Limit::At(MIB), Limit::Unlimited).limits, limits(Some(MIB), None));
        let none = change(Limit::Unlimited, Limit::Unlimited);
        assert_eq!(none.limits, Limits::default());
        assert_eq!(none.project, first.project, "the project stays");
        assert_eq!(self.status(&dir), Some(none), "without limits, but counted");
        self.remove(&path, dir);
    }

    fn bytes_are_rounded_up_and_impossible_limits_refused(&self) {
        let (path, dir) = self.make("round");
        for asked in [1, 1024, 1025, 65_536, 1_000_000_007, (1 << 63) - 65_536] {
            let set = self.set(&dir, at(Bytes(asked), 1));
            let rounded = set.limits.bytes.expect("it was set").0;
            assert!(rounded >= asked && rounded - asked < LARGEST_BLOCK, "{asked} became {rounded}");
            assert!(rounded.is_multiple_of(1024), "{asked} became {rounded}");
            assert_eq!(self.status(&dir), Some(set), "and says so");
        }
        let before = self.status(&dir);
        let refused = |change| match self.setter.set(dir.as_fd(), change) {
            Err(Error::Limit(reason)) => reason,
            other => panic!("{change:?} gave {other:?}"),
        };
        let is_too_large = |change| matches!(refused(change), LimitError::TooLarge { .. });
        for bytes in [(1 << 63) - 65_535, (1 << 63) - 1, 1 << 63, u64::MAX] {
            assert!(is_too_large(at(Bytes(bytes), 1)), "{bytes}");
        }
        assert!(is_too_large(at(MIB, 1 << 63)));
        assert_eq!(refused(at(Bytes(0), 1)), LimitError::Zero);
        assert_eq!(refused(at(MIB, 0)), LimitError::Zero);
        assert_eq!(self.status(&dir), before, "what is refused changes nothing");
        self.remove(&path, dir);
    }

    fn usage_is_counted(&self) {
        let (path, dir) = self.make("usage");
        let empty = self.set(&dir, at(Bytes(64 << 20), 1000)).usage;
        fs::create_dir(path.join("below")).expect("there is room");
        for name in ["a", "b", "below/c"] {
            let mut file = File::create(path.join(name)).expect("there is room");
            file.write_all(&[7; 64 << 10]).and_then(|()| file.sync_all()).expect("there is room");
        }
        let status = self.status(&dir).expect("it is limited");
        assert_eq!(status.usage.inodes, Inodes(5));
        let grown = status.usage.bytes.0 - empty.bytes.0;
        assert!((192 << 10..1 << 20).contains(&grown), "three times 64 KiB took {grown}");
        assert_eq!(
            status.available(),
            limits(Some(Bytes((64 << 20) - status.usage.bytes.0)), Some(995)),
            "what is left"
        );
        let shrunk = self.set(&dir, at(Bytes(4096), 2));
        assert!(shrunk.over_limit(), "a limit below the usage is accepted, and told");
        assert_eq!(shrunk.available(), limits(Some(Bytes(0)), Some(0)));
        self.remove(&path, dir);
    }

    fn projects_are_never_shared(&self) {
        let made: Vec<_> = (0..20).map(|number| self.make(&format!("many{number}"))).collect();
        let set = |dir: &File| self.set(dir, Change { bytes: Limit::Unlimited, inodes: Limit::Unlimited });
        let projects: HashSet<ProjectId> = made.iter().map(|(_, dir)| set(dir).project).collect();
        assert_eq!(projects.len(), made.len(), "a number is taken though its limits are none");
        for (path, dir) in made {
            self.remove(&path, dir);
        }
    }

    fn only_empty_directories_begin_and_end(&self) {
        let (path, dir) = self.make("full");
        File::create(path.join("file")).expect("there is room");
        let refused = self.setter.set(dir.as_fd(), at(MIB, 10));
        assert!(matches!(refused, Err(Error::NotEmpty)), "{refused:?}");
        assert_eq!(self.status(&dir), None, "what is refused changes nothing");
        fs::remove_file(path.join("file")).expect("it is there");
        let limited = self.set(&dir, at(MIB, 10));
        File::create(path.join("file")).expect("there is room");
        self.set(&dir, at(MIB, 20));
        let refused = self.setter.clear(dir.as_fd());
        assert!(matches!(refused, Err(Error::NotEmpty)), "{refused:?}");
        assert_eq!(self.status(&dir).map(|status| status.project), Some(limited.project));
        self.remove(&path, dir);
    }

    fn what_is_inside_counts_for_the_outer_one(&self) {
        let (path, dir) = self.make("outer");
        let outer = self.set(&dir, at(MIB, 10));
        fs::create_dir(path.join("inner")).expect("there is room");
        let inner = File::open(path.join("inner")).expect("it is there");
        let status = self.status(&inner).expect("the outer one's");
        assert_eq!((status.project, status.usage.inodes), (outer.project, Inodes(2)));
        let refused = self.setter.set(inner.as_fd(), at(MIB, 5));
        assert!(
            matches!(refused, Err(Error::Inherited { project }) if project == outer.project),
            "{refused:?}"
        );
        let refused = self.setter.clear(inner.as_fd());
        assert!(matches!(refused, Err(Error::Inherited { .. })), "{refused:?}");
        fs::remove_dir(path.join("inner")).expect("it is empty");
        self.setter.clear(inner.as_fd()).expect("what has been removed has nothing to clear");
        assert_eq!(self.status(&dir).map(|status| status.limits), Some(outer.limits));
        drop(inner);
        self.remove(&path, dir);
    }

    fn what_is_no_directory_is_refused(&self) {
        let path = self.scratch.join("file");
        let file = File::create(&path).expect("there is room");
        let refused =
            [self.setter.set(file.as_fd(), at(MIB, 1)).err(), self.setter.status(file.as_fd()).err()];
        assert!(refused.iter().all(|error| matches!(error, Some(Error::NotADirectory))), "{refused:?}");
        assert!(matches!(self.setter.clear(file.as_fd()), Err(Error::NotADirectory)));
        fs::remove_file(&path).expect("it is there");
    }

    fn removed_directories_let_go(&self) {
        let (path, dir) = self.make("gone");
        let project = self.set(&dir, at(MIB, 10)).project;
        fs::remove_dir(&path).expect("it is empty");
        let refused = self.setter.set(dir.as_fd(), at(MIB, 20));
        assert!(matches!(refused, Err(Error::Removed)), "{refused:?}");
        drop(dir);
        self.release(project);
        self.setter.release(project).expect("releasing again is nothing");
    }

    fn threads_get_different_projects(&self) {
        let made: Vec<_> = (0..16).map(|number| self.make(&format!("thread{number}"))).collect();
        let statuses: Vec<Status> = std::thread::scope(|scope| {
            let set = |dir| scope.spawn(move || self.set(dir, at(MIB, 3)));
            let threads: Vec<_> = made.iter().map(|(_, dir)| set(dir)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
        });
        let projects: HashSet<ProjectId> = statuses.iter().map(|status| status.project).collect();
        assert_eq!(projects.len(), made.len());
        assert!(statuses.iter().all(|status| status.usage.inodes == Inodes(1)));
        for (path, dir) in made {
            self.remove(&path, dir);
        }
    }
}
