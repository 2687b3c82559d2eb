//! Property tests.

use nodekeel_logtree::{
    BacklogLimit, Dn, EntryBody, KindFilter, Level, LogEntry, LogLimits, LogMessage, LogQuery, LogReader,
    LogStore, testing,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn stored_lines_do_not_depend_on_write_boundaries(input in vec(prop_oneof![
        Just(b'\n'), Just(b'\r'), Just(b'a'), Just(0xff), Just(0xc3), Just(0xbc), Just(0xf0), Just(0x9f), any::<u8>(),
    ], 0..400)) {
        testing::fuzz_lines(&input);
    }

    #[test]
    fn names_display_as_their_text(text in "[a.ü\\-]{0,12}|.*") {
        testing::fuzz_dn(text.as_bytes());
    }

    #[test]
    fn klog_accepts_or_rejects_any_line(line in "[IWEFD][0-9]{4} +[0-9:.]{0,15} +[0-9]{0,3} [a-z]{0,3}:[0-9]{0,3}\\] .*|.*") {
        testing::fuzz_klog(line.as_bytes());
    }

    #[test]
    fn structured_klog_accepts_or_rejects_any_text(text in r#"("[a-z\\"]{0,4}"|[a-z]{1,3}=("[a-z\\"]{0,3}"|[a-z]{0,2}|\{"a":[0-9]\}|\[[0-9,]{0,3}\]|<)| ){0,6}"#) {
        testing::fuzz_klog(format!("I1121 11:26:08.703131 1 a.go:1] {text}").as_bytes());
    }

    #[test]
    fn kubernetes_json_accepts_or_rejects_any_line(line in r#"\{"ts":[0-9e.\-"]{1,9},("caller":"[a-z:0-9]{0,5}",)?"msg":".{0,9}"(,"v":[0-9.]{1,2})?(,"err":.{1,3})?\}|.*"#) {
        testing::fuzz_json(line.as_bytes());
    }

    #[test]
    fn etcd_accepts_or_rejects_any_line(line in r#"\{"level":"[a-z]{0,5}","ts":[0-9e.\-"]{1,9},"msg":".{0,9}"\}|(raft)?20[0-9/\- :.]{0,25} [IWE] \| .*|.*"#) {
        testing::fuzz_etcd(line.as_bytes());
    }

    #[test]
    fn logfmt_accepts_or_rejects_any_line(line in r#"(level=(info|warn)|msg=("[a\\"xuU0-9]{0,12}"|[a-z]{0,3})|[a-z]{0,2}=[^ ]{0,3}| ){0,6}|.*"#) {
        testing::fuzz_logfmt(line.as_bytes());
    }

    #[test]
    fn a_leading_level_is_found_or_not_in_any_line(line in r#"(<[0-9]{1,2}>)?\[?(2026-11-21[T ][0-9:.,]{0,12}( ?[+-][0-9:]{4,5}|Z)?)?\]? ?([\[<]?(ERROR|warn|SEVERE)[\]>:]?|[a-zü]{0,3}|[ |:-]{1,2}){0,9}.{0,5}|.*"#) {
        testing::fuzz_level_prefix(line.as_bytes());
    }

    #[test]
    fn kmsg_accepts_or_rejects_any_record(record in "[0-9]{0,4},[0-9]{0,20},[0-9]{0,20},-?;.{0,30}(\n [A-Z]{0,4}=?.{0,10}){0,3}|.*") {
        testing::fuzz_kmsg(record.as_bytes());
    }

    #[test]
    fn every_entry_is_read_or_counted_as_dropped(operations in vec(operation(), 1..160), entries in 1usize..6, names in prop_oneof![Just(2), 2usize..20]) {
        // Beyond five times the limit of names, some are forgotten, and the counts of a name are upper bounds.
        let limits = LogLimits { entries_per_dn: Some(entries), max_names: names, bytes_per_dn: 4096, ..LogLimits::default() };
        let mut model = StoreModel::new(LogStore::new(limits));
        model.exact_by_name = names * 5 > NAMES.len();
        model.exact_resume = names > NAMES.len();
        model.apply_all(operations)?;
    }
}

const NAMES: [&str; 14] =
    ["a", "a.b", "a.b.c", "d", "d.e", "d.f", "d.f.g", "d.f.h", "i.j", "i.j.k", "l", "m.n.o.p", "m.n", "q"];

#[derive(Clone, Debug)]
enum Operation {
    Append {
        name: usize,
        level: usize,
    },
    Open {
        root: usize,
        children: bool,
        min_level: usize,
        kind: KindFilter,
        last: Option<usize>,
    },
    Read {
        reader: usize,
        count: usize,
    },
    Resume {
        root: usize,
        children: bool,
        min_level: usize,
        part: f64,
    },
    Close {
        reader: usize,
    },
    /// The reader is replaced by another one that resumes after it.
    Replace {
        reader: usize,
    },
}

fn operation() -> impl Strategy<Value = Operation> {
    let kind = prop_oneof![Just(KindFilter::All), Just(KindFilter::Leveled)];
    prop_oneof![
        8 => (0..NAMES.len(), 0..6usize).prop_map(|(name, level)| Operation::Append { name, level }),
        1 => (0..=NAMES.len(), any::<bool>(), 0..6usize, kind, proptest::option::of(0..9usize)).prop_map(
            |(root, children, min_level, kind, last)| {
                Operation::Open { root, children, min_level, kind, last }
            }
        ),
        3 => (0..4usize, 0..9usize).prop_map(|(reader, count)| Operation::Read { reader, count }),
        1 => (0..=NAMES.len(), any::<bool>(), 0..6usize, 0.0..1.0).prop_map(
            |(root, children, min_level, part)| Operation::Resume { root, children, min_level, part }
        ),
        1 => (0..4usize).prop_map(|reader| Operation::Close { reader }),
        1 => (0..4usize).prop_map(|reader| Operation::Replace { reader }),
    ]
}

/// A log store, everything ever written to it, and readers with the entries that they should have seen.
struct StoreModel {
    store: LogStore,
    /// No name is ever forgotten, or even cleared.
    exact_by_name: bool,
    exact_resume: bool,
    written: Vec<(Dn, Level)>,
    readers: Vec<FollowingReader>,
}

struct FollowingReader {
    query: LogQuery,
    reader: LogReader,
    /// Number of entries and dropped entries, by name.
    seen: Vec<(Dn, u64)>,
    seq: u64,
    /// Number of matching entries before the start of its backlog.
    before: Vec<(Dn, u64)>,
    /// It has taken over from another reader, and counts may be upper bounds.
    is_resumed: bool,
}

impl StoreModel {
    fn new(store: LogStore) -> StoreModel {
        StoreModel {
            store,
            exact_by_name: false,
            exact_resume: false,
            written: Vec::new(),
            readers: Vec::new(),
        }
    }

    /// A reader that resumes gets every later entry, or learns that it may have lost it.
    fn check_resume(&self, query: LogQuery, seq: u64) -> Result<(), TestCaseError> {
        let later =
            self.written[seq as usize..].iter().filter(|entry| matches_query(&query, entry)).count() as u64;
        let found = read_backlog(&self.store, query.after(self.store.cursor_at(seq)));
        let mut counts = Vec::new();
        found.iter().for_each(|entry| count_entry(&mut counts, entry));
        let found = sum_counts(&counts, None);
        prop_assert!(found >= later, "{} of {}", found, later);
        prop_assert!(found == later || !self.exact_resume, "{} instead of {}", found, later);
        Ok(())
    }

    fn apply_all(mut self, operations: Vec<Operation>) -> Result<(), TestCaseError> {
        for operation in operations {
            self.apply_operation(operation)?;
        }
        for mut follower in std::mem::take(&mut self.readers) {
            follower.read_entries(usize::MAX)?;
            self.check_counts(&follower)?;
        }
        let kept = read_backlog(&self.store, subtree_query("")).into_iter();
        let counted: u64 = kept
            .map(|entry| if let EntryBody::Dropped(dropped) = entry.body { dropped.count } else { 1 })
            .sum();
        prop_assert_eq!(counted, self.written.len() as u64);
        for name in self.store.dn_stats() {
            prop_assert_eq!(name.appended, name.entries as u64 + name.dropped);
        }
        Ok(())
    }

    fn apply_operation(&mut self, operation: Operation) -> Result<(), TestCaseError> {
        match operation {
            Operation::Append { name, level } => {
                let (dn, level) = (dn(NAMES[name]), Level::ALL[level]);
                self.store.append_message(&dn, LogMessage::new(level, (self.written.len() + 1).to_string()));
                self.written.push((dn, level));
            }
            Operation::Open { root, children, min_level, kind, last } => {
                let mut query =
                    LogQuery::of_dn(dn(NAMES.get(root).copied().unwrap_or_default())).kind_filter(kind);
                query = query.min_level(Level::ALL[min_level]);
                if children {
                    query = query.include_descendants();
                }
                self.open_reader(query, last)?;
            }
            Operation::Read { reader, count } => {
                if let Some(follower) = self.readers.get_mut(reader) {
                    follower.read_entries(count)?;
                }
            }
            Operation::Resume { root, children, min_level, part } => {
                let mut query = LogQuery::of_dn(dn(NAMES.get(root).copied().unwrap_or_default()));
                query = query.kind_filter(KindFilter::Leveled).min_level(Level::ALL[min_level]);
                if children {
                    query = query.include_descendants();
                }
                self.check_resume(query, (part * (self.written.len() + 1) as f64) as u64)?;
            }
            Operation::Close { reader } if reader < self.readers.len() => drop(self.readers.remove(reader)),
            Operation::Close { .. } => {}
            Operation::Replace { reader } => {
                if let Some(follower) = self.readers.get_mut(reader) {
                    let cursor = follower.reader.cursor();
                    prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
                    // Before the first entry, the start of the backlog decides.
                    if cursor.seq > 0 {
                        let query = follower.query.clone().backlog_limit(BacklogLimit::All).after(cursor);
                        follower.reader = self.store.open_reader(query).unwrap();
                        follower.is_resumed = true;
                    }
                }
            }
        }
        Ok(())
    }

    /// The last n entries of a query are the end of its backlog, and so are the entries after a sequence
    /// number.
    fn open_reader(&mut self, query: LogQuery, last: Option<usize>) -> Result<(), TestCaseError> {
        let all = read_backlog(&self.store, query.clone());
        if let Some(seq) = all.get(all.len() / 2).map(|entry| entry.seq) {
            let rest = read_backlog(&self.store, query.clone().after(self.store.cursor_at(seq)));
            let numbers = |entries: &[LogEntry]| entries.iter().map(|entry| entry.seq).collect::<Vec<_>>();
            let later: Vec<u64> = numbers(&all).into_iter().filter(|later| *later > seq).collect();
            prop_assert_eq!(numbers(&rest), later);
        }
        let Some(n) = last else { return self.follow_query(query.follow(), &[]) };
        let records =
            all.iter().enumerate().filter(|(_, entry)| !matches!(entry.body, EntryBody::Dropped(_)));
        let from = match n {
            0 => all.len(),
            n => records.map(|(index, _)| index).rev().nth(n - 1).unwrap_or(0),
        };
        let of_all: Vec<_> = all[from..].iter().map(|entry| (entry.seq, &entry.body)).collect();
        let found = read_backlog(&self.store, query.clone().last_entries(n));
        let found: Vec<_> = found.iter().map(|entry| (entry.seq, &entry.body)).collect();
        prop_assert_eq!(found, of_all);
        self.follow_query(query.last_entries(n).follow(), &all[..from])
    }

    fn follow_query(&mut self, query: LogQuery, before: &[LogEntry]) -> Result<(), TestCaseError> {
        let mut counts = Vec::new();
        before.iter().for_each(|entry| count_entry(&mut counts, entry));
        let reader = self.store.open_reader(query.clone()).unwrap();
        self.readers.push(FollowingReader {
            query,
            reader,
            seen: Vec::new(),
            seq: 0,
            before: counts,
            is_resumed: false,
        });
        Ok(())
    }

    fn check_counts(&self, follower: &FollowingReader) -> Result<(), TestCaseError> {
        let query = &follower.query;
        let sum = sum_counts;
        let written: Vec<_> = self.written.iter().filter(|entry| matches_query(query, entry)).collect();
        if follower.is_resumed {
            let known = sum(&follower.seen, None) + sum(&follower.before, None);
            prop_assert!(known >= written.len() as u64, "{} of {} lost silently", known, written.len());
        } else if self.exact_by_name {
            prop_assert_eq!(sum(&follower.seen, None) + sum(&follower.before, None), written.len() as u64);
            for name in NAMES.map(dn) {
                let written = written.iter().filter(|(dn, _)| *dn == name).count() as u64;
                prop_assert_eq!(
                    sum(&follower.seen, Some(&name)) + sum(&follower.before, Some(&name)),
                    written
                );
            }
        } else if query.include_descendants && query.dn.is_root() {
            // Forgotten names stay in the root's subtree.
            prop_assert_eq!(sum(&follower.seen, None) + sum(&follower.before, None), written.len() as u64);
        } else {
            let known = sum(&follower.seen, None) + sum(&follower.before, None);
            prop_assert!(known >= written.len() as u64, "{} of {} lost silently", known, written.len());
        }
        Ok(())
    }
}

fn matches_query(query: &LogQuery, (dn, level): &(Dn, Level)) -> bool {
    let named = if query.include_descendants { dn.is_within(&query.dn) } else { *dn == query.dn };
    named && query.min_level.is_none_or(|min_level| *level >= min_level)
}

fn sum_counts(counts: &[(Dn, u64)], name: Option<&Dn>) -> u64 {
    counts.iter().filter(|(dn, _)| name.is_none_or(|name| name == dn)).map(|(_, count)| count).sum()
}

fn count_entry(counts: &mut Vec<(Dn, u64)>, entry: &LogEntry) {
    let count = if let EntryBody::Dropped(dropped) = entry.body { dropped.count } else { 1 };
    counts.push((entry.dn.clone(), count));
}

impl FollowingReader {
    fn read_entries(&mut self, most: usize) -> Result<(), TestCaseError> {
        for _ in 0..most {
            let Some(entry) = self.reader.try_next() else { break };
            // The place of an upper bound may be that of an entry.
            let is_bound = matches!(entry.body, EntryBody::Dropped(dropped) if !dropped.exact);
            prop_assert!(
                entry.seq > self.seq || (is_bound && entry.seq == self.seq),
                "{} after {}",
                entry.seq,
                self.seq
            );
            self.seq = entry.seq;
            if let EntryBody::Leveled(leveled) = &entry.body {
                prop_assert_eq!(&leveled.message, &entry.seq.to_string());
            }
            count_entry(&mut self.seen, &entry);
        }
        Ok(())
    }
}
