//! The bytes of one name, oldest first.

use std::collections::VecDeque;

use crate::Dn;
use crate::query::Mask;
use crate::record::{Head, TAIL};

/// One number per class of record: the six levels, and raw.
pub(crate) type Counts = [u64; 7];

/// The records of one name in a ring of bytes. Places in it are counted from its first byte ever and never reused.
///
/// Invariant: `appended[c] - evicted[c]` records of class `c` are in the ring.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) dn: Dn,
    buf: VecDeque<u8>,
    /// Place of the oldest byte kept.
    pub(crate) start: u64,
    pub(crate) entries: usize,
    pub(crate) appended: Counts,
    pub(crate) evicted: Counts,
    /// Number of the newest record evicted, by class; and of those that forgotten names below it had.
    evicted_seq: Counts,
    inherited_seq: Counts,
    /// Number of the first record ever, and of the newest.
    pub(crate) first_seq: u64,
    pub(crate) newest_seq: u64,
    /// Readers to wake.
    pub(crate) followers: Vec<usize>,
    /// After growing was refused: from which place on it is worth asking again.
    pub(crate) ask_growth_at: u64,
}

impl Ring {
    pub(crate) fn new(dn: Dn) -> Ring {
        Ring {
            dn,
            buf: VecDeque::new(),
            start: 0,
            entries: 0,
            appended: [0; 7],
            evicted: [0; 7],
            evicted_seq: [0; 7],
            inherited_seq: [0; 7],
            first_seq: u64::MAX,
            newest_seq: 0,
            followers: Vec::new(),
            ask_growth_at: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.buf.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.buf.capacity()
    }

    #[inline]
    pub(crate) fn spare(&self) -> usize {
        self.buf.capacity() - self.buf.len()
    }

    /// Place after the newest byte.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.buf.len() as u64
    }

    pub(crate) fn grow_to(&mut self, capacity: usize) {
        self.buf.reserve_exact(capacity - self.buf.len());
    }

    /// Evicts until what is left fits into `capacity`, and frees the rest.
    pub(crate) fn shrink_to(&mut self, capacity: usize) {
        self.evict_bytes(self.buf.len().saturating_sub(capacity));
        self.buf.shrink_to(capacity);
    }

    /// Drops the oldest record.
    pub(crate) fn evict(&mut self) {
        self.evict_bytes(1);
    }

    /// Makes room for a record of `length` bytes, and for some more after it: to drop a few at once is cheaper.
    pub(crate) fn evict_for(&mut self, length: usize) {
        let spare = length.max(self.buf.capacity() / 64).min(self.buf.capacity());
        self.evict_bytes(spare.saturating_sub(self.spare()));
    }

    /// Drops the oldest records until at least so many bytes are gone.
    fn evict_bytes(&mut self, least: usize) {
        let end = self.end().min(self.start + least as u64);
        let mut at = self.start;
        while at < end {
            let head = self.head(at);
            at += head.length as u64;
            self.entries -= 1;
            self.evicted[usize::from(head.class)] += 1;
            self.evicted_seq[usize::from(head.class)] = head.seq;
        }
        self.buf.drain(..(at - self.start) as usize);
        self.start = at;
    }

    /// Adds a record; there must be room for it.
    #[inline]
    pub(crate) fn push(&mut self, record: &[u8], class: u8, seq: u64) {
        debug_assert!(record.len() <= self.spare(), "room was made");
        self.buf.extend(record);
        self.entries += 1;
        self.appended[usize::from(class)] += 1;
        self.newest_seq = seq;
        self.first_seq = self.first_seq.min(seq);
    }

    /// Takes over the count of a forgotten name's records, as evicted.
    pub(crate) fn inherit(&mut self, forgotten: &Ring) {
        for class in 0..self.appended.len() {
            self.appended[class] += forgotten.appended[class];
            self.evicted[class] += forgotten.appended[class];
            let seq = forgotten.last_seq(class).max(forgotten.inherited_seq[class]);
            self.inherited_seq[class] = self.inherited_seq[class].max(seq);
        }
        self.first_seq = self.first_seq.min(forgotten.first_seq);
    }

    /// A number not below that of the last record of a class, and not above that of the newest record.
    fn last_seq(&self, class: usize) -> u64 {
        if self.appended[class] > self.evicted[class] { self.newest_seq } else { self.evicted_seq[class] }
    }

    /// The number of the newest evicted record the mask admits.
    pub(crate) fn evicted_seq(&self, mask: Mask) -> u64 {
        mask.max(|class| self.evicted_seq[class])
    }

    /// The same, with those of forgotten names.
    pub(crate) fn dropped_seq(&self, mask: Mask) -> u64 {
        mask.max(|class| self.evicted_seq[class].max(self.inherited_seq[class]))
    }

    /// The number of the newest record the mask admits, or a little more.
    pub(crate) fn last_seq_of(&self, mask: Mask) -> u64 {
        mask.max(|class| self.last_seq(class))
    }

    /// The beginning of the record at a place.
    #[inline]
    pub(crate) fn head(&self, at: u64) -> Head {
        Head::of(self.read(at))
    }

    /// Where the record before a place begins; the place must not be the start.
    pub(crate) fn before(&self, at: u64) -> u64 {
        at - u64::from(u32::from_le_bytes(self.read(at - TAIL as u64)))
    }

    #[inline]
    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let (front, back) = self.buf.as_slices();
        let at = (at - self.start) as usize;
        let whole = match at.checked_sub(front.len()) {
            Some(at) => back.get(at..at + N),
            None => front.get(at..at + N),
        };
        match whole.and_then(|bytes| bytes.try_into().ok()) {
            Some(bytes) => bytes,
            // It lies across the seam.
            None => std::array::from_fn(|i| self.buf[at + i]),
        }
    }

    /// Appends `length` bytes from a place on to `to`.
    pub(crate) fn copy(&self, at: u64, length: usize, to: &mut Vec<u8>) {
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
    use crate::decode::decode;
    use crate::record::Record;
    use crate::{Body, Origin};

    /// Walks both ways over a ring that wraps and checks what is found.
    #[test]
    fn records_read_back_both_ways_across_the_seam() {
        let mut ring = Ring::new(Dn::root());
        ring.grow_to(400);
        let mut record = Record::raw_of(&Origin::default());
        for seq in 1..=200u64 {
            record.raw(0, "x".repeat((seq % 37) as usize).as_bytes(), None, false);
            record.set_seq(seq);
            if ring.spare() < record.bytes().len() {
                ring.evict_for(record.bytes().len());
            }
            ring.push(record.bytes(), record.class(), seq);

            let (mut forward, mut at) = (Vec::new(), ring.start);
            while at < ring.end() {
                let head = ring.head(at);
                let mut bytes = Vec::new();
                ring.copy(at, head.length, &mut bytes);
                let entry = decode(Dn::root(), &bytes);
                let Body::Raw(raw) = &entry.body else { panic!("{entry:?}") };
                assert_eq!((entry.seq, raw.text.len() as u64), (head.seq, head.seq % 37));
                forward.push(at);
                at += head.length as u64;
            }
            let mut backward = Vec::new();
            while at > ring.start {
                at = ring.before(at);
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
