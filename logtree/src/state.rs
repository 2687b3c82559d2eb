//! The state of the log store, which one lock guards.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;

use crate::cursor::{MissedEntries, ReaderCursors, RecordBatch};
use crate::query::{BacklogLimit, ClassMask, LogQuery, QueryError};
use crate::record::{RecordBuffer, now_nanos};
use crate::ring::LogRing;
use crate::{Dn, LogLimits};

/// Capacity of a ring with its first record in it.
const INITIAL_CAPACITY: usize = 1 << 10;
/// A ring is not shrunk below this to give another ring space.
const MIN_CAPACITY: usize = 4 << 10;
/// How many cleared names are remembered with their counts, for each name with entries.
const CLEARED_PER_NAME: usize = 4;
/// Maximum number of records that a reader visits under one lock, so that writers wait for microseconds, not
/// for a whole read.
const MAX_STEPS_PER_LOCK: usize = 4096;

/// A name and the last known slot of its ring, to find the ring without a map lookup.
#[derive(Debug)]
pub(crate) struct RingAddress {
    pub(crate) dn: Dn,
    /// Only a hint: the name of the ring in that slot is checked.
    slot_hint: AtomicUsize,
}

impl RingAddress {
    pub(crate) fn new(dn: Dn) -> RingAddress {
        RingAddress { dn, slot_hint: AtomicUsize::new(usize::MAX) }
    }
}

/// All rings and readers. Appends, reads and subscriptions use it under one lock, so numbers, records and
/// wake-ups are consistent.
#[derive(Debug)]
pub(crate) struct LogStoreState {
    limits: LogLimits,
    rings: Vec<Option<LogRing>>,
    slots_by_dn: BTreeMap<Dn, usize>,
    free_slots: Vec<usize>,
    /// The slots of names with memory for entries, without the root.
    live_slots: Vec<usize>,
    /// The slots of names without entries whose records had to be cleared for other names, by the sequence
    /// number of their newest record.
    cleared: BTreeMap<u64, usize>,
    readers: Vec<Option<ReaderCursors>>,
    /// Identifies the store in cursors.
    pub(crate) store_id: u64,
    next_seq: u64,
    /// Sum of the rings' capacities.
    capacity: usize,
}

impl LogStoreState {
    pub(crate) fn new(limits: LogLimits) -> LogStoreState {
        let mut state = LogStoreState {
            limits,
            rings: Vec::new(),
            slots_by_dn: BTreeMap::new(),
            free_slots: Vec::new(),
            live_slots: Vec::new(),
            cleared: BTreeMap::new(),
            readers: Vec::new(),
            store_id: RandomState::new().hash_one(now_nanos()),
            next_seq: 1,
            capacity: 0,
        };
        // The root always exists, to take over the counts of forgotten names.
        state.create_ring(Dn::root());
        state
    }

    fn ring_mut(&mut self, slot: usize) -> &mut LogRing {
        self.rings[slot].as_mut().expect("a slot in use has a ring")
    }

    pub(crate) fn rings(&self) -> impl Iterator<Item = &LogRing> {
        self.slots_by_dn.values().filter_map(|&slot| self.rings[slot].as_ref())
    }

    /// Appends a record and collects the wakers of the readers that wait for it, to be woken without the
    /// lock.
    pub(crate) fn append_record(
        &mut self,
        to: &RingAddress,
        record: &mut RecordBuffer,
        wake: &mut Vec<Waker>,
    ) {
        let slot = self.find_or_create_slot(to, wake);
        if self.ring_mut(slot).free_bytes() < record.bytes().len() {
            self.grow_ring(slot, record.bytes().len());
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        record.set_seq(seq);
        let entries = self.limits.entries_per_dn.unwrap_or(usize::MAX);
        let ring = self.rings[slot].as_mut().expect("a slot in use has a ring");
        while ring.entries >= entries {
            ring.evict_oldest();
        }
        if ring.free_bytes() < record.bytes().len() {
            ring.make_room(record.bytes().len());
        }
        ring.push(record.bytes(), record.class(), seq);
        for &reader in &ring.followers {
            wake.extend(
                self.readers[reader].as_mut().and_then(|reader| reader.take_waker_for(record.class())),
            );
        }
    }

    fn find_or_create_slot(&mut self, to: &RingAddress, wake: &mut Vec<Waker>) -> usize {
        let slot = to.slot_hint.load(Ordering::Relaxed);
        if matches!(self.rings.get(slot), Some(Some(ring)) if ring.dn.is_same(&to.dn)) {
            return slot;
        }
        let slot = match self.slots_by_dn.get(&to.dn) {
            Some(&slot) => slot,
            None => {
                if self.slots_by_dn.len() >= self.limits.max_names.saturating_mul(1 + CLEARED_PER_NAME) {
                    self.forget_idlest_cleared(wake);
                }
                self.create_ring(to.dn.clone())
            }
        };
        to.slot_hint.store(slot, Ordering::Relaxed);
        slot
    }

    fn create_ring(&mut self, dn: Dn) -> usize {
        let mut ring = LogRing::new(dn.clone());
        let slot = self.free_slots.pop().unwrap_or(self.rings.len());
        for (index, reader) in self.readers.iter_mut().enumerate() {
            if let Some(reader) =
                reader.as_mut().filter(|reader| reader.is_following() && reader.matches_dn(&dn))
            {
                reader.add_ring_from_start(slot, &ring);
                ring.followers.push(index);
            }
        }
        if slot == self.rings.len() {
            self.rings.push(None);
        }
        self.rings[slot] = Some(ring);
        self.slots_by_dn.insert(dn, slot);
        slot
    }

    /// Grows the buffer of a ring if the limits allow it: from the total budget, or from a ring that is
    /// larger than the new size. The buffer always grows to at least `length`, the size of a single record.
    fn grow_ring(&mut self, slot: usize, length: usize) {
        let limits = self.limits;
        self.clear_names_beyond_limit(slot);
        let ring = self.ring_mut(slot);
        let have = ring.capacity();
        let must = have < length;
        if !must && (have >= limits.bytes_per_dn || ring.start < ring.retry_growth_at) {
            return;
        }
        // Room beside the records that it has: one long record must not evict them all.
        let need = (ring.len() + length).max(have * 2);
        let want = need.max(INITIAL_CAPACITY).min(limits.bytes_per_dn).max(length);
        while self.capacity + want - have > limits.total_bytes {
            match self.largest_ring(slot, if must { MIN_CAPACITY } else { want }) {
                Some(larger) => self.resize_ring(larger, |ring| ring.shrink_to(ring.capacity() / 2)),
                None if must && self.clear_idlest_dn(slot) => {}
                None if must => break,
                None => {
                    let ring = self.ring_mut(slot);
                    ring.retry_growth_at = ring.start + have as u64;
                    return;
                }
            }
        }
        self.resize_ring(slot, |ring| ring.grow_to(want));
    }

    fn resize_ring(&mut self, slot: usize, change: impl FnOnce(&mut LogRing)) {
        let ring = self.rings[slot].as_mut().expect("a slot in use has a ring");
        self.capacity -= ring.capacity();
        change(ring);
        self.capacity += ring.capacity();
    }

    /// The largest ring except `slot`, if it is larger than `min_capacity`.
    fn largest_ring(&self, slot: usize, min_capacity: usize) -> Option<usize> {
        let rings = self
            .rings
            .iter()
            .enumerate()
            .filter_map(|(index, ring)| Some((index, ring.as_ref()?.capacity())));
        rings
            .filter(|&(index, size)| index != slot && size > min_capacity)
            .max_by_key(|&(_, size)| size)
            .map(|(i, _)| i)
    }

    /// Makes the name in `slot` one of those with entries, if it isn't yet, and clears others for it.
    fn clear_names_beyond_limit(&mut self, slot: usize) {
        let ring = self.ring_mut(slot);
        // The root has its place in the limit, with or without entries.
        if ring.capacity() == 0 && !ring.dn.is_root() {
            let newest_seq = ring.newest_seq;
            self.cleared.remove(&newest_seq);
            while self.live_slots.len() >= self.limits.max_names - 1 && self.clear_idlest_dn(slot) {}
            self.live_slots.push(slot);
        }
    }

    /// Drops the entries of the name whose last write is oldest, but not of the root and not of `keep`. Its
    /// counts stay, and report to its readers what was dropped.
    fn clear_idlest_dn(&mut self, keep: usize) -> bool {
        let newest_seq = |slot: usize| self.rings[slot].as_ref().map_or(0, |ring| ring.newest_seq);
        let others = self.live_slots.iter().enumerate().filter(|(_, slot)| **slot != keep);
        let idlest = others.map(|(at, &slot)| (newest_seq(slot), at)).min();
        let Some((newest_seq, at)) = idlest else { return false };
        let slot = self.live_slots.swap_remove(at);
        self.resize_ring(slot, LogRing::clear);
        self.cleared.insert(newest_seq, slot);
        true
    }

    /// Forgets the cleared name whose last write is oldest. The nearest name above it inherits its counts.
    fn forget_idlest_cleared(&mut self, wake: &mut Vec<Waker>) {
        let Some((_, slot)) = self.cleared.pop_first() else { return };
        let ring = self.rings[slot].take().expect("a cleared slot is in use");
        self.free_slots.push(slot);
        self.slots_by_dn.remove(&ring.dn);
        let heir = std::iter::successors(ring.dn.parent(), Dn::parent)
            .find_map(|above| self.slots_by_dn.get(&above).copied())
            .expect("the root is never forgotten");
        for reader in self.readers.iter_mut().flatten() {
            if reader.forget_ring(slot, &ring) {
                wake.extend(reader.take_waker());
            }
        }
        self.ring_mut(heir).inherit_counts(&ring);
    }

    /// The entries that names of a query lost when they were forgotten, newer than `after`. The names within
    /// the query have inherited them; or a name above it has, which may also have inherited those of others,
    /// but only from before the present ring of the query's name.
    fn forgotten_after(&self, query: &LogQuery, mask: ClassMask, after: u64) -> MissedEntries {
        let ring_of = |dn: &Dn| self.rings[*self.slots_by_dn.get(dn)?].as_ref();
        let before = ring_of(&query.dn).map_or(u64::MAX, |ring| ring.first_seq);
        let mut forgotten = MissedEntries::default();
        for above in std::iter::successors(query.dn.parent(), Dn::parent).filter_map(|dn| ring_of(&dn)) {
            let missed = above.inherited.missed_between(mask, after, before);
            forgotten.add(MissedEntries { is_upper_bound: true, ..missed });
        }
        let within = self.rings().filter(|ring| query.include_descendants && query.matches_dn(&ring.dn));
        within.for_each(|ring| forgotten.add(ring.inherited.missed_between(mask, after, u64::MAX)));
        forgotten
    }

    /// Registers a reader; returns its id and the first sequence number after the backlog.
    /// [`LogStoreState::rewind_reader`] must follow.
    pub(crate) fn add_reader(
        &mut self,
        query: LogQuery,
        mask: ClassMask,
    ) -> Result<(usize, u64), QueryError> {
        if let Some(cursor) = query.after {
            cursor.check(self.store_id, self.next_seq - 1)?;
        }
        let id = self.readers.iter().position(Option::is_none).unwrap_or(self.readers.len());
        let from_start = query.after.is_none() && query.backlog_limit == BacklogLimit::All;
        let forgotten = self.forgotten_after(&query, mask, query.after.map_or(0, |cursor| cursor.seq));
        let mut cursors = ReaderCursors::new(query, mask, forgotten);
        for (slot, ring) in self.rings.iter_mut().enumerate() {
            let Some(ring) = ring.as_mut().filter(|ring| cursors.matches_dn(&ring.dn)) else { continue };
            if from_start {
                cursors.add_ring_from_start(slot, ring);
            } else {
                cursors.add_ring_from_end(slot, ring);
            }
            if cursors.is_following() {
                ring.followers.push(id);
            }
        }
        if from_start {
            cursors.report_forgotten();
        }
        if id == self.readers.len() {
            self.readers.push(None);
        }
        self.readers[id] = Some(cursors);
        Ok((id, self.next_seq))
    }

    /// Moves a reader back by up to `n` entries newer than `after`; false if it must be called again.
    pub(crate) fn rewind_reader(&mut self, id: usize, n: &mut usize, after: u64) -> bool {
        let reader = self.readers[id].as_mut().expect("a reader is registered until it is dropped");
        reader.rewind(&self.rings, n, after, MAX_STEPS_PER_LOCK)
    }

    /// Copies the next records for a reader; false if it must be called again to get all of them.
    pub(crate) fn pull_batch(&mut self, id: usize, until: u64, max: usize, to: &mut RecordBatch) -> bool {
        let reader = self.readers[id].as_mut().expect("a reader is registered until it is dropped");
        reader.pull_batch(&self.rings, until, max, MAX_STEPS_PER_LOCK, to)
    }

    /// Registers the waker for the next record that passes a reader's filters; returns the previous waker.
    pub(crate) fn set_waker(&mut self, id: usize, waker: Waker) -> Option<Waker> {
        self.readers[id].as_mut().expect("a reader is registered until it is dropped").set_waker(waker)
    }

    /// Removes a reader, to be dropped without the lock: its waker may run foreign code.
    pub(crate) fn remove_reader(&mut self, id: usize) -> Option<ReaderCursors> {
        for ring in self.rings.iter_mut().flatten() {
            ring.followers.retain(|&reader| reader != id);
        }
        self.readers[id].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamOrigin;

    #[test]
    fn capacity_is_counted_and_stays_within_the_budget() {
        let limits = LogLimits {
            bytes_per_dn: 64 << 10,
            total_bytes: 128 << 10,
            max_names: 40,
            ..LogLimits::default()
        };
        let mut state = LogStoreState::new(limits);
        let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
        for number in 0..30_000usize {
            let name = number % 7 * (number / 1000);
            record.write_raw_line(0, "x".repeat(number * 31 % 1024).as_bytes(), None, false);
            let to = RingAddress::new(format!("n.{name}").parse().unwrap());
            state.append_record(&to, &mut record, &mut Vec::new());
            assert_eq!(state.capacity, state.rings().map(LogRing::capacity).sum::<usize>());
            assert!(state.capacity <= limits.total_bytes, "{number}: {}", state.capacity);
            assert!(state.rings().all(|ring| ring.capacity() <= limits.bytes_per_dn));
            assert!(state.slots_by_dn.len() <= limits.max_names * (1 + CLEARED_PER_NAME));
            let with_memory = state.rings().filter(|ring| ring.capacity() > 0 && !ring.dn.is_root());
            assert_eq!(with_memory.count(), state.live_slots.len());
            assert!(state.live_slots.len() < limits.max_names);
            assert_eq!(state.live_slots.len() + state.cleared.len() + 1, state.slots_by_dn.len());
        }
        let appended: u64 = state.rings().map(LogRing::total_appended).sum();
        assert_eq!(appended, 30_000);
    }
}
