//! Entries as text. The formats of the original are compared letter by letter, for tools that read them.

use std::time::{Duration, SystemTime};

use nodekeel_logtree::{Body, Dictionary, Dropped, Entry, Field, Level, Leveled, Origin, Raw, Value, render};

use crate::support::*;

fn entry(name: &str, body: Body) -> Entry {
    // 2026-11-21 11:26:08.703131999 UTC
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_795_260_368, 703_131_999);
    Entry { seq: 7, dn: dn(name), time, body }
}

fn message(level: Level, text: &str) -> Leveled {
    Leveled {
        level,
        file: "etcd/src/main.rs".to_owned(),
        line: 42,
        message: text.to_owned(),
        fields: Vec::new(),
        origin: None,
        original_bytes: None,
    }
}

fn leveled(name: &str, text: &str) -> Entry {
    entry(name, Body::Leveled(message(Level::Warn, text)))
}

fn raw(name: &str, text: &str, original_bytes: Option<u64>) -> Entry {
    let origin = Origin { stream: "stdout".to_owned(), generation: 3 };
    entry(name, Body::Raw(Raw { origin, text: text.to_owned(), original_bytes, lossy: false }))
}

fn field(name: &str, value: impl Into<Value>) -> Field {
    Field { name: name.to_owned(), value: value.into() }
}

/// The exact formats: prefix, 32 columns for the name, the whole prefix on each line, raw, truncated raw.
#[test]
fn full_lines_are_those_of_the_original() {
    let prefix = "node.etcd                        W1121 11:26:08.703131 main.rs:42] ";
    assert_eq!(render::full(&leveled("node.etcd", "hello")), format!("{prefix}hello"));
    assert_eq!(render::full(&leveled("node.etcd", "a\n\nb")), format!("{prefix}a\n{prefix}\n{prefix}b"));
    assert_eq!(render::full(&raw("node.etcd", "hello", None)), "node.etcd                        R hello");
    assert_eq!(render::full(&raw("node.etcd", "hel", Some(5))), "node.etcd                        R hel...");
    let long = "a.name.that.is.longer.than.thirty-two.columns";
    assert_eq!(render::full(&raw(long, "x", None)), format!("{long} R x"));
    let unknown = Leveled { file: String::new(), line: 0, ..message(Level::Info, "x") };
    assert!(render::full(&entry("a", Body::Leveled(unknown))).ends_with(" ???:1] x"));
}

#[test]
fn fields_follow_the_message_and_are_quoted_where_they_must_be() {
    let fields = vec![
        field("plain", "a"),
        field("spaced", "a b"),
        field("quoted", "\""),
        field("empty", ""),
        field("n", 1u64),
    ];
    let with = Leveled { fields, ..message(Level::Info, "m") };
    let text = render::full(&entry("a", Body::Leveled(with)));
    assert!(text.ends_with(r#"] m plain=a spaced="a b" quoted="\"" empty="" n=1"#), "{text}");
}

#[test]
fn what_drives_a_terminal_is_escaped() {
    let text = render::full(&raw("a", "red \u{1b}[31m\u{7}\t\u{202e}", None));
    assert!(text.ends_with(r"R red \u{1b}[31m\u{7}\t\u{202e}"), "{text}");
    let value = Leveled { fields: vec![field("k", "a\u{1b} b\nc")], ..message(Level::Info, "m") };
    let text = render::full(&entry("a", Body::Leveled(value)));
    assert!(text.ends_with(r#"m k="a\\u{1b} b\nc""#), "{text}");
}

#[test]
fn dropped_entries_say_how_many() {
    let dropped = |count, exact| render::full(&entry("a", Body::Dropped(Dropped { count, exact })));
    assert!(dropped(1, true).ends_with(" - 1 entry dropped here"));
    assert!(dropped(3, true).ends_with(" - 3 entries dropped here"));
    assert!(dropped(3, false).ends_with(" - at most 3 entries dropped here"));
}

fn compact(entry: &Entry, width: impl Into<Option<usize>>) -> String {
    render::compact(entry, &Dictionary::default(), width.into())
}

/// Case 13: columns for the name by the width, continuation lines, wrapping.
#[test]
fn compact_lines_fit_the_console() {
    let one = leveled("root.role.controlplane.consensus", "hello there");
    assert_eq!(compact(&one, 120), "    cplane consensus W hello there");
    assert_eq!(compact(&one, None), "    cplane consensus W hello there");
    assert_eq!(compact(&one, 60), "cplane consensus W hello there");
    assert_eq!(compact(&one, 40), "W hello there");

    let two = leveled("clock", "hello\n\nthere");
    assert_eq!(compact(&two, 120), "               clock W hello\n                     | there");
    assert_eq!(compact(&two, 20), "W hello\n| there");

    let long = leveled("clock", &"word ".repeat(25));
    let lines: Vec<String> = compact(&long, 120).lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("               clock W word word") && lines[0].len() <= 120);
    assert!(lines[1].starts_with("                     | word"));

    assert_eq!(compact(&leveled("clock", "abcdefghij"), 6), "W abcd\n| efgh\n| ij");
    assert_eq!(compact(&leveled("clock", "漢字漢字"), 7), "W 漢字\n| 漢字");
    assert_eq!(compact(&leveled("clock", "\n\n"), 80), "");
    assert_eq!(compact(&raw("clock", "out", None), 40), "R out");
    assert_eq!(
        compact(&entry("clock", Body::Dropped(Dropped { count: 2, exact: true })), 40),
        "- 2 entries dropped here"
    );
}

#[test]
fn json_has_the_documented_keys() {
    let with = Leveled {
        fields: vec![field("n", -1i64), field("t", "x\"y"), field("f", f64::NAN)],
        origin: Some(Origin { stream: "stderr".to_owned(), generation: 2 }),
        original_bytes: Some(9),
        ..message(Level::Error, "a\nb")
    };
    assert_eq!(
        render::json(&entry("a.b", Body::Leveled(with))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"a.b","kind":"leveled","level":"error","file":"etcd/src/main.rs","line":42,"message":"a\nb","fields":{"n":-1,"t":"x\"y","f":"NaN"},"stream":"stderr","generation":2,"original_bytes":9}"#
    );
    assert_eq!(
        render::json(&raw("", "x\u{1b}", Some(5))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"","kind":"raw","stream":"stdout","generation":3,"text":"x\u001b","original_bytes":5}"#
    );
    assert_eq!(
        render::json(&entry("a", Body::Dropped(Dropped { count: 2, exact: false }))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"a","kind":"dropped","count":2,"exact":false}"#
    );
}
