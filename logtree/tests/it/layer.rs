//! `tracing` events.

use std::fmt;

use nodekeel_logtree::{
    EntryBody, FieldValue, Level, LeveledEntry, LogEntry, LogMessage, LogStore, LogStoreLayer,
};
use tracing::{debug, error, info, info_span, trace, warn};
use tracing_subscriber::layer::SubscriberExt;

use crate::support::*;

fn with_store_layer(store: &LogStore, work: impl FnOnce()) {
    with_layer(store.layer(), work);
}

fn with_layer(layer: LogStoreLayer, work: impl FnOnce()) {
    // tracing caches for all threads whether any subscriber wants an event: without a subscriber for the
    // whole process, tests that start and end concurrently race for the cached value.
    static FOR_ALL: std::sync::Once = std::sync::Once::new();
    FOR_ALL.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry())
            .expect("no other subscriber is global");
    });
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
}

fn read_all(store: &LogStore) -> Vec<LogEntry> {
    read_backlog(store, subtree_query(""))
}

fn leveled_entry(entry: &LogEntry) -> &LeveledEntry {
    match &entry.body {
        EntryBody::Leveled(leveled) => leveled,
        other => panic!("{other:?}"),
    }
}

/// Case 4.
#[test]
fn a_multiline_message_is_one_entry_without_outer_newlines() {
    let store = LogStore::default();
    with_store_layer(&store, || {
        info!("foo\nbar");
        info!("{}", "one\ntwo\n");
        info!("");
    });
    assert_eq!(entry_texts(&read_all(&store)), ["foo\nbar", "one\ntwo", ""]);
}

/// Logs when its thread ends.
struct ThreadExitLogger(tracing::Dispatch);

impl Drop for ThreadExitLogger {
    fn drop(&mut self) {
        tracing::dispatcher::with_default(&self.0, || info!("last words"));
    }
}

thread_local! {
    static PARTING: std::cell::RefCell<Option<ThreadExitLogger>> = const { std::cell::RefCell::new(None) };
}

/// Thread-locals are destroyed in the reverse order of their first use: here the layer's buffer is destroyed
/// before a thread-local that logs, in whose destructor a panic would abort.
#[test]
fn a_thread_can_log_while_it_exits() {
    let store = LogStore::default();
    let ends = |of: &LogStore| {
        with_store_layer(of, || {
            let _span = info_span!("main", dn = "main").entered();
            let subscriber = tracing::dispatcher::get_default(Clone::clone);
            PARTING.set(Some(ThreadExitLogger(subscriber)));
            info!("first words");
        });
    };
    let of = store.clone();
    std::thread::spawn(move || ends(&of)).join().expect("the thread ends");
    assert_eq!(entry_texts(&read_all(&store)), ["first words", "last words"]);
}

/// Case 7, with levels for the original's numbers, and for all names below.
#[test]
fn a_debug_event_is_stored_after_its_name_is_set_to_debug() {
    let store = LogStore::default();
    with_store_layer(&store, || {
        let _span = info_span!("main", dn = "main").entered();
        debug!("not yet");
        store.set_level(&dn("main"), Level::Debug);
        debug!("now");
        trace!("too much");
        debug!(dn = "main.below", "below it, too");
        debug!(dn = "other", "the layer's level holds");
        store.set_level(&dn("main"), Level::Error);
        warn!("not any more");
        info!(dn = "other", "others keep theirs");
        store.reset_level(&dn("main"));
        info!("as before");
    });
    assert_eq!(entry_texts(&read_all(&store)), ["now", "below it, too", "others keep theirs", "as before"]);
    let counted =
        store.dn_stats().iter().map(|name| (name.dn.to_string(), name.suppressed)).collect::<Vec<_>>();
    // Events below the layer's level were never built.
    assert_eq!(
        counted,
        [("", 0), ("main", 2), ("main.below", 0), ("other", 0)].map(|(n, c)| (n.to_owned(), c))
    );
}

/// Case 8.
#[test]
fn levels_and_source_positions_are_those_of_the_events() {
    let store = LogStore::default();
    let first = line!() + 2;
    with_store_layer(&store, || {
        error!("e");
        warn!("w");
        info!("i");
        info!("v0");
    });
    let found = read_all(&store);
    let levels: String = found.iter().map(|entry| entry_level(entry).letter()).collect();
    assert_eq!(levels, "EWII");
    for (index, entry) in found.iter().enumerate() {
        assert!(leveled_entry(entry).file.ends_with("tests/it/layer.rs"), "{entry:?}");
        assert_eq!(leveled_entry(entry).line, first + index as u32);
    }
}

/// Case 11.
#[test]
fn a_helper_can_leave_the_position_to_its_caller() {
    #[track_caller]
    fn helper(store: &LogStore) {
        store.append_message(&dn("main"), LogMessage::new(Level::Info, "by a helper"));
    }
    let store = LogStore::default();
    helper(&store);
    store.append_message(&dn("main"), LogMessage::new(Level::Info, "directly"));
    let found = read_all(&store);
    assert_eq!(leveled_entry(&found[0]).line + 1, leveled_entry(&found[1]).line);
}

#[test]
fn an_event_dn_wins_over_the_innermost_span_dn() {
    let store = LogStore::default();
    with_layer(store.layer().default_dn(dn("node")), || {
        info!("outside");
        let late = info_span!("late", dn = tracing::field::Empty);
        let _outer = info_span!("outer", dn = "a").entered();
        info!("in a");
        let _unnamed = info_span!("unnamed").entered();
        info!("still in a");
        let _inner = info_span!("inner", dn = %dn("a.b")).entered();
        info!("in a.b");
        info!(dn = "c", other = 1, "by its field");
        info!(dn = "not..a.name", "kept");
        late.record("dn", "later");
        late.in_scope(|| info!("in later"));
        info!(parent: None, "outside again");
    });
    let all = read_all(&store);
    let found: Vec<_> = all.iter().map(|entry| format!("{}: {}", entry.dn, entry_text(entry))).collect();
    assert_eq!(
        found,
        [
            "node: outside",
            "a: in a",
            "a: still in a",
            "a.b: in a.b",
            "c: by its field",
            "a.b: kept",
            "later: in later",
            "node: outside again",
        ]
    );
    let fields = |index: usize| {
        let fields = &leveled_entry(&all[index]).fields;
        fields.iter().map(|field| (field.name.clone(), field.value.clone())).collect::<Vec<_>>()
    };
    assert_eq!(fields(4), [("other".to_owned(), FieldValue::Int(1))]);
    assert_eq!(fields(5), [("dn".to_owned(), FieldValue::from("not..a.name"))]);
}

#[test]
fn fields_keep_their_types_and_errors_their_sources() {
    let store = LogStore::default();
    let source = "x".parse::<u8>().unwrap_err();
    let outer = std::io::Error::other(OuterError(source));
    with_store_layer(&store, || {
        info!(text = "t", int = -1, uint = 1u64, float = 0.5, yes = true, debug = ?Some(1), "m");
        error!(error = &outer as &(dyn std::error::Error + 'static), "failed");
    });
    let found = read_all(&store);
    let values: Vec<_> = leveled_entry(&found[0]).fields.iter().map(|field| field.value.clone()).collect();
    let expected = [
        "t".into(),
        FieldValue::Int(-1),
        FieldValue::Uint(1),
        FieldValue::Float(0.5),
        FieldValue::Bool(true),
        "Some(1)".into(),
    ];
    assert_eq!(values, expected);
    assert_eq!(leveled_entry(&found[1]).fields[0].value, "outer: invalid digit found in string".into());
}

#[derive(Debug)]
struct OuterError(std::num::ParseIntError);

impl fmt::Display for OuterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("outer")
    }
}

impl std::error::Error for OuterError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// The `Debug` logs.
struct LoggingDebug;

impl fmt::Debug for LoggingDebug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        info!("said meanwhile");
        f.write_str("quiet")
    }
}

/// The inner event is not asserted: tracing itself mutes a subscriber that is called from within itself,
/// unless it is the global one.
#[test]
fn an_event_that_logs_while_it_is_recorded_is_stored() {
    let store = LogStore::default();
    with_store_layer(&store, || {
        info!(value = ?LoggingDebug, "outer");
        info!("after");
    });
    let found = entry_texts(&read_all(&store));
    let others: Vec<_> = found.iter().filter(|text| *text != "said meanwhile").collect();
    assert_eq!(others, ["outer", "after"]);
}

#[test]
fn two_log_stores_in_one_program_do_not_mix() {
    let (one, other) = (LogStore::default(), LogStore::default());
    append_info(&one, "x", "uses a slot");
    let both = tracing_subscriber::registry().with(one.layer()).with(other.layer().min_level(Level::Warn));
    tracing::subscriber::with_default(both, || {
        let _span = info_span!("a", dn = "a").entered();
        info!("1");
        warn!("2");
    });
    assert_eq!(entry_texts(&read_backlog(&one, name_query("a"))), ["1", "2"]);
    assert_eq!(entry_texts(&read_backlog(&other, name_query("a"))), ["2"]);
}

#[test]
fn the_fields_of_spans_are_stored_with_the_events_in_them() {
    let store = LogStore::default();
    with_store_layer(&store, || {
        let _service = info_span!("service", dn = "main", zone = "a").entered();
        info!("outside");
        let request = info_span!("request", id = 42, zone = "b", user = tracing::field::Empty);
        let _entered = request.enter();
        info!("inside");
        request.record("user", "eve");
        request.record("id", 43);
        info!(code = 7, zone = "own", "answered");
        info!(dn = "elsewhere", "named");
        info!(parent: None, "without");
    });
    let fields = |entry: &LogEntry| -> Vec<String> {
        leveled_entry(entry).fields.iter().map(|field| format!("{}={}", field.name, field.value)).collect()
    };
    let found: Vec<_> = read_all(&store).iter().map(|entry| (entry.dn.to_string(), fields(entry))).collect();
    let expected: [(&str, &[&str]); 5] = [
        ("main", &["zone=a"]),
        ("main", &["id=42", "zone=b"]),
        ("main", &["code=7", "zone=own", "user=eve", "id=43"]),
        ("elsewhere", &["zone=b", "user=eve", "id=43"]),
        ("", &[]),
    ];
    for ((dn, fields), (expected_dn, expected)) in found.iter().zip(expected) {
        assert_eq!((dn.as_str(), fields.len()), (expected_dn, expected.len()), "{found:?}");
        assert!(expected.iter().all(|field| fields.contains(&(*field).to_owned())), "{found:?}");
    }
}

#[test]
fn a_field_without_a_value_hides_no_field_of_a_span() {
    let store = LogStore::default();
    with_store_layer(&store, || {
        let _span = info_span!("request", id = 42).entered();
        info!(id = Option::<u64>::None, "none");
        info!(id = tracing::field::Empty, "empty");
        info!(id = 7, "own");
    });
    let ids: Vec<_> =
        read_all(&store).iter().map(|entry| leveled_entry(entry).fields[0].value.clone()).collect();
    assert_eq!(ids, [FieldValue::Int(42), FieldValue::Int(42), FieldValue::Int(7)]);
}

#[test]
fn a_spans_field_is_cut_and_an_invalid_name_stays_a_field() {
    let store = LogStore::new(nodekeel_logtree::LogLimits { message_bytes: 64, ..Default::default() });
    with_store_layer(&store, || {
        info_span!("long", text = "ü".repeat(1000)).in_scope(|| info!(""));
        info_span!("invalid", dn = "not..valid").in_scope(|| info!("x"));
    });
    let found = read_all(&store);
    assert_eq!(leveled_entry(&found[0]).original_bytes.map(|bytes| bytes < 200), Some(true), "{found:?}");
    assert_eq!(leveled_entry(&found[1]).fields[0].value, FieldValue::from("not..valid"));
}
