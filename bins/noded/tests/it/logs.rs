//! The log through the control socket.

use std::io::Write as _;

use nodekeel_logtree::{Body, Dn, Entry, Level, Message, WriterOptions};
use nodekeel_node::client::level_to_wire;
use nodekeel_node::v1::logs_request::Kind;
use nodekeel_node::v1::{LogsRequest, LogsResponse};
use prost::Message as _;
use tokio::time::timeout;
use tonic::Streaming;

use crate::harness::{BARE, HANG, Local};

/// What a person would call the entry: its text.
fn text(entry: &Entry) -> String {
    match &entry.body {
        Body::Leveled(leveled) => leveled.message.clone(),
        Body::Raw(raw) => raw.text.clone(),
        Body::Dropped(dropped) => format!("{} dropped", dropped.count),
        other => panic!("{other:?}"),
    }
}

impl Local {
    fn log(&self, dn: &str, level: Level, text: &str) {
        self.journal.append(&dn.parse::<Dn>().unwrap(), Message::new(level, text));
    }

    fn print(&self, dn: &str, bytes: &[u8]) {
        let mut writer = self.journal.writer(&dn.parse::<Dn>().unwrap(), WriterOptions::new("stdout"));
        writer.write_all(bytes).unwrap();
    }

    async fn open(&mut self, request: LogsRequest) -> Streaming<LogsResponse> {
        self.client.logs(request).await.unwrap().into_inner()
    }

    /// The texts of all entries of a request that does not follow.
    async fn texts(&mut self, request: LogsRequest) -> Vec<String> {
        let mut chunks = self.open(request).await;
        let mut texts = Vec::new();
        while let Some(chunk) = chunks.message().await.unwrap() {
            texts.extend(chunk.entries.into_iter().map(|entry| text(&entry.try_into().unwrap())));
        }
        texts
    }
}

fn of(dn: &str) -> LogsRequest {
    LogsRequest { dn: dn.into(), ..LogsRequest::default() }
}

/// The text of the next entry, which has to come soon.
async fn next(chunks: &mut Streaming<LogsResponse>) -> String {
    let chunk = timeout(HANG, chunks.message()).await.expect("it comes");
    let [entry] = &chunk.unwrap().unwrap().entries[..] else { panic!("one entry at a time was written") };
    text(&entry.clone().try_into().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_is_as_much_as_was_asked_for() {
    let mut node = Local::start(BARE).await;
    for (dn, line) in [("a", "one"), ("a", "two"), ("a.b", "three"), ("a", "four")] {
        node.log(dn, Level::Info, line);
    }
    assert_eq!(node.texts(of("a")).await, ["one", "two", "four"]);
    assert_eq!(node.texts(LogsRequest { backlog: Some(1), ..of("a") }).await, ["four"]);
    assert_eq!(node.texts(LogsRequest { backlog: Some(0), ..of("a") }).await, [""; 0]);
    let newest_two = LogsRequest { backlog: Some(2), children: true, ..of("a") };
    assert_eq!(node.texts(newest_two).await, ["three", "four"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_utf8_break_neither_backlog_nor_stream() {
    let mut node = Local::start(BARE).await;
    node.print("raw", b"a\xffz\n");
    assert_eq!(node.texts(of("raw")).await, ["a\u{fffd}z"]);
    let mut chunks = node.open(LogsRequest { backlog: Some(0), follow: true, ..of("raw") }).await;
    node.print("raw", b"b\xc3\x28y\n");
    assert_eq!(next(&mut chunks).await, "b\u{fffd}(y");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_brings_what_is_written_while_it_is_open() {
    let mut node = Local::start(BARE).await;
    node.log("a", Level::Info, "before");
    let mut chunks = node.open(LogsRequest { backlog: Some(0), follow: true, ..of("a") }).await;
    for line in ["first", "second"] {
        node.log("other", Level::Info, "not this one");
        node.log("a", Level::Info, line);
        assert_eq!(next(&mut chunks).await, line);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backlog_and_the_stream_join_without_gap_or_repeat() {
    /// As many as are kept of one name, however far its reader is behind.
    const ENTRIES: u32 = 10_000;
    let mut node = Local::start(BARE).await;
    let journal = node.journal.clone();
    // A name that nobody has written to would be refused.
    node.log("a", Level::Info, "0");
    let writer = std::thread::spawn(move || {
        for number in 1..ENTRIES {
            journal.append(&"a".parse().unwrap(), Message::new(Level::Info, number.to_string()));
        }
    });
    let mut chunks = node.open(LogsRequest { follow: true, ..of("a") }).await;
    let mut expected = 0;
    while expected < ENTRIES {
        let chunk = timeout(HANG, chunks.message()).await.expect("it goes on").unwrap().unwrap();
        for entry in chunk.entries {
            let number: u32 = text(&entry.try_into().unwrap()).parse().expect("nothing was dropped");
            assert_eq!(number, expected);
            expected += 1;
        }
    }
    writer.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_hold_for_the_backlog_and_for_the_stream() {
    let mut node = Local::start(BARE).await;
    let write = |node: &Local, dn: &str| {
        let levels = [(Level::Info, "i"), (Level::Warn, "w"), (Level::Error, "e"), (Level::Debug, "d")];
        levels.iter().for_each(|(level, line)| node.log(dn, *level, line));
        node.print(dn, b"raw\n");
    };
    let warnings = LogsRequest { min_level: level_to_wire(Level::Warn).into(), ..of("warnings") };
    for (request, expected) in [
        (warnings, &["w", "e"][..]),
        (LogsRequest { kind: Kind::Raw.into(), ..of("raw") }, &["raw"]),
        (LogsRequest { kind: Kind::Leveled.into(), ..of("leveled") }, &["i", "w", "e", "d"]),
    ] {
        write(&node, &request.dn);
        assert_eq!(node.texts(request.clone()).await, expected);
        let mut chunks = node.open(LogsRequest { follow: true, backlog: Some(0), ..request.clone() }).await;
        write(&node, &request.dn);
        let mut texts = Vec::new();
        while texts.len() < expected.len() {
            let chunk = timeout(HANG, chunks.message()).await.expect("it comes").unwrap().unwrap();
            texts.extend(chunk.entries.into_iter().map(|entry| text(&entry.try_into().unwrap())));
        }
        assert_eq!(texts, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_lines_have_no_level_to_be_asked_for() {
    let mut node = Local::start(BARE).await;
    let both =
        LogsRequest { kind: Kind::Raw.into(), min_level: level_to_wire(Level::Warn).into(), ..of("root") };
    let status = node.client.logs(both).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_message_is_too_large_for_its_reader() {
    let mut node = Local::start(BARE).await;
    // As much as the limits let be kept: a megabyte of long entries in each of some names, and many short ones.
    let long = "x".repeat(10_000);
    for number in 0..5000 {
        node.log(&format!("a.long{}", number % 5), Level::Info, if number < 500 { &long } else { "" });
    }
    let mut chunks = node.open(LogsRequest { children: true, ..of("a") }).await;
    let mut entries = 0;
    while let Some(chunk) = chunks.message().await.unwrap() {
        assert!(chunk.entries.len() <= 2000, "{}", chunk.entries.len());
        assert!(chunk.encoded_len() <= (1 << 20) + 20_000, "{}", chunk.encoded_len());
        entries += chunk.entries.len();
    }
    assert!(entries > 4000, "{entries}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_ends_as_soon_as_its_caller_has_gone() {
    let mut node = Local::start(BARE).await;
    node.log("a", Level::Info, "one");
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    const CALLS: usize = 50;
    let before = tasks();
    let mut calls = Vec::new();
    for _ in 0..CALLS {
        let mut call = node.open(LogsRequest { follow: true, ..of("a") }).await;
        next(&mut call).await;
        calls.push(call);
    }
    assert!(tasks() >= before + CALLS - 10, "each call is served by a task; a few others may have ended");
    drop(calls);
    // Nothing is logged meanwhile that could wake the calls up.
    let gone = || if tasks() < before + 10 { Ok(()) } else { anyhow::bail!("{} tasks", tasks()) };
    tokio::task::block_in_place(|| testbed::wait_until(HANG, "the calls' end", gone)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_when_the_node_stops() {
    let mut node = Local::start(BARE).await;
    node.log("a", Level::Info, "one");
    let mut chunks = node.open(LogsRequest { follow: true, ..of("a") }).await;
    next(&mut chunks).await;
    let report = timeout(HANG, node.node.shutdown()).await.expect("the stream does not keep it");
    assert_eq!(report.stragglers, []);
    let status = chunks.message().await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
}
