//! Logs through the control socket.

use std::io::Write as _;
use std::time::{Duration, SystemTime};

use nodekeel_logtree::{Dn, EntryBody, Level, LogEntry, LogMessage, WriterOptions};
use nodekeel_node::client::level_to_wire;
use nodekeel_node::v1::logs_request::Kind;
use nodekeel_node::v1::{self, LogsRequest, LogsResponse};
use prost::Message as _;
use tokio::time::timeout;
use tonic::Streaming;

use crate::harness::{TEST_TIMEOUT, TestNode};

/// The text of an entry.
fn entry_text(entry: &LogEntry) -> String {
    match &entry.body {
        EntryBody::Leveled(leveled) => leveled.message.clone(),
        EntryBody::Raw(raw) => raw.text.clone(),
        EntryBody::Dropped(dropped) => format!("{} dropped", dropped.count),
        other => panic!("{other:?}"),
    }
}

impl TestNode {
    fn append_entry(&self, dn: &str, level: Level, text: &str) {
        self.log_store.append_message(&dn.parse::<Dn>().unwrap(), LogMessage::new(level, text));
    }

    fn append_output(&self, dn: &str, bytes: &[u8]) {
        let mut writer = self.log_store.line_writer(&dn.parse::<Dn>().unwrap(), WriterOptions::new("stdout"));
        writer.write_all(bytes).unwrap();
    }

    async fn open_logs(&mut self, request: LogsRequest) -> Streaming<LogsResponse> {
        self.client.logs(request).await.unwrap().into_inner()
    }

    /// The texts of all entries of a request without `follow`.
    async fn read_texts(&mut self, request: LogsRequest) -> Vec<String> {
        let mut chunks = self.open_logs(request).await;
        let mut texts = Vec::new();
        while let Some(chunk) = chunks.message().await.unwrap() {
            texts.extend(chunk.entries.into_iter().map(|entry| entry_text(&entry.try_into().unwrap())));
        }
        texts
    }
}

fn logs_request(dn: &str) -> LogsRequest {
    LogsRequest { dn: dn.into(), ..LogsRequest::default() }
}

/// The text of the next entry, which must arrive before the timeout.
async fn next_text(chunks: &mut Streaming<LogsResponse>) -> String {
    let chunk = timeout(TEST_TIMEOUT, chunks.message()).await.expect("an entry arrives");
    let [entry] = &chunk.unwrap().unwrap().entries[..] else { panic!("one entry at a time was written") };
    entry_text(&entry.clone().try_into().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_has_the_requested_length() {
    let mut node = TestNode::start("").await;
    for (dn, line) in [("a", "one"), ("a", "two"), ("a.b", "three"), ("a", "four")] {
        node.append_entry(dn, Level::Info, line);
    }
    assert_eq!(node.read_texts(logs_request("a")).await, ["one", "two", "four"]);
    assert_eq!(node.read_texts(LogsRequest { backlog: Some(1), ..logs_request("a") }).await, ["four"]);
    assert_eq!(node.read_texts(LogsRequest { backlog: Some(0), ..logs_request("a") }).await, [""; 0]);
    let newest_two = LogsRequest { backlog: Some(2), children: true, ..logs_request("a") };
    assert_eq!(node.read_texts(newest_two).await, ["three", "four"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_utf8_break_neither_backlog_nor_stream() {
    let mut node = TestNode::start("").await;
    node.append_output("raw", b"a\xffz\n");
    assert_eq!(node.read_texts(logs_request("raw")).await, ["a\u{fffd}z"]);
    let mut chunks =
        node.open_logs(LogsRequest { backlog: Some(0), follow: true, ..logs_request("raw") }).await;
    node.append_output("raw", b"b\xc3\x28y\n");
    assert_eq!(next_text(&mut chunks).await, "b\u{fffd}(y");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_delivers_entries_that_are_written_while_it_is_open() {
    let mut node = TestNode::start("").await;
    node.append_entry("a", Level::Info, "before");
    let mut chunks =
        node.open_logs(LogsRequest { backlog: Some(0), follow: true, ..logs_request("a") }).await;
    for line in ["first", "second"] {
        node.append_entry("other", Level::Info, "not this one");
        node.append_entry("a", Level::Info, line);
        assert_eq!(next_text(&mut chunks).await, line);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_are_found_by_pattern_field_time_and_cursor() {
    let mut node = TestNode::start("").await;
    for (text, member) in [("refused", 7_i64), ("refused", 8), ("granted", 7)] {
        let message = LogMessage::new(Level::Info, text).with_field("member", member);
        node.log_store.append_message(&"a".parse::<Dn>().unwrap(), message);
    }
    let member = |value: &str| vec![v1::FieldMatch { name: "member".into(), value: value.into() }];
    let refused = LogsRequest { pattern: "^ref".into(), fields: member("7"), ..logs_request("a") };
    assert_eq!(node.read_texts(refused).await, ["refused"]);
    let in_an_hour = SystemTime::now() + Duration::from_secs(3600);
    let later = LogsRequest { since: Some(in_an_hour.into()), ..logs_request("a") };
    assert_eq!(node.read_texts(later).await, [""; 0]);

    let mut chunks = node.open_logs(logs_request("a")).await;
    let cursor = chunks.message().await.unwrap().unwrap().cursor;
    node.append_entry("a", Level::Info, "after it");
    assert_eq!(node.read_texts(LogsRequest { cursor, ..logs_request("a") }).await, ["after it"]);

    for (request, reason) in [
        (LogsRequest { pattern: "a(b".into(), ..logs_request("a") }, "unclosed group"),
        (LogsRequest { cursor: "3".into(), ..logs_request("a") }, "resume at cursor"),
        (LogsRequest { cursor: format!("{:016x}-1", 1), ..logs_request("a") }, "from another process"),
    ] {
        let status = node.client.logs(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains(reason), "{status:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_and_the_stream_join_without_gap_or_repeat() {
    /// As many entries as are kept of one DN, even if the reader is far behind.
    const ENTRIES: u32 = 10_000;
    let mut node = TestNode::start("").await;
    let journal = node.log_store.clone();
    // A DN without an entry would be rejected.
    node.append_entry("a", Level::Info, "0");
    let writer = std::thread::spawn(move || {
        for number in 1..ENTRIES {
            journal.append_message(&"a".parse().unwrap(), LogMessage::new(Level::Info, number.to_string()));
        }
    });
    let mut chunks = node.open_logs(LogsRequest { follow: true, ..logs_request("a") }).await;
    let mut expected = 0;
    while expected < ENTRIES {
        let chunk =
            timeout(TEST_TIMEOUT, chunks.message()).await.expect("the stream continues").unwrap().unwrap();
        for entry in chunk.entries {
            let number: u32 = entry_text(&entry.try_into().unwrap()).parse().expect("nothing was dropped");
            assert_eq!(number, expected);
            expected += 1;
        }
    }
    writer.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_apply_to_the_backlog_and_to_the_stream() {
    let mut node = TestNode::start("").await;
    let write = |node: &TestNode, dn: &str| {
        let levels = [(Level::Info, "i"), (Level::Warn, "w"), (Level::Error, "e"), (Level::Debug, "d")];
        levels.iter().for_each(|(level, line)| node.append_entry(dn, *level, line));
        node.append_output(dn, b"raw\n");
    };
    let warnings = LogsRequest { min_level: level_to_wire(Level::Warn).into(), ..logs_request("warnings") };
    for (request, expected) in [
        (warnings, &["w", "e"][..]),
        (LogsRequest { kind: Kind::Raw.into(), ..logs_request("raw") }, &["raw"]),
        (LogsRequest { kind: Kind::Leveled.into(), ..logs_request("leveled") }, &["i", "w", "e", "d"]),
    ] {
        write(&node, &request.dn);
        assert_eq!(node.read_texts(request.clone()).await, expected);
        let mut chunks =
            node.open_logs(LogsRequest { follow: true, backlog: Some(0), ..request.clone() }).await;
        write(&node, &request.dn);
        let mut texts = Vec::new();
        while texts.len() < expected.len() {
            let chunk =
                timeout(TEST_TIMEOUT, chunks.message()).await.expect("an entry arrives").unwrap().unwrap();
            texts.extend(chunk.entries.into_iter().map(|entry| entry_text(&entry.try_into().unwrap())));
        }
        assert_eq!(texts, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minimum_level_for_raw_lines_is_an_invalid_argument() {
    let mut node = TestNode::start("").await;
    let both = LogsRequest {
        kind: Kind::Raw.into(),
        min_level: level_to_wire(Level::Warn).into(),
        ..logs_request("root")
    };
    let status = node.client.logs(both).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_messages_stay_below_the_limit_of_a_client() {
    let mut node = TestNode::start("").await;
    // As much as the limits allow: a megabyte of long entries in each of several DNs, and many short ones.
    let long = "x".repeat(10_000);
    for number in 0..5000 {
        node.append_entry(
            &format!("a.long{}", number % 5),
            Level::Info,
            if number < 500 { &long } else { "" },
        );
    }
    let mut chunks = node.open_logs(LogsRequest { children: true, ..logs_request("a") }).await;
    let mut entries = 0;
    while let Some(chunk) = chunks.message().await.unwrap() {
        assert!(chunk.entries.len() <= 2000, "{}", chunk.entries.len());
        assert!(chunk.encoded_len() <= (1 << 20) + 20_000, "{}", chunk.encoded_len());
        entries += chunk.entries.len();
    }
    assert!(entries > 4000, "{entries}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_when_its_client_disconnects() {
    let mut node = TestNode::start("").await;
    node.append_entry("a", Level::Info, "one");
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    const CALLS: usize = 50;
    let before = tasks();
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        let mut call = node.open_logs(LogsRequest { follow: true, ..logs_request("a") }).await;
        next_text(&mut call).await;
        calls.push(call);
    }
    assert!(tasks() >= before + CALLS - 10, "a task serves each call; a few others may have ended");
    drop(calls);
    // Nothing is logged, so nothing wakes the calls up.
    let have_ended = || if tasks() < before + 10 { Ok(()) } else { anyhow::bail!("{} tasks", tasks()) };
    tokio::task::block_in_place(|| testbed::wait_until(TEST_TIMEOUT, "the end of the calls", have_ended))
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_when_the_node_stops() {
    let mut node = TestNode::start("").await;
    node.append_entry("a", Level::Info, "one");
    let mut chunks = node.open_logs(LogsRequest { follow: true, ..logs_request("a") }).await;
    next_text(&mut chunks).await;
    let report =
        timeout(TEST_TIMEOUT, node.node.shutdown()).await.expect("the stream does not block the shutdown");
    assert_eq!(report.stragglers, []);
    let status = chunks.message().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
}
