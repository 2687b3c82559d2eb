//! What the journal's one lock guards.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;

use crate::cursor::{Batch, Cursors};
use crate::query::{Backlog, Mask, Query};
use crate::record::Record;
use crate::ring::Ring;
use crate::{Dn, Limits};

/// Capacity of a ring with its first record in it.
const FIRST_CAPACITY: usize = 1 << 10;
/// A ring is not shrunk below this for another's sake.
const LEAST_CAPACITY: usize = 4 << 10;
/// Records a reader looks at while it holds the lock once, so that writers wait for microseconds, not for a whole read.
const STEPS: usize = 4096;

/// A name and where its ring was last seen: finds the ring without comparing its way through a map.
#[derive(Debug)]
pub(crate) struct Address {
    pub(crate) dn: Dn,
    /// Only a hint; the ring there is checked to have this name.
    slot: AtomicUsize,
}

impl Address {
    pub(crate) fn new(dn: Dn) -> Address {
        Address { dn, slot: AtomicUsize::new(usize::MAX) }
    }
}

/// All rings and readers. Everything that appends, reads or subscribes goes through here under one lock: numbers,
/// records and wake-ups are never apart.
#[derive(Debug)]
pub(crate) struct State {
    limits: Limits,
    rings: Vec<Option<Ring>>,
    names: BTreeMap<Dn, usize>,
    readers: Vec<Option<Cursors>>,
    next_seq: u64,
    /// Sum of the rings' capacities.
    capacity: usize,
}

impl State {
    pub(crate) fn new(limits: Limits) -> State {
        let mut state = State {
            limits,
            rings: Vec::new(),
            names: BTreeMap::new(),
            readers: Vec::new(),
            next_seq: 1,
            capacity: 0,
        };
        // The root is always there, to take over the counts of forgotten names.
        state.create(Dn::root());
        state
    }

    fn ring(&mut self, slot: usize) -> &mut Ring {
        self.rings[slot].as_mut().expect("a slot in use has a ring")
    }

    pub(crate) fn rings(&self) -> impl Iterator<Item = &Ring> {
        self.names.values().filter_map(|&slot| self.rings[slot].as_ref())
    }

    /// Appends a record and takes the wakers of those who wait for it, to be woken without the lock.
    pub(crate) fn append(&mut self, to: &Address, record: &mut Record, wake: &mut Vec<Waker>) {
        let slot = self.slot(to, wake);
        if self.ring(slot).spare() < record.bytes().len() {
            self.grow(slot, record.bytes().len(), wake);
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        record.set_seq(seq);
        let entries = self.limits.entries_per_dn.unwrap_or(usize::MAX);
        let ring = self.rings[slot].as_mut().expect("a slot in use has a ring");
        while ring.entries >= entries {
            ring.evict();
        }
        if ring.spare() < record.bytes().len() {
            ring.evict_for(record.bytes().len());
        }
        ring.push(record.bytes(), record.class(), seq);
        for &reader in &ring.followers {
            wake.extend(self.readers[reader].as_mut().and_then(|reader| reader.wake_for(record.class())));
        }
    }

    fn slot(&mut self, to: &Address, wake: &mut Vec<Waker>) -> usize {
        let slot = to.slot.load(Ordering::Relaxed);
        if matches!(self.rings.get(slot), Some(Some(ring)) if ring.dn.is(&to.dn)) {
            return slot;
        }
        let slot = match self.names.get(&to.dn) {
            Some(&slot) => slot,
            None => {
                if self.names.len() >= self.limits.dns {
                    self.forget_idlest(usize::MAX, wake);
                }
                self.create(to.dn.clone())
            }
        };
        to.slot.store(slot, Ordering::Relaxed);
        slot
    }

    fn create(&mut self, dn: Dn) -> usize {
        let mut ring = Ring::new(dn.clone());
        let slot = self.rings.iter().position(Option::is_none).unwrap_or(self.rings.len());
        for (index, reader) in self.readers.iter_mut().enumerate() {
            if let Some(reader) = reader.as_mut().filter(|reader| reader.follows() && reader.matches(&dn)) {
                reader.enter_at_start(slot, &ring);
                ring.followers.push(index);
            }
        }
        if slot == self.rings.len() {
            self.rings.push(None);
        }
        self.rings[slot] = Some(ring);
        self.names.insert(dn, slot);
        slot
    }

    /// Gives a ring a larger buffer, if it may have one: from the budget of all, or from a ring larger than it would be
    /// then. It always gets as much as `length`, a single record, takes.
    fn grow(&mut self, slot: usize, length: usize, wake: &mut Vec<Waker>) {
        let limits = self.limits;
        let ring = self.ring(slot);
        let have = ring.capacity();
        let must = have < length;
        if !must && (have >= limits.bytes_per_dn || ring.start < ring.ask_growth_at) {
            return;
        }
        let want = (have * 2).max(FIRST_CAPACITY).min(limits.bytes_per_dn).max(length);
        while self.capacity + want - have > limits.total_bytes {
            match self.largest(slot, if must { LEAST_CAPACITY } else { want }) {
                Some(larger) => self.resize(larger, |ring| ring.shrink_to(ring.capacity() / 2)),
                None if must && self.forget_idlest(slot, wake) => {}
                None if must => break,
                None => {
                    let ring = self.ring(slot);
                    ring.ask_growth_at = ring.start + have as u64;
                    return;
                }
            }
        }
        self.resize(slot, |ring| ring.grow_to(want));
    }

    fn resize(&mut self, slot: usize, change: impl FnOnce(&mut Ring)) {
        let ring = self.rings[slot].as_mut().expect("a slot in use has a ring");
        self.capacity -= ring.capacity();
        change(ring);
        self.capacity += ring.capacity();
    }

    /// The largest ring but `slot`, if it is larger than `least`.
    fn largest(&self, slot: usize, least: usize) -> Option<usize> {
        let rings = self
            .rings
            .iter()
            .enumerate()
            .filter_map(|(index, ring)| Some((index, ring.as_ref()?.capacity())));
        rings
            .filter(|&(index, size)| index != slot && size > least)
            .max_by_key(|&(_, size)| size)
            .map(|(i, _)| i)
    }

    /// Forgets the name nothing was written to for longest, but not the root and not `keep`.
    /// Its records count as evicted from the nearest name above it.
    fn forget_idlest(&mut self, keep: usize, wake: &mut Vec<Waker>) -> bool {
        let rings = self.rings.iter().enumerate().filter_map(|(slot, ring)| Some((slot, ring.as_ref()?)));
        let idlest = rings
            .filter(|(slot, ring)| *slot != keep && !ring.dn.is_root())
            .min_by_key(|(_, r)| r.newest_seq);
        let Some(slot) = idlest.map(|(slot, _)| slot) else { return false };
        let ring = self.rings[slot].take().expect("it was just found");
        self.names.remove(&ring.dn);
        self.capacity -= ring.capacity();
        let heir = std::iter::successors(ring.dn.parent(), Dn::parent)
            .find_map(|above| self.names.get(&above).copied())
            .expect("the root is never forgotten");
        let above = self.rings[heir].as_mut().expect("a slot in use has a ring");
        for reader in self.readers.iter_mut().flatten() {
            if reader.forget(slot, &ring, heir, above) {
                wake.extend(reader.wake());
            }
        }
        above.inherit(&ring);
        true
    }

    /// Registers a reader; tells its id and the first number that is not backlog. [`State::walk_back`] must follow.
    pub(crate) fn subscribe(&mut self, query: Query, mask: Mask) -> (usize, u64) {
        let id = self.readers.iter().position(Option::is_none).unwrap_or(self.readers.len());
        let from_start = query.after.is_none() && query.backlog == Backlog::All;
        let mut cursors = Cursors::new(query, mask);
        for (slot, ring) in self.rings.iter_mut().enumerate() {
            let Some(ring) = ring.as_mut().filter(|ring| cursors.matches(&ring.dn)) else { continue };
            if from_start {
                cursors.enter_at_start(slot, ring);
            } else {
                cursors.enter_at_end(slot, ring);
            }
            if cursors.follows() {
                ring.followers.push(id);
            }
        }
        if id == self.readers.len() {
            self.readers.push(None);
        }
        self.readers[id] = Some(cursors);
        (id, self.next_seq)
    }

    /// Goes back by up to `n` entries newer than `after`; false if it must be called again.
    pub(crate) fn walk_back(&mut self, id: usize, n: &mut usize, after: u64) -> bool {
        let reader = self.readers[id].as_mut().expect("a reader leaves when it is dropped");
        reader.walk_back(&self.rings, n, after, STEPS)
    }

    /// Copies what comes next for a reader; false if it must be called again to get all there is.
    pub(crate) fn pull(&mut self, id: usize, until: u64, max: usize, to: &mut Batch) -> bool {
        let reader = self.readers[id].as_mut().expect("a reader leaves when it is dropped");
        reader.pull(&self.rings, until, max, STEPS, to)
    }

    /// Has a reader woken by the next record that passes its filters; gives back the waker of before.
    pub(crate) fn wait(&mut self, id: usize, waker: Waker) -> Option<Waker> {
        self.readers[id].as_mut().expect("a reader leaves when it is dropped").wait(waker)
    }

    /// Takes a reader out, to be dropped without the lock: its waker may hold anything.
    pub(crate) fn unsubscribe(&mut self, id: usize) -> Option<Cursors> {
        for ring in self.rings.iter_mut().flatten() {
            ring.followers.retain(|&reader| reader != id);
        }
        self.readers[id].take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Origin;

    #[test]
    fn capacity_is_counted_and_stays_within_the_budget() {
        let limits = Limits { bytes_per_dn: 64 << 10, total_bytes: 128 << 10, dns: 40, ..Limits::default() };
        let mut state = State::new(limits);
        let mut record = Record::raw_of(&Origin::default());
        for number in 0..30_000usize {
            let name = number % 7 * (number / 1000);
            record.raw(0, "x".repeat(number * 31 % 1024).as_bytes(), None, false);
            let to = Address::new(format!("n.{name}").parse().unwrap());
            state.append(&to, &mut record, &mut Vec::new());
            assert_eq!(state.capacity, state.rings().map(Ring::capacity).sum::<usize>());
            assert!(state.capacity <= limits.total_bytes, "{number}: {}", state.capacity);
            assert!(state.rings().all(|ring| ring.capacity() <= limits.bytes_per_dn));
            assert!(state.names.len() <= limits.dns);
        }
        let appended: u64 = state.rings().map(|ring| ring.appended.iter().sum::<u64>()).sum();
        assert_eq!(appended, 30_000);
    }
}
