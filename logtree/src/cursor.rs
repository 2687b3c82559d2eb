//! Where a reader stands: a place in each ring it reads, and what it missed there.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;
use std::task::Waker;

use crate::Dn;
use crate::query::{Mask, Query};
use crate::ring::{Counts, Ring};

/// Entries dropped before a reader came to them and not yet reported to it; none if `count` is 0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Missed {
    pub(crate) count: u64,
    pub(crate) seq: u64,
    /// The count is an upper bound only.
    pub(crate) at_most: bool,
}

impl Missed {
    pub(crate) fn add(&mut self, count: u64, seq: u64) {
        if count > 0 {
            self.count += count;
            self.seq = self.seq.max(seq);
        }
    }
}

/// A reader's place in one ring.
///
/// Invariant: of class `c`, `passed[c]` records lie before `at`, whether they are still in the ring or not.
#[derive(Debug)]
struct Cursor {
    slot: usize,
    at: u64,
    passed: Counts,
    missed: Missed,
}

impl Cursor {
    /// If records were evicted before the reader came to them, notes so and goes on with what is left.
    fn catch_up(&mut self, ring: &Ring, mask: Mask) {
        if self.at < ring.start {
            let count = mask.sum(|class| ring.evicted[class] - self.passed[class]);
            self.missed.add(count, ring.evicted_seq(mask));
            self.passed = ring.evicted;
            self.at = ring.start;
        }
    }

    /// The number of what comes next: a report of missed entries, or a record.
    fn next_seq(&self, ring: &Ring) -> Option<u64> {
        let record = (self.at < ring.end()).then(|| ring.head(self.at).seq);
        let missed = (self.missed.count > 0).then_some(self.missed.seq);
        record.into_iter().chain(missed).min()
    }

    /// The number of what comes before, when walking back: a record, or all that was evicted (if not yet taken).
    fn previous_seq(&self, ring: &Ring, mask: Mask) -> Option<u64> {
        // What was evicted under the walk is what the reader will miss, and where its walk ends.
        let record = (self.at > ring.start).then(|| ring.head(ring.before(self.at)).seq);
        let evicted = (self.missed.count == 0 && self.at >= ring.start).then(|| ring.dropped_seq(mask));
        record.into_iter().chain(evicted.filter(|&seq| seq > 0)).max()
    }
}

/// A reader as the journal knows it.
#[derive(Debug)]
pub(crate) struct Cursors {
    query: Query,
    mask: Mask,
    cursors: Vec<Cursor>,
    /// What it missed of names that were forgotten.
    forgotten: Missed,
    waker: Option<Waker>,
}

/// Stands for [`Cursors::forgotten`] among the indices of cursors.
const FORGOTTEN: usize = usize::MAX;

/// Records copied out of the rings, to be decoded without the lock.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) items: Vec<(Dn, Item)>,
}

/// One item of a [`Batch`].
#[derive(Debug)]
pub(crate) enum Item {
    Record(Range<usize>),
    Missed(Missed),
}

impl Cursors {
    pub(crate) fn new(query: Query, mask: Mask) -> Cursors {
        Cursors { query, mask, cursors: Vec::new(), forgotten: Missed::default(), waker: None }
    }

    pub(crate) fn matches(&self, dn: &Dn) -> bool {
        self.query.matches(dn)
    }

    pub(crate) fn follows(&self) -> bool {
        self.query.follow
    }

    /// Reads a ring from its oldest record on, all evicted ones missed.
    pub(crate) fn enter_at_start(&mut self, slot: usize, ring: &Ring) {
        let mut missed = Missed::default();
        missed.add(self.mask.sum(|class| ring.evicted[class]), ring.dropped_seq(self.mask));
        self.cursors.push(Cursor { slot, at: ring.start, passed: ring.evicted, missed });
    }

    /// Reads a ring from now on.
    pub(crate) fn enter_at_end(&mut self, slot: usize, ring: &Ring) {
        let missed = Missed::default();
        self.cursors.push(Cursor { slot, at: ring.end(), passed: ring.appended, missed });
    }

    /// The ring of a name is about to be forgotten, and its counts to be taken over by another, its heir.
    /// Says whether that made the reader miss something.
    pub(crate) fn forget(&mut self, slot: usize, ring: &Ring, heir_slot: usize, heir: &Ring) -> bool {
        if let Some(index) = self.cursors.iter().position(|cursor| cursor.slot == slot) {
            let mut cursor = self.cursors.swap_remove(index);
            cursor.catch_up(ring, self.mask);
            let unread = self.mask.sum(|class| ring.appended[class] - cursor.passed[class]);
            self.forgotten.add(unread, ring.last_seq_of(self.mask));
            self.forgotten.add(cursor.missed.count, cursor.missed.seq);
            self.forgotten.at_most |= cursor.missed.at_most;
        }
        if let Some(cursor) = self.cursors.iter_mut().find(|cursor| cursor.slot == heir_slot) {
            // What it takes over is no concern of a reader that has just been told, or never asked.
            cursor.catch_up(heir, self.mask);
            for (passed, appended) in cursor.passed.iter_mut().zip(ring.appended) {
                *passed += appended;
            }
        }
        self.forgotten.count > 0
    }

    /// Asks to be woken by the next record that passes the filters; gives back the waker of before.
    pub(crate) fn wait(&mut self, waker: Waker) -> Option<Waker> {
        self.waker.replace(waker)
    }

    /// The waker, if the reader waits for a record of this class.
    pub(crate) fn wake_for(&mut self, class: u8) -> Option<Waker> {
        self.waker.take_if(|_| self.mask.admits(class))
    }

    pub(crate) fn wake(&mut self) -> Option<Waker> {
        self.waker.take()
    }

    /// Goes back by up to `n` records that pass the filters, newest first over all rings, but not to number `after` or
    /// before. Looks at `steps` records at most; false if there is more to do.
    pub(crate) fn walk_back(
        &mut self,
        rings: &[Option<Ring>],
        n: &mut usize,
        after: u64,
        steps: usize,
    ) -> bool {
        let mask = self.mask;
        let ring_of = |cursor: &Cursor| rings[cursor.slot].as_ref().expect("cursors leave with their ring");
        let mut newest: BinaryHeap<(u64, usize)> = (self.cursors.iter().enumerate())
            .filter_map(|(index, cursor)| Some((cursor.previous_seq(ring_of(cursor), mask)?, index)))
            .collect();
        for _ in 0..steps {
            let Some(mut top) = newest.peek_mut() else { return true };
            let (seq, index) = *top;
            if *n == 0 || seq <= after {
                return true;
            }
            let cursor = &mut self.cursors[index];
            let ring = ring_of(cursor);
            let before = (cursor.at > ring.start).then(|| ring.before(cursor.at));
            match before.map(|at| (at, ring.head(at))).filter(|(_, head)| head.seq == seq) {
                Some((at, head)) => {
                    cursor.at = at;
                    cursor.passed[usize::from(head.class)] -= 1;
                    *n -= usize::from(mask.admits(head.class));
                }
                None => {
                    let evicted = mask.sum(|class| ring.evicted[class]);
                    let at_most = after >= ring.first_seq;
                    let count = if at_most { evicted.min(seq - after) } else { evicted };
                    cursor.missed = Missed { count, seq, at_most };
                }
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

    /// Copies up to `max` items numbered below `until`, in order, and goes past them. Looks at `steps` records at most;
    /// false if there is more to do.
    pub(crate) fn pull(
        &mut self,
        rings: &[Option<Ring>],
        until: u64,
        max: usize,
        steps: usize,
        to: &mut Batch,
    ) -> bool {
        let mask = self.mask;
        let ring_of = |cursor: &Cursor| rings[cursor.slot].as_ref().expect("cursors leave with their ring");
        let mut oldest = BinaryHeap::with_capacity(self.cursors.len() + 1);
        for (index, cursor) in self.cursors.iter_mut().enumerate() {
            let ring = ring_of(cursor);
            cursor.catch_up(ring, mask);
            oldest.extend(cursor.next_seq(ring).map(|seq| Reverse((seq, index))));
        }
        if self.forgotten.count > 0 {
            oldest.push(Reverse((self.forgotten.seq, FORGOTTEN)));
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
            if index == FORGOTTEN {
                to.items.push((self.query.dn.clone(), Item::Missed(std::mem::take(&mut self.forgotten))));
                PeekMut::pop(top);
                continue;
            }
            let cursor = &mut self.cursors[index];
            let ring = ring_of(cursor);
            if cursor.missed.count > 0 && cursor.missed.seq == seq {
                to.items.push((ring.dn.clone(), Item::Missed(std::mem::take(&mut cursor.missed))));
            } else {
                let head = ring.head(cursor.at);
                if mask.admits(head.class) {
                    let begin = to.bytes.len();
                    ring.copy(cursor.at, head.length, &mut to.bytes);
                    to.items.push((ring.dn.clone(), Item::Record(begin..to.bytes.len())));
                }
                cursor.at += head.length as u64;
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
