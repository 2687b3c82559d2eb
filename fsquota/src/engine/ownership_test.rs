//! Ownership of a project: whose limits it has.

use super::*;

/// Two directories with one project, as after a copy with all attributes.
fn copied_directory(scratch: &Path) -> (QuotaEngine<MemoryKernel>, File, File) {
    let (original, copy) = (create_dir(scratch, "original"), create_dir(scratch, "copy"));
    let engine = engine_over(MemoryKernel::default());
    let project = set_limits(&engine, original.as_fd()).unwrap().project;
    engine
        .kernel
        .set_project_tag(copy.as_fd(), ProjectTag { project: project.get(), inherit: true })
        .unwrap();
    (engine, original, copy)
}

#[test]
fn a_directory_with_the_project_of_another_one_gets_its_own() {
    for policy in [NonEmptyPolicy::Reject, NonEmptyPolicy::Accept] {
        let scratch = tempfile::tempdir().unwrap();
        let (engine, original, copy) = copied_directory(scratch.path());
        let change = QuotaChange { bytes: LimitChange::Set(Bytes(4096)), ..CHANGE };
        let own = engine.set_limits(copy.as_fd(), change, policy).unwrap();
        let status = engine.read_status(original.as_fd()).unwrap().unwrap();
        assert_eq!((own.limits.bytes, status.limits), (Some(Bytes(4096)), LIMITS));
        assert_ne!(own.project, status.project);
        let lifted = QuotaChange::from(QuotaLimits::default());
        engine.set_limits(copy.as_fd(), lifted, policy).unwrap();
        assert_eq!(engine.read_status(original.as_fd()).unwrap().unwrap().limits, LIMITS);
    }
}

#[test]
fn entries_with_the_project_of_another_directory_are_never_left_uncounted() {
    let scratch = tempfile::tempdir().unwrap();
    let (engine, original, copy) = copied_directory(scratch.path());
    File::create(scratch.path().join("copy/file")).unwrap();
    let rejected = set_limits(&engine, copy.as_fd());
    assert!(matches!(rejected, Err(Error::SharedProject { .. })), "{rejected:?}");
    let status = engine.set_limits(copy.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    let shared = engine.read_status(original.as_fd()).unwrap().unwrap().project;
    // As after a kill, before the entries have lost the shared project.
    assert_eq!(engine.previous_project(copy.as_fd()).unwrap(), Some(shared.get()));
    assert!(matches!(set_limits(&engine, copy.as_fd()), Err(Error::NotEmpty)));
    let again = engine.set_limits(copy.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    assert_eq!(again.project, status.project);
    assert_eq!(engine.previous_project(copy.as_fd()).unwrap(), Some(shared.get()), "until it is finished");
    engine.forget_previous_project(copy.as_fd()).unwrap();
    assert_eq!(set_limits(&engine, copy.as_fd()).unwrap().project, status.project);
}

#[test]
fn entries_with_the_project_that_their_directory_has_lost_are_counted_again() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    let engine = engine_over(MemoryKernel::default());
    let lost = set_limits(&engine, dir.as_fd()).unwrap().project;
    File::create(scratch.path().join("dir/file")).unwrap();
    // As `chattr -p 0` by a pod's root: the file keeps the project.
    engine.kernel.set_project_tag(dir.as_fd(), ProjectTag::default()).unwrap();
    let status = engine.set_limits(dir.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    assert_ne!(status.project, lost);
    assert_eq!(
        engine.previous_project(dir.as_fd()).unwrap(),
        Some(lost.get()),
        "whose entries are changed next"
    );
}

#[test]
fn a_recursive_set_that_was_killed_is_not_complete_until_it_is_repeated() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = create_dir(scratch.path(), "dir");
    File::create(scratch.path().join("dir/file")).unwrap();
    let engine = engine_over(MemoryKernel::default());
    let status = engine.set_limits(dir.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    // As after a kill, before the file has got the project.
    assert!(matches!(set_limits(&engine, dir.as_fd()), Err(Error::NotEmpty)));
    let again = engine.set_limits(dir.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    assert_eq!(again.project, status.project);
    engine.forget_previous_project(dir.as_fd()).unwrap();
    assert_eq!(set_limits(&engine, dir.as_fd()).unwrap().project, status.project);
    let empty = create_dir(scratch.path(), "empty");
    engine.set_limits(empty.as_fd(), CHANGE, NonEmptyPolicy::Accept).unwrap();
    assert_eq!(engine.previous_project(empty.as_fd()).unwrap(), None);
}

#[test]
fn a_set_of_a_copy_killed_at_any_call_leaves_the_other_limits_and_can_be_repeated() {
    for policy in [NonEmptyPolicy::Reject, NonEmptyPolicy::Accept] {
        let mut calls = 0;
        loop {
            let scratch = tempfile::tempdir().unwrap();
            let (engine, original, copy) = copied_directory(scratch.path());
            let left = AtomicU32::new(calls);
            let before = |_| if count_down(&left) { Ok(()) } else { Err(io::Error::other("killed")) };
            let killed = engine_over(HookedKernel { kernel: &engine.kernel, before: &before });
            let _ = killed.set_limits(copy.as_fd(), QuotaLimits::default().into(), policy);
            let shared = engine.read_status(original.as_fd()).unwrap().unwrap();
            assert_eq!(shared.limits, LIMITS);
            let own = engine.set_limits(copy.as_fd(), CHANGE, policy).unwrap();
            assert_ne!(own.project, shared.project);
            engine.release_unused_projects(&[]).unwrap();
            let listed = engine.list_projects(ProjectRange::full_range()).unwrap();
            let limits: Vec<_> = listed.iter().map(|status| (status.project, status.limits)).collect();
            assert_eq!(limits, [(shared.project, LIMITS), (own.project, LIMITS)], "nothing else is left");
            if left.into_inner() != 0 {
                break;
            }
            calls += 1;
        }
        assert!(calls > 8, "killed before {calls} calls");
    }
}

/// A directory with a file, limited by a release that wrote no marks.
fn unmarked_directory(scratch: &Path) -> (QuotaEngine<MemoryKernel>, File) {
    let dir = create_dir(scratch, "dir");
    File::create(scratch.join("dir/file")).unwrap();
    let engine = engine_over(MemoryKernel::default());
    let change = KernelLimitChange { kib: Some(1024), inodes: Some(100) };
    engine.kernel.set_limits(2_000_000_000, change).unwrap();
    engine.kernel.set_project_tag(dir.as_fd(), ProjectTag { project: 2_000_000_000, inherit: true }).unwrap();
    (engine, dir)
}

#[test]
fn a_directory_of_an_earlier_release_keeps_its_project_and_is_marked() {
    let scratch = tempfile::tempdir().unwrap();
    let (engine, dir) = unmarked_directory(scratch.path());
    assert_eq!(engine.owner_mark(dir.as_fd()).unwrap(), None);
    let status = set_limits(&engine, dir.as_fd()).unwrap();
    assert_eq!((status.project.get(), status.limits), (2_000_000_000, LIMITS));
    let mark = OwnerMark { project: 2_000_000_000, previous: None };
    assert_eq!(engine.owner_mark(dir.as_fd()).unwrap(), Some(mark));
    // Its mark proves it from then on, also if others have the project.
    let copy = create_dir(scratch.path(), "copy");
    let tag = engine.kernel.project_tag(dir.as_fd()).unwrap();
    engine.kernel.set_project_tag(copy.as_fd(), tag).unwrap();
    assert_eq!(set_limits(&engine, dir.as_fd()).unwrap().project, status.project);
    assert_ne!(set_limits(&engine, copy.as_fd()).unwrap().project, status.project);
}

#[test]
fn only_the_owner_of_a_project_changes_its_limits() {
    let project = ProjectId::new(7).unwrap();
    let allocate = |carried| ChangeDecision::Allocate { carried };
    for is_complete in [false, true] {
        let marked = ProjectClaim::Marked { project, is_complete };
        let unmarked = ProjectClaim::Unmarked { project, is_complete };
        let change = ChangeDecision::Change { project, is_complete };
        for (claim, has_whole_project, decision) in [
            (ProjectClaim::Missing, false, allocate(None)),
            (marked, false, change),
            (marked, true, change),
            (unmarked, true, change),
            (unmarked, false, allocate(Some(project))),
        ] {
            assert_eq!(decide_change(claim, has_whole_project), decision, "{claim:?}");
        }
    }
}

#[test]
fn clearing_keeps_the_limits_of_a_shared_project() {
    for whole_tree in [false, true] {
        let scratch = tempfile::tempdir().unwrap();
        let (engine, original, copy) = copied_directory(scratch.path());
        if whole_tree {
            let project = engine.start_clearing(copy.as_fd()).unwrap().unwrap();
            engine.finish_clearing(copy.as_fd(), project).unwrap();
        } else {
            engine.clear_limits(copy.as_fd()).unwrap();
        }
        assert_eq!(engine.read_status(copy.as_fd()).unwrap(), None);
        assert_eq!(engine.read_status(original.as_fd()).unwrap().unwrap().limits, LIMITS);
        let own = set_limits(&engine, copy.as_fd()).unwrap().project;
        assert_ne!(own, engine.read_status(original.as_fd()).unwrap().unwrap().project);
    }
}
