#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Instant, SystemTime};

use super::*;
use crate::kernel::QuotaRecord;
use crate::testing::memory::MemoryKernel;
use crate::{Bytes, Inodes, LimitChange, QuotaLimits};

#[path = "engine/ownership_test.rs"]
mod ownership;

/// A call to the kernel that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingCall {
    Read,
    List,
    SetTag(u32),
    SetMark,
    SetLimits,
    Count,
    Lock,
    Unlock,
    Settle,
}

/// A kernel with a hook before each call; if the hook fails, so does the call.
struct HookedKernel<'a> {
    kernel: &'a MemoryKernel,
    before: &'a CallHook<'a>,
}

type CallHook<'a> = dyn Fn(PendingCall) -> io::Result<()> + Send + Sync + 'a;

impl std::fmt::Debug for HookedKernel<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.kernel.fmt(f)
    }
}

impl QuotaKernel for HookedKernel<'_> {
    fn project_tag(&self, file: BorrowedFd<'_>) -> io::Result<ProjectTag> {
        (self.before)(PendingCall::Read)?;
        self.kernel.project_tag(file)
    }
    fn set_project_tag(&self, file: BorrowedFd<'_>, tag: ProjectTag) -> io::Result<()> {
        (self.before)(PendingCall::SetTag(tag.project))?;
        self.kernel.set_project_tag(file, tag)
    }
    fn owner_mark(&self, dir: BorrowedFd<'_>) -> io::Result<Option<OwnerMark>> {
        (self.before)(PendingCall::Read)?;
        self.kernel.owner_mark(dir)
    }
    fn set_owner_mark(&self, dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> io::Result<()> {
        (self.before)(PendingCall::SetMark)?;
        self.kernel.set_owner_mark(dir, mark)
    }
    fn count_tree(&self, dir: BorrowedFd<'_>, project: u32, before: SystemTime) -> Result<u64, Error> {
        (self.before)(PendingCall::Count).map_err(KernelOperation::InspectDirectory.into_error())?;
        self.kernel.count_tree(dir, project, before)
    }
    fn is_enforced(&self) -> io::Result<bool> {
        (self.before)(PendingCall::Read)?;
        self.kernel.is_enforced()
    }
    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord> {
        (self.before)(PendingCall::Read)?;
        self.kernel.quota_record(project)
    }
    fn set_limits(&self, project: u32, change: KernelLimitChange) -> io::Result<()> {
        (self.before)(PendingCall::SetLimits)?;
        self.kernel.set_limits(project, change)
    }
    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>> {
        (self.before)(PendingCall::List)?;
        self.kernel.next_record(from)
    }
    fn lock_allocation(&self, deadline: Instant) -> Result<(), Error> {
        (self.before)(PendingCall::Lock).map_err(KernelOperation::LockAllocation.into_error())?;
        self.kernel.lock_allocation(deadline)
    }
    fn unlock_allocation(&self) {
        // `unlock_allocation` returns no error.
        let _ = (self.before)(PendingCall::Unlock);
    }
    fn flush_removed_inodes(&self) -> io::Result<()> {
        (self.before)(PendingCall::Settle)?;
        self.kernel.flush_removed_inodes()
    }
}

/// Counts down to 0; false once 0 is reached.
fn count_down(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

const CHANGE: QuotaChange =
    QuotaChange { bytes: LimitChange::Set(Bytes(1 << 20)), inodes: LimitChange::Set(Inodes(100)) };
const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(100)) };

fn create_dir(scratch: &Path, name: &str) -> File {
    std::fs::create_dir(scratch.join(name)).unwrap();
    File::open(scratch.join(name)).unwrap()
}

fn engine_over<K: QuotaKernel>(kernel: K) -> QuotaEngine<K> {
    QuotaEngine::new(kernel, ProjectRange::default())
}

/// Repeats the work and kills it before each of its calls in turn: that call and all later ones never happen.
/// `check` sees the state that each kill leaves.
fn killed_at_every_call(
    work: impl Fn(&QuotaEngine<HookedKernel<'_>>, BorrowedFd<'_>),
    prepare: impl Fn(&MemoryKernel, BorrowedFd<'_>),
    check: impl Fn(&MemoryKernel, BorrowedFd<'_>),
) {
    let mut calls = 0;
    loop {
        let scratch = tempfile::tempdir().unwrap();
        let dir = create_dir(scratch.path(), "dir");
        let memory = MemoryKernel::default();
        prepare(&memory, dir.as_fd());
        let left = AtomicU32::new(calls);
        let before = |_| if count_down(&left) { Ok(()) } else { Err(io::Error::other("killed")) };
        work(&engine_over(HookedKernel { kernel: &memory, before: &before }), dir.as_fd());
        check(&memory, dir.as_fd());
        if left.into_inner() != 0 {
            break;
        }
        calls += 1;
    }
    assert!(calls > 3, "the work was killed before {calls} calls");
}

/// An engine whose calls all succeed.
fn healthy_engine(kernel: &MemoryKernel) -> QuotaEngine<HookedKernel<'_>> {
    engine_over(HookedKernel { kernel, before: &|_| Ok(()) })
}

fn set_limits(engine: &QuotaEngine<impl QuotaKernel>, dir: BorrowedFd<'_>) -> Result<QuotaStatus, Error> {
    engine.set_limits(dir, CHANGE, NonEmptyPolicy::Reject)
}

#[test]
fn a_set_killed_at_any_call_leaves_no_project_without_limits_and_can_be_repeated() {
    killed_at_every_call(
        |engine, dir| drop(set_limits(engine, dir)),
        |_, _| {},
        |memory, dir| {
            let healthy = healthy_engine(memory);
            let left = healthy.read_status(dir).unwrap();
            assert!(left.is_none_or(|status| status.limits == LIMITS), "{left:?}");
            let status = set_limits(&healthy, dir).unwrap();
            assert_eq!(status.limits, LIMITS);
            healthy.release_unused_projects(&[]).unwrap();
            assert_eq!(
                healthy.list_projects(ProjectRange::full_range()).unwrap(),
                [status],
                "no other project has limits"
            );
        },
    );
}

#[test]
fn a_clear_killed_at_any_call_can_be_repeated_and_leaves_nothing() {
    killed_at_every_call(
        |engine, dir| drop(engine.clear_limits(dir)),
        |memory, dir| _ = set_limits(&healthy_engine(memory), dir).unwrap(),
        |memory, dir| {
            let healthy = healthy_engine(memory);
            healthy.clear_limits(dir).unwrap();
            assert_eq!(healthy.read_status(dir).unwrap(), None);
            assert_eq!(healthy.list_projects(ProjectRange::full_range()).unwrap(), []);
        },
    );
}

#[test]
fn a_failed_tag_leaves_no_limits_behind() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let engine = engine_over(MemoryKernel::default());
    engine.kernel.fail_next_call(KernelOperation::WriteProject, io::ErrorKind::PermissionDenied);
    let error = set_limits(&engine, dir.as_fd()).unwrap_err();
    assert!(error.is_permission() && !error.is_retryable(), "{error:?}");
    assert_eq!(error.to_string(), "can't set the directory's quota project");
    assert_eq!(engine.list_projects(ProjectRange::full_range()).unwrap(), []);
    assert_eq!(engine.read_status(dir.as_fd()).unwrap(), None);
}

#[test]
fn failed_limits_leave_the_directory_without_a_project() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let engine = engine_over(MemoryKernel::default());
    for call in [KernelOperation::LockAllocation, KernelOperation::ReadLimits, KernelOperation::WriteLimits] {
        engine.kernel.fail_next_call(call, io::ErrorKind::StorageFull);
        let error = set_limits(&engine, dir.as_fd()).unwrap_err();
        assert!(matches!(error, Error::Kernel { call: failed, .. } if failed == call), "{error:?}");
        assert_eq!(engine.read_status(dir.as_fd()).unwrap(), None);
    }
}

/// Sets limits while a rival without the lock allocates the same number for another directory, `times` times.
/// Returns the result, and the status of both directories.
fn set_against_rival(times: u32) -> (Result<QuotaStatus, Error>, [Option<QuotaStatus>; 2]) {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, rival) = (create_dir(scratch.path(), "dir"), create_dir(scratch.path(), "rival"));
    let (memory, left) = (MemoryKernel::default(), AtomicU32::new(times));
    let before = |about| match about {
        PendingCall::SetTag(project @ 1..) if count_down(&left) => {
            memory.set_project_tag(rival.as_fd(), ProjectTag { project, inherit: true })
        }
        _ => Ok(()),
    };
    let set = set_limits(&engine_over(HookedKernel { kernel: &memory, before: &before }), dir.as_fd());
    let healthy = healthy_engine(&memory);
    (set, [&dir, &rival].map(|dir| healthy.read_status(dir.as_fd()).unwrap()))
}

#[test]
fn a_number_that_a_rival_allocated_concurrently_is_left_to_it() {
    let (set, [ours, theirs]) = set_against_rival(1);
    assert_eq!(set.unwrap().limits, LIMITS);
    assert_ne!(ours.unwrap().project, theirs.unwrap().project);
}

#[test]
fn a_rival_that_takes_every_number_is_an_error_in_the_end() {
    let (set, [ours, _]) = set_against_rival(u32::MAX);
    let error = set.unwrap_err();
    assert!(matches!(error, Error::AllocationContended) && error.is_retryable(), "{error:?}");
    assert_eq!(ours, None);
}

#[test]
fn directories_of_another_file_system_are_rejected() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let engine = engine_over(MemoryKernel::default()).restrict_to_device(u64::MAX);
    assert!(matches!(set_limits(&engine, dir.as_fd()), Err(Error::OtherFileSystem)));
}

#[test]
fn all_writes_hold_the_lock_and_slow_calls_do_not() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let is_locked = AtomicBool::new(false);
    let before = |about| {
        match about {
            PendingCall::Lock | PendingCall::Unlock => {
                is_locked.store(about == PendingCall::Lock, Ordering::SeqCst)
            }
            PendingCall::SetTag(_) | PendingCall::SetMark | PendingCall::SetLimits => {
                assert!(is_locked.load(Ordering::SeqCst), "{about:?}")
            }
            PendingCall::List | PendingCall::Settle | PendingCall::Count => {
                assert!(!is_locked.load(Ordering::SeqCst), "{about:?}")
            }
            PendingCall::Read => {}
        }
        Ok(())
    };
    let memory = MemoryKernel::default();
    let engine = engine_over(HookedKernel { kernel: &memory, before: &before });
    let project = set_limits(&engine, dir.as_fd()).unwrap().project;
    set_limits(&engine, dir.as_fd()).unwrap();
    assert!(matches!(engine.release_project(project), Err(Error::ProjectInUse { .. })));
    engine.release_unused_projects(&[]).unwrap();
    engine.clear_limits(dir.as_fd()).unwrap();
    set_limits(&engine, dir.as_fd()).unwrap();
    let project = engine.start_clearing(dir.as_fd()).unwrap().unwrap();
    engine.finish_clearing(dir.as_fd(), project).unwrap();
    assert_eq!(engine.list_projects(ProjectRange::full_range()).unwrap(), []);
}

#[test]
fn limits_that_are_not_enforced_are_neither_set_nor_reported() {
    let scratch = tempfile::tempdir().unwrap();
    let (dir, other) = (create_dir(scratch.path(), "dir"), create_dir(scratch.path(), "other"));
    let engine = engine_over(MemoryKernel::default());
    set_limits(&engine, dir.as_fd()).unwrap();
    engine.kernel.turn_enforcement_off();
    for dir in [&dir, &other] {
        let error = set_limits(&engine, dir.as_fd()).unwrap_err();
        assert!(matches!(error, Error::EnforcementOff) && !error.is_retryable(), "{error:?}");
    }
    assert!(matches!(engine.read_status(dir.as_fd()), Err(Error::EnforcementOff)));
    assert_eq!(engine.read_status(other.as_fd()).unwrap(), None, "it has no limits");
    assert!(engine.find_project(dir.as_fd()).unwrap().is_some(), "what removing it needs");
    engine.clear_limits(dir.as_fd()).unwrap();
}

#[test]
fn the_largest_project_is_listed() {
    let engine = engine_over(MemoryKernel::default());
    let change = KernelLimitChange { kib: Some(1024), inodes: None };
    for number in [7, u32::MAX - 1] {
        engine.kernel.set_limits(number, change.for_new_project()).unwrap();
    }
    let listed = engine.list_projects(ProjectRange::full_range()).unwrap();
    let numbers: Vec<u32> = listed.into_iter().map(|status| status.project.get()).collect();
    assert_eq!(numbers, [7, u32::MAX - 1]);
}

#[test]
fn a_partly_cleared_directory_is_rejected_as_not_empty() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let engine = engine_over(MemoryKernel::default());
    set_limits(&engine, dir.as_fd()).unwrap();
    File::create(scratch.path().join("dir/file")).unwrap();
    engine.start_clearing(dir.as_fd()).unwrap();
    assert!(matches!(set_limits(&engine, dir.as_fd()), Err(Error::NotEmpty)));
    let status = engine.set_limits(dir.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    engine.finish_clearing(dir.as_fd(), status.project).unwrap();
    assert_eq!(engine.read_status(dir.as_fd()).unwrap(), Some(status), "limits set meanwhile stay");
}
