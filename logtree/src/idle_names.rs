//! The names with entries, in the order in which they lose them for others.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::loss::IdlePlace;
use crate::name_log::NameLog;

/// One part in so many of the names is the share that each kind of loss may have: below it, names that lose more are
/// cleared. Without a share, a new name would lose its line to the next one as soon as all others have more.
const SHARES: usize = 8;

/// Names by what they lose, and by idleness. A place may be out of date, because writers don't change it.
#[derive(Debug, Default)]
pub(crate) struct IdleNames([BTreeMap<(u64, u64), Arc<NameLog>>; 3]);

impl IdleNames {
    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(BTreeMap::len).sum()
    }

    pub(crate) fn insert(&mut self, (loss, seq): IdlePlace, log: Arc<NameLog>) {
        self.0[loss as usize].insert((seq, log.id), log);
    }

    pub(crate) fn remove(&mut self, (loss, seq): IdlePlace, id: u64) {
        self.0[loss as usize].remove(&(seq, id));
    }

    /// The name but `keep` to be cleared first.
    pub(crate) fn first(&self, keep: u64) -> Option<Arc<NameLog>> {
        let shared = |names: &&BTreeMap<_, _>| names.len() * SHARES >= self.len();
        // The rest is for the case that `keep` is the only name with a share.
        let in_order = self.0.iter().filter(shared).chain(&self.0);
        let mut others = in_order.flat_map(|names| names.values().filter(|log| log.id != keep).take(1));
        others.next().cloned()
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, (loss, seq): IdlePlace, id: u64) -> bool {
        self.0[loss as usize].contains_key(&(seq, id))
    }
}
