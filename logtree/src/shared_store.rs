//! The parts of a store that its handles, writers, layers and readers share.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::task::Waker;

use crate::class::ClassMask;
use crate::clock::{follow_wall_clock, now_nanos};
use crate::directory::Directory;
use crate::follower::Follower;
use crate::limits::LogLimits;
use crate::line_budget::PartialLineBudget;
use crate::merge::RingMerge;
use crate::missed::MissedEntries;
use crate::name_levels::AtomicLevel;
use crate::name_log::{CacheLine, NameLog, RingAddress, SuppressResult};
use crate::query::{BacklogLimit, LogCursor, LogQuery, QueryError};
use crate::record::RecordBuffer;
use crate::ring::AppendResult;
use crate::{Dn, Level};

/// Shared by all handles, writers, layers and readers.
pub(crate) struct SharedLogStore {
    pub(crate) limits: LogLimits,
    pub(crate) partial_lines: Arc<PartialLineBudget>,
    /// Identifies the store in cursors.
    pub(crate) store_id: u64,
    /// The number of the next record.
    pub(crate) next_seq: CacheLine<AtomicU64>,
    directory: RwLock<Directory>,
    /// The lowest level that is set for any name.
    pub(crate) lowest_level: AtomicLevel,
}

impl fmt::Debug for SharedLogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl SharedLogStore {
    pub(crate) fn new(limits: LogLimits) -> SharedLogStore {
        let partial_lines = Arc::new(PartialLineBudget::new(limits.total_bytes / 4));
        // Random, so that a cursor of an earlier run of the program does not fit.
        let store_id = RandomState::new().hash_one(now_nanos());
        SharedLogStore {
            limits,
            partial_lines: Arc::clone(&partial_lines),
            store_id,
            next_seq: CacheLine(AtomicU64::new(1)),
            directory: RwLock::new(Directory::new(store_id, limits, partial_lines)),
            lowest_level: AtomicLevel::default(),
        }
    }

    pub(crate) fn read_directory(&self) -> RwLockReadGuard<'_, Directory> {
        // No foreign code runs under the lock, and a panic of ours must not silence the log that would report
        // it.
        self.directory.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write_directory(&self) -> RwLockWriteGuard<'_, Directory> {
        self.directory.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_or_create_name(&self, dn: &Dn) -> Arc<NameLog> {
        let found = self.read_directory().find_name(dn).cloned();
        found.unwrap_or_else(|| self.write_directory().find_or_create_name(dn))
    }

    /// Stores a record and wakes the readers that wait for it.
    pub(crate) fn append_record(&self, to: &RingAddress, record: &mut RecordBuffer) {
        let mut wake = Vec::new();
        let known = to.log.get_or_init(|| self.find_or_create_name(&to.dn));
        if known.store_id != self.store_id || !self.append_to(known, record, &mut wake) {
            // The address was used with another store first, or the store has forgotten the name since.
            while !self.append_to(&self.find_or_create_name(&to.dn), record, &mut wake) {}
        }
        for waker in wake {
            waker.wake();
        }
    }

    /// Appends a record to a name; false if the name is forgotten.
    #[inline]
    fn append_to(&self, log: &Arc<NameLog>, record: &mut RecordBuffer, wake: &mut Vec<Waker>) -> bool {
        loop {
            let mut ring = log.lock_ring();
            if ring.directory_entry.is_forgotten {
                return false;
            }
            let appended = ring.append(record, &self.limits, &self.next_seq.0, wake);
            // Before the directory is locked: it locks rings, so the other order could deadlock.
            drop(ring);
            match appended {
                AppendResult::Appended => return true,
                AppendResult::MemoryChanged => {
                    self.write_directory().settle_memory(log);
                    return true;
                }
                AppendResult::NoRoom => {
                    let next_seq = self.next_seq.0.load(Ordering::Acquire);
                    self.write_directory().make_room(log, record, next_seq);
                }
            }
        }
    }

    /// Opens a reader of the names of a query.
    pub(crate) fn open_merge(
        &self,
        query: LogQuery,
        mask: ClassMask,
    ) -> Result<(RingMerge, u64), QueryError> {
        follow_wall_clock();
        let after = query.after.map_or(0, |cursor| cursor.seq);
        let follower = query.follow.then(|| Arc::new(Follower::new(query.clone(), mask)));
        let mut directory = self.write_directory();
        // Names that are created later have later numbers.
        let live_from = self.next_seq.0.load(Ordering::Acquire);
        if let Some(cursor) = query.after {
            cursor.check(self.store_id, live_from - 1)?;
        }
        // Under one lock: a name that is created or forgotten is either counted here or reported to the follower.
        let forgotten = directory.forgotten_after(&query, mask, after);
        let logs = directory.names_of(&query);
        follower.iter().for_each(|follower| directory.add_follower(Arc::clone(follower)));
        drop(directory);
        let (cursor, backlog) = (query.after, query.backlog_limit);
        let mut merge = RingMerge::new(query, mask, follower, forgotten);
        let n = match backlog {
            BacklogLimit::All if cursor.is_none() => {
                merge.add_from_start(logs);
                return Ok((merge, live_from));
            }
            BacklogLimit::All => usize::MAX,
            BacklogLimit::None => 0,
            BacklogLimit::Last(n) => n,
        };
        merge.add_from_end(logs);
        merge.rewind(n, after, live_from);
        if let (Some(LogCursor { seq, missed, .. }), BacklogLimit::All) = (cursor, backlog) {
            merge.report_forgotten(MissedEntries { count: missed, seq, is_upper_bound: true });
        }
        Ok((merge, live_from))
    }

    /// Ends the notices to a reader.
    pub(crate) fn remove_reader<'a>(
        &self,
        follower: Option<&Arc<Follower>>,
        waiting: impl Iterator<Item = &'a Arc<NameLog>>,
    ) {
        let Some(follower) = follower else { return };
        self.write_directory().remove_follower(follower);
        let created = follower.take_inbox().into_iter().flat_map(|inbox| inbox.created.into_values());
        // The reader waits there as well, although it has not seen these names yet.
        created.for_each(|log| log.lock_ring().remove_waiting(follower));
        waiting.for_each(|log| log.lock_ring().remove_waiting(follower));
        drop(follower.take_waker());
    }

    /// The minimum level that is set for a name, or for the nearest one above it.
    pub(crate) fn level(&self, dn: &Dn) -> Option<Level> {
        self.read_directory().levels.find(dn).map(|(_, level)| level)
    }

    pub(crate) fn change_level(&self, dn: &Dn, level: Option<Level>) {
        let mut directory = self.write_directory();
        let is_changed = directory.set_level(dn, level);
        // Under the lock: of two changes, the later one is the last to store its result.
        self.lowest_level.set(directory.levels.lowest());
        drop(directory);
        if is_changed {
            // Filters of the layer may depend on the lowest level.
            tracing::callsite::rebuild_interest_cache();
        }
    }

    /// Returns whether an entry of this level is kept under a name; counts it if not.
    #[inline]
    pub(crate) fn keeps_level(&self, to: &RingAddress, level: Level) -> bool {
        let known = to.log.get_or_init(|| self.find_or_create_name(&to.dn));
        known.store_id == self.store_id && known.min_level.contains(level)
            || !self.suppress_entry(known, &to.dn, level)
    }

    /// Counts an entry that is below the level of its name; false if it is not below it.
    #[cold]
    fn suppress_entry(&self, known: &Arc<NameLog>, dn: &Dn, level: Level) -> bool {
        let mut log = Arc::clone(known);
        loop {
            if log.store_id == self.store_id {
                if log.min_level.contains(level) {
                    return false;
                }
                match log.suppress_entry() {
                    SuppressResult::Counted => return true,
                    SuppressResult::NewName => {
                        self.write_directory().settle_memory(&log);
                        return true;
                    }
                    SuppressResult::Forgotten => {}
                }
            }
            log = self.find_or_create_name(dn);
        }
    }
}
