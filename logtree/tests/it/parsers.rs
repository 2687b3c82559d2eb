//! Output of real programs through parsing writers.

use std::io::Write;

use nodekeel_logtree::parse::{self, LineParser, LogFormat};
use nodekeel_logtree::{EntryBody, Level, LogEntry, LogStore, WriterOptions};

use crate::support::*;

fn store_output(parser: LineParser, output: &str) -> Vec<LogEntry> {
    store_lines(WriterOptions::new("stderr").generation(2).line_parser(parser), output)
}

fn store_lines(options: WriterOptions, output: &str) -> Vec<LogEntry> {
    let store = LogStore::default();
    let mut writer = store.line_writer(&dn("x"), options);
    writer.write_all(output.as_bytes()).unwrap();
    writer.close();
    read_backlog(&store, name_query("x"))
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

fn store_format(format: LogFormat, output: &str) -> Vec<LogEntry> {
    store_lines(WriterOptions::new("stderr").format(format), output)
}

fn errors_of(entries: &[LogEntry]) -> Vec<String> {
    let leveled = entries.iter().filter(|entry| matches!(entry.body, EntryBody::Leveled(_)));
    leveled.filter(|entry| entry_level(entry) == Level::Error).map(entry_text).collect()
}

#[test]
fn every_line_of_kubernetes_klog_has_a_level_also_in_the_middle_of_a_message() {
    let kubelet = include_str!("../../testdata/kubelet-1.36.3-klog.txt");
    let apiserver = include_str!("../../testdata/kube-apiserver-1.36.3-klog.txt");
    let entries = store_format(LogFormat::Klog, kubelet);
    assert_eq!((entries.len(), level_letters(&entries).as_str()), (kubelet.lines().count(), "IWE"));
    assert_eq!(errors_of(&entries), ["command failed"]);
    let EntryBody::Leveled(failed) = &entries.last().unwrap().body else { panic!() };
    assert_eq!((failed.file.as_str(), failed.line, failed.fields[0].name.as_str()), ("run.go", 72, "err"));

    let entries = store_format(LogFormat::Klog, apiserver);
    assert_eq!(entries.len(), apiserver.lines().count());
    assert!(!level_letters(&entries).contains('R'), "{}", level_letters(&entries));
    let errors = ["The manifest file is empty, ignoring.", "Failed to ensure lease exists, will retry"];
    assert_eq!(errors_of(&entries), errors);
    let continued =
        entries.iter().position(|entry| entry_text(entry).starts_with("[-]informer-sync")).unwrap();
    assert_eq!(entries[continued].time, entries[continued - 1].time, "it is a part of the message");
}

#[test]
fn every_line_of_kubernetes_json_has_a_level() {
    let kubelet = include_str!("../../testdata/kubelet-1.36.3-json.txt");
    let apiserver = include_str!("../../testdata/kube-apiserver-1.36.3-json.txt");
    let entries = store_format(LogFormat::Json, kubelet);
    assert_eq!((entries.len(), level_letters(&entries).as_str()), (kubelet.lines().count(), "IE"));
    let entries = store_format(LogFormat::Json, apiserver);
    assert_eq!(entries.len(), apiserver.lines().count());
    assert!(!level_letters(&entries).contains('R'), "{}", level_letters(&entries));
    let errors = ["The manifest file is empty, ignoring.", "Failed to ensure lease exists, will retry"];
    assert_eq!(errors_of(&entries), errors);
}

#[test]
fn lines_before_the_first_message_stay_raw_and_a_crash_is_fatal_with_its_trace() {
    let output = "starting\nI1121 11:26:08.703131 1 a.go:1] up\npanic: a bug\n\ngoroutine 1 [running]:\n";
    assert_eq!(level_letters(&store_format(LogFormat::Klog, output)), "RIF");
    let output = "{\"level\":\"error\",\"msg\":\"x\"}\ncontinued\n";
    assert_eq!(level_letters(&store_format(LogFormat::Zap, output)), "ER", "a message of zap has one line");
}
