//! The position of a reader in each ring it reads, and the entries it missed there.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;
use std::task::Waker;

use crate::Dn;
use crate::query::{ClassMask, LogQuery};
use crate::ring::{ClassCounts, LogRing};

/// Entries that were dropped before a reader reached them and are not yet reported to it; none if `count` is
/// 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MissedEntries {
    pub(crate) count: u64,
    pub(crate) seq: u64,
    /// The count is only an upper bound.
    pub(crate) is_upper_bound: bool,
}

impl MissedEntries {
    pub(crate) fn add(&mut self, other: MissedEntries) {
        if other.count > 0 {
            self.count += other.count;
            self.seq = self.seq.max(other.seq);
            self.is_upper_bound |= other.is_upper_bound;
        }
    }
}

/// A reader's position in one ring.
///
/// Invariant: `passed[c]` records of class `c` are before `position`, whether they are still in the ring or
/// not.
#[derive(Debug)]
struct RingCursor {
    slot: usize,
    position: u64,
    passed: ClassCounts,
    missed: MissedEntries,
}

impl RingCursor {
    /// If records were evicted before the reader reached them, counts them as missed and moves to the oldest
    /// record.
    fn catch_up(&mut self, ring: &LogRing, mask: ClassMask) {
        if self.position < ring.start {
            let count = mask.sum_over(|class| ring.evicted[class] - self.passed[class]);
            self.missed.add(MissedEntries { count, seq: ring.evicted_seq(mask), is_upper_bound: false });
            self.passed = ring.evicted;
            self.position = ring.start;
        }
    }

    /// The sequence number of the next item: a report of missed entries, or a record.
    fn next_seq(&self, ring: &LogRing) -> Option<u64> {
        let record = (self.position < ring.end()).then(|| ring.read_head(self.position).seq);
        let missed = (self.missed.count > 0).then_some(self.missed.seq);
        record.into_iter().chain(missed).min()
    }

    /// The sequence number of the previous item when rewinding: a record, or all evicted ones (unless already
    /// counted).
    fn previous_seq(&self, ring: &LogRing, mask: ClassMask) -> Option<u64> {
        // Records evicted during the rewind are those that the reader will miss; the rewind ends there.
        let record =
            (self.position > ring.start).then(|| ring.read_head(ring.previous_record(self.position)).seq);
        let evicted = (self.missed.count == 0 && self.position >= ring.start).then(|| ring.evicted_seq(mask));
        record.into_iter().chain(evicted.filter(|&seq| seq > 0)).max()
    }
}

/// The store's side of a reader.
#[derive(Debug)]
pub(crate) struct ReaderCursors {
    query: LogQuery,
    mask: ClassMask,
    cursors: Vec<RingCursor>,
    /// The entries it missed under names that were forgotten; and those that it misses if it rewinds to them.
    forgotten: MissedEntries,
    older_forgotten: MissedEntries,
    waker: Option<Waker>,
}

/// Stands for the entries of forgotten names among the indices of cursors.
const FORGOTTEN_INDEX: usize = usize::MAX;

/// Records copied out of the rings, to be decoded without the lock.
#[derive(Debug, Default)]
pub(crate) struct RecordBatch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) items: Vec<(Dn, BatchItem)>,
}

/// One item of a [`RecordBatch`].
#[derive(Debug)]
pub(crate) enum BatchItem {
    Record(Range<usize>),
    Missed(MissedEntries),
}

impl ReaderCursors {
    pub(crate) fn new(query: LogQuery, mask: ClassMask, older_forgotten: MissedEntries) -> ReaderCursors {
        let forgotten = MissedEntries::default();
        ReaderCursors { query, mask, cursors: Vec::new(), forgotten, older_forgotten, waker: None }
    }

    /// Reports the entries that were under forgotten names before it was opened.
    pub(crate) fn report_forgotten(&mut self) {
        self.forgotten.add(std::mem::take(&mut self.older_forgotten));
    }

    pub(crate) fn matches_dn(&self, dn: &Dn) -> bool {
        self.query.matches_dn(dn)
    }

    pub(crate) fn is_following(&self) -> bool {
        self.query.follow
    }

    /// Reads a ring from its oldest record on; evicted records count as missed.
    pub(crate) fn add_ring_from_start(&mut self, slot: usize, ring: &LogRing) {
        let missed = ring.evicted_after(self.mask, 0);
        self.cursors.push(RingCursor { slot, position: ring.start, passed: ring.evicted, missed });
    }

    /// Reads a ring from now on.
    pub(crate) fn add_ring_from_end(&mut self, slot: usize, ring: &LogRing) {
        let missed = MissedEntries::default();
        self.cursors.push(RingCursor { slot, position: ring.end(), passed: ring.appended, missed });
    }

    /// Removes the ring of a name that is about to be forgotten. Returns whether the reader missed entries.
    pub(crate) fn forget_ring(&mut self, slot: usize, ring: &LogRing) -> bool {
        let Some(index) = self.cursors.iter().position(|cursor| cursor.slot == slot) else { return false };
        let mut cursor = self.cursors.swap_remove(index);
        cursor.catch_up(ring, self.mask);
        self.forgotten.add(cursor.missed);
        self.forgotten.count > 0
    }

    /// Registers the waker for the next record that passes the filters; returns the previous waker.
    pub(crate) fn set_waker(&mut self, waker: Waker) -> Option<Waker> {
        self.waker.replace(waker)
    }

    /// The waker, if the reader waits for a record of this class.
    pub(crate) fn take_waker_for(&mut self, class: u8) -> Option<Waker> {
        self.waker.take_if(|_| self.mask.contains(class))
    }

    pub(crate) fn take_waker(&mut self) -> Option<Waker> {
        self.waker.take()
    }

    /// Moves back by up to `n` records that pass the filters, newest first over all rings, down to sequence
    /// number `after`, exclusive. Visits at most `steps` records; false if it must be called again.
    pub(crate) fn rewind(
        &mut self,
        rings: &[Option<LogRing>],
        n: &mut usize,
        after: u64,
        steps: usize,
    ) -> bool {
        let mask = self.mask;
        let ring_of =
            |cursor: &RingCursor| rings[cursor.slot].as_ref().expect("a cursor is removed with its ring");
        let mut newest: BinaryHeap<(u64, usize)> = (self.cursors.iter().enumerate())
            .filter_map(|(index, cursor)| Some((cursor.previous_seq(ring_of(cursor), mask)?, index)))
            .collect();
        if self.older_forgotten.count > 0 {
            newest.push((self.older_forgotten.seq, FORGOTTEN_INDEX));
        }
        for _ in 0..steps {
            let Some(mut top) = newest.peek_mut() else { return true };
            let (seq, index) = *top;
            if *n == 0 || seq <= after {
                return true;
            }
            if index == FORGOTTEN_INDEX {
                PeekMut::pop(top);
                self.forgotten.add(std::mem::take(&mut self.older_forgotten));
                continue;
            }
            let cursor = &mut self.cursors[index];
            let ring = ring_of(cursor);
            let before = (cursor.position > ring.start).then(|| ring.previous_record(cursor.position));
            match before.map(|at| (at, ring.read_head(at))).filter(|(_, head)| head.seq == seq) {
                Some((at, head)) => {
                    cursor.position = at;
                    cursor.passed[usize::from(head.class)] -= 1;
                    *n -= usize::from(mask.contains(head.class));
                }
                None => cursor.missed = ring.evicted_after(mask, after),
            }
            match cursor.previous_seq(ring, mask) {
                Some(seq) => *top = (seq, index),
                None => {
                    PeekMut::pop(top);
                }
            }
        }
        false
    }

    /// Copies up to `max` items with sequence numbers below `until`, in order, and moves past them. Visits at
    /// most `steps` records; false if it must be called again.
    pub(crate) fn pull_batch(
        &mut self,
        rings: &[Option<LogRing>],
        until: u64,
        max: usize,
        steps: usize,
        to: &mut RecordBatch,
    ) -> bool {
        let mask = self.mask;
        let ring_of =
            |cursor: &RingCursor| rings[cursor.slot].as_ref().expect("a cursor is removed with its ring");
        let mut oldest = BinaryHeap::with_capacity(self.cursors.len() + 1);
        for (index, cursor) in self.cursors.iter_mut().enumerate() {
            let ring = ring_of(cursor);
            cursor.catch_up(ring, mask);
            oldest.extend(cursor.next_seq(ring).map(|seq| Reverse((seq, index))));
        }
        if self.forgotten.count > 0 {
            oldest.push(Reverse((self.forgotten.seq, FORGOTTEN_INDEX)));
        }
        for _ in 0..steps {
            let Some(mut top) = oldest.peek_mut() else { return true };
            let Reverse((seq, index)) = *top;
            if seq >= until {
                return true;
            }
            if to.items.len() == max {
                return false;
            }
            if index == FORGOTTEN_INDEX {
                to.items
                    .push((self.query.dn.clone(), BatchItem::Missed(std::mem::take(&mut self.forgotten))));
                PeekMut::pop(top);
                continue;
            }
            let cursor = &mut self.cursors[index];
            let ring = ring_of(cursor);
            if cursor.missed.count > 0 && cursor.missed.seq == seq {
                to.items.push((ring.dn.clone(), BatchItem::Missed(std::mem::take(&mut cursor.missed))));
            } else {
                let head = ring.read_head(cursor.position);
                if mask.contains(head.class) {
                    let begin = to.bytes.len();
                    ring.copy_bytes(cursor.position, head.length, &mut to.bytes);
                    to.items.push((ring.dn.clone(), BatchItem::Record(begin..to.bytes.len())));
                }
                cursor.position += head.length as u64;
                cursor.passed[usize::from(head.class)] += 1;
            }
            match cursor.next_seq(ring) {
                Some(seq) => *top = Reverse((seq, index)),
                None => {
                    PeekMut::pop(top);
                }
            }
        }
        false
    }
}
