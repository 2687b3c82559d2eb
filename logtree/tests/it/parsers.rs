//! Output of real programs through parsing writers.

use std::io::Write;

use nodekeel_logtree::parse::{self, LineParser};
use nodekeel_logtree::{EntryBody, Level, LogEntry, LogQuery, LogStore, WriterOptions};

use crate::support::*;

fn store_output(parser: LineParser, output: &str) -> Vec<LogEntry> {
    let store = LogStore::default();
    let mut writer =
        store.line_writer(&dn("x"), WriterOptions::new("stderr").generation(2).line_parser(parser));
    writer.write_all(output.as_bytes()).unwrap();
    writer.close();
    read_backlog(&store, LogQuery::of_dn(dn("x")))
}

/// The letters of the entries' levels, or `R`, without consecutive duplicates.
fn level_letters(entries: &[LogEntry]) -> String {
    let mut letters: Vec<char> = entries
        .iter()
        .map(|entry| match &entry.body {
            EntryBody::Leveled(leveled) => leveled.level.letter(),
            _ => 'R',
        })
        .collect();
    letters.dedup();
    letters.into_iter().collect()
}

#[test]
fn every_line_of_etcd_json_is_parsed() {
    let output = include_str!("../../testdata/etcd-3.4.23-zap.txt");
    let entries = store_output(parse::etcd_line, output);
    assert_eq!(entries.len(), output.lines().count());
    assert_eq!(level_letters(&entries), "IWI");
    let EntryBody::Leveled(first) = &entries[0].body else { panic!() };
    assert_eq!((first.file.as_str(), first.line), ("embed/etcd.go", 117));
    assert_eq!(first.message, "configuring peer listeners");
    assert_eq!(
        first.origin.as_ref().map(|origin| (origin.stream.as_str(), origin.generation)),
        Some(("stderr", 2))
    );
}

#[test]
fn only_two_bare_warnings_of_etcd_capnslog_stay_raw() {
    let output = include_str!("../../testdata/etcd-3.4.23-capnslog.txt");
    let entries = store_output(parse::etcd_line, output);
    assert_eq!(entries.len(), output.lines().count());
    let raw: Vec<_> =
        entries.iter().filter(|entry| matches!(entry.body, EntryBody::Raw(_))).map(entry_text).collect();
    let warning = "[WARNING] Deprecated '--logger=capnslog' flag is set; use '--logger=zap' flag instead";
    assert_eq!(raw, [warning, warning]);
    let leveled = entries.iter().filter(|entry| matches!(entry.body, EntryBody::Leveled(_)));
    assert_eq!(leveled.filter(|entry| entry_level(entry) == Level::Warn).count(), 1);
}

#[test]
fn every_line_of_containerd_logfmt_is_parsed() {
    let output = include_str!("../../testdata/containerd-1.6.20.txt");
    let entries = store_output(parse::logfmt_line, output);
    assert_eq!(entries.len(), output.lines().count());
    assert_eq!(level_letters(&entries), "IWIWIE");
}

#[test]
fn a_parsed_line_keeps_its_timestamp_and_a_raw_line_gets_its_arrival_time() {
    let before = std::time::SystemTime::now();
    let entries =
        store_output(parse::logfmt_line, "time=\"2001-02-03T04:05:06Z\" level=error msg=x\nnot logfmt\n");
    assert!(entries[0].time < before);
    assert!(entries[1].time >= before);
    assert_eq!(entry_texts(&entries), ["x", "not logfmt"]);
}

#[test]
fn a_line_that_no_parser_accepts_stays_raw_and_is_cut_to_the_raw_limit() {
    let entries =
        store_output(parse::etcd_line, &format!("{{\"level\":\"info\",\"msg\":\"{}\n", "x".repeat(2000)));
    let EntryBody::Raw(raw) = &entries[0].body else { panic!() };
    assert_eq!((raw.text.len(), raw.original_bytes), (1024, Some(2023)));
}

#[test]
fn a_line_longer_than_the_raw_limit_is_parsed_completely() {
    let long = "x".repeat(5000);
    let entries = store_output(parse::etcd_line, &format!("{{\"level\":\"info\",\"msg\":\"{long}\"}}\n"));
    assert_eq!(entry_texts(&entries), [long]);
}
