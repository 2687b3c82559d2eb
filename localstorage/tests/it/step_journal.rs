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
    StepJournal::open(dir, "j").expect("the open succeeds")
}

fn committed_state(dir: &Dir) -> Option<Vec<u8>> {
    open_journal(dir).committed_state().map(<[u8]>::to_vec)
}

/// Writes a journal with two records; `new` is in the first slot.
fn write_two_records(dir: &Dir) -> [Vec<u8>; 2] {
    let mut journal = open_journal(dir);
    journal.commit(b"old").expect("the state is committed");
    journal.commit(b"new").expect("the state is committed");
    slot_contents(dir.path())
}

fn slot_contents(path: &Path) -> [Vec<u8>; 2] {
    ["j.0", "j.1"].map(|name| fs::read(path.join(name)).expect("the entry exists"))
}

#[test]
fn a_new_journal_has_no_state_and_the_last_commit_is_the_state() {
    let (temporary, dir) = scratch_dir();
    assert_eq!(committed_state(&dir), None);
    for number in 0..5_u8 {
        let mut journal = open_journal(&dir);
        journal.commit(&[number; 3]).expect("the state is committed");
        assert_eq!(journal.committed_state(), Some(&[number; 3][..]));
        drop(journal);
        assert_eq!(committed_state(&dir), Some(vec![number; 3]));
    }
    assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"]);
    open_journal(&dir).remove_files().expect("the entry is removed");
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn files_are_written_in_turn_and_in_place() {
    let (temporary, dir) = scratch_dir();
    let mut before = write_two_records(&dir);
    let inodes = || ["j.0", "j.1"].map(|name| dir.metadata(name).expect("the entry exists").inode);
    let same = inodes();
    let mut journal = open_journal(&dir);
    for round in 0..6 {
        journal.commit(format!("round {round}").as_bytes()).expect("the state is committed");
        let after = slot_contents(temporary.path());
        let (written, kept) = ([1, 0][round % 2], round % 2);
        assert_ne!(after[written], before[written]);
        assert_eq!(after[kept], before[kept], "the newest record stays until the next one is complete");
        before = after;
    }
    assert_eq!(inodes(), same);
}

#[test]
fn a_newest_record_cut_at_any_byte_falls_back_to_the_older_state() {
    let (temporary, dir) = scratch_dir();
    let [newest, _] = write_two_records(&dir);
    for length in 0..newest.len() {
        for filler in [None, Some(0), Some(0xff)] {
            let mut cut = newest[..length].to_vec();
            if let Some(filler) = filler {
                cut.resize(newest.len(), filler);
            }
            fs::write(temporary.path().join("j.0"), &cut).expect("the file is written");
            assert_eq!(committed_state(&dir).as_deref(), Some(&b"old"[..]), "cut at {length}");
        }
    }
    fs::write(temporary.path().join("j.0"), &newest).expect("the file is written");
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"new"[..]));
}

#[test]
fn a_newest_record_with_any_byte_flipped_falls_back_to_the_older_state() {
    let (temporary, dir) = scratch_dir();
    let [newest, _] = write_two_records(&dir);
    for at in 0..newest.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut flipped = newest.clone();
            flipped[at] ^= flip;
            fs::write(temporary.path().join("j.0"), &flipped).expect("the file is written");
            assert_eq!(committed_state(&dir).as_deref(), Some(&b"old"[..]), "flipped at {at}");
        }
    }
}

#[test]
fn a_commit_overwrites_the_torn_record() {
    let (temporary, dir) = scratch_dir();
    let [newest, older] = write_two_records(&dir);
    fs::write(temporary.path().join("j.0"), &newest[..newest.len() - 1]).expect("the file is written");
    open_journal(&dir).commit(b"next").expect("the state is committed");
    assert_eq!(slot_contents(temporary.path())[1], older, "the only complete record is unchanged");
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"next"[..]));
}

#[test]
fn two_damaged_records_are_an_error_and_stay_unchanged() {
    let (temporary, dir) = scratch_dir();
    write_two_records(&dir);
    for damage in [b"".as_slice(), b"x", &[0; 4096], &[0xff; 40]] {
        for name in ["j.0", "j.1"] {
            fs::write(temporary.path().join(name), damage).expect("the file is written");
        }
        if damage.is_empty() {
            continue;
        }
        let error = StepJournal::open(&dir, "j").expect_err("both records are damaged");
        assert!(matches!(&error, JournalError::Damaged { path } if path.ends_with("j.0")), "{error:?}");
        assert_eq!(slot_contents(temporary.path()), [damage, damage]);
    }
    // A damaged record in one file and no other file: a killed creation cannot leave that.
    fs::write(temporary.path().join("j.0"), [1; 100]).expect("the file is written");
    fs::remove_file(temporary.path().join("j.1")).expect("the entry is removed");
    assert!(matches!(StepJournal::open(&dir, "j"), Err(JournalError::Damaged { .. })));
}

#[test]
fn a_record_in_the_wrong_slot_is_ignored() {
    let (temporary, dir) = scratch_dir();
    let [newest, _] = write_two_records(&dir);
    fs::write(temporary.path().join("j.1"), newest).expect("the file is written");
    fs::write(temporary.path().join("j.0"), b"damaged").expect("the file is written");
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
    journal.commit(b"old").expect("the state is committed");
    let error = journal.commit(&vec![0; MAX_CONTENT_BYTES + 1]).expect_err("the record is too long");
    assert!(matches!(error, JournalError::RecordTooLong { length, .. } if length == MAX_CONTENT_BYTES + 1));
    journal.commit(&vec![1; MAX_CONTENT_BYTES]).expect("the longest record is committed");
    journal.commit(b"short").expect("the state is committed");
    drop(journal);
    assert_eq!(committed_state(&dir).as_deref(), Some(&b"short"[..]));
}

#[test]
fn invalid_journal_names_are_rejected() {
    let (_temporary, dir) = scratch_dir();
    for name in ["a/b", "../a", "a\0", &"x".repeat(254)] {
        assert!(matches!(StepJournal::open(&dir, name), Err(JournalError::InvalidName { .. })), "{name:?}");
    }
}

#[test]
fn a_symlink_in_place_of_a_record_is_not_followed() {
    let (temporary, dir) = scratch_dir();
    fs::write(temporary.path().join("target"), "kept").expect("the file is written");
    std::os::unix::fs::symlink("target", temporary.path().join("j.0")).expect("the entry is created");
    let error = anyhow::Error::from(StepJournal::open(&dir, "j").expect_err("the slot is a symlink"));
    assert!(format!("{error:#}").contains("path contains a symbolic link"), "{error:#}");
    assert_eq!(fs::read(temporary.path().join("target")).expect("the entry exists"), b"kept");
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
                    opened.commit(&content).expect("no call fails");
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
    StepList::try_new(["one", "two", "three"]).expect("a valid step list")
}

#[test]
fn steps_are_done_in_order_once_and_finished() {
    let (temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"").expect("the run starts");
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
    let again = three_steps().start_run(open_journal(&dir), b"other").expect("the run starts");
    assert_eq!((again.is_resumed(), again.current_step()), (true, None));
    again.remove_journal().expect("the journal is removed");
    assert_eq!(raw_names(temporary.path()), [""; 0]);
    assert_eq!(
        three_steps().start_run(open_journal(&dir), b"").expect("the run starts over").current_step(),
        Some("one")
    );
}

#[test]
fn a_run_resumes_at_the_first_unrecorded_step() {
    let (_temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"started").expect("the run starts");
    assert_eq!(run.current_step(), Some("one"));
    run.complete_step("after one").expect("the step is recorded");
    assert_eq!(run.current_step(), Some("two"));
    drop(run);
    let run = three_steps().start_run(open_journal(&dir), b"started").expect("the run resumes");
    assert_eq!((run.is_resumed(), run.current_step()), (true, Some("two")));
    assert_eq!(run.recorded_state(), b"after one");
}

#[test]
fn a_journal_of_different_steps_is_an_error_and_stays_unchanged() {
    let (temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"").expect("the run starts");
    run.complete_step("").expect("the step is recorded");
    drop(run);
    let before = slot_contents(temporary.path());
    for other in [&["one", "two"][..], &["one", "two", "three", "four"], &["two", "one", "three"], &["one"]] {
        let list = StepList::try_new(other.iter().copied()).expect("a valid step list");
        let Err(StepListError::DifferentSteps { recorded, expected: asked, .. }) =
            list.start_run(open_journal(&dir), b"")
        else {
            panic!("{other:?} are other steps");
        };
        assert_eq!((recorded.as_slice(), asked.as_slice()), (three_steps().step_names(), list.step_names()));
    }
    assert_eq!(slot_contents(temporary.path()), before);
    let (_temporary, dir) = scratch_dir();
    open_journal(&dir).commit(b"something else").expect("the state is committed");
    assert!(matches!(
        three_steps().start_run(open_journal(&dir), b""),
        Err(StepListError::NotAStepRecord { .. })
    ));
}

#[test]
fn the_hook_receives_every_event_in_order() {
    let (_temporary, dir) = scratch_dir();
    let events = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&events);
    let hook = move |point: StepEvent<'_>| {
        recorder.lock().expect("the mutex is not poisoned").push(format!("{point:?}"))
    };
    let list = StepList::try_new(["a", "b"]).expect("a valid step list");
    let mut run = list.start_run_with_hook(open_journal(&dir), b"", hook).expect("the run starts");
    while run.current_step().is_some() {
        run.complete_step("").expect("the step is recorded");
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
    assert_eq!(*events.lock().expect("the mutex is not poisoned"), expected);
}

#[test]
fn a_step_whose_record_failed_stays_the_current_step() {
    let (_temporary, dir) = scratch_dir();
    let mut run = three_steps().start_run(open_journal(&dir), b"old").expect("the run starts");
    with_failpoint_hook(fail_nth_call(1), || run.complete_step("new")).expect_err("the step is not recorded");
    assert_eq!((run.current_step(), run.recorded_state().to_vec()), (Some("one"), b"old".to_vec()));
    run.complete_step("new").expect("the step is recorded");
    assert_eq!((run.current_step(), run.recorded_state().to_vec()), (Some("two"), b"new".to_vec()));
}

/// Async code keeps a run across awaits, on any thread.
#[test]
fn a_run_can_be_sent_to_another_thread() {
    fn assert_send<T: Send + 'static>() {}
    assert_send::<StepRun>();
    assert_send::<StepJournal>();
}
