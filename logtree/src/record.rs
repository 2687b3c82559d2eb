//! The encoding of an entry in a ring: written once, decoded by every reader.
//!
//! ```text
//! length u32 | class u8 | flags u8 | padding u8 | 0 u8 | seq u64 | time i64 | payload | padding | length u32
//! ```
//! The length is that of the whole record, in bytes: a multiple of eight, for which up to seven bytes of padding
//! follow the payload. It is stored at both ends, so that a ring can be walked in both directions.

use std::fmt;
use std::time::SystemTime;

use crate::class::{ClassMask, RAW_CLASS};
use crate::clock::unix_nanos;
use crate::loss::Loss;
use crate::text::floor_char_boundary;
use crate::{FieldValue, Level, LogMessage, StreamOrigin};

/// A record consists of words of this many bytes.
pub(crate) const WORD_BYTES: usize = size_of::<u64>();
/// Bytes after the payload and its padding.
pub(crate) const TRAILER_BYTES: usize = 4;
/// Maximum length of a stored stream, file or field name, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Memory that a buffer keeps for its next record.
const KEPT_CAPACITY: usize = 512;
pub(crate) const LOSSY_FLAG: u8 = 1;
pub(crate) const CUT_FLAG: u8 = 2;

/// The parts after the source position in a leveled payload, each after its tag.
pub(crate) mod tag {
    pub(crate) const MESSAGE: u8 = 0;
    pub(crate) const TEXT: u8 = 1;
    pub(crate) const INT: u8 = 2;
    pub(crate) const UINT: u8 = 3;
    pub(crate) const FLOAT: u8 = 4;
    pub(crate) const BOOL: u8 = 5;
    pub(crate) const CUT: u8 = 6;
    pub(crate) const ORIGIN: u8 = 7;
    pub(crate) const CLAIMED_TIME: u8 = 8;
}

/// Encodes one record at a time; the buffer is reused for the next one.
#[derive(Debug, Default)]
pub(crate) struct RecordBuffer {
    buf: Vec<u8>,
    /// Length of the part of a raw record that is the same for all lines of its origin.
    prefix: usize,
    /// Length at which a leveled record is cut.
    limit: usize,
    /// Bytes of text passed in, and how many of them were left out.
    given_bytes: u64,
    lost_bytes: u64,
}

impl RecordBuffer {
    fn start_record(&mut self, class: u8, time: i64) {
        self.buf.clear();
        // The length follows in `finish_record`, and the number when the ring appends the record.
        self.buf.extend_from_slice(&[0, 0, 0, 0, class, 0, 0, 0]);
        self.buf.extend_from_slice(&[0; 8]);
        self.buf.extend_from_slice(&time.to_le_bytes());
    }

    fn finish_record(&mut self) {
        let unpadded = self.buf.len() + TRAILER_BYTES;
        let length = unpadded.next_multiple_of(WORD_BYTES);
        // A constant number of bytes is stored without a call.
        self.buf.extend_from_slice(&[0; TRAILER_BYTES + WORD_BYTES - 1]);
        self.buf.truncate(length);
        let length_bytes = (length as u32).to_le_bytes();
        self.buf[..4].copy_from_slice(&length_bytes);
        self.buf[6] = (length - unpadded) as u8;
        self.buf[length - TRAILER_BYTES..].copy_from_slice(&length_bytes);
    }

    /// Frees the memory of a large record, so that an idle writer keeps little.
    pub(crate) fn free_memory(&mut self) {
        if self.buf.capacity() > KEPT_CAPACITY {
            self.buf.truncate(self.prefix);
            // `shrink_to` keeps all content, which was therefore cut to the prefix.
            self.buf.shrink_to(KEPT_CAPACITY);
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buf
    }

    pub(crate) fn class(&self) -> u8 {
        self.buf[4]
    }

    /// What a name loses with this record, if it has no other.
    pub(crate) fn loss(&self) -> Loss {
        let is_warning = ClassMask::LEVELED.at_least(Level::Warn).contains(self.class());
        if is_warning { Loss::Warnings } else { Loss::OneLine }
    }

    pub(crate) fn set_seq(&mut self, seq: u64) {
        self.buf[8..16].copy_from_slice(&seq.to_le_bytes());
    }

    /// A record for raw lines of one origin; [`RecordBuffer::write_raw_line`] fills it for each line.
    pub(crate) fn for_raw_lines(origin: &StreamOrigin) -> RecordBuffer {
        let mut record = RecordBuffer::default();
        record.start_record(RAW_CLASS, 0);
        record.push_origin(origin);
        record.prefix = record.buf.len();
        record
    }

    /// Writes a raw line, which must be UTF-8. `original_bytes` is set if `text` is only the start of the
    /// line.
    pub(crate) fn write_raw_line(
        &mut self,
        time: i64,
        text: &[u8],
        original_bytes: Option<u64>,
        lossy: bool,
    ) {
        self.buf.truncate(self.prefix);
        self.buf[5] =
            if lossy { LOSSY_FLAG } else { 0 } | if original_bytes.is_some() { CUT_FLAG } else { 0 };
        self.buf[16..24].copy_from_slice(&time.to_le_bytes());
        self.buf.extend_from_slice(text);
        if let Some(bytes) = original_bytes {
            self.buf.extend_from_slice(&bytes.to_le_bytes());
        }
        self.finish_record();
    }

    fn push_origin(&mut self, origin: &StreamOrigin) {
        self.buf.extend_from_slice(&origin.generation.to_le_bytes());
        self.push_name(&origin.stream);
    }

    fn push_name(&mut self, name: &str) {
        let name = &name[..floor_char_boundary(name, MAX_NAME_BYTES)];
        self.buf.push(name.len() as u8);
        self.buf.extend_from_slice(name.as_bytes());
    }

    /// Starts a leveled record of at most about `limit` bytes.
    pub(crate) fn start_leveled(&mut self, level: Level, time: i64, file: &str, line: u32, limit: usize) {
        self.start_record(level as u8, time);
        self.buf.extend_from_slice(&line.to_le_bytes());
        self.push_name(file);
        (self.limit, self.given_bytes, self.lost_bytes) = (self.buf.len() + limit, 0, 0);
    }

    /// Adds the output that this record was parsed from.
    pub(crate) fn push_parsed_origin(&mut self, origin: &StreamOrigin) {
        self.buf.push(tag::ORIGIN);
        self.push_origin(origin);
    }

    fn push_claimed_time(&mut self, time: SystemTime) {
        self.buf.push(tag::CLAIMED_TIME);
        self.buf.extend_from_slice(&unix_nanos(time).to_le_bytes());
    }

    /// Adds the message, without leading and trailing newlines.
    pub(crate) fn push_message(&mut self, message: fmt::Arguments<'_>) {
        self.buf.push(tag::MESSAGE);
        let length_at = self.reserve_length();
        self.push_args(message);
        self.trim_newlines(length_at + 4);
        self.fill_length(length_at);
    }

    /// Trims newlines at both ends of the bytes written since `start`.
    fn trim_newlines(&mut self, start: usize) {
        let text = &self.buf[start..];
        let end = text.iter().rposition(|&b| b != b'\n').map_or(0, |last| last + 1);
        let begin = text[..end].iter().position(|&b| b != b'\n').unwrap_or(end);
        self.buf.truncate(start + end);
        self.buf.drain(start..start + begin);
    }

    pub(crate) fn push_field(&mut self, name: &str, value: &FieldValue) {
        match value {
            FieldValue::Text(text) => self.push_text_field(name, |record| record.push_text(text)),
            FieldValue::Int(value) => self.push_number_field(tag::INT, name, &value.to_le_bytes()),
            FieldValue::Uint(value) => self.push_number_field(tag::UINT, name, &value.to_le_bytes()),
            FieldValue::Float(value) => self.push_number_field(tag::FLOAT, name, &value.to_le_bytes()),
            FieldValue::Bool(value) => self.push_number_field(tag::BOOL, name, &[u8::from(*value)]),
        }
    }

    /// Adds a text field, which `value` writes with [`RecordBuffer::push_text`] or
    /// [`RecordBuffer::push_args`].
    pub(crate) fn push_text_field(&mut self, name: &str, value: impl FnOnce(&mut RecordBuffer)) {
        if !self.push_field_name(tag::TEXT, name, 4) {
            // The field does not fit: its text is counted, but not stored.
            return value(self);
        }
        let length_at = self.reserve_length();
        value(self);
        self.fill_length(length_at);
    }

    fn push_number_field(&mut self, tag: u8, name: &str, bytes: &[u8]) {
        if self.push_field_name(tag, name, bytes.len()) {
            self.buf.extend_from_slice(bytes);
        }
    }

    /// Starts a field, or counts it as lost if the name and `value` bytes do not fit. Nothing is stored after
    /// the first loss.
    fn push_field_name(&mut self, tag: u8, name: &str, value: usize) -> bool {
        self.given_bytes += name.len() as u64;
        if self.lost_bytes > 0 || self.buf.len() + 2 + name.len().min(MAX_NAME_BYTES) + value > self.limit {
            // At least 1, because 0 would mean that nothing is lost.
            self.lost_bytes += name.len().max(1) as u64;
            return false;
        }
        self.buf.push(tag);
        self.push_name(name);
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
        // Writing into the record can't fail; if a `Debug` implementation fails, its output so far is stored.
        let _ = fmt::write(&mut RecordTextWriter(self), text);
    }

    pub(crate) fn push_text(&mut self, text: &str) {
        self.given_bytes += text.len() as u64;
        // After the first loss nothing is stored: the entry ends early and has no holes.
        let room = if self.lost_bytes > 0 { 0 } else { self.limit.saturating_sub(self.buf.len()) };
        let kept = floor_char_boundary(text, room);
        self.buf.extend_from_slice(&text.as_bytes()[..kept]);
        self.lost_bytes += (text.len() - kept) as u64;
    }

    /// Ends a leveled record. `original_bytes` is set if it was parsed from the start of a longer line.
    pub(crate) fn finish_leveled(&mut self, original_bytes: Option<u64>) {
        if let Some(bytes) = original_bytes.or((self.lost_bytes > 0).then_some(self.given_bytes)) {
            self.buf.push(tag::CUT);
            self.buf.extend_from_slice(&bytes.to_le_bytes());
        }
        self.finish_record();
    }

    pub(crate) fn write_message(
        &mut self,
        message: &LogMessage,
        now: i64,
        origin: Option<&StreamOrigin>,
        limit: usize,
        original_bytes: Option<u64>,
    ) {
        self.start_leveled(message.level, now, short_source_path(&message.file), message.line, limit);
        if let Some(time) = message.claimed_time {
            self.push_claimed_time(time);
        }
        if let Some(origin) = origin {
            self.push_parsed_origin(origin);
        }
        self.push_message(format_args!("{}", message.text));
        for field in &message.fields {
            self.push_field(&field.name, &field.value);
        }
        self.finish_leveled(original_bytes);
    }
}

/// The writer for `Display` and `Debug` implementations.
struct RecordTextWriter<'a>(&'a mut RecordBuffer);

impl fmt::Write for RecordTextWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_text(text);
        Ok(())
    }
}

/// The relevant part of a source path: an absolute path of a dependency starts at its crate's directory.
pub(crate) fn short_source_path(path: &str) -> &str {
    if !path.starts_with('/') {
        return path;
    }
    let Some((head, _)) = path.rsplit_once("/src/") else {
        return path.rsplit_once('/').map_or(path, |(_, base)| base);
    };
    &path[head.rfind('/').map_or(0, |slash| slash + 1)..]
}

/// The first fields of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordHead {
    pub(crate) length: usize,
    pub(crate) class: u8,
    pub(crate) seq: u64,
}

impl RecordHead {
    /// The head of a record that starts with these words.
    #[inline]
    pub(crate) fn from_words(first: u64, seq: u64) -> RecordHead {
        RecordHead { length: first as u32 as usize, class: (first >> 32) as u8, seq }
    }

    /// The head of the record at the start of these bytes.
    #[inline]
    pub(crate) fn from_bytes(bytes: &[u8]) -> RecordHead {
        let words = bytes.as_chunks::<WORD_BYTES>().0;
        let [first, seq] = *words.first_chunk::<2>().expect("records are complete");
        RecordHead::from_words(u64::from_le_bytes(first), u64::from_le_bytes(seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode_record;
    use crate::{Dn, EntryBody, LeveledEntry};

    fn round_trip(message: &LogMessage, limit: usize) -> LeveledEntry {
        let mut record = RecordBuffer::default();
        record.write_message(message, 0, None, limit, None);
        match decode_record(Dn::root(), record.bytes()).body {
            EntryBody::Leveled(leveled) => leveled,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_message_round_trips() {
        let message = LogMessage::new(Level::Warn, "two\nlines")
            .with_field("text", "ü")
            .with_field("int", -1i64)
            .with_field("uint", u64::MAX)
            .with_field("float", 0.5)
            .with_field("bool", true);
        let back = round_trip(&message, 1000);
        assert_eq!((back.level, back.message.as_str(), back.line), (Level::Warn, "two\nlines", message.line));
        assert_eq!(back.fields, message.fields);
        assert_eq!(back.original_bytes, None);
    }

    #[test]
    fn newlines_at_the_ends_of_a_message_are_dropped() {
        assert_eq!(round_trip(&LogMessage::new(Level::Info, "\n\na\n\nb\n"), 1000).message, "a\n\nb");
        assert_eq!(round_trip(&LogMessage::new(Level::Info, "\n\n"), 1000).message, "");
    }

    #[test]
    fn a_long_message_is_cut_at_a_character_and_keeps_its_original_length() {
        let back = round_trip(&LogMessage::new(Level::Info, "ü".repeat(100)).with_field("lost", "too"), 101);
        assert_eq!(back.message, "ü".repeat((101 - 5) / 2));
        assert_eq!(back.original_bytes, Some(207));
        assert_eq!(back.fields, []);
    }

    #[test]
    fn source_files_begin_at_their_crate() {
        assert_eq!(short_source_path("logtree/src/dn.rs"), "logtree/src/dn.rs");
        assert_eq!(
            short_source_path("/home/x/registry/src/index/tokio-1.0.0/src/net/tcp.rs"),
            "tokio-1.0.0/src/net/tcp.rs"
        );
        assert_eq!(short_source_path("/build/main.go"), "main.go");
    }
}
