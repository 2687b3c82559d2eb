//! Reading entries while they are written.

use std::io::Write;
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use nodekeel_logtree::{
    BacklogLimit, KindFilter, Level, LogLimits, LogQuery, LogReader, LogStore, WriterOptions,
};
use tokio_stream::StreamExt;

use crate::support::*;

fn read_available(reader: &mut LogReader) -> Vec<String> {
    std::iter::from_fn(|| reader.try_next()).map(|entry| entry_text(&entry)).collect()
}

/// Case 6.
#[tokio::test]
async fn a_backlog_continues_into_the_stream() {
    let store = LogStore::default();
    append_info(&store, "main", "one");
    let mut raw = store.line_writer(&dn("main.process"), WriterOptions::new("stdout"));
    raw.write_all(b"two\n").unwrap();
    let mut reader = store.open_reader(subtree_query("").follow()).unwrap();
    assert_eq!(entry_texts(&reader.read_backlog()), ["one", "two"]);
    append_info(&store, "main", "three");
    raw.write_all(b"four\n").unwrap();
    assert_eq!(entry_text(&reader.next().await.unwrap()), "three");
    assert_eq!(entry_text(&reader.next().await.unwrap()), "four");
}

/// Case 18: two messages on a stream, and the backlog's filters on it, which the original lacks.
#[test]
fn a_stream_is_filtered_like_a_backlog() {
    let store = LogStore::default();
    let follow =
        |query: LogQuery| store.open_reader(query.backlog_limit(BacklogLimit::None).follow()).unwrap();
    let mut exact = follow(name_query("a"));
    let mut below = follow(subtree_query("a"));
    let mut warnings = follow(subtree_query("").min_level(Level::Warn));
    let mut raw_lines = follow(subtree_query("").kind_filter(KindFilter::Raw));

    append_info(&store, "a", "1");
    append_message(&store, "a.b", Level::Error, "2");
    append_info(&store, "ab", "3");
    store.line_writer(&dn("a"), WriterOptions::new("stdout")).write_all(b"4\n").unwrap();

    assert_eq!(read_available(&mut exact), ["1", "4"]);
    assert_eq!(read_available(&mut below), ["1", "2", "4"]);
    assert_eq!(read_available(&mut warnings), ["2"]);
    assert_eq!(read_available(&mut raw_lines), ["4"]);
}

#[test]
fn names_created_later_appear_in_the_stream() {
    let store = LogStore::default();
    let mut reader = store.open_reader(subtree_query("a").follow()).unwrap();
    append_info(&store, "a.new", "1");
    append_info(&store, "b.new", "2");
    assert_eq!(read_available(&mut reader), ["1"]);
}

#[test]
fn a_slow_reader_gets_the_dropped_count_in_order() {
    let store = LogStore::new(LogLimits { entries_per_dn: Some(3), ..LogLimits::default() });
    let mut reader = store.open_reader(subtree_query("").follow()).unwrap();
    let mut warnings = store.open_reader(subtree_query("").follow().min_level(Level::Warn)).unwrap();
    append_info(&store, "loud", "0");
    append_info(&store, "quiet", "first");
    assert_eq!(read_available(&mut reader), ["0", "first"]);
    for number in 1..=5 {
        let level = if number == 1 { Level::Warn } else { Level::Info };
        append_message(&store, "loud", level, number.to_string());
    }
    append_info(&store, "quiet", "second");
    // Only the unread entries count: five, minus the three that are left.
    assert_eq!(read_available(&mut reader), ["-2", "3", "4", "5", "second"]);
    // A reader of warnings missed one warning, not two entries.
    assert_eq!(read_available(&mut warnings), ["-1"]);
}

#[test]
fn a_reader_is_woken_only_by_matching_entries() {
    let store = LogStore::default();
    let mut reader = store.open_reader(subtree_query("a").follow().min_level(Level::Warn)).unwrap();
    let count = std::sync::Arc::new(WakeCounter::default());
    let waker = Waker::from(count.clone());
    let mut poll = || {
        let reader = std::pin::Pin::new(&mut reader);
        reader.poll_next(&mut Context::from_waker(&waker))
    };
    assert_eq!(poll(), Poll::Pending);
    append_info(&store, "a", "below the level");
    append_message(&store, "b", Level::Error, "elsewhere");
    assert_eq!(count.wakes(), 0);
    append_message(&store, "a", Level::Error, "here");
    append_message(&store, "a", Level::Error, "and here");
    assert_eq!(count.wakes(), 1);
    assert!(poll().is_ready() && poll().is_ready());
    assert_eq!(poll(), Poll::Pending);
    drop(reader);
    append_message(&store, "a", Level::Error, "no reader is left");
    assert_eq!(count.wakes(), 1);
}

#[derive(Default)]
struct WakeCounter(std::sync::atomic::AtomicUsize);

impl WakeCounter {
    fn wakes(&self) -> usize {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
}

impl std::task::Wake for WakeCounter {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
}

/// On a single thread, a reader that always has more entries to read.
#[tokio::test]
async fn a_busy_reader_lets_other_tasks_run() {
    let store = LogStore::default();
    append_info(&store, "a", "first");
    let mut reader = store.open_reader(subtree_query("").follow()).unwrap();
    let others_ran = tokio::spawn(async {});
    let mut read = 0;
    while !others_ran.is_finished() {
        assert!(reader.next().await.is_some());
        append_info(&store, "a", "and one more");
        read += 1;
        assert!(read < 10_000, "the other task is starved");
    }
}

#[tokio::test]
async fn without_follow_the_stream_ends_with_the_backlog() {
    let store = LogStore::default();
    append_info(&store, "a", "1");
    let reader = store.open_reader(subtree_query("")).unwrap();
    append_info(&store, "a", "too late");
    assert_eq!(reader.map(|entry| entry_text(&entry)).collect::<Vec<_>>().await, ["1"]);
}

/// Writers on several threads number the entries of their names. A reader that starts to follow in between
/// finds every number once and in order, or in a count of dropped entries.
#[test]
fn between_backlog_and_stream_there_is_no_gap_and_no_repeat() {
    const EACH: u64 = 20_000;
    const NAMES: [&str; 3] = ["w.a", "w.b", "w.c"];
    for entries in [None, Some(50)] {
        let store = LogStore::new(LogLimits {
            entries_per_dn: entries,
            bytes_per_dn: 8 << 20,
            ..LogLimits::default()
        });
        std::thread::scope(|scope| {
            for name in NAMES {
                let mut writer = store.line_writer(&dn(name), WriterOptions::new("stdout"));
                scope.spawn(move || (0..EACH).for_each(|number| writeln!(writer, "{number}").unwrap()));
            }
            for _ in 0..3 {
                scope.spawn(|| follow_until_complete(&store, NAMES, EACH));
            }
        });
    }
}

fn follow_until_complete(store: &LogStore, names: [&str; 3], each: u64) {
    let mut reader = store.open_reader(subtree_query("w").follow()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut next = [0; 3];
    let mut seq = 0;
    while next != [each; 3] {
        let entry = runtime.block_on(reader.next()).unwrap();
        assert!(entry.seq > seq, "{} after {seq}", entry.seq);
        seq = entry.seq;
        let next = &mut next[names.iter().position(|name| *name == entry.dn.as_str()).unwrap()];
        match entry.body {
            nodekeel_logtree::EntryBody::Dropped(dropped) => {
                assert!(dropped.exact);
                *next += dropped.count;
            }
            _ => {
                assert_eq!(entry_text(&entry), next.to_string());
                *next += 1;
            }
        }
    }
    assert_eq!(reader.try_next(), None);
}
