//! The log store: appends, readers, limits and statistics.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::partial_lines::PartialLineBudget;
use crate::query::{BacklogLimit, LogCursor, LogQuery, QueryError};
use crate::record::{RecordBuffer, now_nanos};
use crate::state::{LogStoreState, RingAddress};
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
    /// Memory for all entries, at least `bytes_per_dn`. When it is used up, names that need more get it from
    /// the names that use most: a flooding name cannot evict a quiet one. Default 64 MiB.
    ///
    /// In addition, lines whose end has not been written take up to a quarter of it, over all
    /// [`LineWriter`]s: beyond that they are cut. A writer itself takes up to 2 KiB, a name with dropped
    /// entries up to 10 KiB.
    pub total_bytes: usize,
    /// Maximum number of names with entries, at least 2. Beyond it, the name that is idle for longest loses
    /// its entries, and its readers find their number. It is forgotten when there are five times as many
    /// names: its readers then find an upper bound, and the nearest name above it inherits its number of
    /// dropped entries. Default 1024.
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
            max_names: 1024,
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
}

/// Shared by all handles, writers, layers and readers.
pub(crate) struct SharedLogStore {
    pub(crate) limits: LogLimits,
    pub(crate) partial_lines: Arc<PartialLineBudget>,
    state: Mutex<LogStoreState>,
    min_levels: RwLock<HashMap<Dn, Level>>,
    has_min_levels: AtomicBool,
}

impl fmt::Debug for SharedLogStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogStore").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl SharedLogStore {
    pub(crate) fn lock_state(&self) -> MutexGuard<'_, LogStoreState> {
        // No foreign code runs under the lock, and a panic of ours must not silence the log that would report
        // it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a record and wakes the readers that wait for it.
    pub(crate) fn append_record(&self, to: &RingAddress, record: &mut RecordBuffer) {
        let mut wake = Vec::new();
        self.lock_state().append_record(to, record, &mut wake);
        for waker in wake {
            waker.wake();
        }
    }

    /// Whether a minimum level is set for any name.
    pub(crate) fn has_min_levels(&self) -> bool {
        self.has_min_levels.load(Ordering::Relaxed)
    }

    pub(crate) fn min_level(&self, dn: &Dn) -> Option<Level> {
        self.min_levels.read().unwrap_or_else(PoisonError::into_inner).get(dn).copied()
    }
}

impl LogStore {
    /// An empty log store. Limits outside of their ranges are clamped.
    pub fn new(limits: LogLimits) -> LogStore {
        let limits = limits.clamped();
        LogStore {
            shared: Arc::new(SharedLogStore {
                limits,
                partial_lines: Arc::new(PartialLineBudget::new(limits.total_bytes / 4)),
                state: Mutex::new(LogStoreState::new(limits)),
                min_levels: RwLock::default(),
                has_min_levels: AtomicBool::new(false),
            }),
        }
    }

    /// Stores a message of any level.
    pub fn append_message(&self, dn: &Dn, message: LogMessage) {
        let mut record = RecordBuffer::default();
        record.write_message(&message, now_nanos(), None, self.shared.limits.message_bytes, None);
        self.shared.append_record(&RingAddress::new(dn.clone()), &mut record);
    }

    /// Creates a writer that stores output line by line.
    pub fn line_writer(&self, dn: &Dn, options: WriterOptions) -> LineWriter {
        LineWriter::new(self.shared.clone(), dn.clone(), options)
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
        let (follow, after, backlog) = (query.follow, query.after, query.backlog_limit);
        let after_seq = after.map_or(0, |cursor| cursor.seq);
        let (id, live_from) = self.shared.lock_state().add_reader(query, mask)?;
        // From here on, dropping the reader unregisters it.
        let reader = LogReader::new(self.shared.clone(), (id, live_from), follow, after_seq);
        let mut n = match backlog {
            BacklogLimit::None => 0,
            BacklogLimit::Last(n) => n,
            BacklogLimit::All if after.is_some() => usize::MAX,
            BacklogLimit::All => 0,
        };
        while !self.shared.lock_state().rewind_reader(id, &mut n, after_seq) {}
        Ok(reader)
    }

    /// The position of the entry with this sequence number.
    pub fn cursor_at(&self, seq: u64) -> LogCursor {
        LogCursor { store_id: self.shared.lock_state().store_id, seq }
    }

    /// Sets the minimum level that the [layer](LogStore::layer) stores for exactly this name, instead of the
    /// layer's minimum level.
    pub fn set_min_level(&self, dn: &Dn, level: Level) {
        self.shared.min_levels.write().unwrap_or_else(PoisonError::into_inner).insert(dn.clone(), level);
        self.shared.has_min_levels.store(true, Ordering::Relaxed);
    }

    /// The minimum level set for exactly this name; `None` if it is not set.
    pub fn min_level(&self, dn: &Dn) -> Option<Level> {
        self.shared.min_level(dn)
    }

    /// Statistics of each name, in the order of names. The root is always included.
    pub fn dn_stats(&self) -> Vec<DnStats> {
        let stats = |ring: &crate::ring::LogRing| DnStats {
            dn: ring.dn.clone(),
            entries: ring.entries,
            bytes: ring.len(),
            appended: ring.total_appended(),
            dropped: ring.total_appended() - ring.entries as u64,
        };
        self.shared.lock_state().rings().map(stats).collect()
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
