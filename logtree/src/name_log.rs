//! One name with its records.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::Dn;
use crate::ring::LogRing;

/// A name and its ring, with its lock: writers of two names don't wait for each other.
#[derive(Debug)]
pub(crate) struct NameLog {
    /// Of its store: two stores that are layers of one subscriber share the addresses in its spans.
    pub(crate) store_id: u64,
    /// Unique in the store; from 1.
    pub(crate) id: u64,
    pub(crate) dn: Dn,
    ring: Mutex<LogRing>,
}

impl NameLog {
    pub(crate) fn new(store_id: u64, id: u64, dn: Dn, ring: LogRing) -> NameLog {
        NameLog { store_id, id, dn, ring: Mutex::new(ring) }
    }

    #[inline]
    pub(crate) fn lock_ring(&self) -> MutexGuard<'_, LogRing> {
        // No foreign code runs under the lock, and a panic of ours must not silence the log that would report
        // it.
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
