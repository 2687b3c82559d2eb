//! The step journal and step lists.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::step_journal::{
    JournalError, MAX_CONTENT_BYTES, StepEvent, StepJournal, StepList, StepListError, StepRun,
};
use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
use proptest::prelude::*;

use crate::fixture::{raw_names, scratch_dir};

fn open_journal(dir: &Dir) -> StepJournal {
    StepJournal::open(dir, "j").unwrap()
}

fn committed_state(dir: &Dir) -> Option<Vec<u8>> {
    open_journal(dir).committed_state().map(<[u8]>::to_vec)
}

/// Writes a journal with two records; `new` is in the first slot.
fn write_two_records(dir: &Dir) -> [Vec<u8>; 2] {
    let mut journal = open_journal(dir);
    journal.commit(b"old").unwrap();
    journal.commit(b"new").unwrap();
    slot_contents(dir.path())
}

/// The length of a record, without the zeros up to the end of its file.
const fn record_bytes(content: &[u8]) -> usize {
    28 + content.len()
}

fn slot_contents(path: &Path) -> [Vec<u8>; 2] {
    ["j.0", "j.1"].map(|name| fs::read(path.join(name)).unwrap())
}

#[test]
fn a_new_journal_has_no_state_and_the_last_commit_is_the_state() {
    let (temporary, dir) = scratch_dir();
    assert_eq!(committed_state(&dir), None);
    for number in 0..5_u8 {
        let mut journal = open_journal(&dir);
        journal.commit(&[number; 3]).unwrap();
        assert_eq!(journal.committed_state(), Some(&[number; 3][..]));
        drop(journal);
        assert_eq!(committed_state(&dir), Some(vec![number; 3]));
    }
    assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"]);
    assert_eq!(slot_contents(temporary.path()).map(|slot| slot.len()), [64 << 10; 2]);
    open_journal(&dir).remove_files().unwrap();
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn files_are_written_in_turn_and_in_place() {
    let (temporary, dir) = scratch_dir();
    let mut before = write_two_records(&dir);
    let inodes = || ["j.0", "j.1"].map(|name| dir.metadata(name).unwrap().inode);
    let same = inodes();
    let mut journal = open_journal(&dir);
    for round in 0..6 {
        journal.commit(format!("round {round}").as_bytes()).unwrap();
        let after = slot_contents(temporary.path());
        let (written, kept) = ([1, 0][round % 2], round % 2);
        assert_ne!(after[written], before[written]);
        assert_eq!(after[kept], before[kept], "the newest record stays until the next one is complete");
        before = after;
    }
    assert_eq!(inodes(), same);
}

#[test]
fn a_newest_record_cut_or_flipped_at_any_byte_falls_back_to_the_older_state() {
    let (temporary, dir) = scratch_dir();
    let [newest, _] = write_two_records(&dir);
    let whole = record_bytes(b"new");
    let state_with = |record: &[u8]| {
        fs::write(temporary.path().join("j.0"), record).unwrap();
        committed_state(&dir).unwrap()
    };
    for at in 0..whole {
        for filler in [0, 0xff] {
            let mut cut = newest[..at].to_vec();
            assert_eq!(state_with(&cut), b"old", "cut at {at}");
            cut.resize(whole, filler);
            assert_eq!(state_with(&cut), b"old", "cut at {at}, filled with {filler}");
        }
        for flip in [0x01, 0x80, 0xff] {
            let mut flipped = newest.clone();
            flipped[at] ^= flip;
            assert_eq!(state_with(&flipped), b"old", "flipped at {at}");
        }
    }
    assert_eq!(state_with(&newest), b"new");
}

#[test]
fn a_commit_overwrites_the_torn_record() {
    let (temporary, dir) = scratch_dir();
    let [newest, older] = write_two_records(&dir);
    fs::write(temporary.path().join("j.0"), &newest[..record_bytes(b"new") - 1]).unwrap();
    open_journal(&dir).commit(b"next").unwrap();
    assert_eq!(slot_contents(temporary.path())[1], older, "the only complete record is unchanged");
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"next"[..]));
}

/// Opens a journal that is damaged, and checks that nothing was changed.
fn check_damaged(dir: &Dir, files: &[(&str, &[u8])]) {
    for name in ["j.0", "j.1"] {
        dir.remove_file(name).unwrap();
    }
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    let error = StepJournal::open(dir, "j").expect_err("no record is complete");
    assert!(
        matches!(&error, JournalError::Damaged { path } if path.ends_with("j.0")),
        "{files:?}: {error:?}"
    );
    for (name, content) in files {
        assert_eq!(&fs::read(dir.path().join(name)).unwrap(), content, "{name}");
    }
    assert_eq!(raw_names(dir.path()), files.iter().map(|(name, _)| *name).collect::<Vec<_>>());
}

/// Empty files are damaged, too: they are not a new journal.
#[test]
fn two_damaged_records_are_an_error_and_stay_unchanged() {
    let (_temporary, dir) = scratch_dir();
    write_two_records(&dir);
    for damage in [b"".as_slice(), b"x", &[0; 4096], &[0xff; 40]] {
        check_damaged(&dir, &[("j.0", damage), ("j.1", damage)]);
        check_damaged(&dir, &[("j.0", damage)]);
        check_damaged(&dir, &[("j.1", damage)]);
    }
    check_damaged(&dir, &[("j.0", b"short garbage"), ("j.1", b"")]);
}

#[test]
fn a_creation_that_a_power_cut_left_in_any_state_is_repeated() {
    let states: [Option<&[u8]>; 5] =
        [None, Some(b""), Some(b"short garbage"), Some(&[0; 4096]), Some(&[0xff; 5000])];
    for first in states {
        for second in states {
            let (temporary, dir) = scratch_dir();
            // The marker is durable before the files, and removed after them.
            fs::write(temporary.path().join("j.new"), "").unwrap();
            for (name, content) in [("j.0", first), ("j.1", second)] {
                if let Some(content) = content {
                    fs::write(temporary.path().join(name), content).unwrap();
                }
            }
            // A lost first file is no state of a creation.
            if first.is_none() && second.is_some() {
                continue;
            }
            let mut journal = open_journal(&dir);
            assert_eq!(journal.committed_state(), None, "{first:?} and {second:?}");
            assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"]);
            assert_eq!(slot_contents(temporary.path()).map(|slot| slot.len()), [64 << 10; 2]);
            journal.commit(b"state").unwrap();
            drop(journal);
            assert_eq!(committed_state(&dir).as_deref(), Some(&b"state"[..]));
        }
    }
}

#[test]
fn a_creation_that_failed_at_any_call_is_completed_by_the_next_open() {
    for nth in 1.. {
        let (temporary, dir) = scratch_dir();
        let created = with_failpoint_hook(fail_nth_call(nth), || StepJournal::open(&dir, "j").map(drop));
        assert_eq!(committed_state(&dir), None, "call {nth}");
        assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"], "call {nth}");
        assert_eq!(slot_contents(temporary.path()).map(|slot| slot.len()), [64 << 10; 2], "call {nth}");
        if created.is_ok() {
            assert!(nth > 10, "a creation takes {nth} calls");
            return;
        }
    }
}

#[test]
fn a_marker_beside_a_complete_record_does_no_harm() {
    let (temporary, dir) = scratch_dir();
    write_two_records(&dir);
    fs::write(temporary.path().join("j.new"), "").unwrap();
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"new"[..]));
    assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"]);
}

/// Makes the nth read fail, as on a bad block, or on vfat beyond the end of a file's chain of clusters.
fn fail_nth_read(nth: u32) -> impl FnMut(&'static str) -> SyscallAction {
    let mut reads = 0;
    move |call| {
        reads += u32::from(call == "read");
        match call == "read" && reads == nth {
            true => SyscallAction::Fail(rustix::io::Errno::IO.raw_os_error()),
            false => SyscallAction::Proceed,
        }
    }
}

#[test]
fn an_unreadable_file_counts_as_a_torn_record_if_the_other_is_complete() {
    // The first two reads are those of the first file, its header and its content.
    for (nth, state) in [(1, "old"), (2, "old"), (3, "new"), (4, "new")] {
        let (_temporary, dir) = scratch_dir();
        write_two_records(&dir);
        let journal = with_failpoint_hook(fail_nth_read(nth), || StepJournal::open(&dir, "j"));
        let mut journal = journal.unwrap_or_else(|error| panic!("read {nth}: {error:?}"));
        assert_eq!(journal.committed_state(), Some(state.as_bytes()), "read {nth}");
        journal.commit(b"next").unwrap();
        drop(journal);
        assert_eq!(committed_state(&dir).as_deref(), Some(&b"next"[..]));
    }
}

#[test]
fn an_unreadable_file_beside_a_damaged_record_is_an_error_of_the_read() {
    let (temporary, dir) = scratch_dir();
    write_two_records(&dir);
    fs::write(temporary.path().join("j.1"), [0; 4096]).unwrap();
    let error = with_failpoint_hook(fail_nth_read(1), || StepJournal::open(&dir, "j"));
    let error = error.expect_err("no record is known");
    assert!(
        matches!(&error, JournalError::Open { source, .. } if source.raw_os_error() == Some(5)),
        "{error:?}"
    );
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"new"[..]), "nothing was changed");
}

#[test]
fn a_commit_of_any_usual_length_changes_no_file_size() {
    let (temporary, dir) = scratch_dir();
    let mut journal = open_journal(&dir);
    for length in [1, 4000, 10, (64 << 10) - 28] {
        journal.commit(&vec![1; length]).unwrap();
        assert_eq!(slot_contents(temporary.path()).map(|slot| slot.len()), [64 << 10; 2], "{length}");
    }
    for _ in 0..2 {
        journal.commit(&[2; 64 << 10]).unwrap();
    }
    assert_eq!(slot_contents(temporary.path()).map(|slot| slot.len()), [128 << 10; 2]);
}

#[test]
fn a_record_in_the_wrong_slot_is_ignored() {
    let (temporary, dir) = scratch_dir();
    let [newest, _] = write_two_records(&dir);
    fs::write(temporary.path().join("j.1"), newest).unwrap();
    fs::write(temporary.path().join("j.0"), b"damaged").unwrap();
    assert!(matches!(StepJournal::open(&dir, "j"), Err(JournalError::Damaged { .. })));
}

#[test]
fn a_journal_can_be_open_only_once() {
    let (_temporary, dir) = scratch_dir();
    let first = open_journal(&dir);
    assert!(StepJournal::open(&dir, "j").expect_err("the journal is locked").is_in_use());
    drop(first);
    open_journal(&dir);
}

#[test]
fn a_record_over_the_limit_is_rejected_and_changes_nothing() {
    let (_temporary, dir) = scratch_dir();
    let mut journal = open_journal(&dir);
    journal.commit(b"old").unwrap();
    let error = journal.commit(&vec![0; MAX_CONTENT_BYTES + 1]).expect_err("the record is too long");
    assert!(matches!(error, JournalError::RecordTooLong { length, .. } if length == MAX_CONTENT_BYTES + 1));
    journal.commit(&vec![1; MAX_CONTENT_BYTES]).expect("the longest record is committed");
    journal.commit(b"short").unwrap();
    drop(journal);
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"short"[..]));
}

#[test]
fn invalid_journal_names_are_rejected() {
    let (_temporary, dir) = scratch_dir();
    for name in ["a/b", "../a", "a\0", &"x".repeat(252)] {
        assert!(matches!(StepJournal::open(&dir, name), Err(JournalError::InvalidName { .. })), "{name:?}");
    }
}

#[test]
fn a_symlink_in_place_of_a_record_is_not_followed() {
    let (temporary, dir) = scratch_dir();
    fs::write(temporary.path().join("target"), "kept").unwrap();
    std::os::unix::fs::symlink("target", temporary.path().join("j.0")).unwrap();
    let error = anyhow::Error::from(StepJournal::open(&dir, "j").expect_err("the slot is a symlink"));
    assert!(format!("{error:#}").contains("path contains a symbolic link"), "{error:#}");
    assert_eq!(fs::read(temporary.path().join("target")).unwrap(), b"kept");
}

#[derive(Clone, Debug)]
enum JournalOperation {
    Commit(Vec<u8>),
    /// The nth call of the commit fails.
    FailCommit(Vec<u8>, u32),
    Reopen,
}

fn journal_operations() -> impl Strategy<Value = Vec<JournalOperation>> {
    let content = || prop::collection::vec(any::<u8>(), 1..60);
    let one = prop_oneof![
        content().prop_map(JournalOperation::Commit),
        (content(), 1..4_u32).prop_map(|(content, nth)| JournalOperation::FailCommit(content, nth)),
        Just(JournalOperation::Reopen),
    ];
    prop::collection::vec(one, 1..20)
}

/// Makes the nth call fail, and shortens writes so that failed ones are torn.
fn fail_nth_call(nth: u32) -> impl FnMut(&'static str) -> SyscallAction {
    let mut count = 0;
    move |_| {
        count += 1;
        if count == nth {
            SyscallAction::Fail(rustix::io::Errno::IO.raw_os_error())
        } else {
            SyscallAction::ShortWrite(20)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn after_any_failure_the_state_is_the_last_commit_or_a_failed_later_one(moves in journal_operations()) {
        let (_temporary, dir) = scratch_dir();
        let mut journal = Some(open_journal(&dir));
        // The possible states: the last committed one, then those of failed commits.
        let mut possible: Vec<Option<Vec<u8>>> = vec![None];
        for next in moves {
            let opened = journal.as_mut().expect("the journal is open");
            match next {
                JournalOperation::Commit(content) => {
                    opened.commit(&content).unwrap();
                    possible = vec![Some(content)];
                }
                JournalOperation::FailCommit(content, nth) => match with_failpoint_hook(fail_nth_call(nth), || opened.commit(&content)) {
                    Ok(()) => possible = vec![Some(content)],
                    Err(_) => {
                        prop_assert_eq!(opened.committed_state(), possible[0].as_deref(), "the journal keeps the old state");
                        possible.push(Some(content));
                    }
                },
                JournalOperation::Reopen => {
                    drop(journal.take());
                    let opened = open_journal(&dir);
                    let found = opened.committed_state().map(<[u8]>::to_vec);
                    prop_assert!(possible.contains(&found), "{:?} of {:?}", found, possible);
                    // An opened state is durable.
                    possible = vec![found];
                    journal = Some(opened);
                }
            }
        }
    }
}

fn three_steps() -> StepList {
    StepList::try_new(["one", "two", "three"]).unwrap()
}

#[test]
fn steps_are_done_in_order_once_and_finished() {
    let (temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"").unwrap();
    assert!(!run.is_resumed());
    let mut done = Vec::new();
    let result: Result<(), StepListError> = run.run_remaining(|step, state| {
        done.push(step.to_owned());
        Ok([state, step.as_bytes()].concat())
    });
    result.expect("all steps complete");
    assert_eq!((done.join(" "), run.recorded_state()), ("one two three".to_owned(), &b"onetwothree"[..]));
    assert!(matches!(run.complete_step(""), Err(StepListError::NoStepLeft)));
    drop(run);
    let again = three_steps().start_run(open_journal(&dir), b"other").unwrap();
    assert_eq!((again.is_resumed(), again.current_step()), (true, None));
    again.remove_journal().unwrap();
    assert_eq!(raw_names(temporary.path()), [""; 0]);
    assert_eq!(
        three_steps().start_run(open_journal(&dir), b"").expect("the run starts over").current_step(),
        Some("one")
    );
}

#[test]
fn a_run_resumes_at_the_first_unrecorded_step() {
    let (_temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"started").unwrap();
    assert_eq!(run.current_step(), Some("one"));
    run.complete_step("after one").unwrap();
    assert_eq!(run.current_step(), Some("two"));
    drop(run);
    let run = three_steps().start_run(open_journal(&dir), b"started").unwrap();
    assert_eq!((run.is_resumed(), run.current_step()), (true, Some("two")));
    assert_eq!(run.recorded_state(), b"after one");
}

fn step_list(names: &[&str]) -> StepList {
    StepList::try_new(names.iter().copied()).unwrap()
}

/// Runs the remaining steps and returns their names.
fn run_steps(dir: &Dir, names: &[&str]) -> Vec<String> {
    let mut run = step_list(names).start_run(open_journal(dir), b"").unwrap();
    let mut done = Vec::new();
    let result: Result<(), StepListError> = run.run_remaining(|step, state| {
        done.push(step.to_owned());
        Ok([state, step.as_bytes()].concat())
    });
    result.expect("all steps complete");
    assert_eq!(run.completed_steps().len(), names.len());
    done
}

#[test]
fn a_complete_journal_of_an_earlier_release_resumes_with_the_added_steps_alone() {
    let (temporary, dir) = scratch_dir();
    assert_eq!(run_steps(&dir, &["one", "two", "three"]), ["one", "two", "three"]);
    assert_eq!(run_steps(&dir, &["one", "new", "two", "three", "last"]), ["new", "last"]);
    let before = slot_contents(temporary.path());
    assert_eq!(run_steps(&dir, &["one", "new", "two", "three", "last"]), [""; 0]);
    let run = step_list(&["last", "new", "three", "two", "one"])
        .start_run(open_journal(&dir), b"")
        .expect("the order of the list may change");
    assert_eq!((run.is_resumed(), run.current_step()), (true, None));
    assert_eq!(run.recorded_state(), b"onetwothreenewlast");
    assert_eq!(slot_contents(temporary.path()), before, "a run without remaining steps records nothing");
}

#[test]
fn a_journal_in_progress_resumes_with_the_added_steps_in_the_order_of_the_list() {
    let (_temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"").unwrap();
    run.complete_step("s").unwrap();
    drop(run);
    let added = ["zero", "one", "new", "two", "three"];
    let mut run = step_list(&added).start_run(open_journal(&dir), b"").unwrap();
    assert_eq!((run.current_step(), run.completed_steps()), (Some("zero"), &["one".to_owned()][..]));
    // A kill after an added step resumes behind it.
    run.complete_step("s").unwrap();
    drop(run);
    assert_eq!(run_steps(&dir, &added), ["new", "two", "three"]);
}

#[test]
fn a_journal_of_a_newer_release_is_rejected_by_its_unknown_step_and_stays_unchanged() {
    let (temporary, dir) = scratch_dir();
    let mut run = step_list(&["one", "attest", "two"]).start_run(open_journal(&dir), b"").expect("started");
    run.complete_step("").unwrap();
    drop(run);
    let before = slot_contents(temporary.path());
    for older in [&["one", "two"][..], &["one", "two", "three"], &["two", "one"]] {
        let Err(error) = step_list(older).start_run(open_journal(&dir), b"") else {
            panic!("{older:?} lacks a recorded step");
        };
        assert!(matches!(&error, StepListError::UnknownStep { step, .. } if step == "attest"), "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains("j.0") && text.contains("newer release (step \"attest\" is unknown)"),
            "{text}"
        );
    }
    assert_eq!(slot_contents(temporary.path()), before);
    assert_eq!(run_steps(&dir, &["one", "attest", "two"]), ["attest", "two"], "the newer release resumes");
}

#[test]
fn a_journal_without_steps_is_an_error_and_stays_unchanged() {
    let (temporary, dir) = scratch_dir();
    open_journal(&dir).commit(b"something else").unwrap();
    let before = slot_contents(temporary.path());
    assert!(matches!(
        three_steps().start_run(open_journal(&dir), b""),
        Err(StepListError::NotAStepRecord { .. })
    ));
    assert_eq!(slot_contents(temporary.path()), before);
}

#[test]
fn the_hook_receives_every_event_in_order() {
    let (_temporary, dir) = scratch_dir();
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&events);
    let hook = move |point: StepEvent<'_>| recorder.lock().unwrap().push(format!("{point:?}"));
    let list = StepList::try_new(["a", "b"]).unwrap();
    let mut run = list.start_run_with_hook(open_journal(&dir), b"", hook).unwrap();
    while run.current_step().is_some() {
        run.complete_step("").unwrap();
    }
    let expected = [
        r#"Committing(Some("a"))"#,
        r#"Committed(Some("a"))"#,
        r#"Before("a")"#,
        r#"After("a")"#,
        r#"Committing(Some("b"))"#,
        r#"Committed(Some("b"))"#,
        r#"Before("b")"#,
        r#"After("b")"#,
        "Committing(None)",
        "Committed(None)",
    ];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[test]
fn a_step_whose_record_failed_stays_the_current_step() {
    let (_temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"old").unwrap();
    with_failpoint_hook(fail_nth_call(1), || run.complete_step("new")).expect_err("the step is not recorded");
    assert_eq!((run.current_step(), run.recorded_state().to_vec()), (Some("one"), b"old".to_vec()));
    run.complete_step("new").unwrap();
    assert_eq!((run.current_step(), run.recorded_state().to_vec()), (Some("two"), b"new".to_vec()));
}

/// Async code keeps a run across awaits, on any thread.
#[test]
fn a_run_can_be_sent_to_another_thread() {
    fn assert_send<T: Send + 'static>() {}
    assert_send::<StepRun>();
    assert_send::<StepJournal>();
}
