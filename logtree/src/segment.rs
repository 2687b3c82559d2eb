//! A block of consecutive records of one name, which readers read while writers append to it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::class::{ClassCounts, ClassMask};
use crate::record::{RecordHead, WORD_BYTES};

/// Records, one after the other, in memory that never grows.
///
/// Invariant: `counts[c]` records of class `c` are in it and not evicted.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Position of its first byte in the ring.
    pub(crate) start: u64,
    length: usize,
    pub(crate) counts: ClassCounts,
    words: SegmentWords,
}

impl Segment {
    /// The memory in addition to its capacity: itself, the counts of its `Arc`, and what the allocator adds.
    pub(crate) const OVERHEAD_BYTES: usize = size_of::<Segment>() + 4 * size_of::<usize>();

    /// An empty segment of this many bytes, rounded down to words.
    pub(crate) fn new(start: u64, bytes: usize) -> Segment {
        Segment { start, length: 0, counts: [0; 7], words: SegmentWords::new(bytes / WORD_BYTES) }
    }

    /// An empty segment in the same memory; in as much other memory, if a reader is reading this.
    pub(crate) fn renew(mut self, start: u64) -> Segment {
        // A view of a reader keeps the old records as they are.
        if Arc::get_mut(&mut self.words.0).is_none() {
            return Segment::new(start, self.capacity());
        }
        Segment { start, length: 0, counts: [0; 7], words: self.words }
    }

    /// Position after its last byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.length as u64
    }

    pub(crate) fn capacity(&self) -> usize {
        self.words.0.len() * WORD_BYTES
    }

    pub(crate) fn has_room(&self, length: usize) -> bool {
        self.capacity() - self.length >= length
    }

    /// Returns whether a record of these classes is in it.
    pub(crate) fn has_class(&self, mask: ClassMask) -> bool {
        mask.classes().any(|class| self.counts[class] > 0)
    }

    /// Appends a record, for which there must be room.
    #[inline]
    pub(crate) fn push(&mut self, record: &[u8], class: u8) {
        let (record_words, _) = record.as_chunks::<WORD_BYTES>();
        for (word, bytes) in self.words.0[self.length / WORD_BYTES..].iter().zip(record_words) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.length += record.len();
        self.counts[usize::from(class)] += 1;
    }

    /// Reads the head of the record at a position.
    #[inline]
    pub(crate) fn read_head(&self, at: u64) -> RecordHead {
        self.words.read_head(at - self.start)
    }

    /// The records in a range of positions, to be read without the lock of the ring.
    pub(crate) fn view(&self, range: Range<u64>) -> SegmentView {
        SegmentView { start: self.start, range, words: self.words.clone() }
    }
}

/// Records of a segment. They stay as they are while the view exists, also if the ring evicts them: writers only append
/// behind them, and use the memory again when no reader has it.
#[derive(Debug)]
pub(crate) struct SegmentView {
    /// Position of the segment's first byte.
    start: u64,
    range: Range<u64>,
    words: SegmentWords,
}

impl SegmentView {
    /// Positions of the first record, and after the last.
    pub(crate) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Reads the head of the record at a position.
    #[inline]
    pub(crate) fn read_head(&self, at: u64) -> RecordHead {
        self.words.read_head(at - self.start)
    }

    /// The position of the record that ends at `end`, and its head.
    pub(crate) fn read_head_before(&self, end: u64) -> (u64, RecordHead) {
        let at = end - self.words.length_of_last(end - self.start);
        (at, self.read_head(at))
    }

    /// Copies whole records from position `at` on, up to `limit` bytes, but at least one.
    pub(crate) fn copy_records(&self, at: u64, limit: usize, to: &mut Vec<u8>) {
        let mut end = at + self.read_head(at).length as u64;
        while end < self.range.end {
            let next = end + self.read_head(end).length as u64;
            if next - at > limit as u64 {
                break;
            }
            end = next;
        }
        self.words.copy_bytes(at - self.start..end - self.start, to);
    }
}

/// The memory of records, in words, of which each record has whole ones. They are atomic so that a reader may read
/// some while a writer stores others. A reader finds what is complete under the lock of the ring, which orders these
/// accesses; the words need no order themselves.
#[derive(Clone, Debug)]
struct SegmentWords(Arc<[AtomicU64]>);

impl SegmentWords {
    fn new(words: usize) -> SegmentWords {
        SegmentWords((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    fn load(&self, index: usize) -> u64 {
        self.0[index].load(Ordering::Relaxed)
    }

    #[inline]
    fn read_head(&self, offset: u64) -> RecordHead {
        let index = offset as usize / WORD_BYTES;
        RecordHead::from_words(self.load(index), self.load(index + 1))
    }

    /// The length of the record that ends at an offset: the last four bytes of a record, too.
    fn length_of_last(&self, end: u64) -> u64 {
        // A word is little-endian, so its last four bytes are the upper half.
        self.load(end as usize / WORD_BYTES - 1) >> 32
    }

    fn copy_bytes(&self, range: Range<u64>, to: &mut Vec<u8>) {
        let words = &self.0[range.start as usize / WORD_BYTES..range.end as usize / WORD_BYTES];
        let before = to.len();
        to.resize(before + words.len() * WORD_BYTES, 0);
        let (copies, _) = to[before..].as_chunks_mut::<WORD_BYTES>();
        // Word by word, because a writer may be storing into other words of this memory.
        for (copy, word) in copies.iter_mut().zip(words) {
            *copy = word.load(Ordering::Relaxed).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamOrigin;
    use crate::record::RecordBuffer;

    fn fill(segment: &mut Segment, text: &[u8]) -> usize {
        let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
        record.write_raw_line(0, text, None, false);
        let before = segment.counts[6];
        while segment.has_room(record.bytes().len()) {
            segment.push(record.bytes(), record.class());
        }
        (segment.counts[6] - before) as usize
    }

    fn read_all(view: &SegmentView) -> Vec<u8> {
        let mut bytes = Vec::new();
        view.copy_records(view.range().start, usize::MAX, &mut bytes);
        bytes
    }

    #[test]
    fn what_a_reader_reads_stays_and_its_memory_is_used_again_only_afterwards() {
        let mut segment = Segment::new(1000, 515);
        assert_eq!(segment.capacity(), 512);
        assert!(fill(&mut segment, b"first") > 5);
        let (view, end) = (segment.view(1000..segment.end()), segment.end());
        let before = read_all(&view);
        let memory = Arc::as_ptr(&segment.words.0);

        let mut next = segment.renew(end);
        assert_eq!((next.start, next.end(), next.capacity(), next.counts), (end, end, 512, [0; 7]));
        fill(&mut next, b"second");
        assert!(read_all(&view) == before && !std::ptr::eq(Arc::as_ptr(&next.words.0), memory));

        let memory = Arc::as_ptr(&next.words.0);
        drop(view);
        let next = next.renew(end);
        assert!(std::ptr::eq(Arc::as_ptr(&next.words.0), memory), "memory is taken without a reader");
    }

    #[test]
    fn a_view_ends_where_it_did_while_writers_append() {
        let mut segment = Segment::new(0, 4096);
        let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
        record.write_raw_line(0, b"a line", None, false);
        segment.push(record.bytes(), record.class());
        let view = segment.view(0..segment.end());
        fill(&mut segment, b"another");
        assert_eq!(read_all(&view), record.bytes());
        assert_eq!(view.read_head_before(view.range().end).0, 0);
    }
}
