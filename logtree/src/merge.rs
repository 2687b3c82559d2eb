//! The names that a reader reads, merged in the order of their records.
//!
//! A queue holds the names that have something to read, by the number of their next item; a name that has
//! nothing costs nothing until a record brings it back. No lock is held but that of one ring at a time.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use crate::LogEntry;
use crate::class::ClassMask;
use crate::cursor::{BackwardStep, CursorState, NextItem, RingCursor};
use crate::decode::decode_record;
use crate::follower::Follower;
use crate::missed::MissedEntries;
use crate::name_log::NameLog;
use crate::query::LogQuery;

/// Memory for copies of records, shared by the names that are read.
const COPIED_BYTES: usize = 64 << 10;
/// Maximum number of items that a call reads or skips.
const MAX_ITEMS_PER_CALL: usize = 1024;

/// Stands for the entries of forgotten names among the ids of names.
const FORGOTTEN_ID: u64 = 0;

/// The items that are left after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remaining {
    /// More items may be there already.
    More,
    /// Nothing below the given number.
    Done,
}

#[derive(Debug)]
pub(crate) struct RingMerge {
    query: LogQuery,
    mask: ClassMask,
    follower: Option<Arc<Follower>>,
    /// By the ids of their names.
    cursors: HashMap<u64, RingCursor>,
    has_new: bool,
    /// The next items: their sequence numbers, or lower bounds, and the ids of their names.
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    /// The entries it missed under names that were forgotten; and those that it misses if it rewinds to them.
    forgotten: MissedEntries,
    older_forgotten: MissedEntries,
}

impl RingMerge {
    pub(crate) fn new(
        query: LogQuery,
        mask: ClassMask,
        follower: Option<Arc<Follower>>,
        older_forgotten: MissedEntries,
    ) -> RingMerge {
        RingMerge {
            query,
            mask,
            follower,
            cursors: HashMap::new(),
            has_new: true,
            queue: BinaryHeap::new(),
            forgotten: MissedEntries::default(),
            older_forgotten,
        }
    }

    pub(crate) fn add_from_start(&mut self, logs: Vec<Arc<NameLog>>) {
        self.cursors.extend(logs.into_iter().map(|log| (log.id, RingCursor::from_start(log))));
        self.report_forgotten(self.older_forgotten);
    }

    pub(crate) fn add_from_end(&mut self, logs: Vec<Arc<NameLog>>) {
        self.cursors.extend(logs.into_iter().map(|log| (log.id, RingCursor::from_end(log))));
    }

    /// Reports missed entries of unknown names.
    pub(crate) fn report_forgotten(&mut self, missed: MissedEntries) {
        self.forgotten.add(missed);
        if missed.count > 0 {
            self.queue.push(Reverse((self.forgotten.seq, FORGOTTEN_ID)));
        }
    }

    /// Moves back by up to `n` entries that pass the filters and have numbers below `live_from`, newest first
    /// over all rings, down to sequence number `after`, exclusive.
    pub(crate) fn rewind(&mut self, mut n: usize, after: u64, live_from: u64) {
        let mask = self.mask;
        let mut newest: BinaryHeap<(u64, u64)> = (self.cursors.iter_mut())
            .filter_map(|(&id, cursor)| Some((cursor.previous_seq(mask)?, id)))
            .collect();
        if self.older_forgotten.count > 0 {
            newest.push((self.older_forgotten.seq, FORGOTTEN_ID));
        }
        // Back through the entries of all names, newest first: `newest` has the next of each name, or a bound of it.
        while let Some((seq, id)) = newest.pop() {
            // Also without a backlog, the entries since the reader was opened are read: they are live.
            if seq <= after || (n == 0 && seq < live_from) {
                return;
            }
            let Some(cursor) = self.cursors.get_mut(&id) else {
                self.report_forgotten(self.older_forgotten);
                continue;
            };
            // As far as this name has the newest.
            let others = newest.peek().map_or(0, |&(seq, _)| seq);
            let end = if n == 0 { live_from } else { after + 1 };
            let content = self.query.filters_content().then_some(&self.query);
            let step =
                BackwardStep { down_to: others.max(end), max: n.max(1), live_from, after: end - 1, content };
            let passed = cursor.step_back(mask, step);
            n -= passed.count;
            newest.extend(passed.previous_seq.map(|seq| (seq, id)));
        }
    }

    /// Takes over what has happened to the names since the last call.
    pub(crate) fn take_notices(&mut self) {
        if self.has_new {
            self.has_new = false;
            let new = self.cursors.iter().filter(|(_, cursor)| cursor.state == CursorState::New);
            new.map(|(&id, _)| id).collect::<Vec<_>>().into_iter().for_each(|id| self.queue_name(id));
        }
        let Some(inbox) = self.follower.as_ref().and_then(|follower| follower.take_inbox()) else { return };
        // First, because the ids of new names may be among those that are ready.
        let created = inbox.created.into_iter().map(|(id, log)| (id, RingCursor::of_created(log)));
        self.cursors.extend(created);
        self.report_forgotten(inbox.forgotten);
        for id in inbox.ready {
            // An id may be there twice, and the first time has queued the name.
            if self.cursors.get(&id).is_some_and(|cursor| cursor.state == CursorState::Waiting) {
                self.queue_name(id);
            }
        }
    }

    /// Puts a name that may have items into the queue.
    fn queue_name(&mut self, id: u64) {
        let Some(cursor) = self.cursors.get_mut(&id) else { return };
        match cursor.load(self.mask, 0, self.follower.as_ref()) {
            NextItem::Item(seq) => {
                cursor.state = CursorState::Queued;
                self.queue.push(Reverse((seq, id)));
            }
            NextItem::Nothing => cursor.state = CursorState::Waiting,
            NextItem::Never => drop(self.cursors.remove(&id)),
        }
    }

    /// Returns whether nothing is left to read: a following reader waits for all of its names.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.is_empty()
    }

    /// Reads up to `max` entries with sequence numbers below `until`, in order.
    pub(crate) fn pull_entries(&mut self, until: u64, max: usize, to: &mut VecDeque<LogEntry>) -> Remaining {
        let mut copied = Vec::new();
        let result = self.pull_items(until, to.len() + max, to, &mut copied);
        // The memory for copies is for one call: a reader may wait long before the next.
        for id in copied {
            self.cursors.get_mut(&id).into_iter().for_each(|cursor| cursor.position.forget_copies());
        }
        result
    }

    fn pull_items(
        &mut self,
        until: u64,
        max: usize,
        to: &mut VecDeque<LogEntry>,
        copied: &mut Vec<u64>,
    ) -> Remaining {
        let limit = (COPIED_BYTES / self.queue.len().max(1)).max(1);
        let follower = self.follower.as_ref();
        for _ in 0..MAX_ITEMS_PER_CALL {
            let Some(mut top) = self.queue.peek_mut() else { return Remaining::Done };
            let Reverse((seq, id)) = *top;
            // From `until` on, a record with a lower number may still be on its way.
            if seq >= until {
                return Remaining::Done;
            }
            if to.len() >= max {
                return Remaining::More;
            }
            let Some(cursor) = self.cursors.get_mut(&id) else {
                PeekMut::pop(top);
                if self.forgotten.seq > seq {
                    // More were added since, and stand in the queue, too.
                    continue;
                }
                let missed = std::mem::take(&mut self.forgotten);
                to.extend((missed.count > 0).then(|| self.query.missed_entry(self.query.dn.clone(), missed)));
                continue;
            };
            let mut next = cursor.next_item(self.mask, limit, follower);
            // The queue may have had a lower bound only. Then the name goes back to its place.
            if next == NextItem::Item(seq) {
                to.extend(read_item(&self.query, cursor));
                next = cursor.next_item(self.mask, limit, follower);
            }
            copied.extend(cursor.position.has_copies().then_some(id));
            match next {
                NextItem::Item(seq) => *top = Reverse((seq, id)),
                NextItem::Nothing => {
                    cursor.state = CursorState::Waiting;
                    PeekMut::pop(top);
                }
                NextItem::Never => {
                    PeekMut::pop(top);
                    self.cursors.remove(&id);
                }
            }
        }
        Remaining::More
    }

    /// The part that writers know, if it follows.
    pub(crate) fn follower(&self) -> Option<&Arc<Follower>> {
        self.follower.as_ref()
    }

    /// The number of entries that it missed and did not report, and that are not newer than `seq`, at most.
    pub(crate) fn unreported_up_to(&self, seq: u64) -> u64 {
        let unreported = self.cursors.values().map(|cursor| cursor.unreported_up_to(self.mask, seq));
        unreported.fold(self.forgotten.count, u64::saturating_add)
    }

    /// The names that notify it.
    pub(crate) fn waiting_names(&self) -> impl Iterator<Item = &Arc<NameLog>> {
        let waiting = self.cursors.values().filter(|cursor| cursor.state == CursorState::Waiting);
        waiting.map(|cursor| &cursor.log)
    }
}

/// Reads the next item of a cursor; `None` if the filters reject it.
fn read_item(query: &LogQuery, cursor: &mut RingCursor) -> Option<LogEntry> {
    let dn = cursor.log.dn.clone();
    if cursor.position.missed.count > 0 {
        return Some(query.missed_entry(dn, std::mem::take(&mut cursor.position.missed)));
    }
    let entry = decode_record(dn, cursor.position.take_copy());
    query.matches_content(&entry).then_some(entry)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::record::RecordBuffer;
    use crate::ring::LogRing;
    use crate::{Dn, DroppedEntries, EntryBody, LogLimits, StreamOrigin};

    /// Another thread writes between the start of the live stream and the search for its place in a name.
    #[test]
    fn a_reader_without_a_backlog_misses_only_what_is_evicted_after_it_was_opened() {
        let limits = LogLimits { entries_per_dn: Some(1), ..LogLimits::default() };
        let log = Arc::new(NameLog::new(1, 1, Dn::root(), LogRing::new(1)));
        log.lock_ring().add_segment(4096);
        let next_seq = AtomicU64::new(1);
        let append = |count| {
            let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
            for _ in 0..count {
                record.write_raw_line(0, b"line", None, false);
                log.lock_ring().append(&mut record, &limits, &next_seq, &mut Vec::new());
            }
        };
        append(5);
        let live_from = 6;
        append(2);
        let query = LogQuery::of_dn(Dn::root());
        let mask = query.class_mask().unwrap();
        let mut merge = RingMerge::new(query, mask, None, MissedEntries::default());
        merge.add_from_end(vec![Arc::clone(&log)]);
        merge.rewind(0, 0, live_from);
        merge.take_notices();
        let mut entries = VecDeque::new();
        merge.pull_entries(8, 10, &mut entries);
        assert_eq!(entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [6, 7]);
        assert_eq!(entries[0].body, EntryBody::Dropped(DroppedEntries { count: 1, exact: true }));
    }
}
