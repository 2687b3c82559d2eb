//! The conformance suite: checks the contract of `QuotaSetter`.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::{
    Bytes, Error, Inodes, LimitChange, LimitError, ProjectId, QuotaChange, QuotaLimits, QuotaSetter,
    QuotaStatus,
};

/// Checks the contract of [`QuotaSetter`] with directories created in `scratch`, an empty directory without
/// limits on a file system that the implementation supports. It removes them again and releases their
/// projects.
///
/// # Panics
/// If the contract is violated, or a directory can't be created.
pub fn conformance(setter: &dyn QuotaSetter, scratch: &Path) {
    let suite = ConformanceSuite { setter, scratch };
    suite.limits_are_set_and_read();
    suite.each_limit_changes_by_itself();
    suite.bytes_are_rounded_up_and_invalid_limits_rejected();
    suite.usage_is_counted();
    suite.projects_are_never_shared();
    suite.only_empty_directories_are_set_and_cleared();
    suite.subdirectories_count_for_the_limited_parent();
    suite.non_directories_are_rejected();
    suite.removed_directories_are_released();
    suite.threads_get_different_projects();
    let left = fs::read_dir(scratch).expect("scratch is readable").count();
    assert_eq!(left, 0, "the suite removes everything it has created");
}

struct ConformanceSuite<'a> {
    setter: &'a dyn QuotaSetter,
    scratch: &'a Path,
}

/// The largest block of a file system, in bytes. *Source:* xfs(5), ext4(5).
const LARGEST_BLOCK: u64 = 65_536;
const MIB: Bytes = Bytes(1 << 20);

fn both_limits(bytes: Bytes, inodes: u64) -> QuotaChange {
    QuotaChange { bytes: LimitChange::Set(bytes), inodes: LimitChange::Set(Inodes(inodes)) }
}

fn expected_limits(bytes: Option<Bytes>, inodes: Option<u64>) -> QuotaLimits {
    QuotaLimits { bytes, inodes: inodes.map(Inodes) }
}

impl ConformanceSuite<'_> {
    fn create_dir(&self, name: &str) -> (PathBuf, File) {
        let path = self.scratch.join(name);
        fs::create_dir(&path).expect("a directory can be created");
        let dir = File::open(&path).expect("the directory can be opened");
        (path, dir)
    }

    fn set_limits(&self, dir: &File, change: QuotaChange) -> QuotaStatus {
        self.setter.set_limits(dir.as_fd(), change).expect("the limits are set")
    }

    fn read_status(&self, dir: &File) -> Option<QuotaStatus> {
        self.setter.read_status(dir.as_fd()).expect("the status is read")
    }

    fn remove_dir(&self, path: &Path, dir: File) {
        let project = self.read_status(&dir).map(|status| status.project);
        fs::remove_dir_all(path).expect("a directory can be removed");
        drop(dir);
        if let Some(project) = project {
            self.release_project(project);
        }
    }

    /// A child that another thread has forked inherits open descriptors until it executes its program, and a
    /// removed directory is counted until then.
    fn release_project(&self, project: ProjectId) {
        for _ in 0..10_000 {
            match self.setter.release_project(project) {
                Err(error) if error.is_retryable() => std::thread::yield_now(),
                result => return result.expect("the project has no inodes any more"),
            }
        }
        panic!("project {project} is in use although it has no inodes");
    }

    fn limits_are_set_and_read(&self) {
        let (path, dir) = self.create_dir("read");
        assert_eq!(self.read_status(&dir), None, "a new directory has no limits");
        self.setter.clear_limits(dir.as_fd()).expect("clearing an unlimited directory succeeds");
        assert_eq!(self.read_status(&dir), None, "and changes nothing");
        let set = self.set_limits(&dir, both_limits(MIB, 100));
        assert_eq!(set.limits, expected_limits(Some(MIB), Some(100)));
        assert_eq!(set.usage.inodes, Inodes(1), "the directory itself is counted");
        assert!(!set.is_over_limit());
        assert_eq!(self.read_status(&dir), Some(set), "the limits are read back as set");
        assert_eq!(self.set_limits(&dir, both_limits(MIB, 100)), set, "the same again changes nothing");
        self.setter.clear_limits(dir.as_fd()).expect("the limits are lifted");
        assert_eq!(self.read_status(&dir), None, "a cleared directory has no limits");
        self.setter.clear_limits(dir.as_fd()).expect("clearing again succeeds");
        let again = self.set_limits(&dir, both_limits(MIB, 7));
        assert_eq!(
            again.limits,
            expected_limits(Some(MIB), Some(7)),
            "a cleared directory can be limited again"
        );
        self.remove_dir(&path, dir);
    }

    fn each_limit_changes_by_itself(&self) {
        let (path, dir) = self.create_dir("each");
        let change = |bytes, inodes| self.set_limits(&dir, QuotaChange { bytes, inodes });
        let (bytes_path, bytes_dir) = self.create_dir("bytes");
        let bytes_alone = QuotaChange { bytes: LimitChange::Set(MIB), inodes: LimitChange::Unlimited };
        assert_eq!(self.set_limits(&bytes_dir, bytes_alone).limits, expected_limits(Some(MIB), None));
        self.remove_dir(&bytes_path, bytes_dir);
        let first = change(LimitChange::Set(MIB), LimitChange::Keep);
        assert_eq!(
            first.limits,
            expected_limits(Some(MIB), None),
            "a new directory that keeps its limit is unlimited"
        );
        let both = change(LimitChange::Keep, LimitChange::Set(Inodes(50)));
        assert_eq!(both.limits, expected_limits(Some(MIB), Some(50)));
        assert_eq!(change(LimitChange::Keep, LimitChange::Keep), both);
        let twice = Bytes(2 * MIB.0);
        assert_eq!(
            change(LimitChange::Set(twice), LimitChange::Keep).limits,
            expected_limits(Some(twice), Some(50))
        );
        assert_eq!(change(LimitChange::Unlimited, LimitChange::Keep).limits, expected_limits(None, Some(50)));
        assert_eq!(
            change(LimitChange::Set(MIB), LimitChange::Unlimited).limits,
            expected_limits(Some(MIB), None)
        );
        let none = change(LimitChange::Unlimited, LimitChange::Unlimited);
        assert_eq!(none.limits, QuotaLimits::default());
        assert_eq!(none.project, first.project, "the project stays");
        assert_eq!(self.read_status(&dir), Some(none), "without limits, but counted");
        self.remove_dir(&path, dir);
    }

    fn bytes_are_rounded_up_and_invalid_limits_rejected(&self) {
        let (path, dir) = self.create_dir("round");
        for requested in [1, 1024, 1025, 65_536, 1_000_000_007, (1 << 63) - 65_536] {
            let set = self.set_limits(&dir, both_limits(Bytes(requested), 1));
            let rounded = set.limits.bytes.expect("the limit was set").0;
            assert!(
                rounded >= requested && rounded - requested < LARGEST_BLOCK,
                "{requested} became {rounded}"
            );
            assert!(rounded.is_multiple_of(1024), "{requested} became {rounded}");
            assert_eq!(self.read_status(&dir), Some(set), "the status has the rounded limit");
        }
        let before = self.read_status(&dir);
        let rejected = |change| match self.setter.set_limits(dir.as_fd(), change) {
            Err(Error::InvalidLimit(reason)) => reason,
            other => panic!("{change:?} gave {other:?}"),
        };
        let is_too_large = |change| matches!(rejected(change), LimitError::TooLarge { .. });
        for bytes in [(1 << 63) - 65_535, (1 << 63) - 1, 1 << 63, u64::MAX] {
            assert!(is_too_large(both_limits(Bytes(bytes), 1)), "{bytes}");
        }
        assert!(is_too_large(both_limits(MIB, 1 << 63)));
        assert_eq!(rejected(both_limits(Bytes(0), 1)), LimitError::Zero);
        assert_eq!(rejected(both_limits(MIB, 0)), LimitError::Zero);
        assert_eq!(self.read_status(&dir), before, "a rejected limit changes nothing");
        self.remove_dir(&path, dir);
    }

    fn usage_is_counted(&self) {
        let (path, dir) = self.create_dir("usage");
        let empty = self.set_limits(&dir, both_limits(Bytes(64 << 20), 1000)).usage;
        fs::create_dir(path.join("below")).expect("the limit allows it");
        for name in ["a", "b", "below/c"] {
            let mut file = File::create(path.join(name)).expect("the limit allows it");
            file.write_all(&[7; 64 << 10]).and_then(|()| file.sync_all()).expect("the limit allows it");
        }
        let status = self.read_status(&dir).expect("the directory is limited");
        assert_eq!(status.usage.inodes, Inodes(5));
        let grown = status.usage.bytes.0 - empty.bytes.0;
        assert!((192 << 10..1 << 20).contains(&grown), "three times 64 KiB used {grown}");
        assert_eq!(
            status.remaining_quota(),
            expected_limits(Some(Bytes((64 << 20) - status.usage.bytes.0)), Some(995)),
            "the remaining quota"
        );
        let shrunk = self.set_limits(&dir, both_limits(Bytes(4096), 2));
        assert!(shrunk.is_over_limit(), "a limit below the usage is accepted and reported");
        assert_eq!(shrunk.remaining_quota(), expected_limits(Some(Bytes(0)), Some(0)), "never below 0");
        let kept = fs::read(path.join("a")).expect("a file can be read");
        assert_eq!(kept.len(), 64 << 10, "existing data stays");
        self.remove_dir(&path, dir);
    }

    fn projects_are_never_shared(&self) {
        let directories: Vec<_> = (0..20).map(|number| self.create_dir(&format!("many{number}"))).collect();
        let set = |dir: &File| {
            self.set_limits(
                dir,
                QuotaChange { bytes: LimitChange::Unlimited, inodes: LimitChange::Unlimited },
            )
        };
        let projects: HashSet<ProjectId> = directories.iter().map(|(_, dir)| set(dir).project).collect();
        assert_eq!(projects.len(), directories.len(), "a number without limits is still allocated");
        for (path, dir) in directories {
            self.remove_dir(&path, dir);
        }
    }

    fn only_empty_directories_are_set_and_cleared(&self) {
        let (path, dir) = self.create_dir("full");
        File::create(path.join("file")).expect("the limit allows it");
        let rejected = self.setter.set_limits(dir.as_fd(), both_limits(MIB, 10));
        assert!(matches!(rejected, Err(Error::NotEmpty)), "{rejected:?}");
        assert_eq!(self.read_status(&dir), None, "a rejected change changes nothing");
        fs::remove_file(path.join("file")).expect("it exists");
        let limited = self.set_limits(&dir, both_limits(MIB, 10));
        File::create(path.join("file")).expect("the limit allows it");
        self.set_limits(&dir, both_limits(MIB, 20));
        let rejected = self.setter.clear_limits(dir.as_fd());
        assert!(matches!(rejected, Err(Error::NotEmpty)), "{rejected:?}");
        assert_eq!(self.read_status(&dir).map(|status| status.project), Some(limited.project));
        self.remove_dir(&path, dir);
    }

    fn subdirectories_count_for_the_limited_parent(&self) {
        let (path, dir) = self.create_dir("outer");
        let outer = self.set_limits(&dir, both_limits(MIB, 10));
        fs::create_dir(path.join("inner")).expect("the limit allows it");
        let inner = File::open(path.join("inner")).expect("it exists");
        let status = self.read_status(&inner).expect("the status of the outer directory");
        assert_eq!((status.project, status.usage.inodes), (outer.project, Inodes(2)));
        let rejected = self.setter.set_limits(inner.as_fd(), both_limits(MIB, 5));
        assert!(
            matches!(rejected, Err(Error::InheritedProject { project }) if project == outer.project),
            "{rejected:?}"
        );
        let rejected = self.setter.clear_limits(inner.as_fd());
        assert!(matches!(rejected, Err(Error::InheritedProject { .. })), "{rejected:?}");
        fs::remove_dir(path.join("inner")).expect("the directory is empty");
        self.setter.clear_limits(inner.as_fd()).expect("clearing a removed directory succeeds");
        assert_eq!(self.read_status(&dir).map(|status| status.limits), Some(outer.limits));
        drop(inner);
        self.remove_dir(&path, dir);
    }

    fn non_directories_are_rejected(&self) {
        let path = self.scratch.join("file");
        let file = File::create(&path).expect("the limit allows it");
        let rejected = [
            self.setter.set_limits(file.as_fd(), both_limits(MIB, 1)).err(),
            self.setter.read_status(file.as_fd()).err(),
        ];
        assert!(rejected.iter().all(|error| matches!(error, Some(Error::NotADirectory))), "{rejected:?}");
        assert!(matches!(self.setter.clear_limits(file.as_fd()), Err(Error::NotADirectory)));
        fs::remove_file(&path).expect("it exists");
        let (target, dir) = self.create_dir("target");
        symlink(&target, &path).expect("a link can be created");
        let link =
            rustix::fs::open(&path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty()).expect("it exists");
        let rejected = self.setter.set_limits(link.as_fd(), both_limits(MIB, 1));
        assert!(matches!(rejected, Err(Error::NotADirectory)), "{rejected:?}");
        assert_eq!(self.read_status(&dir), None, "no link is followed");
        fs::remove_file(&path).expect("it exists");
        self.remove_dir(&target, dir);
    }

    fn removed_directories_are_released(&self) {
        let (path, dir) = self.create_dir("gone");
        let project = self.set_limits(&dir, both_limits(MIB, 10)).project;
        fs::remove_dir(&path).expect("the directory is empty");
        let rejected = self.setter.set_limits(dir.as_fd(), both_limits(MIB, 20));
        assert!(matches!(rejected, Err(Error::Removed)), "{rejected:?}");
        drop(dir);
        self.release_project(project);
        self.setter.release_project(project).expect("releasing again succeeds");
    }

    fn threads_get_different_projects(&self) {
        let directories: Vec<_> = (0..16).map(|number| self.create_dir(&format!("thread{number}"))).collect();
        let statuses: Vec<QuotaStatus> = std::thread::scope(|scope| {
            let set = |dir| scope.spawn(move || self.set_limits(dir, both_limits(MIB, 3)));
            let threads: Vec<_> = directories.iter().map(|(_, dir)| set(dir)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
        });
        let projects: HashSet<ProjectId> = statuses.iter().map(|status| status.project).collect();
        assert_eq!(projects.len(), directories.len());
        assert!(statuses.iter().all(|status| status.usage.inodes == Inodes(1)));
        for (path, dir) in directories {
            self.remove_dir(&path, dir);
        }
    }
}
