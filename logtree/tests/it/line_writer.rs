//! Output of programs, line by line.

use std::io::Write;

use nodekeel_logtree::{EntryBody, LineWriter, LogLimits, LogStore, RawLine, WriterOptions};

use crate::support::*;

fn open_writer(store: &LogStore, generation: u64) -> LineWriter {
    store.line_writer(&dn("x"), WriterOptions::new("stdout").generation(generation))
}

fn raw_lines(store: &LogStore) -> Vec<RawLine> {
    let raw = |entry: nodekeel_logtree::LogEntry| match entry.body {
        EntryBody::Raw(raw) => Some(raw),
        _ => None,
    };
    read_backlog(store, name_query("x")).into_iter().filter_map(raw).collect()
}

fn line_texts(store: &LogStore) -> Vec<String> {
    raw_lines(store).into_iter().map(|raw| raw.text).collect()
}

/// Case 19; writing or closing after closing does not compile.
#[test]
fn writes_are_joined_to_lines_and_closing_completes_the_last() {
    let store = LogStore::default();
    let mut writer = open_writer(&store, 1);
    for piece in ["foo ", "bar\n", "baz", " baz"] {
        assert_eq!(writer.write(piece.as_bytes()).unwrap(), piece.len());
    }
    writer.flush().unwrap();
    assert_eq!(line_texts(&store), ["foo bar"]);
    writer.close();
    assert_eq!(line_texts(&store), ["foo bar", "baz baz"]);
}

/// Case 20: one line, partial writes, overwriting, a query for more lines than stored, a leading newline.
#[test]
fn the_last_lines_of_a_small_ring_are_kept() {
    let small = |entries| LogStore::new(LogLimits { entries_per_dn: Some(entries), ..LogLimits::default() });
    let last = |store: &LogStore, n| entry_texts(&read_backlog(store, name_query("x").last_entries(n)));

    let store = small(3);
    assert_eq!(last(&store, 1), Vec::<String>::new());
    let mut out = open_writer(&store, 1);
    out.write_all(b"Te").unwrap();
    out.write_all(b"st1\n").unwrap();
    assert_eq!(last(&store, 1), ["Test1"]);
    out.write_all(b"Test2\nTest3\nTest4\n").unwrap();
    assert_eq!(last(&store, 3), ["Test2", "Test3", "Test4"]);

    let store = small(1);
    let mut out = open_writer(&store, 1);
    out.write_all(b"Test1").unwrap();
    out.write_all(b"\nTest2\n").unwrap();
    assert_eq!(line_texts(&store), ["Test2"]);
    assert_eq!(last(&store, 2), ["-1", "Test2"]);
}

/// Case 20, its limit.
#[test]
fn a_long_line_is_cut_and_keeps_its_original_length() {
    let store = LogStore::new(LogLimits { line_bytes: 6, ..LogLimits::default() });
    open_writer(&store, 1).write_all(b"Just Testing\nShort\nJusttt\r\n").unwrap();
    let found: Vec<_> = raw_lines(&store).into_iter().map(|raw| (raw.text, raw.original_bytes)).collect();
    let expected = [("Just T", Some(12)), ("Short", None), ("Justtt", None)];
    assert_eq!(found, expected.map(|(text, bytes)| (text.to_owned(), bytes)));
    let entries = read_backlog(&store, name_query("x"));
    assert!(nodekeel_logtree::render::full_text(&entries[0]).ends_with(" R Just T..."));
    assert!(nodekeel_logtree::render::full_text(&entries[1]).ends_with(" R Short"));
}

#[test]
fn a_cut_does_not_split_a_character() {
    let store = LogStore::new(LogLimits { line_bytes: 4, ..LogLimits::default() });
    open_writer(&store, 1).write_all("abcü\n".as_bytes()).unwrap();
    let found = raw_lines(&store);
    assert_eq!((found[0].text.as_str(), found[0].original_bytes, found[0].lossy), ("abc", Some(5), false));
}

#[test]
fn two_generations_do_not_mix_their_lines() {
    let store = LogStore::default();
    let mut dying = open_writer(&store, 1);
    dying.write_all(b"half a li").unwrap();
    let mut next = open_writer(&store, 2);
    next.write_all(b"whole line\n").unwrap();
    drop(dying);
    let found: Vec<_> = raw_lines(&store).into_iter().map(|raw| (raw.origin.generation, raw.text)).collect();
    assert_eq!(found, [(2, "whole line".to_owned()), (1, "half a li".to_owned())]);
}

#[test]
fn a_carriage_return_before_a_newline_is_stripped() {
    let store = LogStore::default();
    let mut out = open_writer(&store, 1);
    for piece in ["a\r\n", "\n", "b\r", "\n", "\r\r\n", "c\rd\n", "tail\r"] {
        out.write_all(piece.as_bytes()).unwrap();
    }
    drop(out);
    assert_eq!(line_texts(&store), ["a", "", "b", "\r", "c\rd", "tail\r"]);
}

#[test]
fn an_endless_line_needs_constant_memory() {
    let store = LogStore::default();
    let mut out = open_writer(&store, 1);
    let chunk = [b'x'; 1 << 16];
    for _ in 0..1024 {
        out.write_all(&chunk).unwrap();
    }
    out.write_all(b"\n").unwrap();
    assert_eq!(raw_lines(&store)[0].original_bytes, Some(64 << 20));
    assert!(store.dn_stats()[1].bytes < 2048);
}

/// 2,000 writers with half a line of 15 KB each.
#[test]
fn the_partial_lines_of_many_writers_stay_within_a_quarter_of_the_budget() {
    let limits = LogLimits {
        total_bytes: 4 << 20,
        bytes_per_dn: 4 << 20,
        line_bytes: 16 << 10,
        ..LogLimits::default()
    };
    let store = LogStore::new(limits);
    let mut writers: Vec<_> = (0..2000).map(|start| open_writer(&store, start)).collect();
    for piece in 0..15 {
        writers.iter_mut().for_each(|writer| writer.write_all(&[b'a' + piece; 1000]).unwrap());
    }
    drop(writers);
    let lines = raw_lines(&store);
    assert_eq!(lines.len(), 2000);
    let kept: usize = lines.iter().map(|line| line.text.len()).sum();
    assert!(kept > 1 << 20 && kept <= (1 << 20) + 2000 * 256, "{kept}");
    for line in &lines {
        let is_whole = line.text.len() == 15_000;
        assert_eq!(line.original_bytes, (!is_whole).then_some(15_000), "a cut line is marked");
        assert!(
            line.text
                .bytes()
                .zip((0..15).flat_map(|piece| [b'a' + piece; 1000]))
                .all(|(one, other)| one == other)
        );
    }
    // The next writers have all of it again.
    let mut writer = open_writer(&store, 1);
    writer.write_all(&[b'x'; 15_000]).unwrap();
    writer.close();
    assert_eq!(raw_lines(&store).last().unwrap().original_bytes, None);
}
