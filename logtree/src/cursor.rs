//! The position of a reader in one ring.

use std::sync::Arc;

use crate::class::{ClassCounts, ClassMask};
use crate::follower::Follower;
use crate::missed::MissedEntries;
use crate::name_log::NameLog;
use crate::query::LogQuery;
use crate::record::RecordHead;
use crate::ring::LogRing;
use crate::segment::SegmentView;

/// Maximum number of segments that a reader skips under the lock of a ring. Writers wait for that, and for nothing else
/// that it does: it reads records without the lock.
const MAX_SKIPS_PER_LOCK: usize = 64;

/// A reader's place in a name.
#[derive(Debug)]
pub(crate) struct RingCursor {
    pub(crate) log: Arc<NameLog>,
    pub(crate) state: CursorState,
    pub(crate) position: RingPosition,
}

/// The source of the next record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CursorState {
    /// Not known yet.
    New,
    /// Items are left to read, and the name is in the reader's queue.
    Queued,
    /// All was read: the ring notifies the reader of the next record.
    Waiting,
}

/// The next find of a reader in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextItem {
    /// A record or a report of missed entries, with this sequence number.
    Item(u64),
    /// Nothing; a following reader now waits for the next.
    Nothing,
    /// Nothing ever again: the name is forgotten.
    Never,
}

/// The item before the position of a cursor.
enum PreviousItem {
    /// Records, of which not all need be wanted.
    Records(SegmentView),
    /// Wanted records that are evicted; the sequence number of the newest.
    Evicted(u64),
    Nothing,
}

impl PreviousItem {
    /// The sequence number, or an upper bound of that of the wanted record.
    fn seq(&self) -> Option<u64> {
        match self {
            PreviousItem::Records(records) => Some(records.read_head_before(records.range().end).1.seq),
            PreviousItem::Evicted(seq) => Some(*seq),
            PreviousItem::Nothing => None,
        }
    }
}

/// The extent of a move of a cursor: see [`RingCursor::step_back`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardStep<'a> {
    pub(crate) down_to: u64,
    pub(crate) max: usize,
    pub(crate) live_from: u64,
    pub(crate) after: u64,
    /// Filters by content that records must pass to be counted.
    pub(crate) content: Option<&'a LogQuery>,
}

/// The number of records that a cursor has passed, and the sequence number of the item before it, or an upper
/// bound of it.
#[derive(Debug, Default)]
pub(crate) struct PassedRecords {
    pub(crate) count: usize,
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
    /// The number of these bytes that are read.
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
        // Under one lock: the position and the counts belong together.
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
            // The lock is taken anew for each segment, so that writers get in between.
            let mut ring = self.log.lock_ring();
            self.position.catch_up(&ring, mask);
            let missed = (self.position.missed.count > 0).then_some(self.position.missed.seq);
            let Some(records) = self.position.next_records(&ring, mask) else {
                return match missed {
                    Some(seq) => NextItem::Item(seq),
                    None if ring.directory_entry.is_forgotten => NextItem::Never,
                    None => {
                        // Under the lock of the search: the next record comes after this, and notifies the reader.
                        follower.into_iter().for_each(|follower| ring.add_waiting(follower));
                        NextItem::Nothing
                    }
                };
            };
            drop(ring);
            // The lock is free: `records` keeps this memory, also if the ring evicts the segment.
            if let Some(seq) = self.position.pass_unwanted(&records, mask) {
                if limit > 0 {
                    records.copy_records(self.position.at, limit, &mut self.position.records);
                }
                // The report of missed entries comes first, because they are older.
                return NextItem::Item(missed.unwrap_or(seq));
            }
        }
    }

    /// The sequence number of the item before the position: a wanted record, or the newest evicted one; or an
    /// upper bound of it.
    pub(crate) fn previous_seq(&mut self, mask: ClassMask) -> Option<u64> {
        let ring = self.log.lock_ring();
        let previous = self.position.find_previous(&ring, mask);
        drop(ring);
        previous.seq()
    }

    /// The number of entries that it missed and did not report, and that are not newer than `seq`.
    pub(crate) fn unreported_up_to(&self, mask: ClassMask, seq: u64) -> u64 {
        if self.position.missed.count == 0 {
            return 0;
        }
        let ring = self.log.lock_ring();
        let evicted = mask.sum_over(|class| ring.evicted[class]) - ring.evicted_after(mask, seq).count;
        // The position has also passed the missed records, which the reader has not seen.
        let read = mask.sum_over(|class| self.position.passed[class]) - self.position.missed.count;
        evicted.saturating_sub(read)
    }

    /// Moves back over wanted records with numbers not below `down_to`, until it has passed `max` of those below
    /// `live_from`. Evicted records newer than `after` count as missed.
    pub(crate) fn step_back(&mut self, mask: ClassMask, step: BackwardStep<'_>) -> PassedRecords {
        let mut passed = PassedRecords::default();
        passed.previous_seq = loop {
            let ring = self.log.lock_ring();
            match self.position.find_previous(&ring, mask) {
                PreviousItem::Records(records) => {
                    drop(ring);
                    let previous_seq = self.position.pass_back(&records, mask, step, &mut passed.count);
                    if previous_seq.is_some() {
                        break previous_seq;
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
    /// Counts records that were evicted before the reader reached them as missed, and moves to the oldest record.
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

    /// The next records, after segments without wanted ones, which it skips; `None` at the end.
    fn next_records(&mut self, ring: &LogRing, mask: ClassMask) -> Option<SegmentView> {
        for (skipped, segment) in ring.segments_from(self.at).enumerate() {
            // The counts of a segment include what was read of it, so only a whole segment can be skipped by them.
            let is_partly_read = self.at > segment.start.max(ring.start);
            if is_partly_read || segment.has_class(mask) || skipped >= MAX_SKIPS_PER_LOCK {
                return Some(segment.view(self.at..segment.end()));
            }
            self.at = segment.end();
            (0..7).for_each(|class| self.passed[class] += segment.counts[class]);
        }
        None
    }

    /// Moves to the next wanted record; returns its sequence number, or `None` at the end of these records.
    fn pass_unwanted(&mut self, records: &SegmentView, mask: ClassMask) -> Option<u64> {
        while self.at < records.range().end {
            let head = records.read_head(self.at);
            if mask.contains(head.class) {
                return Some(head.seq);
            }
            self.pass_record(head);
        }
        None
    }

    /// The item before the position, and before segments without wanted records, which it skips.
    fn find_previous(&mut self, ring: &LogRing, mask: ClassMask) -> PreviousItem {
        for (skipped, segment) in ring.segments_before(self.at).enumerate() {
            let start = segment.start.max(ring.start);
            if self.at <= start {
                // Empty, or evicted.
                continue;
            }
            let is_partly_read = self.at < segment.end();
            if is_partly_read || segment.has_class(mask) || skipped >= MAX_SKIPS_PER_LOCK {
                return PreviousItem::Records(segment.view(start..self.at));
            }
            // The counts are of exactly the records from here to the position: evicted ones are taken off.
            self.at = start;
            (0..7).for_each(|class| self.passed[class] -= segment.counts[class]);
        }
        match ring.evicted_seq(mask) {
            // After `step_back` has counted the evicted records as missed, nothing comes before them.
            seq if seq > 0 && self.missed.count == 0 => PreviousItem::Evicted(seq),
            _ => PreviousItem::Nothing,
        }
    }

    /// Moves back over these records as far as a step goes, and counts those that it wants. Returns the sequence
    /// number of the item before the position, or an upper bound; `None` at the start of these records.
    fn pass_back(
        &mut self,
        records: &SegmentView,
        mask: ClassMask,
        step: BackwardStep<'_>,
        count: &mut usize,
    ) -> Option<u64> {
        let mut copy = Vec::new();
        while self.at > records.range().start {
            let (at, head) = records.read_head_before(self.at);
            let is_wanted = mask.contains(head.class);
            if *count == step.max || (is_wanted && head.seq < step.down_to) {
                return Some(head.seq);
            }
            self.at = at;
            self.passed[usize::from(head.class)] -= 1;
            if is_wanted && head.seq < step.live_from {
                let matches = step.content.is_none_or(|query| {
                    copy.clear();
                    // A limit of 0 copies exactly one record.
                    records.copy_records(at, 0, &mut copy);
                    query.matches_record(&copy)
                });
                *count += usize::from(matches);
            }
        }
        None
    }

    /// Returns whether records have been copied and not read.
    pub(crate) fn has_copies(&self) -> bool {
        self.read_bytes < self.records.len()
    }

    /// Drops the copies: they are still in the store, or will be counted as missed.
    pub(crate) fn forget_copies(&mut self) {
        // Not `clear`: the names of a reader share the memory for copies.
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

    pub(crate) fn take_copy(&mut self) -> &[u8] {
        let begin = self.read_bytes;
        let head = RecordHead::from_bytes(&self.records[begin..]);
        self.read_bytes += head.length;
        self.pass_record(head);
        &self.records[begin..self.read_bytes]
    }
}
