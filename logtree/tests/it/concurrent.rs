//! Writers and readers at once: each entry is read once, or counted as dropped, in order.

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_logtree::{
    BacklogLimit, Dn, EntryBody, Level, LogEntry, LogLimits, LogMessage, LogQuery, LogReader, LogStore,
    WriterOptions,
};
use proptest::prelude::*;

use crate::support::*;

const WRITERS: usize = 3;
const NAMES_PER_WRITER: usize = 3;
/// Entries of each name; their number is their text, and its remainder their level.
const EACH: u64 = 1_000;

fn name_of(writer: usize, name: usize) -> Dn {
    dn(&format!("w.{writer}.{name}"))
}

fn level_of(number: u64) -> Level {
    Level::ALL[number as usize % Level::ALL.len()]
}

/// Numbers that look random, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The entries that one reader must see of each name: the numbers from `next` on that pass its level.
struct Expected {
    min_level: Level,
    next: HashMap<Dn, u64>,
    seq: u64,
    /// Some losses were reported as an upper bound.
    is_upper_bound: bool,
    has_resumed: bool,
}

impl Expected {
    fn new(min_level: Level) -> Expected {
        Expected { min_level, next: HashMap::new(), seq: 0, is_upper_bound: false, has_resumed: false }
    }

    fn skip_others(&self, number: u64) -> u64 {
        (number..).find(|&number| number >= EACH || level_of(number) >= self.min_level).unwrap()
    }

    fn check(&mut self, entry: &LogEntry) {
        let next = self.next.get(&entry.dn).copied().unwrap_or_default();
        let mut next = self.skip_others(next);
        let is_bound = match entry.body {
            EntryBody::Dropped(dropped) => {
                (0..dropped.count).for_each(|_| next = self.skip_others(next + 1));
                !dropped.exact
            }
            _ => {
                let number: u64 = entry_text(entry).parse().unwrap();
                // After an upper bound, a number may come earlier than the bound said. A reader that resumes
                // does not learn of losses from before its place that the one before it had still to report.
                let is_exact = number == next || (self.is_upper_bound && number <= next);
                assert!(is_exact || (self.has_resumed && number > next), "{number}, not {next}");
                next = number + 1;
                false
            }
        };
        assert!(
            entry.seq > self.seq || (is_bound && entry.seq == self.seq),
            "{} after {}",
            entry.seq,
            self.seq
        );
        self.is_upper_bound |= is_bound;
        self.seq = entry.seq;
        self.next.insert(entry.dn.clone(), next);
    }

    fn is_complete(&self) -> bool {
        let done = |dn: &Dn| self.next.get(dn).is_some_and(|&next| self.skip_others(next) >= EACH);
        (0..WRITERS).all(|writer| (0..NAMES_PER_WRITER).all(|name| done(&name_of(writer, name))))
    }
}

fn write_all(store: &LogStore, writer: usize) {
    let names: Vec<Dn> = (0..NAMES_PER_WRITER).map(|name| name_of(writer, name)).collect();
    for number in 0..EACH {
        for name in &names {
            store.append_message(name, LogMessage::new(level_of(number), number.to_string()));
        }
    }
}

/// Reads to the end as one reader, blocking or not, or as many that are killed and resume.
fn read_all(store: &LogStore, min_level: Level, kills: Option<u64>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let query = || subtree_query("w").min_level(min_level).follow();
    let open = |query| store.open_reader(query).unwrap();
    let mut reader: LogReader = open(query());
    let mut expected = Expected::new(min_level);
    let mut numbers = Numbers(kills.unwrap_or_default());
    while !expected.is_complete() {
        expected.check(&runtime.block_on(reader.next()).unwrap());
        if kills.is_some() && numbers.below(100) == 0 {
            // Some are dropped with entries that they have fetched.
            expected.has_resumed = true;
            let cursor = reader.cursor();
            drop(std::mem::replace(&mut reader, open(query().after(cursor))));
        }
    }
    assert_eq!(reader.try_next(), None);
    assert!(kills.is_some() || !expected.is_upper_bound, "a reader that was not killed knows its losses");
}

/// Followers that are opened, read a little, if at all, and are dropped, in any state.
fn disturb(store: &LogStore) {
    let mut numbers = Numbers(7);
    for _ in 0..100 {
        let query = match numbers.below(3) {
            0 => subtree_query(""),
            1 => LogQuery::of_dn(name_of(0, 0)),
            _ => subtree_query("w.1").min_level(Level::Error),
        };
        let backlog = match numbers.below(3) {
            0 => BacklogLimit::None,
            1 => BacklogLimit::Last(numbers.below(50) as usize),
            _ => BacklogLimit::All,
        };
        let mut reader = store.open_reader(query.backlog_limit(backlog).follow()).unwrap();
        let mut seq = 0;
        for _ in 0..numbers.below(300) {
            let Some(entry) = reader.try_next() else { break };
            assert!(entry.seq > seq, "{} after {seq}", entry.seq);
            seq = entry.seq;
        }
    }
}

#[test]
fn each_entry_is_read_once_or_counted_in_order_whatever_readers_come_and_go() {
    for entries_per_dn in [None, Some(40)] {
        let limits = LogLimits { entries_per_dn, bytes_per_dn: 1 << 20, ..LogLimits::default() };
        let store = &LogStore::new(limits);
        std::thread::scope(|scope| {
            scope.spawn(move || disturb(store));
            let readers: Vec<_> =
                [(Level::Trace, None), (Level::Warn, None), (Level::Trace, Some(1)), (Level::Error, Some(2))]
                    .into_iter()
                    .map(|(level, kills)| scope.spawn(move || read_all(store, level, kills)))
                    .collect();
            (0..WRITERS).for_each(|writer| drop(scope.spawn(move || write_all(store, writer))));
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
    }
}

/// Names come and go in little memory; the followers of the root know the number of all entries.
#[test]
fn all_entries_of_names_that_come_and_go_are_counted_while_they_are_read() {
    const NAMES: u64 = 2_000;
    let limits = LogLimits { total_bytes: 64 << 10, bytes_per_dn: 4 << 10, ..LogLimits::default() };
    let store = &LogStore::new(limits);
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut slow = store.open_reader(subtree_query("").follow()).unwrap();
        let follow = move || {
            let mut reader = store.open_reader(subtree_query("").follow()).unwrap();
            let (mut counted, mut seq) = (0, 0);
            loop {
                let is_last = done.load(Ordering::Acquire);
                while let Some(entry) = reader.try_next() {
                    assert!(entry.seq > seq, "{} after {seq}", entry.seq);
                    seq = entry.seq;
                    counted += entry_count(&entry);
                }
                if is_last {
                    return counted;
                }
            }
        };
        let follower = scope.spawn(follow);
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                scope.spawn(move || {
                    let mut own = store.line_writer(&dn("own"), WriterOptions::new(format!("{writer}")));
                    for number in 0..NAMES {
                        append_info(store, &format!("n.{writer}.{}", number % 700), "entry");
                        writeln!(own, "{number}").unwrap();
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Release);
        let all = 4 * NAMES;
        assert_eq!(follower.join().unwrap(), all);
        let slow: u64 = std::iter::from_fn(|| slow.try_next()).map(|entry| entry_count(&entry)).sum();
        assert_eq!(slow, all);
        let stored: u64 = store.dn_stats().iter().map(|stats| stats.appended).sum();
        assert_eq!(stored, all);
    });
}

fn entry_count(entry: &LogEntry) -> u64 {
    if let EntryBody::Dropped(dropped) = entry.body { dropped.count } else { 1 }
}

/// Each name gets entries with the numbers from 0 on, and a reader wants those that a step divides.
struct NumberedEntries {
    /// The length of a text is below.
    longest: u64,
    step: u64,
    /// The number of wanted entries that come before the next, by name.
    next: HashMap<Dn, u64>,
    seq: u64,
}

impl NumberedEntries {
    fn new(longest: u64, step: u64) -> NumberedEntries {
        NumberedEntries { longest, step, next: HashMap::new(), seq: 0 }
    }

    /// All names are read from their first entry on.
    fn with_all_names(mut self) -> NumberedEntries {
        let names = (0..WRITERS).flat_map(|writer| (0..NAMES_PER_WRITER).map(move |name| (writer, name)));
        self.next = names.map(|(writer, name)| (name_of(writer, name), 0)).collect();
        self
    }

    /// Depends on the number in each byte, so that it differs from what was in its memory before.
    fn text_of(&self, number: u64) -> String {
        let filler = char::from(b'a' + (number % 26) as u8);
        format!("{number} {}", String::from(filler).repeat((number * 31 % self.longest) as usize))
    }

    fn check(&mut self, entry: &LogEntry) {
        assert!(entry.seq > self.seq, "{} after {}", entry.seq, self.seq);
        self.seq = entry.seq;
        if let EntryBody::Dropped(dropped) = entry.body {
            assert!(dropped.exact);
            self.next.entry(entry.dn.clone()).and_modify(|next| *next += dropped.count);
            return;
        }
        let text = entry_text(entry);
        let number: u64 = text.split(' ').next().unwrap().parse().unwrap();
        assert_eq!(text, self.text_of(number));
        assert_eq!(number % self.step, 0);
        let next = self.next.entry(entry.dn.clone()).or_insert(number / self.step);
        assert_eq!(number, *next * self.step, "{}", entry.dn);
        *next += 1;
    }

    fn write_all(&self, store: &LogStore, writer: usize) {
        for number in 0..EACH {
            let level = if number.is_multiple_of(self.step) { Level::Error } else { Level::Info };
            for name in 0..NAMES_PER_WRITER {
                append_message(store, name_of(writer, name).as_str(), level, self.text_of(number));
            }
        }
    }

    /// Checks the entries of a follower from before the first, up to the last.
    fn check_follower(mut self, mut reader: LogReader, done: &AtomicBool) {
        loop {
            let is_last = done.load(Ordering::Acquire);
            std::iter::from_fn(|| reader.try_next()).for_each(|entry| self.check(&entry));
            if is_last {
                let wanted = EACH.div_ceil(self.step);
                return assert!(self.next.values().all(|&next| next == wanted), "{:?}", self.next);
            }
            std::thread::yield_now();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn a_reader_gets_each_entry_once_and_whole_while_writers_reuse_its_memory(
        bytes_per_dn in 4096usize..20_000,
        entries_per_dn in proptest::option::of(1usize..60),
        longest in 1u64..700,
        rare in 2u64..80,
        newest in 1usize..300,
    ) {
        let limits = LogLimits { bytes_per_dn, entries_per_dn, ..LogLimits::default() };
        let (store, done) = (&LogStore::new(limits), &AtomicBool::new(false));
        std::thread::scope(|scope| {
            for step in [1, rare] {
                let min_level = if step == 1 { Level::Trace } else { Level::Error };
                let query = move || subtree_query("w").min_level(min_level);
                let follower = store.open_reader(query().follow()).unwrap();
                scope.spawn(move || {
                    NumberedEntries::new(longest, step).with_all_names().check_follower(follower, done);
                });
                scope.spawn(move || {
                    while !done.load(Ordering::Acquire) {
                        let mut all = NumberedEntries::new(longest, step).with_all_names();
                        read_backlog(store, query()).iter().for_each(|entry| all.check(entry));
                        let mut tail = NumberedEntries::new(longest, step);
                        let found = read_backlog(store, query().last_entries(newest));
                        found.iter().for_each(|entry| tail.check(entry));
                        let records = found.iter().filter(|entry| !matches!(entry.body, EntryBody::Dropped(_)));
                        assert!(records.count() <= newest);
                    }
                });
            }
            let writers: Vec<_> = (0..WRITERS)
                .map(|writer| scope.spawn(move || NumberedEntries::new(longest, rare).write_all(store, writer)))
                .collect();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            done.store(true, Ordering::Release);
        });
    }
}
