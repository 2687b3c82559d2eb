//! Checks over arbitrary input, which property tests and fuzz targets share. Each panics if its property does
//! not hold.

use std::io::Write;
use std::time::{Duration, SystemTime};

use unicode_width::UnicodeWidthStr;

use crate::parse::{self, LineContext, LineParser};
use crate::text::is_unprintable;
use crate::{
    Dn, EntryBody, Level, LogEntry, LogLimits, LogMessage, LogQuery, LogStore, NameAbbreviations, RawLine,
    WriterOptions, render,
};

/// [`parse::klog_line`] accepts or rejects any line.
pub fn fuzz_klog(line: &[u8]) {
    check_parser(parse::klog_line, line);
}

/// [`parse::json_line`] accepts or rejects any line.
pub fn fuzz_json(line: &[u8]) {
    check_parser(parse::json_line, line);
}

/// [`parse::etcd_line`], which is zap or capnslog, accepts or rejects any line.
pub fn fuzz_etcd(line: &[u8]) {
    check_parser(parse::etcd_line, line);
}

/// [`parse::level_prefix_line`] accepts or rejects any line.
pub fn fuzz_level_prefix(line: &[u8]) {
    check_parser(parse::level_prefix_line, line);
}

/// [`parse::logfmt_line`] accepts or rejects any line.
pub fn fuzz_logfmt(line: &[u8]) {
    check_parser(parse::logfmt_line, line);
}

/// [`parse::kmsg_record`] accepts or rejects any record.
pub fn fuzz_kmsg(record: &[u8]) {
    let message = parse::kmsg_record(&String::from_utf8_lossy(record)).map(|record| record.message);
    let store = LogStore::default();
    store
        .append_message(&Dn::root(), message.unwrap_or_else(|| LogMessage::new(Level::Info, "not a record")));
    read_all(&store).iter().for_each(fuzz_rendering);
}

/// A line is stored once, as a message if the parser accepts it, otherwise raw; the entry can be rendered.
fn check_parser(parser: LineParser, line: &[u8]) {
    let line: Vec<u8> = line.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte }).collect();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_000_000);
    let text = String::from_utf8_lossy(&line);
    let parsed = parser(text.strip_suffix('\r').unwrap_or(&text), &LineContext::new(now)).is_some();

    let store = LogStore::default();
    let mut writer = store.line_writer(&Dn::root(), WriterOptions::new("x").line_parser(parser));
    writer.write_all(&line).expect("a write never fails");
    writer.write_all(b"\n").expect("a write never fails");
    let entries = read_all(&store);
    assert_eq!(entries.len(), 1, "{text:?}");
    let is_leveled = matches!(entries[0].body, EntryBody::Leveled(_));
    if line.len() < LogLimits::default().message_bytes {
        assert_eq!(is_leveled, parsed, "{text:?}");
    }
    fuzz_rendering(&entries[0]);
}

fn read_all(store: &LogStore) -> Vec<LogEntry> {
    store
        .open_reader(LogQuery::of_dn(Dn::root()).include_descendants())
        .expect("a valid query")
        .read_backlog()
}

/// Every rendering of an entry is safe to print, compact text fits the width, JSON is valid and on one line.
pub fn fuzz_rendering(entry: &LogEntry) {
    let safe = |text: &str| assert!(!text.contains(|c| is_unprintable(c) && c != '\n'), "{text:?}");
    safe(&render::full_text(entry));
    let json = render::json_object(entry);
    assert!(!json.contains('\n'), "{json}");
    safe(&json);
    let value: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(value["seq"], entry.seq);
    for width in [1, 2, 3, 10, 59, 60, 79, 80, 120] {
        let compact = render::compact_text(entry, &NameAbbreviations::default(), Some(width));
        safe(&compact);
        // The letter, a space and one character need three columns.
        for line in compact.split('\n') {
            assert!(line.width() <= width.max(3), "{width}: {line:?}");
        }
    }
}

/// Any text parses as a name or is rejected, and a name displays as its text.
pub fn fuzz_dn(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let Ok(dn) = text.parse::<Dn>() else {
        let unprintable = text.chars().any(|c| c.escape_debug().len() > 1);
        assert!(text.len() > Dn::MAX_BYTES || text.split('.').any(str::is_empty) || unprintable, "{text:?}");
        return;
    };
    assert_eq!(dn.to_string(), text);
    assert_eq!(dn.parts().collect::<Vec<_>>().join("."), text);
    for max in [0, 1, 2, 3, 20] {
        assert!(dn.shorten_to_width(&NameAbbreviations::default(), max).width() <= max, "{text:?}");
    }
    if let Some(parent) = dn.parent() {
        assert!(dn.is_within(&parent) && !parent.is_within(&dn) && parent < dn, "{text:?}");
        assert_eq!(parent.child(dn.parts().next_back().expect("the name is not the root")), Ok(dn.clone()));
    }
    if let Ok(child) = dn.child("x") {
        assert_eq!(child.parent(), Some(dn));
    }
}

/// However bytes are split into writes, they are stored as the same lines, which equal those of a simple
/// model. The first two bytes of the input are the limit of lines and the split of the rest.
pub fn fuzz_lines(input: &[u8]) {
    let [limit, chunk, bytes @ ..] = input else { return };
    let limit = usize::from(*limit).max(1);
    let store =
        LogStore::new(LogLimits { line_bytes: limit, bytes_per_dn: 64 << 20, ..LogLimits::default() });
    let mut writer = store.line_writer(&Dn::root(), WriterOptions::new("x").generation(7));
    let mut rest = bytes;
    let mut length = usize::from(*chunk);
    while !rest.is_empty() {
        length = (length * 5 + 1) % 67;
        let (now, later) = rest.split_at(length.min(rest.len()));
        assert_eq!(writer.write(now).expect("a write never fails"), now.len());
        rest = later;
    }
    writer.close();
    let stored: Vec<RawLine> = read_all(&store)
        .into_iter()
        .map(|entry| match entry.body {
            EntryBody::Raw(raw) => raw,
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = model_lines(bytes);
    assert_eq!(stored.len(), expected.len());
    for (raw, line) in stored.iter().zip(expected) {
        let cut = line.len() > limit;
        let (text, lossy) = model_sanitize(&line[..line.len().min(limit)], cut);
        assert_eq!((raw.text.as_str(), raw.lossy), (text.as_str(), lossy), "{line:?}");
        assert_eq!(raw.original_bytes, cut.then_some(line.len() as u64));
        assert_eq!((raw.origin.stream.as_str(), raw.origin.generation), ("x", 7));
    }
}

fn model_lines(bytes: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').collect();
    let tail = lines.pop().expect("a split yields at least one piece");
    let mut lines: Vec<&[u8]> =
        lines.into_iter().map(|line| line.strip_suffix(b"\r").unwrap_or(line)).collect();
    lines.extend((!tail.is_empty()).then_some(tail));
    lines
}

/// Works chunk by chunk: invalid UTF-8 becomes U+FFFD, and a partial character before a cut is omitted.
fn model_sanitize(bytes: &[u8], cut: bool) -> (String, bool) {
    let (mut text, mut lossy) = (String::new(), false);
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let half = cut && chunks.peek().is_none() && is_partial_character(chunk.invalid());
        if !chunk.invalid().is_empty() && !half {
            text.push('\u{fffd}');
            lossy = true;
        }
    }
    (text, lossy)
}

fn is_partial_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
