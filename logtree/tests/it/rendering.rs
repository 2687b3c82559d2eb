//! Rendering entries as text. The formats of the original are compared exactly, for tools that parse them.

use std::time::{Duration, SystemTime};

use nodekeel_logtree::{
    DroppedEntries, EntryBody, FieldValue, Level, LeveledEntry, LogEntry, LogField, NameAbbreviations,
    RawLine, StreamOrigin, render,
};

use crate::support::*;

fn build_entry(name: &str, body: EntryBody) -> LogEntry {
    // 2026-11-21 11:26:08.703131999 UTC
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_795_260_368, 703_131_999);
    LogEntry { seq: 7, dn: dn(name), time, body }
}

fn leveled_body(level: Level, text: &str) -> LeveledEntry {
    LeveledEntry {
        level,
        claimed_time: None,
        file: "etcd/src/main.rs".to_owned(),
        line: 42,
        message: text.to_owned(),
        fields: Vec::new(),
        origin: None,
        original_bytes: None,
    }
}

fn leveled_entry(name: &str, text: &str) -> LogEntry {
    build_entry(name, EntryBody::Leveled(leveled_body(Level::Warn, text)))
}

fn raw_entry(name: &str, text: &str, original_bytes: Option<u64>) -> LogEntry {
    let origin = StreamOrigin { stream: "stdout".to_owned(), generation: 3 };
    build_entry(name, EntryBody::Raw(RawLine { origin, text: text.to_owned(), original_bytes, lossy: false }))
}

fn log_field(name: &str, value: impl Into<FieldValue>) -> LogField {
    LogField { name: name.to_owned(), value: value.into() }
}

/// The exact formats: prefix, 32 columns for the name, the whole prefix on each line, raw, truncated raw.
#[test]
fn full_lines_match_the_original_format() {
    let prefix = "node.etcd                        W1121 11:26:08.703131 main.rs:42] ";
    assert_eq!(render::full_text(&leveled_entry("node.etcd", "hello")), format!("{prefix}hello"));
    assert_eq!(
        render::full_text(&leveled_entry("node.etcd", "a\n\nb")),
        format!("{prefix}a\n{prefix}\n{prefix}b")
    );
    assert_eq!(
        render::full_text(&raw_entry("node.etcd", "hello", None)),
        "node.etcd                        R hello"
    );
    assert_eq!(
        render::full_text(&raw_entry("node.etcd", "hel", Some(5))),
        "node.etcd                        R hel..."
    );
    let long = "a.name.that.is.longer.than.thirty-two.columns";
    assert_eq!(render::full_text(&raw_entry(long, "x", None)), format!("{long} R x"));
    let unknown = LeveledEntry { file: String::new(), line: 0, ..leveled_body(Level::Info, "x") };
    assert!(render::full_text(&build_entry("a", EntryBody::Leveled(unknown))).ends_with(".703131] x"));
}

#[test]
fn fields_follow_the_message_and_are_quoted_when_needed() {
    let fields = vec![
        log_field("plain", "a"),
        log_field("spaced", "a b"),
        log_field("quoted", "\""),
        log_field("empty", ""),
        log_field("n", 1u64),
    ];
    let with = LeveledEntry { fields, ..leveled_body(Level::Info, "m") };
    let text = render::full_text(&build_entry("a", EntryBody::Leveled(with)));
    assert!(text.ends_with(r#"] m plain=a spaced="a b" quoted="\"" empty="" n=1"#), "{text}");
}

#[test]
fn terminal_control_characters_are_escaped() {
    let text = render::full_text(&raw_entry("a", "red \u{1b}[31m\u{7}\t\u{202e}", None));
    assert!(text.ends_with(r"R red \u{1b}[31m\u{7}\t\u{202e}"), "{text}");
    let value =
        LeveledEntry { fields: vec![log_field("k", "a\u{1b} b\nc")], ..leveled_body(Level::Info, "m") };
    let text = render::full_text(&build_entry("a", EntryBody::Leveled(value)));
    assert!(text.ends_with(r#"m k="a\\u{1b} b\nc""#), "{text}");
}

#[test]
fn json_escapes_what_controls_a_terminal_or_reorders_its_text() {
    let hostile = "csi\u{9b}2J del\u{7f} bidi\u{202e}\u{2066}\u{61c} line\u{2028} \"quoted\" ü漢\u{1f600}";
    let with =
        LeveledEntry { fields: vec![log_field(hostile, hostile)], ..leveled_body(Level::Info, hostile) };
    for entry in [raw_entry("a", hostile, None), build_entry("a", EntryBody::Leveled(with))] {
        let json = render::json_object(&entry);
        let shown = r#"csi\u009b2J del\u007f bidi\u202e\u2066\u061c line\u2028 \"quoted\" ü漢😀"#;
        assert!(json.contains(shown), "{json}");
        assert!(
            !json.contains(['\u{9b}', '\u{7f}', '\u{202e}', '\u{2066}', '\u{61c}', '\u{2028}']),
            "{json}"
        );
        let value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        let text = value.get("text").or(value.get("message"));
        assert_eq!(text.and_then(|text| text.as_str()), Some(hostile), "the escapes mean the same");
    }
}

#[test]
fn dropped_entries_show_their_count() {
    let dropped = |count, exact| {
        render::full_text(&build_entry("a", EntryBody::Dropped(DroppedEntries { count, exact })))
    };
    assert!(dropped(1, true).ends_with(" - 1 entry dropped here"));
    assert!(dropped(3, true).ends_with(" - 3 entries dropped here"));
    assert!(dropped(3, false).ends_with(" - at most 3 entries dropped here"));
}

fn compact_text(entry: &LogEntry, width: impl Into<Option<usize>>) -> String {
    render::compact_text(entry, &NameAbbreviations::default(), width.into())
}

/// Case 13: columns for the name by the width, continuation lines, wrapping.
#[test]
fn compact_lines_fit_the_console() {
    let one = leveled_entry("root.role.controlplane.consensus", "hello there");
    assert_eq!(compact_text(&one, 120), "    cplane consensus W hello there");
    assert_eq!(compact_text(&one, None), "    cplane consensus W hello there");
    assert_eq!(compact_text(&one, 60), "cplane consensus W hello there");
    assert_eq!(compact_text(&one, 40), "W hello there");

    let two = leveled_entry("clock", "hello\n\nthere");
    assert_eq!(compact_text(&two, 120), "               clock W hello\n                     | there");
    assert_eq!(compact_text(&two, 20), "W hello\n| there");

    let long = leveled_entry("clock", &"word ".repeat(25));
    let lines: Vec<String> = compact_text(&long, 120).lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("               clock W word word") && lines[0].len() <= 120);
    assert!(lines[1].starts_with("                     | word"));

    assert_eq!(compact_text(&leveled_entry("clock", "abcdefghij"), 6), "W abcd\n| efgh\n| ij");
    assert_eq!(compact_text(&leveled_entry("clock", "漢字漢字"), 7), "W 漢字\n| 漢字");
    assert_eq!(compact_text(&leveled_entry("clock", "\n\n"), 80), "");
    assert_eq!(compact_text(&raw_entry("clock", "out", None), 40), "R out");
    assert_eq!(
        compact_text(&build_entry("clock", EntryBody::Dropped(DroppedEntries { count: 2, exact: true })), 40),
        "- 2 entries dropped here"
    );
}

#[test]
fn json_has_the_documented_keys() {
    let with = LeveledEntry {
        fields: vec![log_field("n", -1i64), log_field("t", "x\"y"), log_field("f", f64::NAN)],
        origin: Some(StreamOrigin { stream: "stderr".to_owned(), generation: 2 }),
        original_bytes: Some(9),
        ..leveled_body(Level::Error, "a\nb")
    };
    assert_eq!(
        render::json_object(&build_entry("a.b", EntryBody::Leveled(with))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"a.b","kind":"leveled","level":"error","file":"etcd/src/main.rs","line":42,"message":"a\nb","fields":{"n":-1,"t":"x\"y","f":"NaN"},"stream":"stderr","generation":2,"original_bytes":9}"#
    );
    assert_eq!(
        render::json_object(&raw_entry("", "x\u{1b}", Some(5))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"","kind":"raw","stream":"stdout","generation":3,"text":"x\u001b","original_bytes":5}"#
    );
    assert_eq!(
        render::json_object(&build_entry("a", EntryBody::Dropped(DroppedEntries { count: 2, exact: false }))),
        r#"{"seq":7,"time":"2026-11-21T11:26:08.703131999Z","dn":"a","kind":"dropped","count":2,"exact":false}"#
    );
}
