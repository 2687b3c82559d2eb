//! The counts of forgotten names, which the nearest name above them inherits.

use crate::cursor::MissedEntries;
use crate::query::ClassMask;
use crate::ring::{ClassCounts, LogRing};

/// The number of records that forgotten names have had.
#[derive(Clone, Debug)]
pub(crate) struct InheritedCounts {
    counts: ClassCounts,
    /// Sequence number of the newest of them, by class, and of the first of all.
    newest_seq: ClassCounts,
    first_seq: u64,
}

impl Default for InheritedCounts {
    fn default() -> InheritedCounts {
        InheritedCounts { counts: [0; 7], newest_seq: [0; 7], first_seq: u64::MAX }
    }
}

impl InheritedCounts {
    /// All records that a name has had, and those that it has inherited.
    pub(crate) fn of_ring(ring: &LogRing) -> InheritedCounts {
        let mut counts = ring.inherited.as_deref().cloned().unwrap_or_default();
        for class in 0..counts.counts.len() {
            counts.counts[class] += ring.appended[class];
            counts.newest_seq[class] = counts.newest_seq[class].max(ring.last_seq_of_class(class));
        }
        counts.first_seq = counts.first_seq.min(ring.first_seq);
        counts
    }

    pub(crate) fn add(&mut self, other: &InheritedCounts) {
        for class in 0..self.counts.len() {
            self.counts[class] += other.counts[class];
            self.newest_seq[class] = self.newest_seq[class].max(other.newest_seq[class]);
        }
        self.first_seq = self.first_seq.min(other.first_seq);
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
        let count = if is_exact { all } else { all.min((newest + 1).saturating_sub(oldest)) };
        MissedEntries { count, seq: if count > 0 { newest } else { 0 }, is_upper_bound: !is_exact }
    }
}
