//! The log store: appends, readers, limits and statistics.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::task::Waker;

use crate::cursor::MissedEntries;
use crate::directory::Directory;
use crate::follower::Follower;
use crate::merge::RingMerge;
use crate::name_levels::AtomicLevel;
use crate::name_log::{NameLog, RingAddress, SuppressResult};
use crate::partial_lines::PartialLineBudget;
use crate::query::{BacklogLimit, ClassMask, LogCursor, LogQuery, QueryError};
use crate::record::{RecordBuffer, now_nanos};
use crate::ring::AppendResult;
use crate::{Dn, Level, LineWriter, LogMessage, LogReader, LogStoreLayer, WriterOptions};

/// How much a [`LogStore`] keeps. Beyond a limit, the oldest entries are dropped and counted; appends are
/// never rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "plain data, complete")]
pub struct LogLimits {
    /// Memory for the entries of one name, at least 4 KiB. Default 1 MiB, some 6,000 lines.
    pub bytes_per_dn: usize,
    /// Maximum number of entries of one name, in addition. Default none.
    pub entries_per_dn: Option<usize>,
    /// Memory for everything, at least `bytes_per_dn`: entries, the names themselves (about 1 KiB each), and
    /// [`LineWriter`]s (2 KiB each, and up to a quarter of it for lines whose end has not been written, which
    /// are cut beyond that). Writers take up to half of it from the names. When it is used up, names that need
    /// more get it from the names that use most: a flooding name cannot evict a quiet one. Only when there is
    /// no such name, the name that is idle for longest loses its entries. Default 64 MiB.
    ///
    /// Readers take memory in addition: some 200 bytes for each name they read, and 64 KiB or an entry during a call, for
    /// entries that may be dropped while they are copied.
    pub total_bytes: usize,
    /// Maximum number of names with entries, at least 2. Beyond it, the name that is idle for longest loses
    /// its entries, and its readers find their number. It is forgotten when there are five times as many
    /// names, or the memory is used up: its readers then find an upper bound, and the nearest name above it
    /// inherits its number of dropped entries. Default 65,536, more than the default memory can hold.
    pub max_names: usize,
    /// Maximum length of raw lines, in bytes, at most a quarter of `bytes_per_dn`; longer lines are cut.
    /// Default 1024.
    pub line_bytes: usize,
    /// Maximum length of leveled entries, message and fields together, in bytes, at most half of
    /// `bytes_per_dn`; longer ones are cut. Default 16 KiB.
    pub message_bytes: usize,
}

impl Default for LogLimits {
    fn default() -> LogLimits {
        LogLimits {
            bytes_per_dn: 1 << 20,
            entries_per_dn: None,
            total_bytes: 64 << 20,
            max_names: 1 << 16,
            line_bytes: 1024,
            message_bytes: 16 << 10,
        }
    }
}

impl LogLimits {
    /// The limits, clamped to the documented ranges, so that a record always fits its ring.
    fn clamped(self) -> LogLimits {
        let bytes_per_dn = self.bytes_per_dn.clamp(4 << 10, 1 << 30);
        LogLimits {
            bytes_per_dn,
            entries_per_dn: self.entries_per_dn.map(|entries| entries.max(1)),
            total_bytes: self.total_bytes.max(bytes_per_dn),
            max_names: self.max_names.max(2),
            line_bytes: self.line_bytes.clamp(1, bytes_per_dn / 4),
            message_bytes: self.message_bytes.clamp(64, bytes_per_dn / 2),
        }
    }
}

/// Entries by name, in memory; clones are handles to the same store.
///
/// # Contract
/// Entries are numbered in the order they are stored, over all names. A reader gets them in that order, each
/// once, with no gap between backlog and live stream; entries dropped before it reached them are reported at
/// their place. Writers never wait for readers, only for each other, and for microseconds.
#[derive(Clone)]
pub struct LogStore {
    shared: Arc<SharedLogStore>,
}

/// Statistics of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DnStats {
    /// The name.
    pub dn: Dn,
    /// Number of stored entries.
    pub entries: usize,
    /// Their size in bytes.
    pub bytes: usize,
    /// Number of entries ever appended, `entries + dropped`; includes those of forgotten names below it.
    pub appended: u64,
    /// Number of dropped entries.
    pub dropped: u64,
    /// Number of entries that were not kept because they were below the [level](LogStore::set_level) of the name;
    /// includes those of forgotten names below it.
    pub suppressed: u64,
}

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

/// A value that shares its cache line with no other: all writers write it, and read the others.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct CacheLine<T>(pub(crate) T);

impl fmt::Debug for SharedLogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl SharedLogStore {
    fn read_directory(&self) -> RwLockReadGuard<'_, Directory> {
        // No foreign code runs under the lock, and a panic of ours must not silence the log that would report
        // it.
        self.directory.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_directory(&self) -> RwLockWriteGuard<'_, Directory> {
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
            if ring.account.is_forgotten {
                return false;
            }
            let appended = ring.append(record, (log.id, &self.limits, &self.next_seq.0), wake);
            drop(ring);
            match appended {
                AppendResult::Appended => return true,
                AppendResult::MemoryChanged => {
                    self.write_directory().settle_memory(log);
                    return true;
                }
                AppendResult::NoRoom => {
                    let next_seq = self.next_seq.0.load(Ordering::Acquire);
                    self.write_directory().make_room(log, record.bytes().len(), next_seq);
                }
            }
        }
    }

    /// Opens a reader of the names of a query.
    fn open_merge(&self, query: LogQuery, mask: ClassMask) -> Result<(RingMerge, u64), QueryError> {
        let after = query.after.map_or(0, |cursor| cursor.seq);
        let follower = query.follow.then(|| Arc::new(Follower::new(query.clone(), mask)));
        let mut directory = self.write_directory();
        // Names that are created later have later numbers.
        let live_from = self.next_seq.0.load(Ordering::Acquire);
        if let Some(cursor) = query.after {
            cursor.check(self.store_id, live_from - 1)?;
        }
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
        created.for_each(|log| log.lock_ring().remove_waiting(follower));
        waiting.for_each(|log| log.lock_ring().remove_waiting(follower));
        drop(follower.take_waker());
    }

    /// The minimum level that is set for a name, or for the nearest one above it.
    pub(crate) fn level(&self, dn: &Dn) -> Option<Level> {
        self.read_directory().levels.find(dn).map(|(_, level)| level)
    }

    fn change_level(&self, dn: &Dn, level: Option<Level>) {
        let mut directory = self.write_directory();
        let is_changed = directory.set_level(dn, level);
        self.lowest_level.set(directory.levels.lowest());
        drop(directory);
        if is_changed {
            // Filters of the layer may depend on the lowest level.
            tracing::callsite::rebuild_interest_cache();
        }
    }

    /// Whether an entry of this level is kept under a name; counts it if not.
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

impl LogStore {
    /// An empty log store. Limits outside of their ranges are clamped.
    pub fn new(limits: LogLimits) -> LogStore {
        let limits = limits.clamped();
        let partial_lines = Arc::new(PartialLineBudget::new(limits.total_bytes / 4));
        let store_id = RandomState::new().hash_one(now_nanos());
        LogStore {
            shared: Arc::new(SharedLogStore {
                limits,
                partial_lines: Arc::clone(&partial_lines),
                store_id,
                next_seq: CacheLine(AtomicU64::new(1)),
                directory: RwLock::new(Directory::new(store_id, limits, partial_lines)),
                lowest_level: AtomicLevel::default(),
            }),
        }
    }

    /// Stores a message, unless it is below the [level](LogStore::set_level) of its name.
    pub fn append_message(&self, dn: &Dn, message: LogMessage) {
        let address = RingAddress::new(dn.clone());
        if !self.shared.keeps_level(&address, message.level) {
            return;
        }
        let mut record = RecordBuffer::default();
        record.write_message(&message, now_nanos(), None, self.shared.limits.message_bytes, None);
        self.shared.append_record(&address, &mut record);
    }

    /// Creates a writer that stores output line by line.
    pub fn line_writer(&self, dn: &Dn, options: WriterOptions) -> LineWriter {
        let writer = LineWriter::new(self.shared.clone(), dn.clone(), options);
        self.shared.write_directory().make_room_for_writers();
        writer
    }

    /// Creates a layer that stores `tracing` events.
    pub fn layer(&self) -> LogStoreLayer {
        LogStoreLayer::new(self.shared.clone())
    }

    /// Opens a reader of the stored entries, which continues with new entries if the query follows.
    ///
    /// # Errors
    /// [`QueryError`] if the query is contradictory, or its cursor is not a position in this store. A name
    /// without entries is valid: it may be written to later.
    pub fn open_reader(&self, query: LogQuery) -> Result<LogReader, QueryError> {
        let mask = query.class_mask()?;
        let after = query.after.map_or(0, |cursor| cursor.seq);
        let (merge, live_from) = self.shared.open_merge(query, mask)?;
        Ok(LogReader::new(self.shared.clone(), merge, live_from, after))
    }

    /// The position of the entry with this sequence number.
    pub fn cursor_at(&self, seq: u64) -> LogCursor {
        LogCursor { store_id: self.shared.store_id, seq, missed: 0 }
    }

    /// Sets the minimum level of a name, and of all names below it that have no other level. From now on their
    /// entries below it are not kept, whatever writes them, but [counted](DnStats::suppressed). Raw lines have no
    /// level, and are kept. For the [layer](LogStore::layer) it replaces the layer's minimum level.
    ///
    /// Writers only read an atomic number for it; the call itself takes time for each name that it concerns.
    /// `tracing` asks all filters again what they enable, so that one may depend on
    /// [`lowest_level`](LogStore::lowest_level).
    pub fn set_level(&self, dn: &Dn, level: Level) {
        self.shared.change_level(dn, Some(level));
    }

    /// Removes the minimum level that is set for exactly this name: the level of the nearest name above it holds
    /// instead.
    pub fn reset_level(&self, dn: &Dn) {
        self.shared.change_level(dn, None);
    }

    /// The minimum level of a name: the name for which it is set, this one or the nearest above it, and the level.
    /// `None` if it has none.
    pub fn level(&self, dn: &Dn) -> Option<(Dn, Level)> {
        self.shared.read_directory().levels.find(dn).map(|(set, level)| (set.clone(), level))
    }

    /// The names for which a minimum level is set, in their order, with the levels.
    pub fn levels(&self) -> Vec<(Dn, Level)> {
        self.shared.read_directory().levels.iter().map(|(dn, level)| (dn.clone(), level)).collect()
    }

    /// The lowest minimum level that is set for any name; `None` if none is set.
    pub fn lowest_level(&self) -> Option<Level> {
        self.shared.lowest_level.get()
    }

    /// Statistics of each name, in the order of names. The root is always included.
    pub fn dn_stats(&self) -> Vec<DnStats> {
        let logs: Vec<_> = self.shared.read_directory().names().cloned().collect();
        let stats = |log: &Arc<NameLog>| {
            let ring = log.lock_ring();
            DnStats {
                dn: log.dn.clone(),
                entries: ring.entries,
                bytes: ring.len(),
                appended: ring.total_appended(),
                dropped: ring.total_appended() - ring.entries as u64,
                suppressed: ring.suppressed,
            }
        };
        logs.iter().map(stats).collect()
    }
}

impl Default for LogStore {
    fn default() -> LogStore {
        LogStore::new(LogLimits::default())
    }
}

impl fmt::Debug for LogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
