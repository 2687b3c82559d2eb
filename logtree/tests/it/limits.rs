//! What is kept when there is too much.

use std::io::Write;

use nodekeel_logtree::{Body, Journal, Level, Limits, Query, WriterOptions};

use crate::support::*;

fn totals(journal: &Journal) -> (u64, u64, u64) {
    journal.stats().iter().fold((0, 0, 0), |(appended, kept, dropped), name| {
        (appended + name.appended, kept + name.entries as u64, dropped + name.dropped)
    })
}

#[test]
fn a_name_is_bounded_in_bytes_whatever_the_size_of_its_entries() {
    let limits = Limits { bytes_per_dn: 16 << 10, message_bytes: 4 << 10, ..Limits::default() };
    let journal = Journal::new(limits);
    for number in 0..2000 {
        info(&journal, "a", "x".repeat(number * 7 % 9000));
        assert!(journal.stats().iter().all(|name| name.bytes <= 16 << 10));
    }
    let found = read(&journal, Query::new(dn("a")));
    let Body::Dropped(dropped) = found[0].body else { panic!() };
    assert_eq!(dropped.count + found.len() as u64 - 1, 2000);
    assert_eq!(totals(&journal), (2000, found.len() as u64 - 1, dropped.count));
}

#[test]
fn a_long_message_is_cut_and_marked() {
    let journal = Journal::new(Limits { message_bytes: 100, ..Limits::default() });
    info(&journal, "a", "ü".repeat(1000));
    let found = read(&journal, Query::new(dn("a")));
    let Body::Leveled(leveled) = &found[0].body else { panic!() };
    assert!(leveled.message.len() <= 100 && leveled.message.chars().all(|c| c == 'ü'));
    assert_eq!(leveled.original_bytes, Some(2000));
}

#[test]
fn a_flood_takes_the_memory_of_no_quiet_name() {
    let limits = Limits { bytes_per_dn: 1 << 20, total_bytes: 1 << 20, ..Limits::default() };
    let journal = Journal::new(limits);
    for number in 0..64 {
        info(&journal, &format!("quiet.{number}"), "kept");
    }
    for number in 0..16 {
        let mut flood = journal.writer(&dn(&format!("flood.{number}")), WriterOptions::new("stdout"));
        for _ in 0..4_000 {
            flood.write_all(b"a line of a flood that is much like any other line of a flood\n").unwrap();
        }
    }
    for number in 0..64 {
        info(&journal, &format!("quiet.{number}"), "kept, too");
    }
    for entry in read(&journal, within("quiet")) {
        assert!(!matches!(entry.body, Body::Dropped(_)), "{entry:?}");
    }
    let stats = journal.stats();
    assert!(stats.iter().map(|name| name.bytes).sum::<usize>() <= 1 << 20);
    // The floods share what there is about evenly.
    let floods: Vec<usize> =
        stats.iter().filter(|n| n.dn.is_within(&dn("flood"))).map(|name| name.bytes).collect();
    assert!(floods.iter().all(|&bytes| bytes >= 8 << 10), "{floods:?}");
    assert_eq!(totals(&journal).0, 64 * 2 + 16 * 4_000);
}

#[test]
fn beyond_the_most_names_the_idlest_is_forgotten_and_counted_above_it() {
    let journal = Journal::new(Limits { dns: 4, ..Limits::default() });
    let mut follower = journal.read(within("").follow()).unwrap();
    let mut below = journal.read(within("a").follow()).unwrap();
    for name in ["a", "a.idle", "b"] {
        info(&journal, name, format!("in {name}"));
    }
    info(&journal, "a", "again");
    info(&journal, "c", "one too many");
    let names: Vec<_> = journal.stats().iter().map(|name| name.dn.to_string()).collect();
    assert_eq!(names, ["", "a", "b", "c"]);
    assert_eq!(totals(&journal), (5, 4, 1));
    // Whoever reads later finds the count at the nearest name above.
    let found = texts(&read(&journal, within("")));
    assert_eq!(found, ["in a", "-1", "in b", "again", "one too many"]);
    // Whoever follows is told at the name it follows.
    let live: Vec<_> = std::iter::from_fn(|| follower.try_next()).collect();
    assert_eq!(texts(&live), ["in a", "-1", "in b", "again", "one too many"]);
    assert_eq!(live[1].dn, dn(""));
    let live: Vec<_> = std::iter::from_fn(|| below.try_next()).collect();
    assert_eq!(texts(&live), ["in a", "-1", "again"]);
    assert_eq!(live[1].dn, dn("a"));
}

#[test]
fn whoever_has_read_what_is_forgotten_has_missed_nothing() {
    let journal = Journal::new(Limits { dns: 2, ..Limits::default() });
    let mut follower = journal.read(within("").follow()).unwrap();
    for name in ["a", "b", "c", "d"] {
        info(&journal, name, name);
        assert_eq!(text(&follower.try_next().unwrap()), name);
    }
    info(&journal, "", "root");
    assert_eq!(text(&follower.try_next().unwrap()), "root");
    assert_eq!(follower.try_next(), None);
    assert_eq!(texts(&read(&journal, within(""))), ["-3", "d", "root"]);
}

#[test]
fn absurd_limits_are_taken_as_the_nearest_that_work() {
    let none = Limits {
        bytes_per_dn: 0,
        entries_per_dn: Some(0),
        total_bytes: 0,
        dns: 0,
        line_bytes: 0,
        message_bytes: 0,
    };
    let all = Limits {
        bytes_per_dn: usize::MAX,
        entries_per_dn: Some(usize::MAX),
        total_bytes: usize::MAX,
        dns: usize::MAX,
        line_bytes: usize::MAX,
        message_bytes: usize::MAX,
    };
    for limits in [none, all] {
        let journal = Journal::new(limits);
        for name in ["a", "b", "c"] {
            log(&journal, name, Level::Info, "x".repeat(10_000));
            journal
                .writer(&dn(name), WriterOptions::new("s".repeat(1000)))
                .write_all(&[b'x'; 10_000])
                .unwrap();
            assert_eq!(read(&journal, Query::new(dn(name)).last(1)).len(), 1);
        }
    }
}
