//! The locks of volumes and snapshots.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::snapshot::StoredId;

/// Number of short locks; volumes that share one wait for each other.
const LOCK_COUNT: usize = 64;

/// Two locks for each volume and snapshot: a short one for a change in its place, and one that is held for as long as a
/// copy takes. A caller that needs both takes the long one first.
pub(super) struct EntryLocks {
    short: [Mutex<()>; LOCK_COUNT],
    hasher: RandomState,
    /// The volumes and snapshots that are being copied, or made as an image.
    in_progress: Mutex<HashSet<StoredId>>,
    finished: Condvar,
}

/// Keeps other calls from the same snapshot, copy or image, for as long as it takes to make.
pub(super) struct CopyLock<'a> {
    locks: &'a EntryLocks,
    id: StoredId,
}

impl EntryLocks {
    pub(super) fn new() -> Self {
        Self {
            short: [const { Mutex::new(()) }; LOCK_COUNT],
            hasher: RandomState::new(),
            in_progress: Mutex::default(),
            finished: Condvar::new(),
        }
    }

    /// Takes the short lock of a volume or snapshot, which other ids may share.
    pub(super) fn lock(&self, id: &str) -> MutexGuard<'_, ()> {
        let lock = usize::try_from(self.hasher.hash_one(id) % LOCK_COUNT as u64).unwrap_or_default();
        self.short[lock].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing of this id is in progress, and locks it.
    pub(super) fn lock_copy(&self, id: &StoredId) -> CopyLock<'_> {
        // A set of ids, and not one of the short locks: a copy takes minutes, and other volumes share those.
        let mut held = self.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        while !held.insert(id.clone()) {
            held = self.finished.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        CopyLock { locks: self, id: id.clone() }
    }

    /// The same lock, unless a copy holds it.
    pub(super) fn try_lock_copy(&self, id: &StoredId) -> Option<CopyLock<'_>> {
        let mut held = self.in_progress.lock().unwrap_or_else(PoisonError::into_inner);
        held.insert(id.clone()).then(|| CopyLock { locks: self, id: id.clone() })
    }
}

impl Drop for CopyLock<'_> {
    fn drop(&mut self) {
        self.locks.in_progress.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        // All of them, since each waits for an id of its own.
        self.locks.finished.notify_all();
    }
}
