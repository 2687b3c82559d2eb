//! Checks over arbitrary input: the property tests run them on what proptest makes up, the fuzz targets on what the
//! fuzzer finds. Each panics if something does not hold.

use std::io::Write;
use std::time::{Duration, SystemTime};

use unicode_width::UnicodeWidthStr;

use crate::parse::{self, Parser};
use crate::{
    Body, Dictionary, Dn, Entry, Journal, Level, Limits, Message, Query, Raw, WriterOptions, render,
};

/// [`parse::klog`] takes or refuses any line.
pub fn check_klog(line: &[u8]) {
    // The year of a line hangs on the time, which passes between the two parses compared.
    check_parser(parse::klog, line, false);
}

/// [`parse::etcd`], which is zap or capnslog, takes or refuses any line.
pub fn check_etcd(line: &[u8]) {
    check_parser(parse::etcd, line, true);
}

/// [`parse::logfmt`] takes or refuses any line.
pub fn check_logfmt(line: &[u8]) {
    check_parser(parse::logfmt, line, true);
}

/// [`parse::kmsg`] takes or refuses any record.
pub fn check_kmsg(record: &[u8]) {
    let message = parse::kmsg(&String::from_utf8_lossy(record)).map(|record| record.message);
    let journal = Journal::default();
    journal.append(&Dn::root(), message.unwrap_or_else(|| Message::new(Level::Info, "not a record")));
    all(&journal).iter().for_each(check_render);
}

/// A line is stored once, as a message if the parser takes it and raw if not; what is stored can be rendered.
fn check_parser(parser: Parser, line: &[u8], timeless: bool) {
    let line: Vec<u8> = line.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte }).collect();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_000_000);
    let text = String::from_utf8_lossy(&line);
    let parsed = parser(text.strip_suffix('\r').unwrap_or(&text), now).is_some();

    let journal = Journal::default();
    let mut writer = journal.writer(&Dn::root(), WriterOptions::new("x").parser(parser));
    writer.write_all(&line).expect("it never fails");
    writer.write_all(b"\n").expect("it never fails");
    let entries = all(&journal);
    assert_eq!(entries.len(), 1, "{text:?}");
    let is_leveled = matches!(entries[0].body, Body::Leveled(_));
    if timeless && line.len() < Limits::default().message_bytes {
        assert_eq!(is_leveled, parsed, "{text:?}");
    }
    check_render(&entries[0]);
}

fn all(journal: &Journal) -> Vec<Entry> {
    journal.read(Query::new(Dn::root()).children()).expect("a good query").backlog()
}

/// Every rendering of an entry is safe to print, compact ones are as narrow as asked, JSON is JSON on one line.
pub fn check_render(entry: &Entry) {
    let safe = |text: &str| assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    safe(&render::full(entry));
    let json = render::json(entry);
    assert!(!json.contains('\n'), "{json}");
    let value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(value["seq"], entry.seq);
    for width in [1, 2, 3, 10, 59, 60, 79, 80, 120] {
        let compact = render::compact(entry, &Dictionary::default(), Some(width));
        safe(&compact);
        // Below three columns there is no room for the letter, a space and one character.
        for line in compact.split('\n') {
            assert!(line.width() <= width.max(3), "{width}: {line:?}");
        }
    }
}

/// A text is a name or not, and a name is what it was made of.
pub fn check_dn(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let Ok(dn) = text.parse::<Dn>() else {
        let unprintable = text.chars().any(|c| c.escape_debug().len() > 1);
        assert!(text.len() > Dn::MAX_BYTES || text.split('.').any(str::is_empty) || unprintable, "{text:?}");
        return;
    };
    assert_eq!(dn.to_string(), text);
    assert_eq!(dn.parts().collect::<Vec<_>>().join("."), text);
    for max in [0, 1, 2, 3, 20] {
        assert!(dn.shorten(&Dictionary::default(), max).width() <= max, "{text:?}");
    }
    if let Some(parent) = dn.parent() {
        assert!(dn.is_within(&parent) && !parent.is_within(&dn) && parent < dn, "{text:?}");
        assert_eq!(parent.child(dn.parts().next_back().expect("it is not the root")), Ok(dn.clone()));
    }
    if let Ok(child) = dn.child("x") {
        assert_eq!(child.parent(), Some(dn));
    }
}

/// However bytes are cut into writes, they are stored as the same lines, which are those of the plainest model.
/// The first two bytes say how long lines may be and how the rest is cut.
pub fn check_lines(input: &[u8]) {
    let [limit, chunk, bytes @ ..] = input else { return };
    let limit = usize::from(*limit).max(1);
    let journal = Journal::new(Limits { line_bytes: limit, bytes_per_dn: 64 << 20, ..Limits::default() });
    let mut writer = journal.writer(&Dn::root(), WriterOptions::new("x").generation(7));
    let mut rest = bytes;
    let mut length = usize::from(*chunk);
    while !rest.is_empty() {
        length = (length * 5 + 1) % 67;
        let (now, later) = rest.split_at(length.min(rest.len()));
        assert_eq!(writer.write(now).expect("it never fails"), now.len());
        rest = later;
    }
    writer.close();
    let stored: Vec<Raw> = all(&journal)
        .into_iter()
        .map(|entry| match entry.body {
            Body::Raw(raw) => raw,
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = model(bytes);
    assert_eq!(stored.len(), expected.len());
    for (raw, line) in stored.iter().zip(expected) {
        let cut = line.len() > limit;
        let (text, lossy) = model_text(&line[..line.len().min(limit)], cut);
        assert_eq!((raw.text.as_str(), raw.lossy), (text.as_str(), lossy), "{line:?}");
        assert_eq!(raw.original_bytes, cut.then_some(line.len() as u64));
        assert_eq!((raw.origin.stream.as_str(), raw.origin.generation), ("x", 7));
    }
}

fn model(bytes: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').collect();
    let tail = lines.pop().expect("there is always one piece");
    let mut lines: Vec<&[u8]> =
        lines.into_iter().map(|line| line.strip_suffix(b"\r").unwrap_or(line)).collect();
    lines.extend((!tail.is_empty()).then_some(tail));
    lines
}

/// Chunk by chunk: what is not UTF-8 becomes U+FFFD, but half a character before a cut nothing.
fn model_text(bytes: &[u8], cut: bool) -> (String, bool) {
    let (mut text, mut lossy) = (String::new(), false);
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let half = cut && chunks.peek().is_none() && is_half(chunk.invalid());
        if !chunk.invalid().is_empty() && !half {
            text.push('\u{fffd}');
            lossy = true;
        }
    }
    (text, lossy)
}

fn is_half(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
