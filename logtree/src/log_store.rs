//! The handle of a store: appends, readers, levels and statistics.

use std::fmt;
use std::sync::Arc;

use crate::clock::now_nanos;
use crate::limits::LogLimits;
use crate::name_log::{NameLog, RingAddress};
use crate::query::{LogCursor, LogQuery, QueryError};
use crate::record::RecordBuffer;
use crate::shared_store::SharedLogStore;
use crate::{Dn, Level, LineWriter, LogMessage, LogReader, LogStoreLayer, WriterOptions};

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

impl LogStore {
    /// An empty log store. Limits outside of their ranges are clamped.
    pub fn new(limits: LogLimits) -> LogStore {
        LogStore { shared: Arc::new(SharedLogStore::new(limits.clamped())) }
    }

    /// Stores a message, unless it is below the [level](LogStore::set_level) of its name.
    pub fn append_message(&self, dn: &Dn, message: LogMessage) {
        // For this message alone: the second use needs no lookup of the name.
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
        // The writer exists by now, and its memory counts against that of the names.
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
    /// entries below it are not kept, by any writer, but [counted](DnStats::suppressed). Raw lines have no
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
        // Without the directory's lock for the rest: writers of new names need not wait for all rings.
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
