//! Counts of entries that readers miss: of evicted records, and of the names that the store has forgotten.

use crate::class::{ClassCounts, ClassMask};
use crate::eviction_history::EvictionHistory;

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

/// The number of records that forgotten names have had.
#[derive(Debug)]
pub(crate) struct InheritedCounts {
    counts: ClassCounts,
    /// Sequence number of the newest of them, by class, and of the first of all.
    newest_seq: ClassCounts,
    first_seq: u64,
    /// The counts at earlier times, each with the largest number up to then.
    history: EvictionHistory,
}

impl Default for InheritedCounts {
    fn default() -> InheritedCounts {
        InheritedCounts {
            counts: [0; 7],
            newest_seq: [0; 7],
            first_seq: u64::MAX,
            history: EvictionHistory::default(),
        }
    }
}

impl InheritedCounts {
    /// Adds the records of one class of a name. `newest_seq` may be larger than that of the last of them.
    pub(crate) fn add_class(&mut self, class: usize, count: u64, newest_seq: u64) {
        self.counts[class] += count;
        self.newest_seq[class] = self.newest_seq[class].max(newest_seq);
    }

    /// A name whose first record has this sequence number is among them.
    pub(crate) fn start_at(&mut self, first_seq: u64) {
        self.first_seq = self.first_seq.min(first_seq);
    }

    pub(crate) fn add(&mut self, other: &InheritedCounts) {
        for class in 0..self.counts.len() {
            self.add_class(class, other.counts[class], other.newest_seq[class]);
        }
        self.start_at(other.first_seq);
        // All records that are counted by now have numbers up to the largest.
        self.history.add_point(self.newest_seq.into_iter().max().unwrap_or(0), self.counts);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of::<InheritedCounts>() + self.history.memory_bytes()
    }

    pub(crate) fn first_seq(&self) -> u64 {
        self.first_seq
    }

    /// The classes with records, their numbers, and the sequence number of the newest.
    pub(crate) fn by_class(&self) -> impl Iterator<Item = (usize, u64, u64)> {
        let with_records = (0..self.counts.len()).filter(|&class| self.counts[class] > 0);
        with_records.map(|class| (class, self.counts[class], self.newest_seq[class]))
    }

    pub(crate) fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Those that are newer than `after` and older than `before`, as far as it is known.
    pub(crate) fn missed_between(&self, mask: ClassMask, after: u64, before: u64) -> MissedEntries {
        let newest = mask.max_over(|class| self.newest_seq[class]).min(before.saturating_sub(1));
        let all = mask.sum_over(|class| self.counts[class]);
        let is_exact = after < self.first_seq && mask.max_over(|class| self.newest_seq[class]) < before;
        let oldest = self.first_seq.max(after.saturating_add(1));
        // Their numbers are not known: there are at most as many as numbers between the two.
        let (older, _) = self.history.evicted_up_to(after);
        let later = all - mask.sum_over(|class| older[class]);
        let count = if is_exact { all } else { later.min((newest + 1).saturating_sub(oldest)) };
        MissedEntries { count, seq: if count > 0 { newest } else { 0 }, is_upper_bound: !is_exact }
    }
}
