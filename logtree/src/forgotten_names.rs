//! The number of records of each name that the store has forgotten: what a reader of that name has missed.
//!
//! A forgotten name costs a twentieth of one without entries, because only a hash of it is kept. When too many are
//! forgotten, the older half becomes one number, an upper bound for every name.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use crate::Dn;
use crate::class::ClassMask;
use crate::missed::{InheritedCounts, MissedEntries};
use crate::query::LogQuery;

/// Memory of a number in a tree whose nodes are about two thirds full, and of a pointer.
const OWN_BYTES: usize = 56;
const BELOW_BYTES: usize = 48;

/// The number of records of one class of a name.
#[derive(Clone, Copy, Debug)]
struct OwnCount {
    count: u64,
    first_seq: u64,
    newest_seq: u64,
}

/// The counts of names that were forgotten one after the other.
#[derive(Debug, Default)]
struct Generation {
    /// The records of each name, by a hash of it, whose lowest bits are the class.
    own: BTreeMap<u64, OwnCount>,
    /// The records below each name that a name above it has inherited, by a hash of the name.
    below: BTreeMap<u64, Box<InheritedCounts>>,
    bytes: usize,
}

impl Generation {
    fn add_own(&mut self, hash: u64, counts: &InheritedCounts) {
        for (class, count, newest_seq) in counts.by_class() {
            let known = self.own.entry(class_key(hash, class)).or_insert_with(|| {
                self.bytes += OWN_BYTES;
                OwnCount { count: 0, first_seq: u64::MAX, newest_seq: 0 }
            });
            known.count += count;
            known.first_seq = known.first_seq.min(counts.first_seq());
            known.newest_seq = known.newest_seq.max(newest_seq);
        }
    }

    fn add_below(&mut self, hash: u64, counts: &InheritedCounts) {
        let mut before = 0;
        let known = self.below.entry(hash).and_modify(|known| before = BELOW_BYTES + known.memory_bytes());
        let known = known.or_default();
        known.add(counts);
        self.bytes = self.bytes - before + BELOW_BYTES + known.memory_bytes();
    }
}

fn class_key(hash: u64, class: usize) -> u64 {
    hash & !7 | class as u64
}

#[derive(Debug)]
pub(crate) struct ForgottenNames {
    /// Random, so that nobody can choose names with the same hash.
    hasher: RandomState,
    recent: Generation,
    older: Generation,
    max_recent_bytes: usize,
    /// Those whose names are not known any more.
    nameless: InheritedCounts,
}

impl ForgottenNames {
    /// No counts; later as many as about this memory holds.
    pub(crate) fn new(bytes: usize) -> ForgottenNames {
        ForgottenNames {
            hasher: RandomState::new(),
            recent: Generation::default(),
            older: Generation::default(),
            max_recent_bytes: bytes / 2,
            nameless: InheritedCounts::default(),
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.recent.bytes + self.older.bytes
    }

    /// Adds the records of a name, and those that it had inherited from names below it. `above` are the names between it
    /// and its heir.
    pub(crate) fn add_name(
        &mut self,
        dn: &Dn,
        own: &InheritedCounts,
        inherited: Option<&InheritedCounts>,
        above: impl Iterator<Item = Dn>,
    ) {
        if self.recent.bytes >= self.max_recent_bytes {
            self.start_generation();
        }
        let hash = self.hasher.hash_one(dn);
        self.recent.add_own(hash, own);
        inherited.into_iter().for_each(|counts| self.recent.add_below(hash, counts));
        for hash in above.map(|dn| self.hasher.hash_one(dn)) {
            self.recent.add_below(hash, own);
            inherited.into_iter().for_each(|counts| self.recent.add_below(hash, counts));
        }
    }

    fn start_generation(&mut self) {
        let oldest = std::mem::replace(&mut self.older, std::mem::take(&mut self.recent));
        // Records below a name are also those of a name that was forgotten at the same time or earlier.
        for (key, own) in oldest.own {
            self.nameless.add_class((key & 7) as usize, own.count, own.newest_seq);
            self.nameless.start_at(own.first_seq);
        }
    }

    /// The entries that a query has missed after a number, but not those that names within it have inherited. `before` is
    /// the first number of the query's name since it was created last.
    pub(crate) fn missed_after(
        &self,
        query: &LogQuery,
        mask: ClassMask,
        after: u64,
        before: u64,
    ) -> MissedEntries {
        let hash = self.hasher.hash_one(&query.dn);
        let mut own = InheritedCounts::default();
        let mut missed = MissedEntries::default();
        for generation in [&self.recent, &self.older] {
            for class in mask.classes() {
                if let Some(found) = generation.own.get(&class_key(hash, class)) {
                    own.add_class(class, found.count, found.newest_seq);
                    own.start_at(found.first_seq);
                }
            }
            if let Some(below) = generation.below.get(&hash).filter(|_| query.include_descendants) {
                missed.add(below.missed_between(mask, after, u64::MAX));
            }
        }
        missed.add(own.missed_between(mask, after, u64::MAX));
        let nameless = self.nameless.missed_between(mask, after, before);
        missed.add(MissedEntries { is_upper_bound: true, ..nameless });
        missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dn(text: &str) -> Dn {
        text.parse().unwrap()
    }

    fn counts(count: u64, seq: u64) -> InheritedCounts {
        let mut counts = InheritedCounts::default();
        counts.add_class(2, count, seq + count - 1);
        counts.start_at(seq);
        counts
    }

    #[test]
    fn counts_are_exact_by_name_and_subtree_until_there_are_too_many() {
        let mut forgotten = ForgottenNames::new(10_000);
        let missed = |forgotten: &ForgottenNames, query: LogQuery, after| {
            let missed = forgotten.missed_after(&query, ClassMask::LEVELED, after, u64::MAX);
            (missed.count, missed.is_upper_bound)
        };
        let name = |text| LogQuery::of_dn(dn(text));
        forgotten.add_name(&dn("a.b.c"), &counts(3, 1), None, [dn("a.b"), dn("a")].into_iter());
        forgotten.add_name(&dn("a.b"), &counts(5, 4), Some(&counts(7, 9)), [dn("a")].into_iter());
        for (query, count) in [
            (name("a.b.c"), 3),
            (name("a.b"), 5),
            (name("a.b").include_descendants(), 15),
            (name("a"), 0),
            (name("a").include_descendants(), 15),
            (name("other"), 0),
        ] {
            assert_eq!(missed(&forgotten, query, 0), (count, false));
        }
        assert_eq!(missed(&forgotten, name("a.b"), 6), (2, true));
        for number in 0..1000 {
            forgotten.add_name(&dn(&format!("n.{number}")), &counts(1, 100 + number), None, [].into_iter());
            assert!(forgotten.memory_bytes() <= 11_000);
        }
        let (count, is_bound) = missed(&forgotten, name("a.b").include_descendants(), 0);
        assert!(is_bound && (15..=1000).contains(&count), "{count}");
        assert_eq!(missed(&forgotten, name("n.999"), 1098), (1, false));
    }
}
