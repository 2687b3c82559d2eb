#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::kernel::Record;
use crate::testing::memory::Memory;
use crate::{Bytes, Inodes, Limit, Limits};

/// A call to the kernel that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    Read,
    List,
    SetTag(u32),
    SetLimits,
    Lock,
    Unlock,
    Settle,
}

/// A kernel before each call of which something is done, and which fails where that fails.
struct Hooked<'a> {
    kernel: &'a Memory,
    before: &'a Before<'a>,
}

type Before<'a> = dyn Fn(About) -> io::Result<()> + Send + Sync + 'a;

impl std::fmt::Debug for Hooked<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.kernel.fmt(f)
    }
}

impl Kernel for Hooked<'_> {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        (self.before)(About::Read)?;
        self.kernel.tag(file)
    }
    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        (self.before)(About::SetTag(tag.project))?;
        self.kernel.set_tag(file, tag)
    }
    fn record(&self, project: u32) -> io::Result<Record> {
        (self.before)(About::Read)?;
        self.kernel.record(project)
    }
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        (self.before)(About::SetLimits)?;
        self.kernel.set_limits(project, change)
    }
    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        (self.before)(About::List)?;
        self.kernel.next(from)
    }
    fn lock(&self) -> io::Result<()> {
        (self.before)(About::Lock)?;
        self.kernel.lock()
    }
    fn unlock(&self) {
        // Nobody is told that it failed.
        let _ = (self.before)(About::Unlock);
    }
    fn settle(&self) -> io::Result<()> {
        (self.before)(About::Settle)?;
        self.kernel.settle()
    }
}

/// Counts down; false at 0, where it stays.
fn count_down(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

const CHANGE: Change = Change { bytes: Limit::At(Bytes(1 << 20)), inodes: Limit::At(Inodes(100)) };
const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(100)) };

fn make(scratch: &Path, name: &str) -> File {
    std::fs::create_dir(scratch.join(name)).unwrap();
    File::open(scratch.join(name)).unwrap()
}

fn engine<K: Kernel>(kernel: K) -> Engine<K> {
    Engine::new(kernel, ProjectRange::default())
}

/// Does the work again and again, killed before each of its calls in turn: that one and all after it never happen.
/// `check` sees what each left.
fn at_every_call(
    work: impl Fn(&Engine<Hooked<'_>>, BorrowedFd<'_>),
    prepare: impl Fn(&Memory, BorrowedFd<'_>),
    check: impl Fn(&Memory, BorrowedFd<'_>),
) {
    let mut calls = 0;
    loop {
        let scratch = tempfile::tempdir().unwrap();
        let dir = make(scratch.path(), "dir");
        let memory = Memory::default();
        prepare(&memory, dir.as_fd());
        let left = AtomicU32::new(calls);
        let before = |_| if count_down(&left) { Ok(()) } else { Err(io::Error::other("killed")) };
        work(&engine(Hooked { kernel: &memory, before: &before }), dir.as_fd());
        check(&memory, dir.as_fd());
        if left.into_inner() != 0 {
            break;
        }
        calls += 1;
    }
    assert!(calls > 3, "the work was killed before {calls} calls");
}

/// Somebody who lives.
fn healthy(kernel: &Memory) -> Engine<Hooked<'_>> {
    engine(Hooked { kernel, before: &|_| Ok(()) })
}

fn set(engine: &Engine<impl Kernel>, dir: BorrowedFd<'_>) -> Result<Status, Error> {
    engine.set(dir, CHANGE, Contents::Refused)
}

#[test]
fn whoever_is_killed_while_setting_leaves_no_project_without_limits_and_the_next_one_goes_on() {
    at_every_call(
        |engine, dir| drop(set(engine, dir)),
        |_, _| {},
        |memory, dir| {
            let healthy = healthy(memory);
            let left = healthy.status(dir).unwrap();
            assert!(left.is_none_or(|status| status.limits == LIMITS), "{left:?}");
            let status = set(&healthy, dir).unwrap();
            assert_eq!(status.limits, LIMITS);
            healthy.release_all_unused(&[]).unwrap();
            assert_eq!(healthy.list(ProjectRange::all()).unwrap(), [status], "nothing else is kept");
        },
    );
}

#[test]
fn whoever_is_killed_while_clearing_can_clear_again_and_nothing_is_kept() {
    at_every_call(
        |engine, dir| drop(engine.clear(dir)),
        |memory, dir| _ = set(&healthy(memory), dir).unwrap(),
        |memory, dir| {
            let healthy = healthy(memory);
            healthy.clear(dir).unwrap();
            assert_eq!(healthy.status(dir).unwrap(), None);
            assert_eq!(healthy.list(ProjectRange::all()).unwrap(), []);
        },
    );
}

#[test]
fn a_directory_that_can_not_be_given_a_project_leaves_no_limits_behind() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = make(scratch.path(), "dir");
    let engine = engine(Memory::default());
    engine.kernel.fail(Call::WriteProject, io::ErrorKind::PermissionDenied);
    let error = set(&engine, dir.as_fd()).unwrap_err();
    assert!(error.is_permission() && !error.is_retryable(), "{error:?}");
    assert_eq!(error.to_string(), "write the directory's project");
    assert_eq!(engine.list(ProjectRange::all()).unwrap(), []);
    assert_eq!(engine.status(dir.as_fd()).unwrap(), None);
}

#[test]
fn limits_that_can_not_be_set_leave_the_directory_without_a_project() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = make(scratch.path(), "dir");
    let engine = engine(Memory::default());
    for call in [Call::Lock, Call::ReadLimits, Call::WriteLimits] {
        engine.kernel.fail(call, io::ErrorKind::StorageFull);
        let error = set(&engine, dir.as_fd()).unwrap_err();
        assert!(matches!(error, Error::Kernel { call: failed, .. } if failed == call), "{error:?}");
        assert_eq!(engine.status(dir.as_fd()).unwrap(), None);
    }
}

/// Sets, while somebody who keeps to no lock takes the same numbers for another directory, so many times; what became of
/// the two.
fn contested(times: u32) -> (Result<Status, Error>, [Option<Status>; 2]) {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, rival) = (make(scratch.path(), "dir"), make(scratch.path(), "rival"));
    let (memory, left) = (Memory::default(), AtomicU32::new(times));
    let before = |about| match about {
        About::SetTag(project @ 1..) if count_down(&left) => {
            memory.set_tag(rival.as_fd(), Tag { project, inherit: true })
        }
        _ => Ok(()),
    };
    let set = set(&engine(Hooked { kernel: &memory, before: &before }), dir.as_fd());
    let healthy = healthy(&memory);
    (set, [&dir, &rival].map(|dir| healthy.status(dir.as_fd()).unwrap()))
}

#[test]
fn a_number_that_another_took_at_the_same_time_is_noticed_and_left_to_it() {
    let (set, [ours, theirs]) = contested(1);
    assert_eq!(set.unwrap().limits, LIMITS);
    assert_ne!(ours.unwrap().project, theirs.unwrap().project);
}

#[test]
fn one_that_takes_every_number_is_told_of_in_the_end() {
    let (set, [ours, _]) = contested(u32::MAX);
    let error = set.unwrap_err();
    assert!(matches!(error, Error::Contended) && error.is_retryable(), "{error:?}");
    assert_eq!(ours, None);
}

#[test]
fn directories_of_another_file_system_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = make(scratch.path(), "dir");
    let engine = engine(Memory::default()).only_on(u64::MAX);
    assert!(matches!(set(&engine, dir.as_fd()), Err(Error::OtherFileSystem)));
}

#[test]
fn what_is_written_is_written_under_the_lock_and_nothing_long_is_done_with_it() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = make(scratch.path(), "dir");
    let is_locked = AtomicBool::new(false);
    let before = |about| {
        match about {
            About::Lock | About::Unlock => is_locked.store(about == About::Lock, Ordering::SeqCst),
            About::SetTag(_) | About::SetLimits => assert!(is_locked.load(Ordering::SeqCst), "{about:?}"),
            About::List | About::Settle => assert!(!is_locked.load(Ordering::SeqCst), "{about:?}"),
            About::Read => {}
        }
        Ok(())
    };
    let memory = Memory::default();
    let engine = engine(Hooked { kernel: &memory, before: &before });
    let project = set(&engine, dir.as_fd()).unwrap().project;
    set(&engine, dir.as_fd()).unwrap();
    assert!(matches!(engine.release(project), Err(Error::InUse { .. })));
    engine.release_all_unused(&[]).unwrap();
    engine.clear(dir.as_fd()).unwrap();
    set(&engine, dir.as_fd()).unwrap();
    let project = engine.begin_clearing(dir.as_fd()).unwrap().unwrap();
    engine.finish_clearing(dir.as_fd(), project).unwrap();
    assert_eq!(engine.list(ProjectRange::all()).unwrap(), []);
}

/// Two directories with one project, as a copy with all its attributes makes them.
fn copied(scratch: &Path) -> (Engine<Memory>, File, File) {
    let (original, copy) = (make(scratch, "original"), make(scratch, "copy"));
    let engine = engine(Memory::default());
    let project = set(&engine, original.as_fd()).unwrap().project;
    engine.kernel.set_tag(copy.as_fd(), Tag { project: project.get(), inherit: true }).unwrap();
    (engine, original, copy)
}

#[test]
fn limits_that_are_anothers_too_are_not_changed() {
    let scratch = tempfile::tempdir().unwrap();
    let (engine, original, copy) = copied(scratch.path());
    let change = Change { bytes: Limit::At(Bytes(4096)), ..CHANGE };
    let error = engine.set(copy.as_fd(), change, Contents::Refused).unwrap_err();
    assert!(matches!(error, Error::Shared { .. }) && error.to_string().contains("clear it"), "{error}");
    assert_eq!(engine.status(original.as_fd()).unwrap().unwrap().limits, LIMITS);
}

#[test]
fn clearing_leaves_the_limits_of_a_project_that_is_anothers_too() {
    for whole_tree in [false, true] {
        let scratch = tempfile::tempdir().unwrap();
        let (engine, original, copy) = copied(scratch.path());
        if whole_tree {
            let project = engine.begin_clearing(copy.as_fd()).unwrap().unwrap();
            engine.finish_clearing(copy.as_fd(), project).unwrap();
        } else {
            engine.clear(copy.as_fd()).unwrap();
        }
        assert_eq!(engine.status(copy.as_fd()).unwrap(), None);
        assert_eq!(engine.status(original.as_fd()).unwrap().unwrap().limits, LIMITS);
        let own = set(&engine, copy.as_fd()).unwrap().project;
        assert_ne!(own, engine.status(original.as_fd()).unwrap().unwrap().project);
    }
}

#[test]
fn a_directory_half_cleared_is_refused_like_any_other_that_is_not_empty() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = make(scratch.path(), "dir");
    let engine = engine(Memory::default());
    set(&engine, dir.as_fd()).unwrap();
    File::create(scratch.path().join("dir/file")).unwrap();
    engine.begin_clearing(dir.as_fd()).unwrap();
    assert!(matches!(set(&engine, dir.as_fd()), Err(Error::NotEmpty)));
    let status = engine.set(dir.as_fd(), CHANGE, Contents::Accepted).unwrap();
    engine.finish_clearing(dir.as_fd(), status.project).unwrap();
    assert_eq!(engine.status(dir.as_fd()).unwrap(), Some(status), "limited again meanwhile, it stays so");
}
