//! A block of consecutive records of one name.

use crate::query::ClassMask;
use crate::record::{RecordHead, TRAILER_BYTES};
use crate::ring::ClassCounts;

/// Records, one after the other, in a buffer that never grows.
///
/// Invariant: `counts[c]` records of class `c` are in it and not evicted.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Position of its first byte in the ring.
    pub(crate) start: u64,
    bytes: Vec<u8>,
    pub(crate) counts: ClassCounts,
}

impl Segment {
    pub(crate) fn new(start: u64, mut buffer: Vec<u8>) -> Segment {
        buffer.clear();
        Segment { start, bytes: buffer, counts: [0; 7] }
    }

    /// Position after its last byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub(crate) fn has_room(&self, length: usize) -> bool {
        self.bytes.capacity() - self.bytes.len() >= length
    }

    /// Whether a record of these classes is in it.
    pub(crate) fn has_class(&self, mask: ClassMask) -> bool {
        mask.classes().any(|class| self.counts[class] > 0)
    }

    /// Appends a record, for which there must be room.
    #[inline]
    pub(crate) fn push(&mut self, record: &[u8], class: u8) {
        self.bytes.extend_from_slice(record);
        self.counts[usize::from(class)] += 1;
    }

    /// The buffer, to be used again.
    pub(crate) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    /// Reads the head of the record at a position.
    #[inline]
    pub(crate) fn read_head(&self, at: u64) -> RecordHead {
        let at = (at - self.start) as usize;
        RecordHead::from_bytes(&self.bytes[at..])
    }

    /// The position of the record that ends at `end`.
    pub(crate) fn record_before(&self, end: u64) -> u64 {
        let at = (end - self.start) as usize - TRAILER_BYTES;
        let length = self.bytes[at..].first_chunk().expect("records are complete");
        end - u64::from(u32::from_le_bytes(*length))
    }

    /// Copies whole records from position `at` on, up to `limit` bytes, but at least one.
    pub(crate) fn copy_records(&self, at: u64, limit: usize, to: &mut Vec<u8>) {
        let begin = (at - self.start) as usize;
        let mut end = begin + self.read_head(at).length;
        while end < self.bytes.len() {
            let length = RecordHead::from_bytes(&self.bytes[end..]).length;
            if end + length - begin > limit {
                break;
            }
            end += length;
        }
        to.extend_from_slice(&self.bytes[begin..end]);
    }
}
