//! The position of a reader in one ring, and the entries it missed there.

use std::sync::Arc;

use crate::follower::Follower;
use crate::name_log::NameLog;
use crate::query::ClassMask;
use crate::record::RecordHead;
use crate::ring::{ClassCounts, LogRing};

/// Maximum number of records that a reader visits under the lock of a ring, so that its writers wait for
/// a microsecond, not for a whole read.
const MAX_STEPS_PER_LOCK: usize = 128;

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
            // The number in a client's cursor is any.
            self.count = self.count.saturating_add(other.count);
            self.seq = self.seq.max(other.seq);
            self.is_upper_bound |= other.is_upper_bound;
        }
    }
}

/// A reader's place in a name.
#[derive(Debug)]
pub(crate) struct RingCursor {
    pub(crate) log: Arc<NameLog>,
    pub(crate) state: CursorState,
    pub(crate) position: RingPosition,
}

/// Where the next record comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CursorState {
    /// Not known yet.
    New,
    /// It has items to read, and stands in the reader's queue.
    Queued,
    /// All was read: the ring notifies the reader of the next record.
    Waiting,
}

/// What a reader finds next in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextItem {
    /// A record or a report of missed entries, with this sequence number.
    Item(u64),
    /// Nothing; a following reader now waits for the next.
    Nothing,
    /// Nothing ever again: the name is forgotten.
    Never,
}

/// Records before the position of a cursor.
enum PreviousItem {
    Record {
        at: u64,
        head: RecordHead,
    },
    /// Records that are not wanted were passed; this was the number of the last one.
    Unwanted(u64),
    Evicted(u64),
    Nothing,
}

impl PreviousItem {
    fn seq(&self) -> Option<u64> {
        match self {
            PreviousItem::Record { head, .. } => Some(head.seq),
            PreviousItem::Unwanted(seq) | PreviousItem::Evicted(seq) => Some(*seq),
            PreviousItem::Nothing => None,
        }
    }
}

/// How far a cursor moves back: see [`RingCursor::step_back`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardStep {
    pub(crate) down_to: u64,
    pub(crate) max: usize,
    pub(crate) live_from: u64,
    pub(crate) after: u64,
    /// Whether the caller wants copies of the records.
    pub(crate) copies: bool,
}

/// What a cursor has passed, and the sequence number of the item before it, or an upper bound of it.
#[derive(Debug, Default)]
pub(crate) struct PassedRecords {
    pub(crate) count: usize,
    pub(crate) records: Vec<u8>,
    pub(crate) previous_seq: Option<u64>,
}

/// A position in a ring.
///
/// Invariant: `passed[c]` records of class `c` are before `at`, whether they are still in the ring or not.
#[derive(Debug)]
pub(crate) struct RingPosition {
    at: u64,
    passed: ClassCounts,
    pub(crate) missed: MissedEntries,
    /// Copies of the records from `at` on.
    records: Vec<u8>,
    /// How many of these bytes are read.
    read_bytes: usize,
}

impl RingCursor {
    fn new(log: Arc<NameLog>, state: CursorState, at: u64, passed: ClassCounts) -> RingCursor {
        let missed = MissedEntries::default();
        let position = RingPosition { at, passed, missed, records: Vec::new(), read_bytes: 0 };
        RingCursor { log, state, position }
    }

    /// Reads a name from its first record on, where the reader waits already.
    pub(crate) fn of_created(log: Arc<NameLog>) -> RingCursor {
        RingCursor::new(log, CursorState::Waiting, 0, [0; 7])
    }

    /// Reads a name from its oldest record on; evicted records count as missed.
    pub(crate) fn from_start(log: Arc<NameLog>) -> RingCursor {
        RingCursor::new(log, CursorState::New, 0, [0; 7])
    }

    /// Reads a name from now on.
    pub(crate) fn from_end(log: Arc<NameLog>) -> RingCursor {
        let ring = log.lock_ring();
        let (end, appended) = (ring.end(), ring.appended);
        drop(ring);
        RingCursor::new(log, CursorState::New, end, appended)
    }

    /// The next item, from the copies or else from the ring.
    pub(crate) fn next_item(
        &mut self,
        mask: ClassMask,
        limit: usize,
        follower: Option<&Arc<Follower>>,
    ) -> NextItem {
        match self.position.next_copy(mask) {
            Some(_) if self.position.missed.count > 0 => NextItem::Item(self.position.missed.seq),
            Some(seq) => NextItem::Item(seq),
            None => self.load(mask, limit, follower),
        }
    }

    /// Finds the next item, and copies up to `limit` bytes of records from there on, or at least one record;
    /// none if `limit` is 0.
    pub(crate) fn load(
        &mut self,
        mask: ClassMask,
        limit: usize,
        follower: Option<&Arc<Follower>>,
    ) -> NextItem {
        self.position.forget_copies();
        loop {
            let mut ring = self.log.lock_ring();
            self.position.catch_up(&ring, mask);
            let missed = (self.position.missed.count > 0).then_some(self.position.missed.seq);
            match self.position.pass_unwanted(&ring, mask) {
                Some(Some(seq)) => {
                    if limit > 0 {
                        let segment = ring.segment_at(self.position.at);
                        segment.copy_records(self.position.at, limit, &mut self.position.records);
                    }
                    return NextItem::Item(missed.unwrap_or(seq));
                }
                Some(None) => {
                    return match missed {
                        Some(seq) => NextItem::Item(seq),
                        None if ring.account.is_forgotten => NextItem::Never,
                        None => {
                            follower.into_iter().for_each(|follower| ring.add_waiting(follower));
                            NextItem::Nothing
                        }
                    };
                }
                // Writers may have their turn.
                None => {}
            }
        }
    }

    /// The sequence number of the item before the position: a wanted record, or the newest evicted one; or an
    /// upper bound of it.
    pub(crate) fn previous_seq(&mut self, mask: ClassMask) -> Option<u64> {
        self.position.find_previous(&self.log.lock_ring(), mask, &mut { MAX_STEPS_PER_LOCK }).seq()
    }

    /// How many of the entries that it missed and did not report are not newer than `seq`.
    pub(crate) fn unreported_up_to(&self, mask: ClassMask, seq: u64) -> u64 {
        if self.position.missed.count == 0 {
            return 0;
        }
        let ring = self.log.lock_ring();
        let evicted = mask.sum_over(|class| ring.evicted[class]) - ring.evicted_after(mask, seq).count;
        let read = mask.sum_over(|class| self.position.passed[class]) - self.position.missed.count;
        evicted.saturating_sub(read)
    }

    /// Moves back over records with numbers not below `down_to`, until it has passed `max` of those below
    /// `live_from`; returns those. Evicted records newer than `after` count as missed.
    pub(crate) fn step_back(&mut self, mask: ClassMask, step: BackwardStep) -> PassedRecords {
        let ring = self.log.lock_ring();
        let mut passed = PassedRecords::default();
        let mut steps = MAX_STEPS_PER_LOCK;
        passed.previous_seq = loop {
            match self.position.find_previous(&ring, mask, &mut steps) {
                // Writers may have their turn.
                previous if steps == 0 => break previous.seq(),
                PreviousItem::Record { at, head } if head.seq >= step.down_to && passed.count < step.max => {
                    self.position.at = at;
                    self.position.passed[usize::from(head.class)] -= 1;
                    if head.seq < step.live_from {
                        passed.count += 1;
                        if step.copies {
                            ring.segment_at(at).copy_records(at, 0, &mut passed.records);
                        }
                    }
                }
                PreviousItem::Evicted(seq) if seq >= step.down_to && passed.count < step.max => {
                    // Also those that were evicted during the rewind.
                    self.position.missed = ring.evicted_after(mask, step.after);
                    self.position.at = ring.start;
                    self.position.passed = ring.evicted;
                }
                other => break other.seq(),
            }
        };
        passed
    }
}

impl RingPosition {
    /// If records were evicted before the reader reached them, counts them as missed and moves to the oldest
    /// record.
    fn catch_up(&mut self, ring: &LogRing, mask: ClassMask) {
        if self.at < ring.start {
            let count = mask.sum_over(|class| ring.evicted[class] - self.passed[class]);
            self.missed.add(MissedEntries { count, seq: ring.evicted_seq(mask), is_upper_bound: false });
            self.passed = ring.evicted;
            self.at = ring.start;
        }
    }

    fn pass_record(&mut self, head: RecordHead) {
        self.at += head.length as u64;
        self.passed[usize::from(head.class)] += 1;
    }

    /// Moves to the next wanted record, over at most some others: `Some` with its sequence number, or with
    /// `None` at the end; `None` if it must be called again.
    fn pass_unwanted(&mut self, ring: &LogRing, mask: ClassMask) -> Option<Option<u64>> {
        for _ in 0..MAX_STEPS_PER_LOCK {
            if self.at == ring.end() {
                return Some(None);
            }
            let segment = ring.segment_at(self.at);
            if self.at == segment.start.max(ring.start) && !segment.has_class(mask) {
                self.at = segment.end();
                (0..7).for_each(|class| self.passed[class] += segment.counts[class]);
                continue;
            }
            let head = segment.read_head(self.at);
            if mask.contains(head.class) {
                return Some(Some(head.seq));
            }
            self.pass_record(head);
        }
        None
    }

    /// Finds the previous wanted record, and moves before others that come after it.
    fn find_previous(&mut self, ring: &LogRing, mask: ClassMask, steps: &mut usize) -> PreviousItem {
        let mut passed_seq = None;
        while *steps > 0 || passed_seq.is_none() {
            *steps = steps.saturating_sub(1);
            if self.at <= ring.start {
                let evicted = ring.evicted_seq(mask);
                return match self.missed.count == 0 && evicted > 0 {
                    true => PreviousItem::Evicted(evicted),
                    false => PreviousItem::Nothing,
                };
            }
            let segment = ring.segment_before(self.at);
            let before = segment.record_before(self.at);
            let head = segment.read_head(before);
            passed_seq = Some(head.seq);
            if self.at == segment.end() && !segment.has_class(mask) {
                self.at = segment.start.max(ring.start);
                (0..7).for_each(|class| self.passed[class] -= segment.counts[class]);
                continue;
            }
            if mask.contains(head.class) {
                return PreviousItem::Record { at: before, head };
            }
            self.at = before;
            self.passed[usize::from(head.class)] -= 1;
        }
        passed_seq.map_or(PreviousItem::Nothing, PreviousItem::Unwanted)
    }

    /// Whether records have been copied and not read.
    pub(crate) fn has_copies(&self) -> bool {
        self.read_bytes < self.records.len()
    }

    /// Drops the copies: they are still in the store, or will be counted as missed.
    pub(crate) fn forget_copies(&mut self) {
        self.records = Vec::new();
        self.read_bytes = 0;
    }

    /// The sequence number of the next wanted record among the copies.
    pub(crate) fn next_copy(&mut self, mask: ClassMask) -> Option<u64> {
        while self.has_copies() {
            let head = RecordHead::from_bytes(&self.records[self.read_bytes..]);
            if mask.contains(head.class) {
                return Some(head.seq);
            }
            self.read_bytes += head.length;
            self.pass_record(head);
        }
        None
    }

    /// Reads the next of the copies.
    pub(crate) fn take_copy(&mut self) -> &[u8] {
        let begin = self.read_bytes;
        let head = RecordHead::from_bytes(&self.records[begin..]);
        self.read_bytes += head.length;
        self.pass_record(head);
        &self.records[begin..self.read_bytes]
    }
}
