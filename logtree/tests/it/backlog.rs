//! Reading what is stored.

use std::collections::HashSet;
use std::io::Write;

use nodekeel_logtree::{Backlog, Body, Journal, Kind, Level, Limits, Query, QueryError, WriterOptions};

use crate::support::*;

fn capped(entries: usize) -> Journal {
    Journal::new(Limits { entries_per_dn: Some(entries), bytes_per_dn: 16 << 20, ..Limits::default() })
}

/// Case 1.
#[test]
fn the_newest_entries_of_a_name_are_kept_in_order_and_the_others_counted() {
    let journal = capped(8192);
    for number in 0..9000 {
        info(&journal, "main", format!("#{number}"));
    }
    let found = texts(&read(&journal, Query::new(dn("main"))));
    let expected: Vec<_> =
        ["-808".to_owned()].into_iter().chain((808..9000).map(|n| format!("#{n}"))).collect();
    assert_eq!(found, expected);
}

/// Case 2.
#[test]
fn a_chatty_name_does_not_push_out_a_quiet_one() {
    let journal = capped(8192);
    for number in 0..9000 {
        info(&journal, "chatty", format!("chatty {number}"));
        if number % 10 == 0 {
            info(&journal, "solemn", format!("solemn {number}"));
        }
    }
    let count = |query| read(&journal, query).iter().filter(|e| !matches!(e.body, Body::Dropped(_))).count();
    assert_eq!(count(Query::new(dn("chatty"))), 8192);
    assert_eq!(count(Query::new(dn("solemn"))), 900);
    assert_eq!(count(Query::new(dn("absent"))), 0);
    let all = texts(&read(&journal, within("")));
    assert_eq!(all.len(), 9092 + 1);
    let all = HashSet::<String>::from_iter(all);
    for number in 0..9000 {
        assert_eq!(all.contains(&format!("chatty {number}")), number >= 808, "{number}");
        assert_eq!(all.contains(&format!("solemn {number}")), number % 10 == 0, "{number}");
    }
}

/// Case 3.
#[test]
fn a_subtree_is_a_name_and_what_is_below_it() {
    let journal = Journal::default();
    for name in ["a", "a.b", "a.b.c", "a.b.d", "e.f", "e.g", "a.bc"] {
        info(&journal, name, name);
    }
    let found = |name| texts(&read(&journal, within(name)));
    assert_eq!(found(""), ["a", "a.b", "a.b.c", "a.b.d", "e.f", "e.g", "a.bc"]);
    assert_eq!(found("a"), ["a", "a.b", "a.b.c", "a.b.d", "a.bc"]);
    assert_eq!(found("a.b"), ["a.b", "a.b.c", "a.b.d"]);
    assert_eq!(found("e"), ["e.f", "e.g"]);
}

/// Case 5; the line without its end is stored once its writer is gone, which the original never did.
#[test]
fn leveled_and_raw_entries_are_read_together_and_a_line_without_end_comes_last() {
    let journal = Journal::default();
    for name in ["main", "main.foo", "main.bar", "aux"] {
        info(&journal, name, name);
    }
    let mut writer = journal.writer(&dn("aux.process"), WriterOptions::new("stdout"));
    writer.write_all(b"processing foo\nprocessing bar\nbaz").unwrap();
    let count = |name| read(&journal, within(name)).len();
    assert_eq!((count("main"), count(""), count("aux")), (3, 6, 3));
    writer.close();
    assert_eq!(texts(&read(&journal, within("aux"))), ["aux", "processing foo", "processing bar", "baz"]);
}

/// Case 9.
#[test]
fn a_least_level_leaves_out_what_is_below_it() {
    let journal = Journal::default();
    for (level, text) in [(Level::Error, "e"), (Level::Warn, "w"), (Level::Info, "i"), (Level::Debug, "d")] {
        log(&journal, "main", level, text);
    }
    let found = read(&journal, Query::new(dn("main")).min_level(Level::Warn));
    assert_eq!(texts(&found), ["e", "w"]);
}

/// Case 10.
#[test]
fn the_last_n_are_the_newest_over_all_names_oldest_first() {
    let journal = Journal::default();
    let names = ["main", "main.foo", "main.bar", "main.bar.quiet", "main.bar.loud"];
    let mut written = Vec::new();
    for number in 0..14 {
        let name = match number {
            3 | 7 => "main.bar.quiet",
            5 => "main.foo",
            n => ["main", "main.bar", "main.bar.loud"][n % 3],
        };
        assert!(names.contains(&name));
        info(&journal, name, number.to_string());
        written.push(number.to_string());
    }
    assert_eq!(texts(&read(&journal, within("main").last(3))), written[11..]);
    assert_eq!(texts(&read(&journal, Query::new(dn("main.foo")).last(3))), ["5"]);
    assert_eq!(texts(&read(&journal, within("main.bar.quiet").last(2))), ["3", "7"]);
    assert_eq!(texts(&read(&journal, within("main").last(14))), written);
    assert_eq!(texts(&read(&journal, within("main").last(usize::MAX))), written);
    assert_eq!(read(&journal, within("main").last(0)), []);
    assert_eq!(read(&journal, within("main").backlog(Backlog::None)), []);
}

/// Case 18, as far as it is the journal's: what its filters find.
#[test]
fn filters_by_kind_and_level_are_independent() {
    let journal = Journal::default();
    for level in [Level::Info, Level::Warn, Level::Error, Level::Fatal] {
        log(&journal, "main", level, level.to_string());
    }
    let mut raw = journal.writer(&dn("main"), WriterOptions::new("stdout"));
    raw.write_all(b"raw\n").unwrap();
    let query = || Query::new(dn("main"));
    let found = |query| texts(&read(&journal, query));
    assert_eq!(found(query().min_level(Level::Warn)), ["warn", "error", "fatal"]);
    assert_eq!(found(query().min_level(Level::Warn).raw_passes_level()), ["warn", "error", "fatal", "raw"]);
    assert_eq!(found(query().kind(Kind::Raw)), ["raw"]);
    assert_eq!(found(query().kind(Kind::Leveled)), ["info", "warn", "error", "fatal"]);
    assert_eq!(found(query().last(1)), ["raw"]);
    assert_eq!(found(query().kind(Kind::Leveled).last(1)), ["fatal"]);
    let error = journal.read(query().kind(Kind::Raw).min_level(Level::Warn)).unwrap_err();
    assert_eq!(error, QueryError::LevelOnRaw);
}

/// Case 18, its invalid UTF-8: safe from the start, for backlog and stream alike.
#[test]
fn what_is_not_utf8_is_replaced_once_and_marked() {
    let journal = Journal::default();
    let mut follower = journal.read(Query::new(dn("main")).follow()).unwrap();
    let mut raw = journal.writer(&dn("main"), WriterOptions::new("stdout"));
    raw.write_all(b"a\xff\xfez\n").unwrap();
    let live = follower.try_next().unwrap();
    assert_eq!(read(&journal, Query::new(dn("main"))), std::slice::from_ref(&live));
    let Body::Raw(raw) = live.body else { panic!() };
    assert_eq!((raw.text.as_str(), raw.lossy, raw.original_bytes), ("a\u{fffd}\u{fffd}z", true, None));
}

#[test]
fn dropped_entries_are_reported_only_where_the_reader_would_have_come_to_them() {
    let journal = capped(3);
    info(&journal, "quiet", "q1");
    for number in 0..10 {
        info(&journal, "loud", number.to_string());
    }
    info(&journal, "quiet", "q2");
    assert_eq!(texts(&read(&journal, within(""))), ["q1", "-7", "7", "8", "9", "q2"]);
    assert_eq!(texts(&read(&journal, within("").last(4))), ["7", "8", "9", "q2"]);
    assert_eq!(texts(&read(&journal, within("").last(5))), ["q1", "-7", "7", "8", "9", "q2"]);
    assert_eq!(texts(&read(&journal, within("").min_level(Level::Warn))), Vec::<String>::new());
}

#[test]
fn a_reader_goes_on_where_an_earlier_one_stopped() {
    let journal = capped(4);
    for number in 0..3 {
        info(&journal, "a", number.to_string());
        info(&journal, "b", number.to_string());
    }
    let mut reader = journal.read(within("").last(3)).unwrap();
    assert_eq!(texts(&reader.backlog()), ["1", "2", "2"]);
    let position = reader.position();
    assert_eq!(read(&journal, within("").after(position)), []);
    info(&journal, "a", "3");
    assert_eq!(texts(&read(&journal, within("").after(position))), ["3"]);
    for number in 4..9 {
        info(&journal, "a", number.to_string());
    }
    // Of the six new ones of `a` two are gone, and no more than two can be: the numbers say so.
    assert_eq!(texts(&read(&journal, within("").after(position))), ["-2?", "5", "6", "7", "8"]);
    assert_eq!(texts(&read(&journal, within("").after(position).last(2))), ["7", "8"]);
    assert_eq!(texts(&read(&journal, Query::new(dn("a")).after(0))), ["-5", "5", "6", "7", "8"]);
}

#[test]
fn a_large_backlog_comes_in_pieces_and_ends_where_it_began_to_be_read() {
    let journal = Journal::default();
    for number in 0..5000 {
        info(&journal, ["a", "b", "c"][number % 3], number.to_string());
    }
    let mut reader = journal.read(within("").follow()).unwrap();
    info(&journal, "a", "live");
    let mut all = Vec::new();
    loop {
        let chunk = reader.backlog_chunk(700);
        if chunk.is_empty() {
            break;
        }
        assert!(chunk.len() <= 700);
        all.extend(texts(&chunk));
    }
    assert_eq!(all, (0..5000).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(text(&reader.try_next().unwrap()), "live");
    assert_eq!(reader.try_next(), None);
}
