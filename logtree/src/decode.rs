//! Decodes records into entries.

use crate::clock::{time_from_nanos, wall_time};
use crate::record::{CUT_FLAG, LOSSY_FLAG, TRAILER_BYTES, tag};
use crate::{Dn, EntryBody, FieldValue, Level, LeveledEntry, LogEntry, LogField, RawLine, StreamOrigin};

/// Decodes a record written by [`RecordBuffer`](crate::record::RecordBuffer).
pub(crate) fn decode_record(dn: Dn, record: &[u8]) -> LogEntry {
    let padding = usize::from(record[6]);
    let mut fields = RecordBytes(&record[4..record.len() - TRAILER_BYTES - padding]);
    let [class, flags, _, _] = fields.take_array();
    let seq = u64::from_le_bytes(fields.take_array());
    let time = wall_time(i64::from_le_bytes(fields.take_array()));
    let body = match Level::ALL.get(usize::from(class)) {
        Some(&level) => EntryBody::Leveled(decode_leveled(level, fields)),
        None => {
            // The only class that is no level is that of raw lines.
            let origin = fields.take_origin();
            // Before the text, which has no length in the record and takes the rest.
            let original_bytes =
                (flags & CUT_FLAG != 0).then(|| u64::from_le_bytes(fields.take_last_array()));
            EntryBody::Raw(RawLine {
                origin,
                text: fields.take_rest(),
                original_bytes,
                lossy: flags & LOSSY_FLAG != 0,
            })
        }
    };
    LogEntry { seq, dn, time, body }
}

fn decode_leveled(level: Level, mut from: RecordBytes<'_>) -> LeveledEntry {
    let line = u32::from_le_bytes(from.take_array());
    let file = from.take_name();
    let mut leveled = LeveledEntry {
        level,
        claimed_time: None,
        file,
        line,
        message: String::new(),
        fields: Vec::new(),
        origin: None,
        original_bytes: None,
    };
    while !from.0.is_empty() {
        let [tag] = from.take_array();
        match tag {
            tag::MESSAGE => leveled.message = from.take_text(),
            tag::CUT => leveled.original_bytes = Some(u64::from_le_bytes(from.take_array())),
            tag::CLAIMED_TIME => {
                leveled.claimed_time = Some(time_from_nanos(i64::from_le_bytes(from.take_array())));
            }
            tag::ORIGIN => leveled.origin = Some(from.take_origin()),
            // The others are tags of fields, each with its name.
            tag => {
                let name = from.take_name();
                let value = match tag {
                    tag::INT => FieldValue::Int(i64::from_le_bytes(from.take_array())),
                    tag::UINT => FieldValue::Uint(u64::from_le_bytes(from.take_array())),
                    tag::FLOAT => FieldValue::Float(f64::from_le_bytes(from.take_array())),
                    tag::BOOL => FieldValue::Bool(from.take_array() != [0]),
                    _ => FieldValue::Text(from.take_text()),
                };
                leveled.fields.push(LogField { name, value });
            }
        }
    }
    leveled
}

/// The undecoded rest of a record. Only this crate writes records, so a short one is a bug.
struct RecordBytes<'a>(&'a [u8]);

impl RecordBytes<'_> {
    fn take_array<const N: usize>(&mut self) -> [u8; N] {
        let (array, rest) = self.0.split_first_chunk().expect("records are complete");
        self.0 = rest;
        *array
    }

    fn take_last_array<const N: usize>(&mut self) -> [u8; N] {
        let (rest, array) = self.0.split_last_chunk().expect("records are complete");
        self.0 = rest;
        *array
    }

    fn take_string(&mut self, length: usize) -> String {
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8_lossy(text).into_owned()
    }

    fn take_name(&mut self) -> String {
        let [length] = self.take_array();
        self.take_string(length.into())
    }

    fn take_text(&mut self) -> String {
        let length = u32::from_le_bytes(self.take_array());
        self.take_string(length as usize)
    }

    fn take_rest(&mut self) -> String {
        self.take_string(self.0.len())
    }

    fn take_origin(&mut self) -> StreamOrigin {
        let generation = u64::from_le_bytes(self.take_array());
        StreamOrigin { generation, stream: self.take_name() }
    }
}
