//! Output of real programs through parsing writers.

use std::io::Write;
use std::time::{Duration, SystemTime};

use nodekeel_logtree::parse::{self, LineContext, LineParser, LogFormat, LogZone};
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
fn an_entry_has_the_time_of_its_receipt_beside_the_one_that_its_line_claims() {
    let before = SystemTime::now();
    let entries =
        store_output(parse::logfmt_line, "time=\"2001-02-03T04:05:06Z\" level=error msg=x\nnot logfmt\n");
    assert!(entries.iter().all(|entry| entry.time >= before));
    let EntryBody::Leveled(claimant) = &entries[0].body else { panic!() };
    assert!(claimant.claimed_time.unwrap() < before);
    let json = nodekeel_logtree::render::json_object(&entries[0]);
    assert!(json.contains(r#""claimed_time":"2001-02-03T04:05:06.000000000Z""#), "{json}");
    assert_eq!(entry_texts(&entries), ["x", "not logfmt"]);
}

#[test]
fn a_line_that_no_parser_accepts_stays_raw_and_is_cut_to_the_raw_limit() {
    let entries = store_output(parse::etcd_line, &format!("{{\"msg\":\"{}\n", "x".repeat(2000)));
    let EntryBody::Raw(raw) = &entries[0].body else { panic!() };
    assert_eq!((raw.text.len(), raw.original_bytes), (1024, Some(2008)));
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
    let level = |at: usize| entry_level(&entries[at]);
    assert_eq!(level(continued), level(continued - 1), "it is a part of the message");
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
    assert_eq!(level_letters(&store_format(LogFormat::Json, output)), "ER", "a message in JSON has one line");
}

#[test]
fn a_field_that_a_line_repeats_is_a_list_in_json() {
    let entries = store_output(parse::logfmt_line, "level=info a=1 b=2 a=3\n");
    let json = nodekeel_logtree::render::json_object(&entries[0]);
    assert!(json.contains(r#""fields":{"a":["1","3"],"b":"2"}"#), "{json}");
}

/// Real output of programs in two zones, of which each line without a zone is of one second.
#[test]
fn lines_of_programs_in_other_zones_have_their_levels_and_claim_the_right_time() {
    let programs = [
        (
            LogFormat::LevelPrefix,
            [
                ("JST-9", include_str!("../../testdata/python-3.11.2-Asia_Tokyo.txt"), 1_795_781_153),
                (
                    "EST5EDT,M3.2.0,M11.1.0",
                    include_str!("../../testdata/python-3.11.2-America_New_York.txt"),
                    1_795_781_157,
                ),
            ],
            ["an error", "a critical one", "an exception", "Traceback (most recent call last):"],
        ),
        (
            LogFormat::Klog,
            [
                ("JST-9", include_str!("../../testdata/kube-scheduler-1.36.3-Asia_Tokyo.txt"), 1_795_781_154),
                (
                    "EST5EDT,M3.2.0,M11.1.0",
                    include_str!("../../testdata/kube-scheduler-1.36.3-America_New_York.txt"),
                    1_795_781_158,
                ),
            ],
            ["command failed"; 4],
        ),
    ];
    for (format, zones, errors) in programs {
        for (zone, output, second) in zones {
            let parse = format.line_parser().unwrap();
            let context = LineContext::new(SystemTime::UNIX_EPOCH + Duration::from_secs(second))
                .zone(zone.parse::<LogZone>().unwrap());
            for line in output.lines() {
                let claimed = parse(line, &context).and_then(|message| message.claimed_time);
                let distance = claimed.map(|time| time.duration_since(context.received_at).unwrap());
                assert!(distance.unwrap_or_default() < Duration::from_secs(2), "{line}");
            }
            let entries = store_lines(WriterOptions::new("stderr").format(format), output);
            let is_error = |entry: &&LogEntry| matches!(&entry.body, EntryBody::Leveled(leveled) if leveled.level >= Level::Error);
            let seen: Vec<_> = entries.iter().filter(is_error).map(entry_text).collect();
            for error in errors {
                assert!(seen.iter().any(|text| text.contains(error)), "{error}: {seen:?}");
            }
        }
    }
}

#[test]
fn an_error_of_java_has_its_stack_as_its_lines() {
    let entries = store_format(LogFormat::LevelPrefix, include_str!("../../testdata/java-17.0.15.txt"));
    assert_eq!(level_letters(&entries), "RIRWRE", "the line before a message is raw");
    let stack = entries.iter().filter(|entry| entry_text(entry).starts_with("\tat "));
    assert!(stack.map(entry_level).all(|level| level == Level::Error));
}
