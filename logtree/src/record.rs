//! How an entry lies in a ring: written once, read back as often as asked.
//!
//! ```text
//! length u32 | class u8 | flags u8 | 0 u16 | seq u64 | time i64 | payload | length u32
//! ```
//! The length, of the whole record, stands at both ends so that a ring can be walked both ways.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};

use crate::text::floor_boundary;
use crate::{Level, Message, Origin, Value};

/// Bytes after the payload.
pub(crate) const TAIL: usize = 4;
/// Longest stream or file name kept, in bytes.
const NAME: usize = 255;
/// A record's class is its level, or this.
pub(crate) const RAW: u8 = 6;

/// Flags of raw records.
pub(crate) const LOSSY: u8 = 1;
pub(crate) const CUT: u8 = 2;

/// What follows the source position in a leveled payload, each with its tag before it.
pub(crate) mod tag {
    pub(crate) const MESSAGE: u8 = 0;
    pub(crate) const TEXT: u8 = 1;
    pub(crate) const INT: u8 = 2;
    pub(crate) const UINT: u8 = 3;
    pub(crate) const FLOAT: u8 = 4;
    pub(crate) const BOOL: u8 = 5;
    pub(crate) const CUT: u8 = 6;
    pub(crate) const ORIGIN: u8 = 7;
}

/// Nanoseconds since 1970, at the nearest end if `time` is outside of the years 1677 to 2262.
pub(crate) fn nanos(time: SystemTime) -> i64 {
    let (sign, distance) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (1, after),
        Err(before) => (-1, before.duration()),
    };
    let seconds = i64::try_from(distance.as_secs()).unwrap_or(i64::MAX);
    sign * seconds.saturating_mul(1_000_000_000).saturating_add(i64::from(distance.subsec_nanos()))
}

/// What time it is, as [`nanos`] has it.
pub(crate) fn now() -> i64 {
    // Not by way of `SystemTime`, whose arithmetic costs half as much as the clock itself.
    match clock_gettime(ClockId::CLOCK_REALTIME) {
        Ok(now) => now.tv_sec().saturating_mul(1_000_000_000).saturating_add(now.tv_nsec()),
        Err(_) => nanos(SystemTime::now()),
    }
}

/// The inverse of [`nanos`].
pub(crate) fn time(nanos: i64) -> SystemTime {
    let distance = Duration::from_nanos(nanos.unsigned_abs());
    if nanos < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

/// A record being written; its buffer is used again for the next one.
#[derive(Debug, Default)]
pub(crate) struct Record {
    buf: Vec<u8>,
    /// How much of a raw record is the same for all lines of its origin.
    prefix: usize,
    /// Where a leveled record is cut.
    limit: usize,
    /// Bytes of text given, and of those left out.
    given: u64,
    lost: u64,
}

impl Record {
    fn begin(&mut self, class: u8, time: i64) {
        self.buf.clear();
        self.buf.extend_from_slice(&[0, 0, 0, 0, class, 0, 0, 0]);
        self.buf.extend_from_slice(&[0; 8]);
        self.buf.extend_from_slice(&time.to_le_bytes());
    }

    fn end(&mut self) {
        let length = (self.buf.len() + TAIL) as u32;
        self.buf[..4].copy_from_slice(&length.to_le_bytes());
        self.buf.extend_from_slice(&length.to_le_bytes());
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buf
    }

    pub(crate) fn class(&self) -> u8 {
        self.buf[4]
    }

    pub(crate) fn set_seq(&mut self, seq: u64) {
        self.buf[8..16].copy_from_slice(&seq.to_le_bytes());
    }

    /// A record for raw lines of one origin, to be filled by [`Record::raw`] for each.
    pub(crate) fn raw_of(origin: &Origin) -> Record {
        let mut record = Record::default();
        record.begin(RAW, 0);
        record.origin(origin);
        record.prefix = record.buf.len();
        record
    }

    /// Writes a raw line, which must be UTF-8. `original_bytes` is given if `text` is only its beginning.
    pub(crate) fn raw(&mut self, time: i64, text: &[u8], original_bytes: Option<u64>, lossy: bool) {
        self.buf.truncate(self.prefix);
        self.buf[5] = if lossy { LOSSY } else { 0 } | if original_bytes.is_some() { CUT } else { 0 };
        self.buf[16..24].copy_from_slice(&time.to_le_bytes());
        self.buf.extend_from_slice(text);
        if let Some(bytes) = original_bytes {
            self.buf.extend_from_slice(&bytes.to_le_bytes());
        }
        self.end();
    }

    fn origin(&mut self, origin: &Origin) {
        self.buf.extend_from_slice(&origin.generation.to_le_bytes());
        self.name(&origin.stream);
    }

    fn name(&mut self, name: &str) {
        let name = &name[..floor_boundary(name, NAME)];
        self.buf.push(name.len() as u8);
        self.buf.extend_from_slice(name.as_bytes());
    }

    /// Begins a leveled record of at most about `limit` bytes.
    pub(crate) fn leveled(&mut self, level: Level, time: i64, file: &str, line: u32, limit: usize) {
        self.begin(level as u8, time);
        self.buf.extend_from_slice(&line.to_le_bytes());
        self.name(file);
        (self.limit, self.given, self.lost) = (self.buf.len() + limit, 0, 0);
    }

    /// Notes the output this record was parsed from.
    pub(crate) fn parsed_from(&mut self, origin: &Origin) {
        self.buf.push(tag::ORIGIN);
        self.origin(origin);
    }

    /// The message, without the newlines at its ends.
    pub(crate) fn message(&mut self, message: fmt::Arguments<'_>) {
        self.buf.push(tag::MESSAGE);
        let length_at = self.reserve_length();
        self.push_args(message);
        self.trim_newlines(length_at + 4);
        self.fill_length(length_at);
    }

    /// Cuts newlines off both ends of what was written since `start`.
    fn trim_newlines(&mut self, start: usize) {
        let text = &self.buf[start..];
        let end = text.iter().rposition(|&b| b != b'\n').map_or(0, |last| last + 1);
        let begin = text[..end].iter().position(|&b| b != b'\n').unwrap_or(end);
        self.buf.truncate(start + end);
        self.buf.drain(start..start + begin);
    }

    pub(crate) fn field(&mut self, name: &str, value: &Value) {
        match value {
            Value::Text(text) => self.text(name, |record| record.push_text(text)),
            Value::Int(value) => self.number(tag::INT, name, &value.to_le_bytes()),
            Value::Uint(value) => self.number(tag::UINT, name, &value.to_le_bytes()),
            Value::Float(value) => self.number(tag::FLOAT, name, &value.to_le_bytes()),
            Value::Bool(value) => self.number(tag::BOOL, name, &[u8::from(*value)]),
        }
    }

    /// A field of text, written by `value` with [`Record::push_text`] or [`Record::push_args`].
    pub(crate) fn text(&mut self, name: &str, value: impl FnOnce(&mut Record)) {
        if !self.field_name(tag::TEXT, name, 4) {
            // Nothing is kept of it, but it is counted.
            return value(self);
        }
        let length_at = self.reserve_length();
        value(self);
        self.fill_length(length_at);
    }

    fn number(&mut self, tag: u8, name: &str, bytes: &[u8]) {
        if self.field_name(tag, name, bytes.len()) {
            self.buf.extend_from_slice(bytes);
        }
    }

    /// Begins a field, or counts it as lost if it and `value` bytes do not fit. Nothing is kept after the first loss.
    fn field_name(&mut self, tag: u8, name: &str, value: usize) -> bool {
        self.given += name.len() as u64;
        if self.lost > 0 || self.buf.len() + 2 + name.len().min(NAME) + value > self.limit {
            self.lost += name.len().max(1) as u64;
            return false;
        }
        self.buf.push(tag);
        self.name(name);
        true
    }

    fn reserve_length(&mut self) -> usize {
        self.buf.extend_from_slice(&[0; 4]);
        self.buf.len() - 4
    }

    fn fill_length(&mut self, at: usize) {
        let length = (self.buf.len() - at - 4) as u32;
        self.buf[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }

    pub(crate) fn push_args(&mut self, text: fmt::Arguments<'_>) {
        // Writing into the record cannot fail; a `Debug` that reports failure has said what it had to.
        let _ = fmt::write(&mut TextOf(self), text);
    }

    pub(crate) fn push_text(&mut self, text: &str) {
        self.given += text.len() as u64;
        let room = if self.lost > 0 { 0 } else { self.limit.saturating_sub(self.buf.len()) };
        let kept = floor_boundary(text, room);
        self.buf.extend_from_slice(&text.as_bytes()[..kept]);
        self.lost += (text.len() - kept) as u64;
    }

    /// Ends a leveled record. `original_bytes` is given if it was made of the beginning of a longer line.
    pub(crate) fn end_leveled(&mut self, original_bytes: Option<u64>) {
        if let Some(bytes) = original_bytes.or((self.lost > 0).then_some(self.given)) {
            self.buf.push(tag::CUT);
            self.buf.extend_from_slice(&bytes.to_le_bytes());
        }
        self.end();
    }

    /// Writes a whole ready message.
    pub(crate) fn ready(
        &mut self,
        message: &Message,
        now: i64,
        origin: Option<&Origin>,
        limit: usize,
        original_bytes: Option<u64>,
    ) {
        let time = message.time.map_or(now, nanos);
        self.leveled(message.level, time, source_file(&message.file), message.line, limit);
        if let Some(origin) = origin {
            self.parsed_from(origin);
        }
        self.message(format_args!("{}", message.text));
        for field in &message.fields {
            self.field(&field.name, &field.value);
        }
        self.end_leveled(original_bytes);
    }
}

/// Where `Display` and `Debug` implementations write to.
struct TextOf<'a>(&'a mut Record);

impl fmt::Write for TextOf<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_text(text);
        Ok(())
    }
}

/// The part of a source path that says something: of a dependency's absolute path what begins at its crate.
pub(crate) fn source_file(path: &str) -> &str {
    if !path.starts_with('/') {
        return path;
    }
    let Some((head, _)) = path.rsplit_once("/src/") else {
        return path.rsplit_once('/').map_or(path, |(_, base)| base);
    };
    &path[head.rfind('/').map_or(0, |slash| slash + 1)..]
}

/// The beginning of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    pub(crate) length: usize,
    pub(crate) class: u8,
    pub(crate) seq: u64,
}

impl Head {
    pub(crate) fn of(bytes: [u8; 16]) -> Head {
        let [l0, l1, l2, l3, class, _, _, _, seq @ ..] = bytes;
        Head { length: u32::from_le_bytes([l0, l1, l2, l3]) as usize, class, seq: u64::from_le_bytes(seq) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode;
    use crate::{Body, Dn, Leveled};

    fn round_trip(message: &Message, limit: usize) -> Leveled {
        let mut record = Record::default();
        record.ready(message, 0, None, limit, None);
        match decode(Dn::root(), record.bytes()).body {
            Body::Leveled(leveled) => leveled,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_message_comes_back_as_it_went_in() {
        let message = Message::new(Level::Warn, "two\nlines")
            .field("text", "ü")
            .field("int", -1i64)
            .field("uint", u64::MAX)
            .field("float", 0.5)
            .field("bool", true);
        let back = round_trip(&message, 1000);
        assert_eq!((back.level, back.message.as_str(), back.line), (Level::Warn, "two\nlines", message.line));
        assert_eq!(back.fields, message.fields);
        assert_eq!(back.original_bytes, None);
    }

    #[test]
    fn newlines_at_the_ends_of_a_message_are_dropped() {
        assert_eq!(round_trip(&Message::new(Level::Info, "\n\na\n\nb\n"), 1000).message, "a\n\nb");
        assert_eq!(round_trip(&Message::new(Level::Info, "\n\n"), 1000).message, "");
    }

    #[test]
    fn a_long_message_is_cut_at_a_character_and_says_how_long_it_was() {
        let back = round_trip(&Message::new(Level::Info, "ü".repeat(100)).field("lost", "too"), 101);
        assert_eq!(back.message, "ü".repeat((101 - 5) / 2));
        assert_eq!(back.original_bytes, Some(207));
        assert_eq!(back.fields, []);
    }

    #[test]
    fn times_before_1970_and_out_of_range_survive() {
        assert_eq!(time(nanos(UNIX_EPOCH - Duration::from_millis(1))), UNIX_EPOCH - Duration::from_millis(1));
        assert_eq!(nanos(UNIX_EPOCH + Duration::from_secs(1 << 40)), i64::MAX);
    }

    #[test]
    fn source_files_begin_at_their_crate() {
        assert_eq!(source_file("logtree/src/dn.rs"), "logtree/src/dn.rs");
        assert_eq!(
            source_file("/home/x/registry/src/index/tokio-1.0.0/src/net/tcp.rs"),
            "tokio-1.0.0/src/net/tcp.rs"
        );
        assert_eq!(source_file("/build/main.go"), "main.go");
    }
}
