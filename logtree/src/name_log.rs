//! One name with its records.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Dn;
use crate::name_levels::AtomicLevel;
use crate::ring::LogRing;

/// A value that shares its cache line with no other: all writers write it, and read the others.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct CacheLine<T>(pub(crate) T);

/// As long as a cache line.
type Gap = [u64; 8];

/// A name and its ring, with its lock: writers of two names don't wait for each other, and share no cache line. What
/// readers need for each entry shares none with the ring, which writers change. Gaps keep them apart: an alignment
/// would cost each of many names twice as much.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct NameLog {
    /// Of its store: two stores that are layers of one subscriber share the addresses in its spans.
    pub(crate) store_id: u64,
    /// Unique in the store; from 1.
    pub(crate) id: u64,
    pub(crate) dn: Dn,
    /// Contains no level if the store has forgotten the name.
    pub(crate) min_level: AtomicLevel,
    before_ring: Gap,
    ring: Mutex<LogRing>,
    after_ring: Gap,
}

impl NameLog {
    pub(crate) fn new(store_id: u64, id: u64, dn: Dn, ring: LogRing) -> NameLog {
        let (before_ring, after_ring) = (Gap::default(), Gap::default());
        let (min_level, ring) = (AtomicLevel::default(), Mutex::new(ring));
        NameLog { store_id, id, dn, min_level, before_ring, ring, after_ring }
    }

    #[inline]
    pub(crate) fn lock_ring(&self) -> MutexGuard<'_, LogRing> {
        // No foreign code runs under the lock, and a panic of ours must not silence the log that would report
        // it.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an entry below the level that is set for the name.
    pub(crate) fn suppress_entry(&self) -> SuppressResult {
        let mut ring = self.lock_ring();
        if ring.directory_entry.is_forgotten {
            return SuppressResult::Forgotten;
        }
        ring.suppressed += 1;
        if ring.suppressed == 1 && !ring.directory_entry.has_entries {
            return SuppressResult::NewName;
        }
        SuppressResult::Counted
    }
}

/// The place at which an entry below its level was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SuppressResult {
    Counted,
    /// Counted under a name that has no entries, whose memory may exceed the limit.
    NewName,
    /// Not counted: the store has forgotten the name.
    Forgotten,
}

/// A name to write to. In the first store that it is used with, it needs no lookup but the first, unless the
/// store forgets the name.
#[derive(Debug)]
pub(crate) struct RingAddress {
    pub(crate) dn: Dn,
    pub(crate) log: OnceLock<Arc<NameLog>>,
}

impl RingAddress {
    pub(crate) fn new(dn: Dn) -> RingAddress {
        RingAddress { dn, log: OnceLock::new() }
    }
}
