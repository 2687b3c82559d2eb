//! Output of programs, line by line.

use std::io::Write;

use nodekeel_logtree::{Body, Journal, Limits, LineWriter, Query, Raw, WriterOptions};

use crate::support::*;

fn writer(journal: &Journal, generation: u64) -> LineWriter {
    journal.writer(&dn("x"), WriterOptions::new("stdout").generation(generation))
}

fn raws(journal: &Journal) -> Vec<Raw> {
    let raw = |entry: nodekeel_logtree::Entry| match entry.body {
        Body::Raw(raw) => Some(raw),
        _ => None,
    };
    read(journal, Query::new(dn("x"))).into_iter().filter_map(raw).collect()
}

fn lines(journal: &Journal) -> Vec<String> {
    raws(journal).into_iter().map(|raw| raw.text).collect()
}

/// Case 19; to write or close again after closing does not compile.
#[test]
fn writes_are_joined_to_lines_and_closing_ends_the_last() {
    let journal = Journal::default();
    let mut writer = writer(&journal, 1);
    for piece in ["foo ", "bar\n", "baz", " baz"] {
        assert_eq!(writer.write(piece.as_bytes()).unwrap(), piece.len());
    }
    writer.flush().unwrap();
    assert_eq!(lines(&journal), ["foo bar"]);
    writer.close();
    assert_eq!(lines(&journal), ["foo bar", "baz baz"]);
}

/// Case 20: one line, partial writes, overwriting, asking for more than there is, a newline first.
#[test]
fn the_last_lines_of_a_small_ring_are_kept() {
    let small = |entries| Journal::new(Limits { entries_per_dn: Some(entries), ..Limits::default() });
    let last = |journal: &Journal, n| texts(&read(journal, Query::new(dn("x")).last(n)));

    let journal = small(3);
    assert_eq!(last(&journal, 1), Vec::<String>::new());
    let mut out = writer(&journal, 1);
    out.write_all(b"Te").unwrap();
    out.write_all(b"st1\n").unwrap();
    assert_eq!(last(&journal, 1), ["Test1"]);
    out.write_all(b"Test2\nTest3\nTest4\n").unwrap();
    assert_eq!(last(&journal, 3), ["Test2", "Test3", "Test4"]);

    let journal = small(1);
    let mut out = writer(&journal, 1);
    out.write_all(b"Test1").unwrap();
    out.write_all(b"\nTest2\n").unwrap();
    assert_eq!(lines(&journal), ["Test2"]);
    assert_eq!(last(&journal, 2), ["-1", "Test2"]);
}

/// Case 20, its limit.
#[test]
fn a_long_line_is_cut_and_says_how_long_it_was() {
    let journal = Journal::new(Limits { line_bytes: 6, ..Limits::default() });
    writer(&journal, 1).write_all(b"Just Testing\nShort\nJusttt\r\n").unwrap();
    let found: Vec<_> = raws(&journal).into_iter().map(|raw| (raw.text, raw.original_bytes)).collect();
    let expected = [("Just T", Some(12)), ("Short", None), ("Justtt", None)];
    assert_eq!(found, expected.map(|(text, bytes)| (text.to_owned(), bytes)));
    let entries = read(&journal, Query::new(dn("x")));
    assert!(nodekeel_logtree::render::full(&entries[0]).ends_with(" R Just T..."));
    assert!(nodekeel_logtree::render::full(&entries[1]).ends_with(" R Short"));
}

#[test]
fn a_cut_does_not_split_a_character() {
    let journal = Journal::new(Limits { line_bytes: 4, ..Limits::default() });
    writer(&journal, 1).write_all("abcü\n".as_bytes()).unwrap();
    let found = raws(&journal);
    assert_eq!((found[0].text.as_str(), found[0].original_bytes, found[0].lossy), ("abc", Some(5), false));
}

#[test]
fn two_generations_do_not_mix_their_lines() {
    let journal = Journal::default();
    let mut dying = writer(&journal, 1);
    dying.write_all(b"half a li").unwrap();
    let mut next = writer(&journal, 2);
    next.write_all(b"whole line\n").unwrap();
    drop(dying);
    let found: Vec<_> = raws(&journal).into_iter().map(|raw| (raw.origin.generation, raw.text)).collect();
    assert_eq!(found, [(2, "whole line".to_owned()), (1, "half a li".to_owned())]);
}

#[test]
fn carriage_returns_and_nothing_but_newlines() {
    let journal = Journal::default();
    let mut out = writer(&journal, 1);
    for piece in ["a\r\n", "\n", "b\r", "\n", "\r\r\n", "c\rd\n", "tail\r"] {
        out.write_all(piece.as_bytes()).unwrap();
    }
    drop(out);
    assert_eq!(lines(&journal), ["a", "", "b", "\r", "c\rd", "tail\r"]);
}

#[test]
fn an_endless_line_takes_no_memory() {
    let journal = Journal::default();
    let mut out = writer(&journal, 1);
    let chunk = [b'x'; 1 << 16];
    for _ in 0..1024 {
        out.write_all(&chunk).unwrap();
    }
    out.write_all(b"\n").unwrap();
    assert_eq!(raws(&journal)[0].original_bytes, Some(64 << 20));
    assert!(journal.stats()[1].bytes < 2048);
}
