//! What must hold for anything.

use nodekeel_logtree::{Body, Dn, Entry, Journal, Kind, Level, Limits, Message, Query, Reader, testing};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::support::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn lines_do_not_depend_on_how_they_are_written(input in vec(prop_oneof![
        Just(b'\n'), Just(b'\r'), Just(b'a'), Just(0xff), Just(0xc3), Just(0xbc), Just(0xf0), Just(0x9f), any::<u8>(),
    ], 0..400)) {
        testing::check_lines(&input);
    }

    #[test]
    fn names_are_what_they_were_made_of(text in "[a.ü\\-]{0,12}|.*") {
        testing::check_dn(text.as_bytes());
    }

    #[test]
    fn klog_takes_or_refuses_any_line(line in "[IWEFD][0-9]{4} +[0-9:.]{0,15} +[0-9]{0,3} [a-z]{0,3}:[0-9]{0,3}\\] .*|.*") {
        testing::check_klog(line.as_bytes());
    }

    #[test]
    fn etcd_takes_or_refuses_any_line(line in r#"\{"level":"[a-z]{0,5}","ts":[0-9e.\-"]{1,9},"msg":".{0,9}"\}|(raft)?20[0-9/\- :.]{0,25} [IWE] \| .*|.*"#) {
        testing::check_etcd(line.as_bytes());
    }

    #[test]
    fn logfmt_takes_or_refuses_any_line(line in r#"(level=(info|warn)|msg=("[a\\"xuU0-9]{0,12}"|[a-z]{0,3})|[a-z]{0,2}=[^ ]{0,3}| ){0,6}|.*"#) {
        testing::check_logfmt(line.as_bytes());
    }

    #[test]
    fn kmsg_takes_or_refuses_any_record(record in "[0-9]{0,4},[0-9]{0,20},[0-9]{0,20},-?;.{0,30}(\n [A-Z]{0,4}=?.{0,10}){0,3}|.*") {
        testing::check_kmsg(record.as_bytes());
    }

    #[test]
    fn what_is_written_is_read_or_counted(operations in vec(operation(), 1..120), entries in 1usize..6, names in 2usize..6) {
        // With fewer names than are written to, some are forgotten, and counts are only right over all of them.
        let limits = Limits { entries_per_dn: Some(entries), dns: names, bytes_per_dn: 4096, ..Limits::default() };
        Run::new(Journal::new(limits), names > NAMES.len()).all(operations)?;
    }
}

const NAMES: [&str; 4] = ["a", "a.b", "a.b.c", "d"];

#[derive(Clone, Debug)]
enum Operation {
    Append { name: usize, level: usize },
    Open { root: usize, children: bool, least: usize, kind: Kind, last: Option<usize> },
    Read { reader: usize, count: usize },
    Close { reader: usize },
}

fn operation() -> impl Strategy<Value = Operation> {
    let kind = prop_oneof![Just(Kind::All), Just(Kind::Leveled)];
    prop_oneof![
        8 => (0..NAMES.len(), 0..6usize).prop_map(|(name, level)| Operation::Append { name, level }),
        1 => (0..=NAMES.len(), any::<bool>(), 0..6usize, kind, proptest::option::of(0..9usize)).prop_map(
            |(root, children, least, kind, last)| Operation::Open { root, children, least, kind, last }
        ),
        3 => (0..4usize, 0..9usize).prop_map(|(reader, count)| Operation::Read { reader, count }),
        1 => (0..4usize).prop_map(|reader| Operation::Close { reader }),
    ]
}

/// A journal, everything ever written to it, and readers with what they should have seen.
struct Run {
    journal: Journal,
    /// No name was or will be forgotten.
    exact_by_name: bool,
    written: Vec<(Dn, Level)>,
    readers: Vec<Follower>,
}

struct Follower {
    query: Query,
    reader: Reader,
    /// Entries and dropped ones, of all and by name.
    seen: Vec<(Dn, u64)>,
    seq: u64,
    /// How many of the matching ones its backlog did not go back to.
    before: Vec<(Dn, u64)>,
}

impl Run {
    fn new(journal: Journal, exact_by_name: bool) -> Run {
        Run { journal, exact_by_name, written: Vec::new(), readers: Vec::new() }
    }

    fn all(mut self, operations: Vec<Operation>) -> Result<(), TestCaseError> {
        for operation in operations {
            self.one(operation)?;
        }
        for mut follower in std::mem::take(&mut self.readers) {
            follower.read(usize::MAX)?;
            self.check_counts(&follower)?;
        }
        let kept = read(&self.journal, within("")).into_iter();
        let counted: u64 =
            kept.map(|entry| if let Body::Dropped(dropped) = entry.body { dropped.count } else { 1 }).sum();
        prop_assert_eq!(counted, self.written.len() as u64);
        for name in self.journal.stats() {
            prop_assert_eq!(name.appended, name.entries as u64 + name.dropped);
        }
        Ok(())
    }

    fn one(&mut self, operation: Operation) -> Result<(), TestCaseError> {
        match operation {
            Operation::Append { name, level } => {
                let (dn, level) = (dn(NAMES[name]), Level::ALL[level]);
                self.journal.append(&dn, Message::new(level, (self.written.len() + 1).to_string()));
                self.written.push((dn, level));
            }
            Operation::Open { root, children, least, kind, last } => {
                let mut query = Query::new(dn(NAMES.get(root).copied().unwrap_or_default())).kind(kind);
                query = query.min_level(Level::ALL[least]);
                if children {
                    query = query.children();
                }
                self.open(query, last)?;
            }
            Operation::Read { reader, count } => {
                if let Some(follower) = self.readers.get_mut(reader) {
                    follower.read(count)?;
                }
            }
            Operation::Close { reader } if reader < self.readers.len() => drop(self.readers.remove(reader)),
            Operation::Close { .. } => {}
        }
        Ok(())
    }

    /// The last n of a query are the end of all of it, and so is what comes after a number.
    fn open(&mut self, query: Query, last: Option<usize>) -> Result<(), TestCaseError> {
        let all = read(&self.journal, query.clone());
        if let Some(seq) = all.get(all.len() / 2).map(|entry| entry.seq) {
            let rest = read(&self.journal, query.clone().after(seq));
            let numbers = |entries: &[Entry]| entries.iter().map(|entry| entry.seq).collect::<Vec<_>>();
            prop_assert_eq!(numbers(&rest), numbers(&all[all.len() / 2 + 1..]));
        }
        let Some(n) = last else { return self.follow(query.follow(), &[]) };
        let records = all.iter().enumerate().filter(|(_, entry)| !matches!(entry.body, Body::Dropped(_)));
        let from = match n {
            0 => all.len(),
            n => records.map(|(index, _)| index).rev().nth(n - 1).unwrap_or(0),
        };
        let of_all: Vec<_> = all[from..].iter().map(|entry| (entry.seq, &entry.body)).collect();
        let found = read(&self.journal, query.clone().last(n));
        let found: Vec<_> = found.iter().map(|entry| (entry.seq, &entry.body)).collect();
        prop_assert_eq!(found, of_all);
        self.follow(query.last(n).follow(), &all[..from])
    }

    fn follow(&mut self, query: Query, before: &[Entry]) -> Result<(), TestCaseError> {
        let mut counts = Vec::new();
        before.iter().for_each(|entry| count(&mut counts, entry));
        let reader = self.journal.read(query.clone()).unwrap();
        self.readers.push(Follower { query, reader, seen: Vec::new(), seq: 0, before: counts });
        Ok(())
    }

    fn check_counts(&self, follower: &Follower) -> Result<(), TestCaseError> {
        let query = &follower.query;
        let matching = |(dn, level): &&(Dn, Level)| {
            let named = if query.children { dn.is_within(&query.dn) } else { *dn == query.dn };
            named && query.min_level.is_none_or(|least| *level >= least)
        };
        let sum = |counts: &[(Dn, u64)], name: Option<&Dn>| -> u64 {
            counts.iter().filter(|(dn, _)| name.is_none_or(|name| name == dn)).map(|(_, count)| count).sum()
        };
        let written: Vec<_> = self.written.iter().filter(matching).collect();
        if self.exact_by_name {
            prop_assert_eq!(sum(&follower.seen, None) + sum(&follower.before, None), written.len() as u64);
            for name in NAMES.map(dn) {
                let written = written.iter().filter(|(dn, _)| *dn == name).count() as u64;
                prop_assert_eq!(
                    sum(&follower.seen, Some(&name)) + sum(&follower.before, Some(&name)),
                    written
                );
            }
        } else if query.children && query.dn.is_root() {
            // Nothing leaves the root's subtree when it is forgotten.
            prop_assert_eq!(sum(&follower.seen, None) + sum(&follower.before, None), written.len() as u64);
        }
        Ok(())
    }
}

fn count(counts: &mut Vec<(Dn, u64)>, entry: &Entry) {
    let count = if let Body::Dropped(dropped) = entry.body { dropped.count } else { 1 };
    counts.push((entry.dn.clone(), count));
}

impl Follower {
    fn read(&mut self, most: usize) -> Result<(), TestCaseError> {
        for _ in 0..most {
            let Some(entry) = self.reader.try_next() else { break };
            prop_assert!(entry.seq > self.seq, "{} after {}", entry.seq, self.seq);
            self.seq = entry.seq;
            if let Body::Leveled(leveled) = &entry.body {
                prop_assert_eq!(&leveled.message, &entry.seq.to_string());
            }
            count(&mut self.seen, &entry);
        }
        Ok(())
    }
}
