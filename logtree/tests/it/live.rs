//! Reading what is being written.

use std::io::Write;
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use nodekeel_logtree::{Backlog, Journal, Kind, Level, Limits, Query, Reader, WriterOptions};
use tokio_stream::StreamExt;

use crate::support::*;

fn now(reader: &mut Reader) -> Vec<String> {
    std::iter::from_fn(|| reader.try_next()).map(|entry| text(&entry)).collect()
}

/// Case 6.
#[tokio::test]
async fn a_backlog_goes_over_into_the_stream() {
    let journal = Journal::default();
    info(&journal, "main", "one");
    let mut raw = journal.writer(&dn("main.process"), WriterOptions::new("stdout"));
    raw.write_all(b"two\n").unwrap();
    let mut reader = journal.read(within("").follow()).unwrap();
    assert_eq!(texts(&reader.backlog()), ["one", "two"]);
    info(&journal, "main", "three");
    raw.write_all(b"four\n").unwrap();
    assert_eq!(text(&reader.next().await.unwrap()), "three");
    assert_eq!(text(&reader.next().await.unwrap()), "four");
}

/// Case 18: two messages on a stream, and the filters of the backlog on it, which the original forgot.
#[test]
fn a_stream_is_filtered_like_a_backlog() {
    let journal = Journal::default();
    let follow = |query: Query| journal.read(query.backlog(Backlog::None).follow()).unwrap();
    let mut exact = follow(Query::new(dn("a")));
    let mut below = follow(within("a"));
    let mut warnings = follow(within("").min_level(Level::Warn));
    let mut raw_lines = follow(within("").kind(Kind::Raw));

    info(&journal, "a", "1");
    log(&journal, "a.b", Level::Error, "2");
    info(&journal, "ab", "3");
    journal.writer(&dn("a"), WriterOptions::new("stdout")).write_all(b"4\n").unwrap();

    assert_eq!(now(&mut exact), ["1", "4"]);
    assert_eq!(now(&mut below), ["1", "2", "4"]);
    assert_eq!(now(&mut warnings), ["2"]);
    assert_eq!(now(&mut raw_lines), ["4"]);
}

#[test]
fn names_that_come_later_are_in_the_stream() {
    let journal = Journal::default();
    let mut reader = journal.read(within("a").follow()).unwrap();
    info(&journal, "a.new", "1");
    info(&journal, "b.new", "2");
    assert_eq!(now(&mut reader), ["1"]);
}

#[test]
fn a_slow_reader_is_told_what_it_missed_at_its_place() {
    let journal = Journal::new(Limits { entries_per_dn: Some(3), ..Limits::default() });
    let mut reader = journal.read(within("").follow()).unwrap();
    let mut warnings = journal.read(within("").follow().min_level(Level::Warn)).unwrap();
    info(&journal, "loud", "0");
    info(&journal, "quiet", "first");
    assert_eq!(now(&mut reader), ["0", "first"]);
    for number in 1..=5 {
        let level = if number == 1 { Level::Warn } else { Level::Info };
        log(&journal, "loud", level, number.to_string());
    }
    info(&journal, "quiet", "second");
    // Of the six only the four it had not read count, less the three that are left.
    assert_eq!(now(&mut reader), ["-2", "3", "4", "5", "second"]);
    // Whoever wants warnings only missed one warning, not two entries.
    assert_eq!(now(&mut warnings), ["-1"]);
}

#[test]
fn a_reader_is_woken_by_what_passes_its_filters_only() {
    let journal = Journal::default();
    let mut reader = journal.read(within("a").follow().min_level(Level::Warn)).unwrap();
    let count = std::sync::Arc::new(CountWakes::default());
    let waker = Waker::from(count.clone());
    let mut poll = || {
        let reader = std::pin::Pin::new(&mut reader);
        reader.poll_next(&mut Context::from_waker(&waker))
    };
    assert_eq!(poll(), Poll::Pending);
    info(&journal, "a", "below the level");
    log(&journal, "b", Level::Error, "elsewhere");
    assert_eq!(count.wakes(), 0);
    log(&journal, "a", Level::Error, "here");
    log(&journal, "a", Level::Error, "and here");
    assert_eq!(count.wakes(), 1);
    assert!(poll().is_ready() && poll().is_ready());
    assert_eq!(poll(), Poll::Pending);
    drop(reader);
    log(&journal, "a", Level::Error, "nobody is there");
    assert_eq!(count.wakes(), 1);
}

#[derive(Default)]
struct CountWakes(std::sync::atomic::AtomicUsize);

impl CountWakes {
    fn wakes(&self) -> usize {
        self.0.load(std::sync::atomic::Ordering::SeqCst)
    }
}

impl std::task::Wake for CountWakes {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
}

/// On a single thread, a reader with more to read than it will ever have read.
#[tokio::test]
async fn a_reader_with_much_to_read_lets_other_tasks_run() {
    let journal = Journal::default();
    info(&journal, "a", "first");
    let mut reader = journal.read(within("").follow()).unwrap();
    let others_ran = tokio::spawn(async {});
    let mut read = 0;
    while !others_ran.is_finished() {
        assert!(reader.next().await.is_some());
        info(&journal, "a", "and one more");
        read += 1;
        assert!(read < 10_000, "the other task waits for ever");
    }
}

#[tokio::test]
async fn without_follow_the_stream_ends_with_the_backlog() {
    let journal = Journal::default();
    info(&journal, "a", "1");
    let reader = journal.read(within("")).unwrap();
    info(&journal, "a", "too late");
    assert_eq!(reader.map(|entry| text(&entry)).collect::<Vec<_>>().await, ["1"]);
}

/// Writers on several threads, each name's entries numbered by its writer; a reader that follows from somewhere in
/// between finds every number once and in order, or in a report of dropped ones.
#[test]
fn between_backlog_and_stream_there_is_no_gap_and_no_repeat() {
    const EACH: u64 = 20_000;
    const NAMES: [&str; 3] = ["w.a", "w.b", "w.c"];
    for entries in [None, Some(50)] {
        let journal =
            Journal::new(Limits { entries_per_dn: entries, bytes_per_dn: 8 << 20, ..Limits::default() });
        std::thread::scope(|scope| {
            for name in NAMES {
                let mut writer = journal.writer(&dn(name), WriterOptions::new("stdout"));
                scope.spawn(move || (0..EACH).for_each(|number| writeln!(writer, "{number}").unwrap()));
            }
            for _ in 0..3 {
                scope.spawn(|| follow_to_the_end(&journal, NAMES, EACH));
            }
        });
    }
}

fn follow_to_the_end(journal: &Journal, names: [&str; 3], each: u64) {
    let mut reader = journal.read(within("w").follow()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut next = [0; 3];
    let mut seq = 0;
    while next != [each; 3] {
        let entry = runtime.block_on(reader.next()).unwrap();
        assert!(entry.seq > seq, "{} after {seq}", entry.seq);
        seq = entry.seq;
        let next = &mut next[names.iter().position(|name| *name == entry.dn.as_str()).unwrap()];
        match entry.body {
            nodekeel_logtree::Body::Dropped(dropped) => {
                assert!(dropped.exact);
                *next += dropped.count;
            }
            _ => {
                assert_eq!(text(&entry), next.to_string());
                *next += 1;
            }
        }
    }
    assert_eq!(reader.try_next(), None);
}
