//! The journal and the lists of steps.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::journal::{Error, Journal, MAX_CONTENT, Point, Run, Steps, StepsError};
use nodekeel_localstorage::testing::{Verdict, with_hook};
use proptest::prelude::*;

use crate::bed::{raw_names, scratch};

fn open(dir: &Dir) -> Journal {
    Journal::open(dir, "j").expect("it opens")
}

fn state(dir: &Dir) -> Option<Vec<u8>> {
    open(dir).state().map(<[u8]>::to_vec)
}

/// A journal with two states, of which `new` is in the first file.
fn with_two(dir: &Dir) -> [Vec<u8>; 2] {
    let mut journal = open(dir);
    journal.commit(b"old").expect("it is committed");
    journal.commit(b"new").expect("it is committed");
    contents(dir.path())
}

fn contents(path: &Path) -> [Vec<u8>; 2] {
    ["j.0", "j.1"].map(|name| fs::read(path.join(name)).expect("it is there"))
}

#[test]
fn a_new_journal_has_no_state_and_the_last_commit_is_the_state() {
    let (temporary, dir) = scratch();
    assert_eq!(state(&dir), None);
    for number in 0..5_u8 {
        let mut journal = open(&dir);
        journal.commit(&[number; 3]).expect("it is committed");
        assert_eq!(journal.state(), Some(&[number; 3][..]));
        drop(journal);
        assert_eq!(state(&dir), Some(vec![number; 3]));
    }
    assert_eq!(raw_names(temporary.path()), ["j.0", "j.1"]);
    open(&dir).remove().expect("it is removed");
    assert_eq!(raw_names(temporary.path()), [""; 0]);
}

#[test]
fn files_are_written_in_turn_and_in_place() {
    let (temporary, dir) = scratch();
    let mut before = with_two(&dir);
    let inodes = || ["j.0", "j.1"].map(|name| dir.metadata(name).expect("it is there").inode);
    let same = inodes();
    let mut journal = open(&dir);
    for round in 0..6 {
        journal.commit(format!("round {round}").as_bytes()).expect("it is committed");
        let after = contents(temporary.path());
        let (written, kept) = ([1, 0][round % 2], round % 2);
        assert_ne!(after[written], before[written]);
        assert_eq!(after[kept], before[kept], "the newest stays until the next is whole");
        before = after;
    }
    assert_eq!(inodes(), same);
}

#[test]
fn a_newest_record_that_was_cut_at_any_byte_gives_the_older_state() {
    let (temporary, dir) = scratch();
    let [newest, _] = with_two(&dir);
    for length in 0..newest.len() {
        for filler in [None, Some(0), Some(0xff)] {
            let mut cut = newest[..length].to_vec();
            if let Some(filler) = filler {
                cut.resize(newest.len(), filler);
            }
            fs::write(temporary.path().join("j.0"), &cut).expect("it is written");
            assert_eq!(state(&dir).as_deref(), Some(&b"old"[..]), "cut at {length}");
        }
    }
    fs::write(temporary.path().join("j.0"), &newest).expect("it is written");
    assert_eq!(state(&dir).as_deref(), Some(&b"new"[..]));
}

#[test]
fn a_newest_record_with_any_byte_flipped_gives_the_older_state() {
    let (temporary, dir) = scratch();
    let [newest, _] = with_two(&dir);
    for at in 0..newest.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut flipped = newest.clone();
            flipped[at] ^= flip;
            fs::write(temporary.path().join("j.0"), &flipped).expect("it is written");
            assert_eq!(state(&dir).as_deref(), Some(&b"old"[..]), "flipped at {at}");
        }
    }
}

#[test]
fn the_commit_after_a_torn_one_takes_the_torn_ones_place() {
    let (temporary, dir) = scratch();
    let [newest, older] = with_two(&dir);
    fs::write(temporary.path().join("j.0"), &newest[..newest.len() - 1]).expect("it is written");
    open(&dir).commit(b"next").expect("it is committed");
    assert_eq!(contents(temporary.path())[1], older, "the only whole one is not touched");
    assert_eq!(state(&dir).as_deref(), Some(&b"next"[..]));
}

#[test]
fn two_damaged_records_are_an_error_and_stay_as_they_are() {
    let (temporary, dir) = scratch();
    with_two(&dir);
    for damage in [b"".as_slice(), b"x", &[0; 4096], &[0xff; 40]] {
        for name in ["j.0", "j.1"] {
            fs::write(temporary.path().join(name), damage).expect("it is written");
        }
        if damage.is_empty() {
            continue;
        }
        let error = Journal::open(&dir, "j").expect_err("both are damaged");
        assert!(matches!(&error, Error::Damaged { path } if path.ends_with("j.0")), "{error:?}");
        assert_eq!(contents(temporary.path()), [damage, damage]);
    }
    // One file with a record and no other: no killed creation has that.
    fs::write(temporary.path().join("j.0"), [1; 100]).expect("it is written");
    fs::remove_file(temporary.path().join("j.1")).expect("it is removed");
    assert!(matches!(Journal::open(&dir, "j"), Err(Error::Damaged { .. })));
}

#[test]
fn a_record_in_the_other_records_file_does_not_count() {
    let (temporary, dir) = scratch();
    let [newest, _] = with_two(&dir);
    fs::write(temporary.path().join("j.1"), newest).expect("it is written");
    fs::write(temporary.path().join("j.0"), b"damaged").expect("it is written");
    assert!(matches!(Journal::open(&dir, "j"), Err(Error::Damaged { .. })));
}

#[test]
fn a_journal_is_open_once() {
    let (_temporary, dir) = scratch();
    let first = open(&dir);
    assert!(Journal::open(&dir, "j").expect_err("it is locked").is_in_use());
    drop(first);
    open(&dir);
}

#[test]
fn what_is_too_long_is_refused_and_changes_nothing() {
    let (_temporary, dir) = scratch();
    let mut journal = open(&dir);
    journal.commit(b"old").expect("it is committed");
    let error = journal.commit(&vec![0; MAX_CONTENT + 1]).expect_err("it is too long");
    assert!(matches!(error, Error::TooLong { length, .. } if length == MAX_CONTENT + 1));
    journal.commit(&vec![1; MAX_CONTENT]).expect("the longest");
    journal.commit(b"short").expect("it is committed");
    drop(journal);
    assert_eq!(state(&dir).as_deref(), Some(&b"short"[..]));
}

#[test]
fn names_that_are_none_are_refused() {
    let (_temporary, dir) = scratch();
    for name in ["a/b", "../a", "a\0", &"x".repeat(254)] {
        assert!(matches!(Journal::open(&dir, name), Err(Error::Name { .. })), "{name:?}");
    }
}

#[test]
fn a_link_in_the_place_of_a_record_is_not_followed() {
    let (temporary, dir) = scratch();
    fs::write(temporary.path().join("target"), "kept").expect("it is written");
    std::os::unix::fs::symlink("target", temporary.path().join("j.0")).expect("it is made");
    let error = anyhow::Error::from(Journal::open(&dir, "j").expect_err("it is a link"));
    assert!(format!("{error:#}").contains("a symbolic link is in the way"), "{error:#}");
    assert_eq!(fs::read(temporary.path().join("target")).expect("it is there"), b"kept");
}

#[derive(Clone, Debug)]
enum Move {
    Commit(Vec<u8>),
    /// The nth call of the commit fails.
    FailingCommit(Vec<u8>, u32),
    Reopen,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let content = || prop::collection::vec(any::<u8>(), 1..60);
    let one = prop_oneof![
        content().prop_map(Move::Commit),
        (content(), 1..4_u32).prop_map(|(content, nth)| Move::FailingCommit(content, nth)),
        Just(Move::Reopen),
    ];
    prop::collection::vec(one, 1..20)
}

/// Fails the nth call, and cuts writes short so that failed ones are torn.
fn failing(nth: u32) -> impl FnMut(&'static str) -> Verdict {
    let mut count = 0;
    move |_| {
        count += 1;
        if count == nth { Verdict::Fail(rustix::io::Errno::IO.raw_os_error()) } else { Verdict::Short(20) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_fails_the_state_is_the_last_one_or_one_that_failed_after_it(moves in moves()) {
        let (_temporary, dir) = scratch();
        let mut journal = Some(open(&dir));
        // What it may be: first what was committed last.
        let mut may_be: Vec<Option<Vec<u8>>> = vec![None];
        for next in moves {
            let opened = journal.as_mut().expect("it is open");
            match next {
                Move::Commit(content) => {
                    opened.commit(&content).expect("nothing fails");
                    may_be = vec![Some(content)];
                }
                Move::FailingCommit(content, nth) => match with_hook(failing(nth), || opened.commit(&content)) {
                    Ok(()) => may_be = vec![Some(content)],
                    Err(_) => {
                        prop_assert_eq!(opened.state(), may_be[0].as_deref(), "it goes on with the old state");
                        may_be.push(Some(content));
                    }
                },
                Move::Reopen => {
                    drop(journal.take());
                    let opened = open(&dir);
                    let found = opened.state().map(<[u8]>::to_vec);
                    prop_assert!(may_be.contains(&found), "{:?} of {:?}", found, may_be);
                    // From now on it is durable.
                    may_be = vec![found];
                    journal = Some(opened);
                }
            }
        }
    }
}

fn steps() -> Steps {
    Steps::try_new(["one", "two", "three"]).expect("a good list")
}

#[test]
fn steps_are_done_in_order_once_and_finished() {
    let (temporary, dir) = scratch();
    let mut run = steps().start(open(&dir), b"").expect("it starts");
    assert!(!run.is_resumed());
    let mut done = Vec::new();
    let result: Result<(), StepsError> = run.each(|step, state| {
        done.push(step.to_owned());
        Ok([state, step.as_bytes()].concat())
    });
    result.expect("each is done");
    assert_eq!((done.join(" "), run.state()), ("one two three".to_owned(), &b"onetwothree"[..]));
    assert!(matches!(run.done(""), Err(StepsError::NoneLeft)));
    drop(run);
    let again = steps().start(open(&dir), b"other").expect("it starts");
    assert_eq!((again.is_resumed(), again.step()), (true, None));
    again.finish().expect("it is finished");
    assert_eq!(raw_names(temporary.path()), [""; 0]);
    assert_eq!(steps().start(open(&dir), b"").expect("it starts anew").step(), Some("one"));
}

#[test]
fn a_run_goes_on_with_the_step_that_was_not_recorded() {
    let (_temporary, dir) = scratch();
    let mut run = steps().start(open(&dir), b"begun").expect("it starts");
    assert_eq!(run.step(), Some("one"));
    run.done("after one").expect("it is recorded");
    assert_eq!(run.step(), Some("two"));
    drop(run);
    let run = steps().start(open(&dir), b"begun").expect("it goes on");
    assert_eq!((run.is_resumed(), run.step()), (true, Some("two")));
    assert_eq!(run.state(), b"after one");
}

#[test]
fn other_steps_are_an_error_and_change_nothing() {
    let (temporary, dir) = scratch();
    let mut run = steps().start(open(&dir), b"").expect("it starts");
    run.done("").expect("it is recorded");
    drop(run);
    let before = contents(temporary.path());
    for other in [&["one", "two"][..], &["one", "two", "three", "four"], &["two", "one", "three"], &["one"]] {
        let list = Steps::try_new(other.iter().copied()).expect("a good list");
        let Err(StepsError::Other { recorded, asked, .. }) = list.start(open(&dir), b"") else {
            panic!("{other:?} are other steps");
        };
        assert_eq!((recorded.as_slice(), asked.as_slice()), (steps().names(), list.names()));
    }
    assert_eq!(contents(temporary.path()), before);
    let (_temporary, dir) = scratch();
    open(&dir).commit(b"something else").expect("it is committed");
    assert!(matches!(steps().start(open(&dir), b""), Err(StepsError::NotSteps { .. })));
}

#[test]
fn the_hook_hears_of_every_point_in_order() {
    let (_temporary, dir) = scratch();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hearing = Arc::clone(&heard);
    let hook = move |point: Point<'_>| hearing.lock().expect("no panic").push(format!("{point:?}"));
    let list = Steps::try_new(["a", "b"]).expect("a good list");
    let mut run = list.start_with(open(&dir), b"", hook).expect("it starts");
    while run.step().is_some() {
        run.done("").expect("it is recorded");
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
    assert_eq!(*heard.lock().expect("no panic"), expected);
}

#[test]
fn a_step_whose_record_failed_is_the_same_step_still() {
    let (_temporary, dir) = scratch();
    let mut run = steps().start(open(&dir), b"old").expect("it starts");
    with_hook(failing(1), || run.done("new")).expect_err("it is not recorded");
    assert_eq!((run.step(), run.state().to_vec()), (Some("one"), b"old".to_vec()));
    run.done("new").expect("it is recorded");
    assert_eq!((run.step(), run.state().to_vec()), (Some("two"), b"new".to_vec()));
}

/// Async code holds a run across awaits, on any thread.
#[test]
fn a_run_may_go_to_another_thread() {
    fn may<T: Send + 'static>() {}
    may::<Run>();
    may::<Journal>();
}
