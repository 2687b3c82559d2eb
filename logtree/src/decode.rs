//! Records back into entries.

use crate::record::{CUT, LOSSY, TAIL, tag, time};
use crate::{Body, Dn, Entry, Field, Level, Leveled, Origin, Raw, Value};

/// Reads a record written by [`Record`](crate::record::Record).
pub(crate) fn decode(dn: Dn, record: &[u8]) -> Entry {
    let mut fields = Fields(&record[4..record.len() - TAIL]);
    let [class, flags, _, _] = fields.array();
    let seq = u64::from_le_bytes(fields.array());
    let time = time(i64::from_le_bytes(fields.array()));
    let body = match Level::ALL.get(usize::from(class)) {
        Some(&level) => Body::Leveled(leveled(level, fields)),
        None => {
            let origin = fields.origin();
            let original_bytes = (flags & CUT != 0).then(|| u64::from_le_bytes(fields.last()));
            Body::Raw(Raw { origin, text: fields.rest(), original_bytes, lossy: flags & LOSSY != 0 })
        }
    };
    Entry { seq, dn, time, body }
}

fn leveled(level: Level, mut from: Fields<'_>) -> Leveled {
    let line = u32::from_le_bytes(from.array());
    let file = from.name();
    let mut leveled = Leveled {
        level,
        file,
        line,
        message: String::new(),
        fields: Vec::new(),
        origin: None,
        original_bytes: None,
    };
    while !from.0.is_empty() {
        let [tag] = from.array();
        match tag {
            tag::MESSAGE => leveled.message = from.text(),
            tag::CUT => leveled.original_bytes = Some(u64::from_le_bytes(from.array())),
            tag::ORIGIN => leveled.origin = Some(from.origin()),
            tag => {
                let name = from.name();
                let value = match tag {
                    tag::INT => Value::Int(i64::from_le_bytes(from.array())),
                    tag::UINT => Value::Uint(u64::from_le_bytes(from.array())),
                    tag::FLOAT => Value::Float(f64::from_le_bytes(from.array())),
                    tag::BOOL => Value::Bool(from.array() != [0]),
                    _ => Value::Text(from.text()),
                };
                leveled.fields.push(Field { name, value });
            }
        }
    }
    leveled
}

/// What is left to read of a record. Records are written by this crate alone, so a short one is a bug.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (array, rest) = self.0.split_first_chunk().expect("records are whole");
        self.0 = rest;
        *array
    }

    fn last<const N: usize>(&mut self) -> [u8; N] {
        let (rest, array) = self.0.split_last_chunk().expect("records are whole");
        self.0 = rest;
        *array
    }

    fn string(&mut self, length: usize) -> String {
        let (text, rest) = self.0.split_at(length);
        self.0 = rest;
        String::from_utf8_lossy(text).into_owned()
    }

    fn name(&mut self) -> String {
        let [length] = self.array();
        self.string(length.into())
    }

    fn text(&mut self) -> String {
        let length = u32::from_le_bytes(self.array());
        self.string(length as usize)
    }

    fn rest(&mut self) -> String {
        self.string(self.0.len())
    }

    fn origin(&mut self) -> Origin {
        let generation = u64::from_le_bytes(self.array());
        Origin { generation, stream: self.name() }
    }
}
