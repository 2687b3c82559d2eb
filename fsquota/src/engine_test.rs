#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::kernel::Record;
use crate::testing::memory::Memory;
use crate::{Bytes, Inodes, Limit, Limits};

/// A kernel whose caller is killed before the n-th call: that one and all after it never happen.
#[derive(Debug)]
struct Mortal<'a> {
    kernel: &'a Memory,
    left: AtomicU32,
}

impl<'a> Mortal<'a> {
    fn new(kernel: &'a Memory, calls: u32) -> Self {
        Self { kernel, left: AtomicU32::new(calls) }
    }

    fn alive(&self) -> io::Result<&'a Memory> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map(|_| self.kernel).map_err(|_| io::Error::other("killed"))
    }

    fn was_killed(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }
}

impl Kernel for Mortal<'_> {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        self.alive()?.tag(file)
    }
    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        self.alive()?.set_tag(file, tag)
    }
    fn record(&self, project: u32) -> io::Result<Record> {
        self.alive()?.record(project)
    }
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        self.alive()?.set_limits(project, change)
    }
    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        self.alive()?.next(from)
    }
    fn lock(&self) -> io::Result<()> {
        self.alive()?.lock()
    }
    fn unlock(&self) {}
    fn settle(&self) -> io::Result<()> {
        self.alive()?.settle()
    }
}

/// Somebody who keeps to no lock and takes the same numbers for another directory, so many times.
#[derive(Debug)]
struct Contested {
    kernel: Memory,
    rival: File,
    times: AtomicU32,
}

impl Kernel for Contested {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        self.kernel.tag(file)
    }
    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        let left = self.times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if left.is_ok() && tag.project != 0 {
            self.kernel.set_tag(self.rival.as_fd(), tag)?;
        }
        self.kernel.set_tag(file, tag)
    }
    fn record(&self, project: u32) -> io::Result<Record> {
        self.kernel.record(project)
    }
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        self.kernel.set_limits(project, change)
    }
    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        self.kernel.next(from)
    }
    fn lock(&self) -> io::Result<()> {
        self.kernel.lock()
    }
    fn unlock(&self) {}
    fn settle(&self) -> io::Result<()> {
        self.kernel.settle()
    }
}

/// Sees to it that whatever is written is written under the lock, and that nobody waits with it for what others removed.
#[derive(Debug, Default)]
struct Guarded {
    kernel: Memory,
    is_locked: AtomicBool,
}

impl Guarded {
    #[track_caller]
    fn assert_locked(&self, locked: bool) {
        assert_eq!(self.is_locked.load(Ordering::SeqCst), locked);
    }
}

impl Kernel for Guarded {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        self.kernel.tag(file)
    }
    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        self.assert_locked(true);
        self.kernel.set_tag(file, tag)
    }
    fn record(&self, project: u32) -> io::Result<Record> {
        self.kernel.record(project)
    }
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        self.assert_locked(true);
        self.kernel.set_limits(project, change)
    }
    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        self.assert_locked(false);
        self.kernel.next(from)
    }
    fn lock(&self) -> io::Result<()> {
        self.is_locked.store(true, Ordering::SeqCst);
        self.kernel.lock()
    }
    fn unlock(&self) {
        self.is_locked.store(false, Ordering::SeqCst);
    }
    fn settle(&self) -> io::Result<()> {
        self.assert_locked(false);
        self.kernel.settle()
    }
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

/// Does the work again and again, killed before each of its calls in turn; `check` sees what each left.
fn at_every_call(
    work: impl Fn(&Engine<Mortal<'_>>, BorrowedFd<'_>),
    prepare: impl Fn(&Memory, BorrowedFd<'_>),
    check: impl Fn(&Memory, BorrowedFd<'_>),
) {
    let mut calls = 0;
    loop {
        let scratch = tempfile::tempdir().unwrap();
        let dir = make(scratch.path(), "dir");
        let memory = Memory::default();
        prepare(&memory, dir.as_fd());
        let engine = engine(Mortal::new(&memory, calls));
        work(&engine, dir.as_fd());
        check(&memory, dir.as_fd());
        if !engine.kernel.was_killed() {
            break;
        }
        calls += 1;
    }
    assert!(calls > 3, "the work was killed before {calls} calls");
}

/// Somebody who lives.
fn healthy(memory: &Memory) -> Engine<Mortal<'_>> {
    engine(Mortal::new(memory, u32::MAX))
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
            healthy.release_all_unused().unwrap();
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

fn contested(scratch: &Path, times: u32) -> (Engine<Contested>, File) {
    let rival = make(scratch, "rival");
    let kernel = Contested { kernel: Memory::default(), rival, times: AtomicU32::new(times) };
    (engine(kernel), make(scratch, "dir"))
}

#[test]
fn a_number_that_another_took_at_the_same_time_is_noticed_and_left_to_it() {
    let scratch = tempfile::tempdir().unwrap();
    // The tag and its withdrawal: two changes are one attempt.
    let (engine, dir) = contested(scratch.path(), 2);
    let ours = set(&engine, dir.as_fd()).unwrap();
    let theirs = engine.status(engine.kernel.rival.as_fd()).unwrap().unwrap();
    assert_ne!(ours.project, theirs.project);
    assert_eq!(ours.limits, LIMITS);
}

#[test]
fn one_that_takes_every_number_is_told_of_in_the_end() {
    let scratch = tempfile::tempdir().unwrap();
    let (engine, dir) = contested(scratch.path(), u32::MAX);
    let error = set(&engine, dir.as_fd()).unwrap_err();
    assert!(matches!(error, Error::Contended) && error.is_retryable(), "{error:?}");
    assert_eq!(engine.status(dir.as_fd()).unwrap(), None);
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
    let engine = engine(Guarded::default());
    let project = set(&engine, dir.as_fd()).unwrap().project;
    set(&engine, dir.as_fd()).unwrap();
    assert!(matches!(engine.release(project), Err(Error::InUse { .. })));
    engine.release_all_unused().unwrap();
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
