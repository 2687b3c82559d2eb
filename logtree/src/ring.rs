//! The records of one name, oldest first.

use std::collections::VecDeque;

use crate::Dn;
use crate::cursor::MissedEntries;
use crate::eviction_history::EvictionHistory;
use crate::query::ClassMask;
use crate::record::{RecordHead, TRAILER_BYTES};

/// How many records are evicted, at most, between two points of the history.
const EVICTIONS_PER_POINT: usize = 16;

/// One number per record class: the six levels, and raw.
pub(crate) type ClassCounts = [u64; 7];

/// The records of one name in a ring of bytes. Positions count from the first byte ever written and are never
/// reused.
///
/// Invariant: `appended[c] - evicted[c]` records of class `c` are in the ring.
#[derive(Debug)]
pub(crate) struct LogRing {
    pub(crate) dn: Dn,
    buf: VecDeque<u8>,
    /// Position of the oldest byte kept.
    pub(crate) start: u64,
    pub(crate) entries: usize,
    pub(crate) appended: ClassCounts,
    pub(crate) evicted: ClassCounts,
    /// Sequence number of the newest evicted record, by class.
    evicted_seq: ClassCounts,
    eviction_history: EvictionHistory,
    /// The records of forgotten names below it.
    pub(crate) inherited: InheritedCounts,
    /// Sequence number of the first record ever, and of the newest.
    pub(crate) first_seq: u64,
    pub(crate) newest_seq: u64,
    /// Readers to wake.
    pub(crate) followers: Vec<usize>,
    /// The position from which a growth that was rejected is retried.
    pub(crate) retry_growth_at: u64,
}

/// The number of records that forgotten names have had.
#[derive(Debug)]
pub(crate) struct InheritedCounts {
    counts: ClassCounts,
    /// Sequence number of the newest of them, by class, and of the first of all.
    newest_seq: ClassCounts,
    first_seq: u64,
}

impl InheritedCounts {
    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Those that are newer than `after` and older than `before`, as far as it is known.
    pub(crate) fn missed_between(&self, mask: ClassMask, after: u64, before: u64) -> MissedEntries {
        let newest = mask.max_over(|class| self.newest_seq[class]).min(before.saturating_sub(1));
        let all = mask.sum_over(|class| self.counts[class]);
        let is_exact = after < self.first_seq && mask.max_over(|class| self.newest_seq[class]) < before;
        let oldest = self.first_seq.max(after.saturating_add(1));
        let count = if is_exact { all } else { all.min((newest + 1).saturating_sub(oldest)) };
        MissedEntries { count, seq: if count > 0 { newest } else { 0 }, is_upper_bound: !is_exact }
    }
}

impl LogRing {
    pub(crate) fn new(dn: Dn) -> LogRing {
        LogRing {
            dn,
            buf: VecDeque::new(),
            start: 0,
            entries: 0,
            appended: [0; 7],
            evicted: [0; 7],
            evicted_seq: [0; 7],
            eviction_history: EvictionHistory::default(),
            inherited: InheritedCounts { counts: [0; 7], newest_seq: [0; 7], first_seq: u64::MAX },
            first_seq: u64::MAX,
            newest_seq: 0,
            followers: Vec::new(),
            retry_growth_at: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.buf.len()
    }

    /// The number of records ever, including those of forgotten names below it.
    pub(crate) fn total_appended(&self) -> u64 {
        self.appended.iter().sum::<u64>() + self.inherited.total()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.buf.capacity()
    }

    #[inline]
    pub(crate) fn free_bytes(&self) -> usize {
        self.buf.capacity() - self.buf.len()
    }

    /// Position after the newest byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.buf.len() as u64
    }

    pub(crate) fn grow_to(&mut self, capacity: usize) {
        self.buf.reserve_exact(capacity - self.buf.len());
    }

    /// Evicts until the remaining records fit into `capacity`, and frees the rest.
    pub(crate) fn shrink_to(&mut self, capacity: usize) {
        self.evict_bytes(self.buf.len().saturating_sub(capacity));
        self.buf.shrink_to(capacity);
    }

    /// Evicts all records, and frees their memory.
    pub(crate) fn clear(&mut self) {
        self.shrink_to(0);
        self.eviction_history = EvictionHistory::default();
    }

    /// Drops the oldest record.
    pub(crate) fn evict_oldest(&mut self) {
        self.evict_bytes(1);
    }

    /// Frees space for a record of `length` bytes and some more, because evicting several records at once is
    /// cheaper.
    pub(crate) fn make_room(&mut self, length: usize) {
        let spare = length.max(self.buf.capacity() / 64).min(self.buf.capacity());
        self.evict_bytes(spare.saturating_sub(self.free_bytes()));
    }

    /// Evicts the oldest records until at least `minimum` bytes are evicted.
    fn evict_bytes(&mut self, minimum: usize) {
        let end = self.end().min(self.start + minimum as u64);
        let mut at = self.start;
        while at < end {
            let head = self.read_head(at);
            at += head.length as u64;
            self.entries -= 1;
            self.evicted[usize::from(head.class)] += 1;
            self.evicted_seq[usize::from(head.class)] = head.seq;
            // Of many evictions at once, some points suffice.
            if at >= end || self.entries.is_multiple_of(EVICTIONS_PER_POINT) {
                self.eviction_history.add_point(head.seq, self.evicted);
            }
        }
        self.buf.drain(..(at - self.start) as usize);
        self.start = at;
    }

    /// Appends a record, for which space must be free.
    #[inline]
    pub(crate) fn push(&mut self, record: &[u8], class: u8, seq: u64) {
        debug_assert!(record.len() <= self.free_bytes(), "space was freed");
        self.buf.extend(record);
        self.entries += 1;
        self.appended[usize::from(class)] += 1;
        self.newest_seq = seq;
        self.first_seq = self.first_seq.min(seq);
    }

    /// Adds the records of a forgotten name, and those that it has inherited.
    pub(crate) fn inherit_counts(&mut self, forgotten: &LogRing) {
        let (own, from) = (&mut self.inherited, &forgotten.inherited);
        for class in 0..own.counts.len() {
            own.counts[class] += forgotten.appended[class] + from.counts[class];
            let newest = forgotten.last_seq_of_class(class).max(from.newest_seq[class]);
            own.newest_seq[class] = own.newest_seq[class].max(newest);
        }
        own.first_seq = own.first_seq.min(forgotten.first_seq).min(from.first_seq);
    }

    /// A sequence number between that of the last record of a class and that of the newest record.
    fn last_seq_of_class(&self, class: usize) -> u64 {
        if self.appended[class] > self.evicted[class] { self.newest_seq } else { self.evicted_seq[class] }
    }

    /// The evicted records that are newer than `after`.
    pub(crate) fn evicted_after(&self, mask: ClassMask, after: u64) -> MissedEntries {
        let seq = self.evicted_seq(mask);
        if seq <= after {
            return MissedEntries::default();
        }
        let evicted = mask.sum_over(|class| self.evicted[class]);
        if after < self.first_seq {
            return MissedEntries { count: evicted, seq, is_upper_bound: false };
        }
        let (known, is_exact) = self.eviction_history.evicted_up_to(after);
        let count = evicted - mask.sum_over(|class| known[class]);
        MissedEntries { count: count.min(seq - after), seq, is_upper_bound: !is_exact }
    }

    /// The sequence number of the newest evicted record that the mask contains.
    pub(crate) fn evicted_seq(&self, mask: ClassMask) -> u64 {
        mask.max_over(|class| self.evicted_seq[class])
    }

    /// Reads the head of the record at a position.
    #[inline]
    pub(crate) fn read_head(&self, at: u64) -> RecordHead {
        RecordHead::from_bytes(self.read_bytes(at))
    }

    /// The position of the record before `at`, which must not be the start.
    pub(crate) fn previous_record(&self, at: u64) -> u64 {
        at - u64::from(u32::from_le_bytes(self.read_bytes(at - TRAILER_BYTES as u64)))
    }

    #[inline]
    fn read_bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let (front, back) = self.buf.as_slices();
        let at = (at - self.start) as usize;
        let whole = match at.checked_sub(front.len()) {
            Some(at) => back.get(at..at + N),
            None => front.get(at..at + N),
        };
        match whole.and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => bytes,
            // It spans the wraparound of the buffer.
            None => std::array::from_fn(|i| self.buf[at + i]),
        }
    }

    /// Appends `length` bytes, from position `at` on, to `to`.
    pub(crate) fn copy_bytes(&self, at: u64, length: usize, to: &mut Vec<u8>) {
        let (front, back) = self.buf.as_slices();
        let at = (at - self.start) as usize;
        match at.checked_sub(front.len()) {
            Some(at) => to.extend_from_slice(&back[at..at + length]),
            None => {
                let in_front = length.min(front.len() - at);
                to.extend_from_slice(&front[at..at + in_front]);
                to.extend_from_slice(&back[..length - in_front]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode_record;
    use crate::record::RecordBuffer;
    use crate::{EntryBody, StreamOrigin};

    /// Walks in both directions over a ring that wraps around, and checks the records.
    #[test]
    fn records_are_readable_in_both_directions_across_the_wraparound() {
        let mut ring = LogRing::new(Dn::root());
        ring.grow_to(400);
        let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
        for seq in 1..=200u64 {
            record.write_raw_line(0, "x".repeat((seq % 37) as usize).as_bytes(), None, false);
            record.set_seq(seq);
            if ring.free_bytes() < record.bytes().len() {
                ring.make_room(record.bytes().len());
            }
            ring.push(record.bytes(), record.class(), seq);

            let (mut forward, mut at) = (Vec::new(), ring.start);
            while at < ring.end() {
                let head = ring.read_head(at);
                let mut bytes = Vec::new();
                ring.copy_bytes(at, head.length, &mut bytes);
                let entry = decode_record(Dn::root(), &bytes);
                let EntryBody::Raw(raw) = &entry.body else { panic!("{entry:?}") };
                assert_eq!((entry.seq, raw.text.len() as u64), (head.seq, head.seq % 37));
                forward.push(at);
                at += head.length as u64;
            }
            let mut backward = Vec::new();
            while at > ring.start {
                at = ring.previous_record(at);
                backward.push(at);
            }
            backward.reverse();
            assert_eq!(forward, backward);
            assert_eq!(forward.len(), ring.entries);
            assert_eq!(ring.appended[6] - ring.evicted[6], ring.entries as u64);
        }
        assert!(ring.capacity() == 400 && ring.evicted[6] > 100);
    }
}
