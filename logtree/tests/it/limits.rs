//! Which entries are kept when a limit is exceeded.

use std::io::Write;

use nodekeel_logtree::{EntryBody, Level, LogEntry, LogLimits, LogQuery, LogStore, WriterOptions};

use crate::support::*;

fn totals(store: &LogStore) -> (u64, u64, u64) {
    store.dn_stats().iter().fold((0, 0, 0), |(appended, kept, dropped), name| {
        (appended + name.appended, kept + name.entries as u64, dropped + name.dropped)
    })
}

#[test]
fn a_name_is_bounded_in_bytes_whatever_the_size_of_its_entries() {
    let limits = LogLimits { bytes_per_dn: 16 << 10, message_bytes: 4 << 10, ..LogLimits::default() };
    let store = LogStore::new(limits);
    for number in 0..2000 {
        append_info(&store, "a", "x".repeat(number * 7 % 9000));
        assert!(store.dn_stats().iter().all(|name| name.bytes <= 16 << 10));
    }
    let found = read_backlog(&store, name_query("a"));
    let EntryBody::Dropped(dropped) = found[0].body else { panic!() };
    assert_eq!(dropped.count + found.len() as u64 - 1, 2000);
    assert_eq!(totals(&store), (2000, found.len() as u64 - 1, dropped.count));
}

#[test]
fn a_long_message_evicts_nothing_while_its_name_has_space() {
    let store = LogStore::default();
    for number in 0..12 {
        append_info(&store, "a", format!("short {number}"));
    }
    for length in [16_000, 5_000, 16_000] {
        append_info(&store, "a", "x".repeat(length));
    }
    assert_eq!(totals(&store), (15, 15, 0));
}

#[test]
fn a_long_message_is_cut_and_marked() {
    let store = LogStore::new(LogLimits { message_bytes: 100, ..LogLimits::default() });
    append_info(&store, "a", "ü".repeat(1000));
    let found = read_backlog(&store, name_query("a"));
    let EntryBody::Leveled(leveled) = &found[0].body else { panic!() };
    assert!(leveled.message.len() <= 100 && leveled.message.chars().all(|c| c == 'ü'));
    assert_eq!(leveled.original_bytes, Some(2000));
}

#[test]
fn a_flood_does_not_evict_quiet_names() {
    let limits = LogLimits { bytes_per_dn: 1 << 20, total_bytes: 1 << 20, ..LogLimits::default() };
    let store = LogStore::new(limits);
    for number in 0..64 {
        append_info(&store, &format!("quiet.{number}"), "kept");
    }
    for number in 0..16 {
        let mut flood = store.line_writer(&dn(&format!("flood.{number}")), WriterOptions::new("stdout"));
        for _ in 0..4_000 {
            flood.write_all(b"a line of a flood that is much like any other line of a flood\n").unwrap();
        }
    }
    for number in 0..64 {
        append_info(&store, &format!("quiet.{number}"), "kept, too");
    }
    for entry in read_backlog(&store, subtree_query("quiet")) {
        assert!(!matches!(entry.body, EntryBody::Dropped(_)), "{entry:?}");
    }
    let stats = store.dn_stats();
    assert!(stats.iter().map(|name| name.bytes).sum::<usize>() <= 1 << 20);
    // The floods share the memory about evenly.
    let floods: Vec<usize> =
        stats.iter().filter(|n| n.dn.is_within(&dn("flood"))).map(|name| name.bytes).collect();
    assert!(floods.iter().all(|&bytes| bytes >= 8 << 10), "{floods:?}");
    assert_eq!(totals(&store).0, 64 * 2 + 16 * 4_000);
}

#[test]
fn beyond_the_name_limit_the_idlest_name_loses_its_entries_and_reports_them() {
    let store = LogStore::new(LogLimits { max_names: 4, ..LogLimits::default() });
    let mut follower = store.open_reader(subtree_query("").follow()).unwrap();
    let mut below = store.open_reader(subtree_query("a").follow()).unwrap();
    for name in ["a", "a.idle", "b"] {
        append_info(&store, name, format!("in {name}"));
    }
    append_info(&store, "a", "again");
    append_info(&store, "c", "one too many");
    assert_eq!(totals(&store), (5, 4, 1));
    let idle = &store.dn_stats()[2];
    assert_eq!((idle.dn.as_str(), idle.entries, idle.bytes, idle.dropped), ("a.idle", 0, 0, 1));
    assert_eq!(read_texts(&store, name_query("a.idle")), ["-1"]);
    let found = read_texts(&store, subtree_query(""));
    assert_eq!(found, ["in a", "-1", "in b", "again", "one too many"]);
    for (reader, texts) in
        [(&mut follower, &found[..]), (&mut below, &["in a", "-1", "again"].map(Into::into))]
    {
        let live: Vec<_> = std::iter::from_fn(|| reader.try_next()).collect();
        assert_eq!(entry_texts(&live), texts);
        assert_eq!(live[1].dn, dn("a.idle"));
    }
    append_info(&store, "a.idle", "back");
    assert_eq!(read_texts(&store, subtree_query("a.idle")), ["-1", "back"]);
}

/// Five names for each that may have entries: beyond that, one is forgotten.
#[test]
fn beyond_five_times_the_name_limit_a_name_is_forgotten_and_its_readers_find_their_number() {
    let store = LogStore::new(LogLimits { max_names: 2, ..LogLimits::default() });
    let mut follower = store.open_reader(name_query("quiet.a").follow()).unwrap();
    append_info(&store, "old", "1");
    append_info(&store, "quiet.a", "2");
    append_info(&store, "quiet.a", "3");
    for number in 0..9 {
        append_info(&store, &format!("flood.{number}"), "x");
    }
    let names: Vec<_> = store.dn_stats().iter().map(|name| name.dn.to_string()).collect();
    assert!(!names.contains(&"quiet.a".to_owned()) && !names.contains(&"old".to_owned()), "{names:?}");
    assert_eq!(totals(&store), (12, 1, 11));
    assert_eq!(read_texts(&store, name_query("quiet.a")), ["-2"]);
    assert_eq!(read_texts(&store, subtree_query("quiet")), ["-2"]);
    assert_eq!(read_texts(&store, name_query("quiet.a").last_entries(1)), ["-2"]);
    let resumed = name_query("quiet.a").after(store.cursor_at(2));
    assert_eq!(read_texts(&store, resumed), ["-1?"]);
    let resumed = name_query("quiet.a").after(store.cursor_at(3));
    assert_eq!(read_texts(&store, resumed), [""; 0]);
    let warnings = name_query("quiet.a").min_level(Level::Warn);
    assert_eq!(read_texts(&store, warnings), [""; 0], "no warning was dropped");
    // A reader from before knows it exactly, too.
    assert_eq!(entry_text(&follower.try_next().unwrap()), "-2");
    // Written again, it still says what it has lost before.
    append_info(&store, "quiet.a", "4");
    assert_eq!(read_texts(&store, name_query("quiet.a")), ["-2", "4"]);
    assert_eq!(read_texts(&store, subtree_query("quiet")), ["-2", "4"]);
}

/// Four errors fit a name's first block of memory, ten do not.
#[test]
fn a_quiet_name_keeps_its_errors_beside_names_with_one_line_each() {
    for (errors, names, limits) in [
        (5, 100_000, LogLimits::default()),
        (10, 10_000, LogLimits { total_bytes: 4 << 20, ..LogLimits::default() }),
        (10, 10_000, LogLimits { max_names: 1024, ..LogLimits::default() }),
    ] {
        let store = LogStore::new(limits);
        let texts: Vec<_> = (0..errors).map(|number| format!("{number} {}", "x".repeat(60))).collect();
        append_info(&store, "root.etcd", "starting");
        texts.iter().for_each(|text| append_message(&store, "root.etcd", Level::Error, text));
        (0..names).for_each(|number| append_info(&store, &format!("root.n{number}"), "the only line"));
        assert_eq!(read_texts(&store, name_query("root.etcd").min_level(Level::Error)), texts);
        assert_eq!(
            read_texts(&store, name_query(&format!("root.n{}", names - 1)).last_entries(1)),
            ["the only line"]
        );
    }
}

/// Names with warnings, and names with several lines, don't take the place of all others.
#[test]
fn a_name_keeps_its_only_line_for_a_while_beside_names_that_lose_more() {
    let store = LogStore::new(LogLimits { max_names: 1000, ..LogLimits::default() });
    for number in 0..5000 {
        append_message(&store, &format!("warning.{number}"), Level::Warn, "a warning");
        (0..2).for_each(|_| append_info(&store, &format!("lines.{number}"), "a line"));
    }
    (0..100).for_each(|number| append_info(&store, &format!("n{number}"), "the only line"));
    let kept = |query: LogQuery| {
        let entries = read_backlog(&store, query);
        entries.iter().filter(|entry| !matches!(entry.body, EntryBody::Dropped(_))).count()
    };
    (0..100).for_each(|number| assert_eq!(kept(name_query(&format!("n{number}"))), 1));
    let (warnings, lines) = (kept(subtree_query("warning")), kept(subtree_query("lines")));
    assert!(warnings > 500 && lines > 200, "{warnings} {lines}");
}

#[test]
fn a_quiet_name_in_a_flood_of_names_is_not_lost_silently() {
    let store = LogStore::new(LogLimits { max_names: 1024, ..LogLimits::default() });
    for number in 0..5 {
        append_message(&store, "root.etcd", Level::Error, number.to_string());
    }
    let mut flood =
        (0..).map(|number| append_message(&store, &format!("root.flood-{number}"), Level::Error, "one line"));
    flood.by_ref().take(1100).for_each(drop);
    let errors = || name_query("root.etcd").min_level(Level::Error);
    assert_eq!(read_texts(&store, errors()), ["-5"]);
    flood.take(10_000).for_each(drop);
    assert_eq!(read_texts(&store, errors()), ["-5"]);
    // A name that lost nothing.
    assert_eq!(read_texts(&store, name_query("root.flood-11099")), ["one line"]);
    assert_eq!(read_texts(&store, name_query("root.unknown")), [""; 0]);
}

/// Other names take as many sequence numbers.
#[test]
fn a_reader_that_resumes_learns_how_many_entries_forgotten_names_had_since() {
    let store = LogStore::new(LogLimits { max_names: 100, ..LogLimits::default() });
    append_info(&store, "a", "inherits");
    let append = |number: usize| {
        append_info(&store, &format!("a.{number}"), "the only line");
        (0..5).for_each(|_| append_info(&store, "other", "x"));
    };
    (0..5000).for_each(append);
    let mut reader = store.open_reader(subtree_query("a").last_entries(1)).unwrap();
    reader.read_backlog();
    (5000..9000).for_each(append);
    let found = read_backlog(&store, subtree_query("a").after(reader.cursor()));
    let counts = found.iter().map(|entry| match entry.body {
        EntryBody::Dropped(dropped) => dropped.count,
        _ => 1,
    });
    let count: u64 = counts.sum();
    assert!((4000..=4125).contains(&count), "{count}");
}

#[test]
fn a_reader_that_has_read_a_cleared_or_forgotten_name_has_missed_nothing() {
    let store = LogStore::new(LogLimits { max_names: 2, ..LogLimits::default() });
    let mut follower = store.open_reader(subtree_query("").follow()).unwrap();
    for number in 0..12 {
        append_info(&store, &format!("n{number}"), number.to_string());
        assert_eq!(entry_text(&follower.try_next().unwrap()), number.to_string());
    }
    append_info(&store, "", "root");
    assert_eq!(entry_text(&follower.try_next().unwrap()), "root");
    assert_eq!(follower.try_next(), None);
    let found = read_texts(&store, subtree_query(""));
    assert_eq!(found.concat(), ["-3", &"-1".repeat(8), "11", "root"].concat());
}

#[test]
fn out_of_range_limits_are_clamped() {
    let none = LogLimits {
        bytes_per_dn: 0,
        entries_per_dn: Some(0),
        total_bytes: 0,
        max_names: 0,
        line_bytes: 0,
        message_bytes: 0,
    };
    let all = LogLimits {
        bytes_per_dn: usize::MAX,
        entries_per_dn: Some(usize::MAX),
        total_bytes: usize::MAX,
        max_names: usize::MAX,
        line_bytes: usize::MAX,
        message_bytes: usize::MAX,
    };
    for limits in [none, all] {
        let store = LogStore::new(limits);
        for name in ["a", "b", "c"] {
            append_message(&store, name, Level::Info, "x".repeat(10_000));
            store
                .line_writer(&dn(name), WriterOptions::new("s".repeat(1000)))
                .write_all(&[b'x'; 10_000])
                .unwrap();
            assert_eq!(read_backlog(&store, name_query(name).last_entries(1)).len(), 1);
        }
    }
}

/// 20,000 names and 2,000 writers with a partial line each, in 4 MiB.
#[test]
fn memory_is_bounded_whatever_the_number_of_names_and_writers() {
    let store = LogStore::new(LogLimits { total_bytes: 4 << 20, ..LogLimits::default() });
    let mut writers = Vec::new();
    for number in 0..20_000 {
        append_info(&store, &format!("n.{number}"), "the only line");
        if number % 10 == 0 {
            let mut writer = store.line_writer(&dn(&format!("w.{number}")), WriterOptions::new("stdout"));
            writer.write_all(&[b'x'; 1000]).unwrap();
            writers.push(writer);
        }
    }
    let stats = store.dn_stats();
    let entries: usize = stats.iter().map(|name| name.bytes).sum();
    assert!(
        entries + stats.len() * 512 + writers.len() * 512 <= 4 << 20,
        "{entries} in {} names",
        stats.len()
    );
    assert_eq!(totals(&store).0, 20_000);
    drop(writers);
    assert_eq!(totals(&store).0, 22_000);
}

/// Names share the memory, so a name loses its entries only when it has been idle for longest.
#[test]
fn a_thousand_names_keep_their_entries_while_memory_is_left() {
    let store = LogStore::default();
    for number in 0..5_000 {
        append_info(&store, &format!("n.{number}"), "kept");
    }
    assert_eq!(totals(&store), (5_000, 5_000, 0));
}

#[test]
fn a_reader_that_resumes_finds_what_was_not_reported_to_the_one_before() {
    let store = LogStore::new(LogLimits { entries_per_dn: Some(2), ..LogLimits::default() });
    for (number, name) in ["a", "b", "b", "a", "b", "b", "b"].iter().enumerate() {
        append_info(&store, name, (number + 1).to_string());
    }
    let mut reader = store.open_reader(subtree_query("")).unwrap();
    // Of b, 2, 3 and 5 were dropped, which stands at the place of 5.
    assert_eq!(entry_texts(&reader.read_backlog_chunk(1)), ["1"]);
    assert_eq!(entry_texts(&reader.read_backlog_chunk(1)), ["4"]);
    let cursor = reader.cursor();
    assert_eq!(cursor.missed, 2);
    let rest = read_backlog(&store, subtree_query("").after(cursor));
    assert_eq!(entry_texts(&rest), ["-2?", "-1?", "6", "7"]);
    assert_eq!(entry_texts(&reader.read_backlog()), ["-3", "6", "7"]);
    assert_eq!(reader.cursor().missed, 0);
}

#[test]
fn a_cursor_with_any_number_of_missed_entries_is_read() {
    let store = LogStore::new(LogLimits { max_names: 2, ..LogLimits::default() });
    // More names than the store remembers.
    (0..20).for_each(|number| append_info(&store, &format!("n.{number}"), "x"));
    let cursor = format!("{}+{}", store.cursor_at(1), u64::MAX).parse().unwrap();
    let entries = read_backlog(&store, subtree_query("").after(cursor));
    let dropped = |entry: &LogEntry| match entry.body {
        EntryBody::Dropped(dropped) => Some(dropped.count),
        _ => None,
    };
    assert_eq!(entries.iter().filter_map(dropped).max(), Some(u64::MAX));
}
