//! The journal itself.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::query::{Backlog, Query, QueryError};
use crate::record::{Record, now};
use crate::state::{Address, State};
use crate::{Dn, JournalLayer, Level, LineWriter, Message, Reader, WriterOptions};

/// How much a [`Journal`] keeps. What exceeds a limit is dropped oldest first and counted; nothing is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "plain data, complete")]
pub struct Limits {
    /// Memory for the entries of one name, at least 4 KiB. Default 1 MiB, some 6,000 lines.
    pub bytes_per_dn: usize,
    /// Most entries of one name, besides. Default none.
    pub entries_per_dn: Option<usize>,
    /// Memory for all entries, at least `bytes_per_dn`. When it is used up, names that need more take it from those
    /// that have most: a flooding name cannot push out a quiet one. Default 64 MiB.
    pub total_bytes: usize,
    /// Most names, at least 2. Beyond, the one idle for longest is forgotten; its entries count as dropped from the
    /// nearest name above it. Default 1024.
    pub dns: usize,
    /// Where raw lines are cut, in bytes; at most a quarter of `bytes_per_dn`. Default 1024.
    pub line_bytes: usize,
    /// Where leveled entries are cut, message and fields together; at most half of `bytes_per_dn`. Default 16 KiB.
    pub message_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            bytes_per_dn: 1 << 20,
            entries_per_dn: None,
            total_bytes: 64 << 20,
            dns: 1024,
            line_bytes: 1024,
            message_bytes: 16 << 10,
        }
    }
}

impl Limits {
    /// The same within the ranges documented, so that a record always fits its ring.
    fn within_ranges(self) -> Limits {
        let bytes_per_dn = self.bytes_per_dn.clamp(4 << 10, 1 << 30);
        Limits {
            bytes_per_dn,
            entries_per_dn: self.entries_per_dn.map(|entries| entries.max(1)),
            total_bytes: self.total_bytes.max(bytes_per_dn),
            dns: self.dns.max(2),
            line_bytes: self.line_bytes.clamp(1, bytes_per_dn / 4),
            message_bytes: self.message_bytes.clamp(64, bytes_per_dn / 2),
        }
    }
}

/// Entries by name, in memory; clones are handles to the same journal.
///
/// # Contract
/// Entries are numbered in the order they are stored, over all names. A reader gets them in that order, each once,
/// with no gap between backlog and live stream; what was dropped before it came to it is reported at its place. Writers
/// never wait for readers, only for each other, and for microseconds.
#[derive(Clone)]
pub struct Journal {
    shared: Arc<Shared>,
}

/// What a name has stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DnStats {
    /// The name.
    pub dn: Dn,
    /// Entries stored.
    pub entries: usize,
    /// Bytes they take.
    pub bytes: usize,
    /// Entries ever appended, `entries + dropped`; includes those of forgotten names below it.
    pub appended: u64,
    /// Entries dropped.
    pub dropped: u64,
}

/// Behind all handles, writers, layers and readers.
pub(crate) struct Shared {
    pub(crate) limits: Limits,
    state: Mutex<State>,
    levels: RwLock<HashMap<Dn, Level>>,
    has_levels: AtomicBool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // No code of others runs under the lock, and a bug of ours must not silence the log that would tell of it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a record and wakes those who wait for it.
    pub(crate) fn append(&self, to: &Address, record: &mut Record) {
        let mut wake = Vec::new();
        self.state().append(to, record, &mut wake);
        for waker in wake {
            waker.wake();
        }
    }

    /// Whether any name has a level of its own.
    pub(crate) fn has_levels(&self) -> bool {
        self.has_levels.load(Ordering::Relaxed)
    }

    pub(crate) fn level(&self, dn: &Dn) -> Option<Level> {
        self.levels.read().unwrap_or_else(PoisonError::into_inner).get(dn).copied()
    }
}

impl Journal {
    /// An empty journal. Limits outside of their ranges are taken as the nearest end.
    pub fn new(limits: Limits) -> Journal {
        let limits = limits.within_ranges();
        Journal {
            shared: Arc::new(Shared {
                limits,
                state: Mutex::new(State::new(limits)),
                levels: RwLock::default(),
                has_levels: AtomicBool::new(false),
            }),
        }
    }

    /// Stores a message whatever its level.
    pub fn append(&self, dn: &Dn, message: Message) {
        let mut record = Record::default();
        record.ready(&message, now(), None, self.shared.limits.message_bytes, None);
        self.shared.append(&Address::new(dn.clone()), &mut record);
    }

    /// A writer that stores output line by line.
    pub fn writer(&self, dn: &Dn, options: WriterOptions) -> LineWriter {
        LineWriter::new(self.shared.clone(), dn.clone(), options)
    }

    /// A layer that stores `tracing` events.
    pub fn layer(&self) -> JournalLayer {
        JournalLayer::new(self.shared.clone())
    }

    /// Reads what is stored, and goes on with what will be if the query follows.
    ///
    /// # Errors
    /// [`QueryError`] if the query makes no sense. A name nobody wrote to is no error: it may be written to later.
    pub fn read(&self, query: Query) -> Result<Reader, QueryError> {
        let mask = query.mask()?;
        let (follow, after, backlog) = (query.follow, query.after, query.backlog);
        let (id, live_from) = self.shared.state().subscribe(query, mask);
        // From here on the reader is dropped properly whatever happens.
        let reader = Reader::new(self.shared.clone(), id, live_from, follow, after);
        let mut n = match backlog {
            Backlog::None => 0,
            Backlog::Last(n) => n,
            Backlog::All if after.is_some() => usize::MAX,
            Backlog::All => 0,
        };
        while !self.shared.state().walk_back(id, &mut n, after.unwrap_or(0)) {}
        Ok(reader)
    }

    /// Sets the least level the [layer](Journal::layer) stores for exactly this name, instead of the layer's own.
    pub fn set_level(&self, dn: &Dn, level: Level) {
        self.shared.levels.write().unwrap_or_else(PoisonError::into_inner).insert(dn.clone(), level);
        self.shared.has_levels.store(true, Ordering::Relaxed);
    }

    /// The level set for exactly this name, if one is.
    pub fn level(&self, dn: &Dn) -> Option<Level> {
        self.shared.level(dn)
    }

    /// What each name has stored, in the order of names. The root is always there.
    pub fn stats(&self) -> Vec<DnStats> {
        let stats = |ring: &crate::ring::Ring| DnStats {
            dn: ring.dn.clone(),
            entries: ring.entries,
            bytes: ring.len(),
            appended: ring.appended.iter().sum(),
            dropped: ring.evicted.iter().sum(),
        };
        self.shared.state().rings().map(stats).collect()
    }
}

impl Default for Journal {
    fn default() -> Journal {
        Journal::new(Limits::default())
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}
