//! Reading stored entries.

use std::collections::HashSet;
use std::io::Write;

use nodekeel_logtree::{
    BacklogLimit, EntryBody, KindFilter, Level, LogLimits, LogMessage, LogQuery, LogStore, QueryError,
    TextPattern, WriterOptions,
};

use crate::support::*;

fn store_with_max_entries(entries: usize) -> LogStore {
    LogStore::new(LogLimits { entries_per_dn: Some(entries), bytes_per_dn: 16 << 20, ..LogLimits::default() })
}

/// Case 1.
#[test]
fn the_newest_entries_of_a_name_are_kept_in_order_and_the_others_counted() {
    let store = store_with_max_entries(8192);
    for number in 0..9000 {
        append_info(&store, "main", format!("#{number}"));
    }
    let found = read_texts(&store, name_query("main"));
    let expected: Vec<_> =
        ["-808".to_owned()].into_iter().chain((808..9000).map(|n| format!("#{n}"))).collect();
    assert_eq!(found, expected);
}

/// Case 2.
#[test]
fn a_chatty_name_does_not_evict_a_quiet_one() {
    let store = store_with_max_entries(8192);
    for number in 0..9000 {
        append_info(&store, "chatty", format!("chatty {number}"));
        if number % 10 == 0 {
            append_info(&store, "solemn", format!("solemn {number}"));
        }
    }
    let count = |query| {
        read_backlog(&store, query).iter().filter(|e| !matches!(e.body, EntryBody::Dropped(_))).count()
    };
    assert_eq!(count(name_query("chatty")), 8192);
    assert_eq!(count(name_query("solemn")), 900);
    assert_eq!(count(name_query("absent")), 0);
    let all = read_texts(&store, subtree_query(""));
    assert_eq!(all.len(), 9092 + 1);
    let all = HashSet::<String>::from_iter(all);
    for number in 0..9000 {
        assert_eq!(all.contains(&format!("chatty {number}")), number >= 808, "{number}");
        assert_eq!(all.contains(&format!("solemn {number}")), number % 10 == 0, "{number}");
    }
}

/// Case 3.
#[test]
fn a_subtree_query_returns_a_name_and_its_descendants() {
    let store = LogStore::default();
    for name in ["a", "a.b", "a.b.c", "a.b.d", "e.f", "e.g", "a.bc"] {
        append_info(&store, name, name);
    }
    let found = |name| read_texts(&store, subtree_query(name));
    assert_eq!(found(""), ["a", "a.b", "a.b.c", "a.b.d", "e.f", "e.g", "a.bc"]);
    assert_eq!(found("a"), ["a", "a.b", "a.b.c", "a.b.d", "a.bc"]);
    assert_eq!(found("a.b"), ["a.b", "a.b.c", "a.b.d"]);
    assert_eq!(found("e"), ["e.f", "e.g"]);
}

/// Case 5; the line without its end is stored once its writer is closed, which the original never did.
#[test]
fn leveled_and_raw_entries_are_read_together_and_an_unterminated_line_comes_last() {
    let store = LogStore::default();
    for name in ["main", "main.foo", "main.bar", "aux"] {
        append_info(&store, name, name);
    }
    let mut writer = store.line_writer(&dn("aux.process"), WriterOptions::new("stdout"));
    writer.write_all(b"processing foo\nprocessing bar\nbaz").unwrap();
    let count = |name| read_backlog(&store, subtree_query(name)).len();
    assert_eq!((count("main"), count(""), count("aux")), (3, 6, 3));
    writer.close();
    assert_eq!(read_texts(&store, subtree_query("aux")), ["aux", "processing foo", "processing bar", "baz"]);
}

/// Case 9.
#[test]
fn a_minimum_level_hides_lower_levels() {
    let store = LogStore::default();
    for (level, text) in [(Level::Error, "e"), (Level::Warn, "w"), (Level::Info, "i"), (Level::Debug, "d")] {
        append_message(&store, "main", level, text);
    }
    let found = read_backlog(&store, name_query("main").min_level(Level::Warn));
    assert_eq!(entry_texts(&found), ["e", "w"]);
}

/// Case 10.
#[test]
fn the_last_n_entries_are_the_newest_over_all_names_oldest_first() {
    let store = LogStore::default();
    let names = ["main", "main.foo", "main.bar", "main.bar.quiet", "main.bar.loud"];
    let mut written = Vec::new();
    for number in 0..14 {
        let name = match number {
            3 | 7 => "main.bar.quiet",
            5 => "main.foo",
            n => ["main", "main.bar", "main.bar.loud"][n % 3],
        };
        assert!(names.contains(&name));
        append_info(&store, name, number.to_string());
        written.push(number.to_string());
    }
    assert_eq!(read_texts(&store, subtree_query("main").last_entries(3)), written[11..]);
    assert_eq!(read_texts(&store, name_query("main.foo").last_entries(3)), ["5"]);
    assert_eq!(read_texts(&store, subtree_query("main.bar.quiet").last_entries(2)), ["3", "7"]);
    assert_eq!(read_texts(&store, subtree_query("main").last_entries(14)), written);
    assert_eq!(read_texts(&store, subtree_query("main").last_entries(usize::MAX)), written);
    assert_eq!(read_backlog(&store, subtree_query("main").last_entries(0)), []);
    assert_eq!(read_backlog(&store, subtree_query("main").backlog_limit(BacklogLimit::None)), []);
}

/// Case 18, the part of the log store: the results of its filters.
#[test]
fn filters_by_kind_and_level_are_independent() {
    let store = LogStore::default();
    for level in [Level::Info, Level::Warn, Level::Error, Level::Fatal] {
        append_message(&store, "main", level, level.to_string());
    }
    let mut raw = store.line_writer(&dn("main"), WriterOptions::new("stdout"));
    raw.write_all(b"raw\n").unwrap();
    let query = || name_query("main");
    let found = |query| read_texts(&store, query);
    assert_eq!(found(query().min_level(Level::Warn)), ["warn", "error", "fatal"]);
    assert_eq!(
        found(query().min_level(Level::Warn).raw_passes_min_level()),
        ["warn", "error", "fatal", "raw"]
    );
    assert_eq!(found(query().kind_filter(KindFilter::Raw)), ["raw"]);
    assert_eq!(found(query().kind_filter(KindFilter::Leveled)), ["info", "warn", "error", "fatal"]);
    assert_eq!(found(query().last_entries(1)), ["raw"]);
    assert_eq!(found(query().kind_filter(KindFilter::Leveled).last_entries(1)), ["fatal"]);
    let error = store.open_reader(query().kind_filter(KindFilter::Raw).min_level(Level::Warn)).unwrap_err();
    assert_eq!(error, QueryError::MinLevelOnRaw);
}

/// Case 18, its invalid UTF-8: safe from the start, for backlog and stream alike.
#[test]
fn invalid_utf8_is_replaced_once_and_marked() {
    let store = LogStore::default();
    let mut follower = store.open_reader(name_query("main").follow()).unwrap();
    let mut raw = store.line_writer(&dn("main"), WriterOptions::new("stdout"));
    raw.write_all(b"a\xff\xfez\n").unwrap();
    let live = follower.try_next().unwrap();
    assert_eq!(read_backlog(&store, name_query("main")), std::slice::from_ref(&live));
    let EntryBody::Raw(raw) = live.body else { panic!() };
    assert_eq!((raw.text.as_str(), raw.lossy, raw.original_bytes), ("a\u{fffd}\u{fffd}z", true, None));
}

#[test]
fn dropped_entries_are_reported_only_where_the_reader_would_have_reached_them() {
    let store = store_with_max_entries(3);
    append_info(&store, "quiet", "q1");
    for number in 0..10 {
        append_info(&store, "loud", number.to_string());
    }
    append_info(&store, "quiet", "q2");
    assert_eq!(read_texts(&store, subtree_query("")), ["q1", "-7", "7", "8", "9", "q2"]);
    assert_eq!(read_texts(&store, subtree_query("").last_entries(4)), ["7", "8", "9", "q2"]);
    assert_eq!(read_texts(&store, subtree_query("").last_entries(5)), ["q1", "-7", "7", "8", "9", "q2"]);
    assert_eq!(read_texts(&store, subtree_query("").min_level(Level::Warn)), Vec::<String>::new());
}

#[test]
fn a_reader_resumes_where_an_earlier_one_stopped() {
    let store = store_with_max_entries(4);
    for number in 0..3 {
        append_info(&store, "a", number.to_string());
        append_info(&store, "b", number.to_string());
    }
    let mut reader = store.open_reader(subtree_query("").last_entries(3)).unwrap();
    assert_eq!(entry_texts(&reader.read_backlog()), ["1", "2", "2"]);
    let position = reader.cursor();
    assert_eq!(read_backlog(&store, subtree_query("").after(position)), []);
    append_info(&store, "a", "3");
    assert_eq!(read_texts(&store, subtree_query("").after(position)), ["3"]);
    for number in 4..9 {
        append_info(&store, "a", number.to_string());
    }
    // Two of the six new entries of `a` were dropped; the sequence numbers show that it can't be more than
    // two.
    assert_eq!(read_texts(&store, subtree_query("").after(position)), ["-2?", "5", "6", "7", "8"]);
    assert_eq!(read_texts(&store, subtree_query("").after(position).last_entries(2)), ["7", "8"]);
    assert_eq!(read_texts(&store, name_query("a").after(store.cursor_at(0))), ["-5", "5", "6", "7", "8"]);
}

#[test]
fn a_large_backlog_is_read_in_chunks_and_ends_where_the_reader_was_opened() {
    let store = LogStore::default();
    for number in 0..5000 {
        append_info(&store, ["a", "b", "c"][number % 3], number.to_string());
    }
    let mut reader = store.open_reader(subtree_query("").follow()).unwrap();
    append_info(&store, "a", "live");
    let mut all = Vec::new();
    loop {
        let chunk = reader.read_backlog_chunk(700);
        if chunk.is_empty() {
            break;
        }
        assert!(chunk.len() <= 700);
        all.extend(entry_texts(&chunk));
    }
    assert_eq!(all, (0..5000).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(entry_text(&reader.try_next().unwrap()), "live");
    assert_eq!(reader.try_next(), None);
}

#[test]
fn a_cursor_of_the_future_or_of_another_life_is_an_error() {
    let store = LogStore::default();
    for number in 0..10 {
        append_info(&store, "a", number.to_string());
    }
    let open = |store: &LogStore, cursor| store.open_reader(subtree_query("").after(cursor)).map(drop);
    assert_eq!(
        open(&store, store.cursor_at(1_000_000)),
        Err(QueryError::FutureCursor { seq: 1_000_000, newest: 10 })
    );
    assert_eq!(open(&store, store.cursor_at(10)), Ok(()));
    let next_life = LogStore::default();
    append_info(&next_life, "a", "0");
    assert_eq!(open(&next_life, store.cursor_at(1)), Err(QueryError::ForeignCursor));
    assert_eq!(open(&next_life.clone(), next_life.cursor_at(0)), Ok(()));
}

#[test]
fn entries_are_found_by_time_text_and_field_in_backlog_and_stream() {
    let store = store_with_max_entries(8);
    let message = |level, text: &str, member: i64| {
        LogMessage::new(level, text).with_field("member", member).with_field("peer", "etcd-1")
    };
    let query = || name_query("main").follow();
    let pattern = |text| TextPattern::new(text).unwrap();
    let mut follower =
        store.open_reader(query().matching(pattern("refused$")).with_field("member", "7")).unwrap();
    for (text, member) in [("conn refused", 7), ("conn refused", 8), ("refused, too", 7), ("all refused", 7)]
    {
        store.append_message(&dn("main"), message(Level::Warn, text, member));
    }
    store.line_writer(&dn("main"), WriterOptions::new("stdout")).write_all(b"raw refused\n").unwrap();
    let live: Vec<_> = std::iter::from_fn(|| follower.try_next()).collect();
    assert_eq!(entry_texts(&live), ["conn refused", "all refused"]);
    let found = |query: LogQuery| read_texts(&store, query);
    assert_eq!(found(query().matching(pattern("^raw|member=8"))), ["conn refused", "raw refused"]);
    assert_eq!(found(query().with_field("peer", "etcd-1").with_field("member", "8")), ["conn refused"]);
    assert_eq!(found(query().with_field("peer", "etcd")), [""; 0]);
    // The newest of those that match, also where others are newer.
    assert_eq!(found(query().matching(pattern("conn")).last_entries(1)), ["conn refused"]);
    let all = read_backlog(&store, query());
    assert_eq!(found(query().since(all[3].time)), ["all refused", "raw refused"]);
    let future = all[4].time + std::time::Duration::from_secs(3600);
    assert_eq!(found(query().since(future)), [""; 0]);
    // What was dropped may have matched.
    (0..6).for_each(|_| append_info(&store, "main", "other"));
    assert_eq!(found(query().matching(pattern("raw"))), ["-3?", "raw refused"]);
    let error = TextPattern::new("a(b").unwrap_err();
    assert_eq!(error.to_string(), "can't search for \"a(b\": unclosed group");
}

/// Other names take as many sequence numbers, and what was read before the cursor is no loss.
#[test]
fn the_loss_that_a_resume_reports_is_at_most_a_few_percent_more_than_it_is() {
    for (before, since) in [(1000, 8000), (100_000, 3000), (3000, 100_000), (50_000, 50_000)] {
        let store = LogStore::new(LogLimits { bytes_per_dn: 64 << 10, ..LogLimits::default() });
        let mut append_both = |number: i32| {
            append_info(&store, "mine", number.to_string());
            append_info(&store, "other", number.to_string());
        };
        (0..before).for_each(&mut append_both);
        let mut reader = store.open_reader(subtree_query("mine").last_entries(1)).unwrap();
        reader.read_backlog();
        (0..since).for_each(&mut append_both);
        let found = read_backlog(&store, subtree_query("mine").after(reader.cursor()));
        let EntryBody::Dropped(reported) = found[0].body else { panic!("{:?}", found[0]) };
        let lost = since as u64 - (found.len() as u64 - 1);
        assert!(reported.count >= lost && reported.count <= lost + lost / 32 + 16, "{reported:?} for {lost}");
    }
}
