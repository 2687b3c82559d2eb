//! The names of a store, and the memory that they share.
//!
//! A name takes memory in segments. When the budget is used up, a name that needs one gets it from a name
//! that uses more, and else from itself; a small one gets it from an idle name that loses little: one line rather than
//! several, and warnings last. The directory is locked for that, a ring only after the directory, and never two rings
//! at once.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::class::ClassMask;
use crate::follower::Follower;
use crate::forgotten_names::ForgottenNames;
use crate::idle_names::IdleNames;
use crate::line_budget::PartialLineBudget;
use crate::loss::{IdlePlace, Loss};
use crate::missed::MissedEntries;
use crate::name_levels::LevelTable;
use crate::name_log::NameLog;
use crate::query::LogQuery;
use crate::record::RecordBuffer;
use crate::ring::{LogRing, MAX_SEGMENT_BYTES};
use crate::{Dn, Level, LogLimits};

/// The number of cleared names that are remembered with their counts, for each name with entries.
const CLEARED_PER_NAME: usize = 4;
/// Memory of a name in addition to its ring's segments and the text of its name: the ring, its places below in trees
/// whose nodes are little more than half full, and what the allocator adds.
const NAME_BYTES: usize = size_of::<NameLog>() + 384;

/// Names in the order of a number of each.
type NamesByNumber<N> = BTreeMap<(N, u64), Arc<NameLog>>;

/// The maximum number of names that are looked at to clear one.
const MAX_CANDIDATES: usize = 32;

#[derive(Debug)]
pub(crate) struct Directory {
    store_id: u64,
    limits: LogLimits,
    names: BTreeMap<Dn, Arc<NameLog>>,
    /// The names that can give a part of their entries to others, by the memory of their rings.
    by_memory: NamesByNumber<usize>,
    /// The names with memory for entries but the root.
    idle: IdleNames,
    /// The names without entries but the root, which were cleared for others or never had any, by the number of
    /// their last.
    cleared: NamesByNumber<u64>,
    forgotten: ForgottenNames,
    followers: Vec<Arc<Follower>>,
    pub(crate) levels: LevelTable,
    memory: usize,
    /// Uses a part of the same budget.
    writers: Arc<PartialLineBudget>,
    next_id: u64,
}

impl Directory {
    pub(crate) fn new(store_id: u64, limits: LogLimits, writers: Arc<PartialLineBudget>) -> Directory {
        let mut directory = Directory {
            store_id,
            limits,
            names: BTreeMap::new(),
            by_memory: BTreeMap::new(),
            idle: IdleNames::default(),
            cleared: BTreeMap::new(),
            forgotten: ForgottenNames::new(limits.total_bytes / 16),
            followers: Vec::new(),
            levels: LevelTable::default(),
            memory: 0,
            writers,
            next_id: 1,
        };
        // The root always exists, to take over the counts of forgotten names.
        directory.create_name(Dn::root());
        directory
    }

    pub(crate) fn find_name(&self, dn: &Dn) -> Option<&Arc<NameLog>> {
        self.names.get(dn)
    }

    /// All names, in their order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Arc<NameLog>> {
        self.names.values()
    }

    /// The names of a query that exist.
    pub(crate) fn names_of(&self, query: &LogQuery) -> Vec<Arc<NameLog>> {
        // The names within a name follow it directly in their order.
        let from_dn = self.names.range(query.dn.clone()..);
        from_dn.take_while(|(dn, _)| query.matches_dn(dn)).map(|(_, log)| Arc::clone(log)).collect()
    }

    pub(crate) fn add_follower(&mut self, follower: Arc<Follower>) {
        self.followers.push(follower);
    }

    pub(crate) fn remove_follower(&mut self, follower: &Arc<Follower>) {
        self.followers.retain(|other| !Arc::ptr_eq(other, follower));
    }

    /// The name, which is created if it doesn't exist.
    pub(crate) fn find_or_create_name(&mut self, dn: &Dn) -> Arc<NameLog> {
        if let Some(log) = self.names.get(dn) {
            return Arc::clone(log);
        }
        if self.names.len() >= self.limits.max_names.saturating_mul(1 + CLEARED_PER_NAME) {
            self.forget_idlest_cleared();
        }
        let log = self.create_name(dn.clone());
        self.cleared.insert((0, log.id), Arc::clone(&log));
        log
    }

    fn create_name(&mut self, dn: Dn) -> Arc<NameLog> {
        let mut ring = LogRing::new(self.next_id);
        let followers: Vec<_> = self.followers.iter().filter(|follower| follower.matches_dn(&dn)).collect();
        // Before a writer can find the name, so that its first record notifies them.
        followers.iter().for_each(|follower| ring.add_waiting(follower));
        let log = Arc::new(NameLog::new(self.store_id, self.next_id, dn.clone(), ring));
        log.min_level.set(self.levels.find(&dn).map(|(_, level)| level));
        followers.iter().for_each(|follower| follower.add_created(&log));
        self.next_id += 1;
        self.memory += NAME_BYTES + dn.as_str().len();
        self.names.insert(dn, Arc::clone(&log));
        log
    }

    /// Sets or removes the minimum level of a name; returns whether that changes it.
    pub(crate) fn set_level(&mut self, dn: &Dn, level: Option<Level>) -> bool {
        let former = self.levels.replace(dn, level);
        if former != level {
            for (name, log) in self.names.range(dn.clone()..).take_while(|(name, _)| name.is_within(dn)) {
                log.min_level.set(self.levels.find(name).map(|(_, level)| level));
            }
        }
        former != level
    }

    /// Makes room for a record of a name, of which `next_seq` will be the lowest number.
    pub(crate) fn make_room(&mut self, log: &Arc<NameLog>, record: &RecordBuffer, next_seq: u64) {
        let length = record.bytes().len();
        // Another writer of the name may have been here first.
        let ring = log.lock_ring();
        if ring.directory_entry.is_forgotten || ring.has_room(length) {
            return;
        }
        let (has_entries, memory) = (ring.directory_entry.has_entries, ring.directory_entry.memory);
        let (is_divisible, growth) = (ring.is_divisible(), ring.growth_bytes(length, &self.limits));
        drop(ring);
        if !has_entries && !log.dn.is_root() {
            self.make_place(log, record.loss(), next_seq);
        }
        let Some(size) = growth else { return self.replace_segments(log, length) };
        // The memory comes from names that use more than this one would, else from itself.
        while self.is_over_budget(size) && self.take_segment(log, memory + size) {}
        if self.is_over_budget(size) && is_divisible && memory + size > self.small_name_bytes() {
            self.replace_segments(log, length);
            // It uses most, so it need not ask again for each record.
            log.lock_ring().deny_growth();
            return;
        }
        self.change_ring(log, |ring| ring.add_segment(size));
        self.keep_budget(log);
    }

    /// Replaces the oldest segments of a name with one for a record.
    fn replace_segments(&mut self, log: &Arc<NameLog>, length: usize) {
        let limits = self.limits;
        self.change_ring(log, |ring| {
            let before = ring.capacity();
            let wanted = ring.next_segment_bytes(length, &limits);
            while (ring.capacity() + wanted > limits.bytes_per_dn || before - ring.capacity() < wanted)
                && ring.evict_segment().is_some()
            {}
            ring.add_segment((before - ring.capacity()).clamp(length, length.max(MAX_SEGMENT_BYTES)));
        });
        self.keep_budget(log);
    }

    /// Counts the memory of a ring that has changed it.
    pub(crate) fn settle_memory(&mut self, log: &Arc<NameLog>) {
        self.change_ring(log, |_| ());
        self.keep_budget(log);
    }

    pub(crate) fn make_room_for_writers(&mut self) {
        let root = self.find_or_create_name(&Dn::root());
        self.keep_budget(&root);
    }

    /// Frees memory while the budget is exceeded.
    fn keep_budget(&mut self, keep: &Arc<NameLog>) {
        while self.is_over_budget(0) && self.take_memory(keep) {}
    }

    fn is_over_budget(&self, more: usize) -> bool {
        // Writers of lines take at most half of the budget from the names.
        let total = self.limits.total_bytes;
        self.memory.saturating_add(more) > total.saturating_sub(self.writers.used_bytes()).max(total / 2)
    }

    /// The memory of a ring up to which a name is small: it gives no part of its entries to another, and need not give
    /// its own for new ones.
    fn small_name_bytes(&self) -> usize {
        (self.limits.total_bytes / 64).min(4 << 10)
    }

    /// Changes a ring, and counts its memory again, unless it is forgotten.
    fn change_ring(&mut self, log: &Arc<NameLog>, change: impl FnOnce(&mut LogRing)) {
        let mut ring = log.lock_ring();
        if ring.directory_entry.is_forgotten {
            return;
        }
        change(&mut ring);
        let before = ring.directory_entry.memory;
        let after = ring.memory_bytes();
        ring.directory_entry.memory = after;
        let is_divisible = ring.is_divisible() && after > self.small_name_bytes();
        let divisible = if is_divisible { after } else { 0 };
        let was_divisible = std::mem::replace(&mut ring.directory_entry.divisible_memory, divisible);
        drop(ring);
        self.memory = self.memory - before + after;
        if divisible != was_divisible {
            self.by_memory.remove(&(was_divisible, log.id));
            if is_divisible {
                self.by_memory.insert((divisible, log.id), Arc::clone(log));
            }
        }
    }

    /// Takes the oldest segment of the name that uses most memory except `keep`, if it is more than `above`.
    fn take_segment(&mut self, keep: &Arc<NameLog>, above: usize) -> bool {
        let mut others = self.by_memory.iter().rev().filter(|(_, log)| log.id != keep.id);
        let Some((&(memory, _), largest)) = others.next() else { return false };
        // Only the largest name gives memory: a quiet one keeps its entries.
        if memory <= above {
            return false;
        }
        let largest = Arc::clone(largest);
        self.change_ring(&largest, |ring| drop(ring.evict_segment()));
        true
    }

    /// Takes memory from any name but `keep`.
    fn take_memory(&mut self, keep: &Arc<NameLog>) -> bool {
        // The smallest loss first: old entries of a large name, then the rings of cleared names if these are many,
        // then all entries of an idle name.
        self.take_segment(keep, 0)
            || (self.cleared.len() > self.idle.len() / 4 && self.forget_idlest_cleared())
            || self.clear_idlest(keep)
            || self.forget_idlest_cleared()
    }

    /// Makes a name one of those with entries, and clears others for it.
    fn make_place(&mut self, log: &Arc<NameLog>, loss: Loss, next_seq: u64) {
        let place = (loss, next_seq);
        let mut ring = log.lock_ring();
        let (_, was_idle_since) = std::mem::replace(&mut ring.directory_entry.place, place);
        ring.directory_entry.has_entries = true;
        drop(ring);
        self.cleared.remove(&(was_idle_since, log.id));
        // The root has its place in the limit, with or without entries.
        while self.idle.len() >= self.limits.max_names - 1 && self.clear_idlest(log) {}
        self.idle.insert(place, Arc::clone(log));
    }

    /// Drops the entries of the name that loses least, and of those the idlest, but not of the root and not of `keep`.
    /// Its counts stay, and report to its readers what was dropped.
    fn clear_idlest(&mut self, keep: &Arc<NameLog>) -> bool {
        let mut best: Option<(IdlePlace, Arc<NameLog>)> = None;
        for _ in 0..MAX_CANDIDATES {
            let Some(log) = self.idle.first(keep.id) else { break };
            let mut ring = log.lock_ring();
            let former = ring.directory_entry.place;
            let place = (ring.loss(), ring.newest_seq.max(former.1));
            ring.directory_entry.place = place;
            drop(ring);
            if place == former {
                best = Some((place, log));
                break;
            }
            // It was written to since it got its place.
            self.idle.remove(former, log.id);
            self.idle.insert(place, Arc::clone(&log));
            if best.as_ref().is_none_or(|(best, _)| place < *best) {
                best = Some((place, log));
            }
        }
        let Some((place, log)) = best else { return false };
        self.idle.remove(place, log.id);
        log.lock_ring().directory_entry.has_entries = false;
        self.change_ring(&log, LogRing::clear);
        self.cleared.insert((place.1, log.id), log);
        true
    }

    /// Forgets the cleared name whose last write is oldest. The nearest name above it inherits its counts.
    fn forget_idlest_cleared(&mut self) -> bool {
        let Some((_, log)) = self.cleared.pop_first() else { return false };
        let mut ring = log.lock_ring();
        // Under the ring's lock: a writer that still knows the name sees it, and looks the name up again.
        ring.directory_entry.is_forgotten = true;
        // A writer that reads only the level comes to `suppress_entry`, and sees it there.
        log.min_level.exclude_all();
        let suppressed = ring.suppressed;
        let memory = ring.directory_entry.memory;
        let (own, inherited) = (ring.counts_to_inherit(), ring.inherited.take());
        for follower in self.followers.iter().filter(|follower| follower.matches_dn(&log.dn)) {
            ring.remove_waiting(follower);
            follower.forget_name(log.id, ring.evicted_after(follower.mask, 0));
        }
        drop(ring);
        self.names.remove(&log.dn);
        self.memory -= NAME_BYTES + log.dn.as_str().len() + memory;
        let above = || std::iter::successors(log.dn.parent(), Dn::parent);
        let heir = above().find_map(|dn| self.names.get(&dn)).expect("the root is never forgotten").clone();
        self.memory -= self.forgotten.memory_bytes();
        let between = above().take_while(|dn| *dn != heir.dn);
        self.forgotten.add_name(&log.dn, &own, inherited.as_deref(), between);
        self.memory += self.forgotten.memory_bytes();
        // The ring is unlocked: two locked rings could deadlock.
        self.change_ring(&heir, |ring| {
            let counts = ring.inherited.get_or_insert_default();
            inherited.iter().for_each(|inherited| counts.add(inherited));
            counts.add(&own);
            ring.suppressed += suppressed;
        });
        true
    }

    /// The entries that names of a query lost when they were forgotten, newer than `after`.
    pub(crate) fn forgotten_after(&self, query: &LogQuery, mask: ClassMask, after: u64) -> MissedEntries {
        let mut forgotten = MissedEntries::default();
        // The root is never forgotten, and inherits all that no other name does.
        if !query.dn.is_root() {
            let before = self.names.get(&query.dn).map_or(u64::MAX, |log| log.lock_ring().first_seq);
            forgotten = self.forgotten.missed_after(query, mask, after, before);
        }
        if query.include_descendants {
            // Names within the query have inherited those that were forgotten since they were created.
            for log in self.names_of(query) {
                let ring = log.lock_ring();
                let inherited = ring.inherited.as_ref();
                forgotten.add(inherited.map_or_else(MissedEntries::default, |inherited| {
                    inherited.missed_between(mask, after, u64::MAX)
                }));
            }
        }
        forgotten
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::StreamOrigin;
    use crate::ring::AppendResult;

    fn append(directory: &mut Directory, name: &str, record: &mut RecordBuffer, next_seq: &AtomicU64) {
        let log = directory.find_or_create_name(&name.parse().unwrap());
        let limits = directory.limits;
        loop {
            let seq = next_seq.load(Ordering::Relaxed);
            let mut ring = log.lock_ring();
            let appended = ring.append(record, &limits, next_seq, &mut Vec::new());
            drop(ring);
            match appended {
                AppendResult::Appended => return,
                AppendResult::MemoryChanged => return directory.settle_memory(&log),
                AppendResult::NoRoom => directory.make_room(&log, record, seq),
            }
        }
    }

    #[test]
    fn memory_is_counted_and_stays_within_the_budget() {
        for max_names in [40, 100_000] {
            let limits = LogLimits {
                bytes_per_dn: 64 << 10,
                total_bytes: 128 << 10,
                max_names,
                ..LogLimits::default()
            };
            let (mut directory, next_seq) =
                (Directory::new(1, limits, Arc::new(PartialLineBudget::new(0))), AtomicU64::new(1));
            let mut record = RecordBuffer::for_raw_lines(&StreamOrigin::default());
            for number in 0..30_000usize {
                let name = number % 7 * (number / if max_names == 40 { 1000 } else { 10 });
                record.write_raw_line(0, "x".repeat(number * 31 % 1024).as_bytes(), None, false);
                append(&mut directory, &format!("n.{name}"), &mut record, &next_seq);
                check_directory(&directory, number.is_multiple_of(100));
            }
            let appended: u64 = directory.names().map(|log| log.lock_ring().total_appended()).sum();
            assert_eq!(appended, 30_000);
        }
    }

    #[test]
    fn a_full_name_has_few_segments_and_a_reader_few_locks() {
        let limits = LogLimits::default();
        let mut directory = Directory::new(1, limits, Arc::new(PartialLineBudget::new(0)));
        let (mut record, next_seq) =
            (RecordBuffer::for_raw_lines(&StreamOrigin::default()), AtomicU64::new(1));
        record.write_raw_line(0, &[b'x'; 135], None, false);
        for _ in 0..20_000 {
            append(&mut directory, "n", &mut record, &next_seq);
        }
        check_directory(&directory, true);
        let log = directory.find_or_create_name(&"n".parse().unwrap());
        let ring = log.lock_ring();
        let segments = ring.segments_from(ring.start).count();
        assert!(ring.capacity() > limits.bytes_per_dn * 15 / 16 && segments <= 24, "{segments}");
    }

    fn check_directory(directory: &Directory, thoroughly: bool) {
        let Directory { limits, names, by_memory, idle, cleared, .. } = directory;
        assert!(directory.memory <= limits.total_bytes, "{}", directory.memory);
        assert!(names.len() <= limits.max_names * (1 + CLEARED_PER_NAME));
        assert!(idle.len() < limits.max_names);
        assert_eq!(idle.len() + cleared.len() + 1, names.len());
        if thoroughly {
            let counted = names.values().map(|log| {
                let ring = log.lock_ring();
                assert!(ring.capacity() <= limits.bytes_per_dn);
                assert_eq!(ring.directory_entry.memory, ring.memory_bytes());
                let divisible = ring.directory_entry.divisible_memory;
                assert_eq!(by_memory.contains_key(&(divisible, log.id)), divisible > 0);
                assert!(divisible == 0 || (divisible == ring.memory_bytes() && ring.is_divisible()));
                let place = ring.directory_entry.place;
                assert_eq!(idle.contains(place, log.id), ring.directory_entry.has_entries);
                NAME_BYTES + log.dn.as_str().len() + ring.memory_bytes()
            });
            assert_eq!(directory.memory, counted.sum::<usize>() + directory.forgotten.memory_bytes());
        }
    }
}
