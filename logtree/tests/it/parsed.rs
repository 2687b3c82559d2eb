//! Output of real programs through parsing writers.

use std::io::Write;

use nodekeel_logtree::parse::{self, Parser};
use nodekeel_logtree::{Body, Entry, Journal, Level, Query, WriterOptions};

use crate::support::*;

fn store(parser: Parser, output: &str) -> Vec<Entry> {
    let journal = Journal::default();
    let mut writer = journal.writer(&dn("x"), WriterOptions::new("stderr").generation(2).parser(parser));
    writer.write_all(output.as_bytes()).unwrap();
    writer.close();
    read(&journal, Query::new(dn("x")))
}

/// How many entries have each level's letter, or `R`.
fn letters(entries: &[Entry]) -> String {
    let mut letters: Vec<char> = entries
        .iter()
        .map(|entry| match &entry.body {
            Body::Leveled(leveled) => leveled.level.letter(),
            _ => 'R',
        })
        .collect();
    letters.dedup();
    letters.into_iter().collect()
}

#[test]
fn every_line_of_etcds_json_is_understood() {
    let output = include_str!("../../testdata/etcd-3.4.23-zap.txt");
    let entries = store(parse::etcd, output);
    assert_eq!(entries.len(), output.lines().count());
    assert_eq!(letters(&entries), "IWI");
    let Body::Leveled(first) = &entries[0].body else { panic!() };
    assert_eq!((first.file.as_str(), first.line), ("embed/etcd.go", 117));
    assert_eq!(first.message, "configuring peer listeners");
    assert_eq!(
        first.origin.as_ref().map(|origin| (origin.stream.as_str(), origin.generation)),
        Some(("stderr", 2))
    );
}

#[test]
fn of_etcds_older_text_only_its_two_bare_warnings_stay_raw() {
    let output = include_str!("../../testdata/etcd-3.4.23-capnslog.txt");
    let entries = store(parse::etcd, output);
    assert_eq!(entries.len(), output.lines().count());
    let raw: Vec<_> = entries.iter().filter(|entry| matches!(entry.body, Body::Raw(_))).map(text).collect();
    let warning = "[WARNING] Deprecated '--logger=capnslog' flag is set; use '--logger=zap' flag instead";
    assert_eq!(raw, [warning, warning]);
    let leveled = entries.iter().filter(|entry| matches!(entry.body, Body::Leveled(_)));
    assert_eq!(leveled.filter(|entry| level(entry) == Level::Warn).count(), 1);
}

#[test]
fn every_line_of_containerds_logfmt_is_understood() {
    let output = include_str!("../../testdata/containerd-1.6.20.txt");
    let entries = store(parse::logfmt, output);
    assert_eq!(entries.len(), output.lines().count());
    assert_eq!(letters(&entries), "IWIWIE");
}

#[test]
fn a_parsed_line_has_its_own_time_and_an_unparsed_one_that_of_its_arrival() {
    let before = std::time::SystemTime::now();
    let entries = store(parse::logfmt, "time=\"2001-02-03T04:05:06Z\" level=error msg=x\nnot logfmt\n");
    assert!(entries[0].time < before);
    assert!(entries[1].time >= before);
    assert_eq!(texts(&entries), ["x", "not logfmt"]);
}

#[test]
fn a_line_that_no_parser_takes_is_kept_raw_and_cut_as_such() {
    let entries = store(parse::etcd, &format!("{{\"level\":\"info\",\"msg\":\"{}\n", "x".repeat(2000)));
    let Body::Raw(raw) = &entries[0].body else { panic!() };
    assert_eq!((raw.text.len(), raw.original_bytes), (1024, Some(2023)));
}

#[test]
fn a_line_longer_than_raw_ones_may_be_is_parsed_whole() {
    let long = "x".repeat(5000);
    let entries = store(parse::etcd, &format!("{{\"level\":\"info\",\"msg\":\"{long}\"}}\n"));
    assert_eq!(texts(&entries), [long]);
}
