//! The records of one name, oldest first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use crate::class::{ClassCounts, ClassMask};
use crate::eviction_history::EvictionHistory;
use crate::follower::{Follower, WaitingFollowers};
use crate::loss::{IdlePlace, Loss};
use crate::missed::{InheritedCounts, MissedEntries};
use crate::record::RecordBuffer;
use crate::segment::Segment;
use crate::{Level, LogLimits};

/// The maximum number of records that are evicted between two points of the history.
const EVICTIONS_PER_POINT: usize = 16;
/// The number of points that a name without entries keeps.
const CLEARED_POINTS: usize = 16;
/// The smallest capacity of a segment, and the largest.
const MIN_SEGMENT_BYTES: usize = 512;
pub(crate) const MAX_SEGMENT_BYTES: usize = 64 << 10;

/// The records of one name in segments. Positions count from the first byte ever written and are never
/// reused.
///
/// Invariant: `appended[c] - evicted[c]` records of class `c` are in the ring, those from position `start`
/// on.
#[derive(Debug)]
pub(crate) struct LogRing {
    /// The id of its name, by which readers know it.
    id: u64,
    /// Oldest first; records are appended to the last.
    segments: VecDeque<Segment>,
    /// Sum of their capacities.
    capacity: usize,
    /// Position of the oldest record kept.
    pub(crate) start: u64,
    pub(crate) entries: usize,
    pub(crate) appended: ClassCounts,
    pub(crate) evicted: ClassCounts,
    /// Sequence number of the newest evicted record, by class.
    evicted_seq: ClassCounts,
    eviction_history: EvictionHistory,
    /// The records of forgotten names below it.
    pub(crate) inherited: Option<Box<InheritedCounts>>,
    /// Entries that were not kept because of their level, including those of forgotten names below it.
    pub(crate) suppressed: u64,
    /// Sequence number of the first record ever, and of the newest.
    pub(crate) first_seq: u64,
    pub(crate) newest_seq: u64,
    /// The position up to which a growth that was rejected is not tried again.
    retry_growth_at: u64,
    pub(crate) directory_entry: DirectoryEntry,
    waiting: WaitingFollowers,
}

/// The part of a name that the directory of names keeps: it changes only under the directory's lock, too.
#[derive(Debug, Default)]
pub(crate) struct DirectoryEntry {
    /// The memory that the directory has counted.
    pub(crate) memory: usize,
    /// The same if it can give a part of it to other names, else 0.
    pub(crate) divisible_memory: usize,
    /// The place among the names with entries, or among those without, for which only the number counts.
    pub(crate) place: IdlePlace,
    pub(crate) has_entries: bool,
    /// The store has forgotten the name: nothing may be appended.
    pub(crate) is_forgotten: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AppendResult {
    Appended,
    /// Appended, and the memory differs from what the directory has counted.
    MemoryChanged,
    /// Nothing: the directory must make room.
    NoRoom,
}

impl LogRing {
    pub(crate) fn new(id: u64) -> LogRing {
        LogRing {
            id,
            segments: VecDeque::new(),
            capacity: 0,
            start: 0,
            entries: 0,
            appended: [0; 7],
            evicted: [0; 7],
            evicted_seq: [0; 7],
            eviction_history: EvictionHistory::default(),
            inherited: None,
            suppressed: 0,
            first_seq: u64::MAX,
            newest_seq: 0,
            retry_growth_at: 0,
            directory_entry: DirectoryEntry::default(),
            waiting: WaitingFollowers::default(),
        }
    }

    /// The bytes of the records.
    pub(crate) fn len(&self) -> usize {
        (self.end() - self.start) as usize
    }

    /// The number of records ever, including those of forgotten names below it.
    pub(crate) fn total_appended(&self) -> u64 {
        self.appended.iter().sum::<u64>() + self.inherited.as_ref().map_or(0, |inherited| inherited.total())
    }

    /// What is lost if it is cleared now.
    pub(crate) fn loss(&self) -> Loss {
        let warnings = ClassMask::LEVELED.at_least(Level::Warn);
        match self.entries {
            _ if warnings.classes().any(|class| self.appended[class] > self.evicted[class]) => Loss::Warnings,
            0 | 1 => Loss::OneLine,
            _ => Loss::Lines,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// All memory behind it.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.capacity
            + self.segments.capacity() * Segment::OVERHEAD_BYTES
            + self.eviction_history.memory_bytes()
            + self.inherited.as_ref().map_or(0, |inherited| inherited.memory_bytes())
    }

    /// Position after the newest byte.
    pub(crate) fn end(&self) -> u64 {
        self.segments.back().map_or(self.start, Segment::end)
    }

    #[inline]
    pub(crate) fn has_room(&self, length: usize) -> bool {
        self.segments.back().is_some_and(|last| last.has_room(length))
    }

    /// Returns whether it has records in more than one segment: it can give some away and keep the newest.
    pub(crate) fn is_divisible(&self) -> bool {
        self.segments.len() > 1
    }

    /// The capacity of the next segment, which a record of `length` bytes fits. It is a small part of the
    /// ring's and of the budget, because segments are evicted whole.
    pub(crate) fn next_segment_bytes(&self, length: usize, limits: &LogLimits) -> usize {
        let max = (limits.total_bytes / 256).clamp(MIN_SEGMENT_BYTES, MAX_SEGMENT_BYTES);
        (self.capacity / 8).clamp(MIN_SEGMENT_BYTES, max).max(length)
    }

    pub(crate) fn add_segment(&mut self, capacity: usize) {
        self.push_segment(Segment::new(self.end(), capacity));
    }

    fn push_segment(&mut self, segment: Segment) {
        self.capacity += segment.capacity();
        self.segments.push_back(segment);
    }

    /// Reuses the oldest segment for the next records, if it is large enough and isn't the only one.
    fn reuse_oldest_segment(&mut self, length: usize) -> bool {
        let fits = self.is_divisible() && self.segments[0].capacity() >= length;
        if fits && let Some(oldest) = self.evict_segment() {
            self.push_segment(oldest.renew(self.end()));
        }
        fits
    }

    /// Drops the oldest segment; `None` if there is none.
    pub(crate) fn evict_segment(&mut self) -> Option<Segment> {
        let end = self.segments.front()?.end();
        self.evict_before(end);
        let oldest = self.segments.pop_front()?;
        self.capacity -= oldest.capacity();
        self.start = self.start.max(end);
        // The list of a ring that was large takes memory, too.
        if self.segments.capacity() > 4 * self.segments.len() + 4 {
            self.segments.shrink_to(2 * self.segments.len());
        }
        Some(oldest)
    }

    pub(crate) fn evict_oldest(&mut self) {
        self.evict_before(self.start + 1);
    }

    /// Evicts all records, and frees their memory.
    pub(crate) fn clear(&mut self) {
        while self.evict_segment().is_some() {}
        self.segments = VecDeque::new();
        self.eviction_history.shrink_to(CLEARED_POINTS);
    }

    fn evict_before(&mut self, end: u64) {
        let end = end.min(self.end());
        while self.start < end {
            let segment = self.segments.partition_point(|segment| segment.end() <= self.start);
            let segment = &mut self.segments[segment];
            while self.start < end.min(segment.end()) {
                let head = segment.read_head(self.start);
                let class = usize::from(head.class);
                self.start += head.length as u64;
                self.entries -= 1;
                segment.counts[class] -= 1;
                self.evicted[class] += 1;
                self.evicted_seq[class] = head.seq;
                // Of many evictions at once, some points suffice.
                if self.start >= end || self.entries.is_multiple_of(EVICTIONS_PER_POINT) {
                    self.eviction_history.add_point(head.seq, self.evicted);
                }
            }
        }
    }

    /// The capacity of the segment by which it may grow for a record. The last one may be smaller than the
    /// others, unless it is much smaller.
    pub(crate) fn growth_bytes(&self, length: usize, limits: &LogLimits) -> Option<usize> {
        let wanted = self.next_segment_bytes(length, limits);
        let size = wanted.min(limits.bytes_per_dn.saturating_sub(self.capacity));
        (size >= length && size * 4 >= wanted).then_some(size)
    }

    /// Doesn't ask for more memory until all of its records are replaced.
    pub(crate) fn deny_growth(&mut self) {
        self.retry_growth_at = self.end() + self.capacity as u64;
    }

    /// Makes room without more memory, if the ring has reached its limit or was denied more, or if all
    /// records of its oldest segment are evicted. The directory replaces small segments, from when the ring was
    /// small, by one: a reader locks the ring for each.
    fn make_room(&mut self, length: usize, limits: &LogLimits) -> bool {
        let Some(oldest) = self.segments.front() else { return false };
        let may_grow = self.end() >= self.retry_growth_at && self.growth_bytes(length, limits).is_some();
        let is_small = oldest.capacity() * 4 < self.next_segment_bytes(length, limits);
        let is_empty = oldest.end() <= self.start;
        (is_empty || !(may_grow || is_small)) && self.reuse_oldest_segment(length)
    }

    /// Appends a record with the next number, and collects the wakers of the readers that wait for it.
    #[inline]
    pub(crate) fn append(
        &mut self,
        record: &mut RecordBuffer,
        limits: &LogLimits,
        next_seq: &AtomicU64,
        wake: &mut Vec<Waker>,
    ) -> AppendResult {
        let length = record.bytes().len();
        let mut evicts = false;
        if !self.has_room(length) {
            evicts = true;
            if !self.make_room(length, limits) {
                return AppendResult::NoRoom;
            }
        }
        while self.entries >= limits.entries_per_dn.unwrap_or(usize::MAX) {
            evicts = true;
            self.evict_oldest();
        }
        // Before the record has its number: a reader that knows a later number then knows of this one.
        self.waiting.notify(record.class(), self.id, wake);
        // Under the lock of the ring: its records are in the order of their numbers.
        let seq = next_seq.fetch_add(1, Ordering::AcqRel);
        record.set_seq(seq);
        self.push(record.bytes(), record.class(), seq);
        // Without an eviction the record went into a segment that the directory has counted.
        if evicts && self.memory_bytes() != self.directory_entry.memory {
            return AppendResult::MemoryChanged;
        }
        AppendResult::Appended
    }

    /// Appends a record, for which there must be room.
    #[inline]
    fn push(&mut self, record: &[u8], class: u8, seq: u64) {
        self.segments.back_mut().expect("room was made").push(record, class);
        self.entries += 1;
        self.appended[usize::from(class)] += 1;
        self.newest_seq = seq;
        self.first_seq = self.first_seq.min(seq);
    }

    /// Notifies a reader of the next record of its classes.
    pub(crate) fn add_waiting(&mut self, follower: &Arc<Follower>) {
        self.waiting.add(follower);
    }

    pub(crate) fn remove_waiting(&mut self, follower: &Arc<Follower>) {
        self.waiting.remove(follower);
    }

    /// All records that the name has had: what it leaves to the name above it, with those that it has inherited.
    pub(crate) fn counts_to_inherit(&self) -> InheritedCounts {
        let mut counts = InheritedCounts::default();
        for class in 0..self.appended.len() {
            // While the last record of a class is in the ring, its number is not known: that of the newest is a bound.
            let has_records = self.appended[class] > self.evicted[class];
            let newest = if has_records { self.newest_seq } else { self.evicted_seq[class] };
            counts.add_class(class, self.appended[class], newest);
        }
        counts.start_at(self.first_seq);
        counts
    }

    /// The evicted records that are newer than `after`.
    pub(crate) fn evicted_after(&self, mask: ClassMask, after: u64) -> MissedEntries {
        let seq = self.evicted_seq(mask);
        if seq <= after {
            return MissedEntries::default();
        }
        let evicted = mask.sum_over(|class| self.evicted[class]);
        // The reader has seen no record of this name, so it has missed all that are evicted.
        if after < self.first_seq {
            return MissedEntries { count: evicted, seq, is_upper_bound: false };
        }
        let (known, is_exact) = self.eviction_history.evicted_up_to(after);
        let count = evicted - mask.sum_over(|class| known[class]);
        // Between the two numbers there are no more records than that.
        MissedEntries { count: count.min(seq - after), seq, is_upper_bound: !is_exact }
    }

    /// The sequence number of the newest evicted record that the mask contains.
    pub(crate) fn evicted_seq(&self, mask: ClassMask) -> u64 {
        mask.max_over(|class| self.evicted_seq[class])
    }

    /// The segments with the records from a position on, oldest first.
    pub(crate) fn segments_from(&self, at: u64) -> impl Iterator<Item = &Segment> {
        self.segments.range(self.segments.partition_point(|segment| segment.end() <= at)..)
    }

    /// The segments with the records before a position, newest first.
    pub(crate) fn segments_before(&self, at: u64) -> impl Iterator<Item = &Segment> {
        let count = self.segments.partition_point(|segment| segment.start < at);
        self.segments.range(..count).rev()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamOrigin;

    /// Walks in both directions over a ring that reuses its segments, and checks the records.
    #[test]
    fn records_are_readable_in_both_directions_over_segments() {
        let limits = LogLimits { bytes_per_dn: 4096, ..LogLimits::default() };
        let (mut ring, next_seq) = (LogRing::new(1), AtomicU64::new(1));
        let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
        for number in 1..=1000u64 {
            record.write_raw_line(0, "x".repeat((number % 37) as usize).as_bytes(), None, false);
            while ring.append(&mut record, &limits, &next_seq, &mut Vec::new()) == AppendResult::NoRoom {
                match ring.growth_bytes(record.bytes().len(), &limits) {
                    Some(length) => ring.add_segment(length),
                    None => drop(ring.evict_segment()),
                }
            }
            let (mut forward, mut at) = (Vec::new(), ring.start);
            while let Some(segment) = ring.segments_from(at).next() {
                let head = segment.read_head(at);
                let mut bytes = Vec::new();
                segment.view(at..segment.end()).copy_records(at, 0, &mut bytes);
                let text = bytes.len() - 37 - usize::from(bytes[6]);
                assert_eq!((bytes.len(), text as u64), (head.length, head.seq % 37));
                forward.push(at);
                at += head.length as u64;
            }
            assert_eq!(at, ring.end());
            let mut backward = Vec::new();
            while at > ring.start {
                let segment = ring.segments_before(at).next().unwrap();
                at = segment.view(segment.start..at).read_head_before(at).0;
                backward.push(at);
            }
            backward.reverse();
            assert_eq!(forward, backward);
            assert_eq!(forward.len(), ring.entries);
            assert_eq!(ring.appended[6] - ring.evicted[6], ring.entries as u64);
            assert_eq!(ring.segments.iter().map(Segment::capacity).sum::<usize>(), ring.capacity());
        }
        assert!(ring.capacity() <= limits.bytes_per_dn && ring.evicted[6] > 900);
    }
}
