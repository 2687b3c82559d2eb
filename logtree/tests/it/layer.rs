//! `tracing` events.

use std::fmt;

use nodekeel_logtree::{Body, Entry, Journal, JournalLayer, Level, Leveled, Message, Query, Value};
use tracing::{debug, error, info, info_span, trace, warn};
use tracing_subscriber::layer::SubscriberExt;

use crate::support::*;

fn traced(journal: &Journal, work: impl FnOnce()) {
    traced_by(journal.layer(), work);
}

fn traced_by(layer: JournalLayer, work: impl FnOnce()) {
    // Whether anybody wants an event is kept per event for all threads: without a subscriber that lives as long as the
    // program, tests that begin and end at the same time can race for the answer.
    static FOR_ALL: std::sync::Once = std::sync::Once::new();
    FOR_ALL.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry()).expect("it is the only one");
    });
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
}

fn all(journal: &Journal) -> Vec<Entry> {
    read(journal, within(""))
}

fn leveled(entry: &Entry) -> &Leveled {
    match &entry.body {
        Body::Leveled(leveled) => leveled,
        other => panic!("{other:?}"),
    }
}

/// Case 4.
#[test]
fn a_message_of_several_lines_is_one_entry_without_newlines_at_its_ends() {
    let journal = Journal::default();
    traced(&journal, || {
        info!("foo\nbar");
        info!("{}", "one\ntwo\n");
        info!("");
    });
    assert_eq!(texts(&all(&journal)), ["foo\nbar", "one\ntwo", ""]);
}

/// Logs when its thread ends.
struct Parting(tracing::Dispatch);

impl Drop for Parting {
    fn drop(&mut self) {
        tracing::dispatcher::with_default(&self.0, || info!("last words"));
    }
}

thread_local! {
    static PARTING: std::cell::RefCell<Option<Parting>> = const { std::cell::RefCell::new(None) };
}

/// What a thread keeps goes in the reverse of the order in which it was first used: here the layer's part goes before
/// one that logs, which could not even panic.
#[test]
fn a_thread_may_log_while_it_ends() {
    let journal = Journal::default();
    let ends = |of: &Journal| {
        traced(of, || {
            let _span = info_span!("main", dn = "main").entered();
            let subscriber = tracing::dispatcher::get_default(Clone::clone);
            PARTING.set(Some(Parting(subscriber)));
            info!("first words");
        });
    };
    let of = journal.clone();
    std::thread::spawn(move || ends(&of)).join().expect("it ends");
    assert_eq!(texts(&all(&journal)), ["first words", "last words"]);
}

/// Case 7, with levels for the original's numbers.
#[test]
fn a_verbose_event_is_stored_once_its_name_is_made_verbose() {
    let journal = Journal::default();
    traced(&journal, || {
        let _span = info_span!("main", dn = "main").entered();
        debug!("not yet");
        journal.set_level(&dn("main"), Level::Debug);
        debug!("now");
        trace!("too much");
        debug!(dn = "main.below", "levels are for exactly one name");
        journal.set_level(&dn("main"), Level::Error);
        warn!("not any more");
        info!(dn = "main.below", "others keep theirs");
    });
    assert_eq!(texts(&all(&journal)), ["now", "others keep theirs"]);
    assert_eq!((journal.level(&dn("main")), journal.level(&dn("main.below"))), (Some(Level::Error), None));
}

/// Case 8.
#[test]
fn levels_and_source_positions_are_those_of_the_events() {
    let journal = Journal::default();
    let first = line!() + 2;
    traced(&journal, || {
        error!("e");
        warn!("w");
        info!("i");
        info!("v0");
    });
    let found = all(&journal);
    let levels: String = found.iter().map(|entry| level(entry).letter()).collect();
    assert_eq!(levels, "EWII");
    for (index, entry) in found.iter().enumerate() {
        assert!(leveled(entry).file.ends_with("tests/it/layer.rs"), "{entry:?}");
        assert_eq!(leveled(entry).line, first + index as u32);
    }
}

/// Case 11.
#[test]
fn a_helper_can_leave_the_position_to_its_caller() {
    #[track_caller]
    fn helper(journal: &Journal) {
        journal.append(&dn("main"), Message::new(Level::Info, "by a helper"));
    }
    let journal = Journal::default();
    helper(&journal);
    journal.append(&dn("main"), Message::new(Level::Info, "directly"));
    let found = all(&journal);
    assert_eq!(leveled(&found[0]).line + 1, leveled(&found[1]).line);
}

#[test]
fn the_innermost_name_wins_and_the_events_own_above_all() {
    let journal = Journal::default();
    traced_by(journal.layer().default_dn(dn("node")), || {
        info!("outside");
        let late = info_span!("late", dn = tracing::field::Empty);
        let _outer = info_span!("outer", dn = "a").entered();
        info!("in a");
        let _unnamed = info_span!("unnamed").entered();
        info!("still in a");
        let _inner = info_span!("inner", dn = %dn("a.b")).entered();
        info!("in a.b");
        info!(dn = "c", other = 1, "on its own");
        info!(dn = "not..a.name", "kept");
        late.record("dn", "later");
        late.in_scope(|| info!("in later"));
        info!(parent: None, "outside again");
    });
    let all = all(&journal);
    let found: Vec<_> = all.iter().map(|entry| format!("{}: {}", entry.dn, text(entry))).collect();
    assert_eq!(
        found,
        [
            "node: outside",
            "a: in a",
            "a: still in a",
            "a.b: in a.b",
            "c: on its own",
            "a.b: kept",
            "later: in later",
            "node: outside again",
        ]
    );
    let fields = |index: usize| {
        let fields = &leveled(&all[index]).fields;
        fields.iter().map(|field| (field.name.clone(), field.value.clone())).collect::<Vec<_>>()
    };
    assert_eq!(fields(4), [("other".to_owned(), Value::Int(1))]);
    assert_eq!(fields(5), [("dn".to_owned(), Value::from("not..a.name"))]);
}

#[test]
fn fields_keep_their_types_and_errors_their_sources() {
    let journal = Journal::default();
    let source = "x".parse::<u8>().unwrap_err();
    let outer = std::io::Error::other(Outer(source));
    traced(&journal, || {
        info!(text = "t", int = -1, uint = 1u64, float = 0.5, yes = true, debug = ?Some(1), "m");
        error!(error = &outer as &(dyn std::error::Error + 'static), "failed");
    });
    let found = all(&journal);
    let values: Vec<_> = leveled(&found[0]).fields.iter().map(|field| field.value.clone()).collect();
    let expected =
        ["t".into(), Value::Int(-1), Value::Uint(1), Value::Float(0.5), Value::Bool(true), "Some(1)".into()];
    assert_eq!(values, expected);
    assert_eq!(leveled(&found[1]).fields[0].value, "outer: invalid digit found in string".into());
}

#[derive(Debug)]
struct Outer(std::num::ParseIntError);

impl fmt::Display for Outer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("outer")
    }
}

impl std::error::Error for Outer {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Its `Debug` logs.
struct Talkative;

impl fmt::Debug for Talkative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        info!("said meanwhile");
        f.write_str("quiet")
    }
}

/// The inner event is not asked for: tracing itself mutes a subscriber that is called from within itself, unless it is
/// the global one.
#[test]
fn an_event_that_logs_while_it_is_recorded_is_stored() {
    let journal = Journal::default();
    traced(&journal, || {
        info!(value = ?Talkative, "outer");
        info!("after");
    });
    let found = texts(&all(&journal));
    let others: Vec<_> = found.iter().filter(|text| *text != "said meanwhile").collect();
    assert_eq!(others, ["outer", "after"]);
}

#[test]
fn two_journals_in_one_program_do_not_mix() {
    let (one, other) = (Journal::default(), Journal::default());
    info(&one, "x", "takes the place");
    let both = tracing_subscriber::registry().with(one.layer()).with(other.layer().min_level(Level::Warn));
    tracing::subscriber::with_default(both, || {
        let _span = info_span!("a", dn = "a").entered();
        info!("1");
        warn!("2");
    });
    assert_eq!(texts(&read(&one, Query::new(dn("a")))), ["1", "2"]);
    assert_eq!(texts(&read(&other, Query::new(dn("a")))), ["2"]);
}
