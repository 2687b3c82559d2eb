//! Queries: the entries that a reader returns.

use std::fmt;
use std::str::FromStr;
use std::time::SystemTime;

use crate::class::ClassMask;
use crate::content_filter::{ContentFilter, TextPattern};
use crate::decode::decode_record;
use crate::missed::MissedEntries;
use crate::{Dn, DroppedEntries, EntryBody, Level, LogEntry};

/// The entries that a reader returns. Start with [`LogQuery::of_dn`]; the filters apply to backlog and live stream
/// alike.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogQuery {
    /// The name to read.
    pub dn: Dn,
    /// True to read all names below it, too.
    pub include_descendants: bool,
    /// The number of stored entries to start with.
    pub backlog_limit: BacklogLimit,
    /// True to continue with new entries.
    pub follow: bool,
    /// Leveled, raw, or both.
    pub kind_filter: KindFilter,
    /// Minimum level of leveled entries.
    pub min_level: Option<Level>,
    /// True if raw lines, which have no level, pass a `min_level`. They do not by default.
    pub raw_passes_min_level: bool,
    /// Only entries after this position, at which an earlier reader stopped
    /// ([`LogReader::cursor`](crate::LogReader::cursor)).
    pub after: Option<LogCursor>,
    /// The content that entries must have: [`LogQuery::since`], [`LogQuery::matching`], [`LogQuery::with_field`].
    /// Dropped entries can't be searched: their numbers become upper bounds.
    pub(crate) content: ContentFilter,
}

/// The number of stored entries that a reader starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum BacklogLimit {
    /// None; entries after [`LogQuery::after`] are not read, either.
    None,
    /// All.
    All,
    /// The newest entries, up to this number, that pass the filters, over all names read, oldest first.
    Last(usize),
}

/// The kinds of entries to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum KindFilter {
    /// Both.
    All,
    /// Messages with a level.
    Leveled,
    /// Raw lines.
    Raw,
}

/// A position in a store, at which a reader stopped. Plain data: a client can keep it, and resume after it while
/// the store exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "plain data, complete")]
pub struct LogCursor {
    /// Identifies the store: each has a random number, also after a restart of the program.
    pub store_id: u64,
    /// The sequence number of the last entry read; 0 before the first.
    pub seq: u64,
    /// Upper bound of the number of entries up to there that were dropped, and not yet reported.
    pub missed: u64,
}

/// The text is not a [`LogCursor`]: use one that a reader returned, unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("can't resume at cursor {0:?}: it was not printed with log entries; read without a cursor")]
pub struct ParseCursorError(pub String);

impl fmt::Display for LogCursor {
    /// The store's number in 16 hexadecimal digits, a dash, and the sequence number; a plus sign and the number of
    /// missed entries, if it is not 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.store_id, self.seq)?;
        if self.missed > 0 { write!(f, "+{}", self.missed) } else { Ok(()) }
    }
}

impl FromStr for LogCursor {
    type Err = ParseCursorError;

    fn from_str(text: &str) -> Result<LogCursor, ParseCursorError> {
        let parse = |(store_id, seq): (&str, &str)| {
            let store_id = u64::from_str_radix(store_id, 16).ok()?;
            let (seq, missed) = seq.split_once('+').unwrap_or((seq, "0"));
            Some(LogCursor { store_id, seq: seq.parse().ok()?, missed: missed.parse().ok()? })
        };
        // Only the printed form is valid, without the signs and leading zeros that the parsers of numbers accept.
        let cursor = text.split_once('-').and_then(parse).filter(|cursor| cursor.to_string() == text);
        cursor.ok_or_else(|| ParseCursorError(text.to_owned()))
    }
}

impl LogCursor {
    pub(crate) fn check(self, store_id: u64, newest: u64) -> Result<(), QueryError> {
        if self.store_id != store_id {
            return Err(QueryError::ForeignCursor);
        }
        if self.seq > newest {
            return Err(QueryError::FutureCursor { seq: self.seq, newest });
        }
        Ok(())
    }
}

/// The reason why a query can't be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// Raw lines have no level: omit one of the two.
    #[error("raw (unparsed) log lines have no level: query raw lines or a minimum level, not both")]
    MinLevelOnRaw,
    /// The cursor is a position in another store, such as that of an earlier run of the program, whose entries
    /// are gone. Read the backlog without a cursor.
    #[error("the log cursor is from another process, or from before its restart: read without a cursor")]
    ForeignCursor,
    /// The cursor is newer than all entries: it was not read from this store.
    #[error("log cursor {seq} is newer than the newest log entry {newest}: read without a cursor")]
    FutureCursor {
        /// The cursor's sequence number.
        seq: u64,
        /// That of the newest entry, 0 without entries.
        newest: u64,
    },
}

impl LogQuery {
    /// Queries all entries stored under exactly this name.
    pub fn of_dn(dn: Dn) -> LogQuery {
        LogQuery {
            dn,
            include_descendants: false,
            backlog_limit: BacklogLimit::All,
            follow: false,
            kind_filter: KindFilter::All,
            min_level: None,
            raw_passes_min_level: false,
            after: None,
            content: ContentFilter::default(),
        }
    }

    /// Includes all names below the name.
    pub fn include_descendants(mut self) -> LogQuery {
        self.include_descendants = true;
        self
    }

    /// Sets how many stored entries to start with.
    pub fn backlog_limit(mut self, backlog: BacklogLimit) -> LogQuery {
        self.backlog_limit = backlog;
        self
    }

    /// Starts with the newest `n` entries.
    pub fn last_entries(self, n: usize) -> LogQuery {
        self.backlog_limit(BacklogLimit::Last(n))
    }

    /// Continues with new entries.
    pub fn follow(mut self) -> LogQuery {
        self.follow = true;
        self
    }

    /// Reads leveled or raw entries only.
    pub fn kind_filter(mut self, kind: KindFilter) -> LogQuery {
        self.kind_filter = kind;
        self
    }

    /// Omits leveled entries below `level`, and raw lines unless [`LogQuery::raw_passes_min_level`] is set.
    pub fn min_level(mut self, level: Level) -> LogQuery {
        self.min_level = Some(level);
        self
    }

    /// Lets raw lines pass a minimum level.
    pub fn raw_passes_min_level(mut self) -> LogQuery {
        self.raw_passes_min_level = true;
        self
    }

    /// Resumes after this position.
    pub fn after(mut self, cursor: LogCursor) -> LogQuery {
        self.after = Some(cursor);
        self
    }

    pub(crate) fn matches_dn(&self, dn: &Dn) -> bool {
        if self.include_descendants { dn.is_within(&self.dn) } else { *dn == self.dn }
    }

    /// Omits entries whose time is before this one.
    pub fn since(mut self, time: SystemTime) -> LogQuery {
        self.content.since = Some(time);
        self
    }

    /// Omits entries in which the pattern is neither in the message or raw line, nor in a field written as
    /// `name=value`.
    pub fn matching(mut self, pattern: TextPattern) -> LogQuery {
        self.content.pattern = Some(pattern);
        self
    }

    /// Omits entries without a field of this name and value, as text. Repeated, all must be there.
    pub fn with_field(mut self, name: impl Into<String>, value: impl Into<String>) -> LogQuery {
        self.content.fields.push((name.into(), value.into()));
        self
    }

    pub(crate) fn filters_content(&self) -> bool {
        !self.content.is_empty()
    }

    /// Returns whether an entry passes the filters by content.
    pub(crate) fn matches_content(&self, entry: &LogEntry) -> bool {
        self.content.matches(entry)
    }

    /// Returns whether a record passes the filters by content.
    pub(crate) fn matches_record(&self, record: &[u8]) -> bool {
        // With any name, because these filters do not look at it.
        self.matches_content(&decode_record(Dn::root(), record))
    }

    /// The entry that takes the place of missed ones.
    pub(crate) fn missed_entry(&self, dn: Dn, missed: MissedEntries) -> LogEntry {
        // Dropped entries have no content any more that the filters could look at.
        let dropped =
            DroppedEntries { count: missed.count, exact: !missed.is_upper_bound && !self.filters_content() };
        LogEntry { seq: missed.seq, dn, time: SystemTime::now(), body: EntryBody::Dropped(dropped) }
    }

    /// The classes of records that pass the filters.
    pub(crate) fn class_mask(&self) -> Result<ClassMask, QueryError> {
        if self.kind_filter == KindFilter::Raw && self.min_level.is_some() {
            return Err(QueryError::MinLevelOnRaw);
        }
        let levels = ClassMask::LEVELED.at_least(self.min_level.unwrap_or(Level::Trace));
        let raw_passes = self.min_level.is_none() || self.raw_passes_min_level;
        Ok(match self.kind_filter {
            KindFilter::Leveled => levels,
            KindFilter::Raw => ClassMask::RAW,
            KindFilter::All if raw_passes => levels.union(ClassMask::RAW),
            KindFilter::All => levels,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted_classes(query: LogQuery) -> Vec<usize> {
        query.class_mask().unwrap().classes().collect()
    }

    #[test]
    fn raw_lines_pass_a_minimum_level_only_on_request() {
        let warn = LogQuery::of_dn(Dn::root()).min_level(Level::Warn);
        assert_eq!(admitted_classes(warn.clone()), [3, 4, 5]);
        assert_eq!(admitted_classes(warn.clone().raw_passes_min_level()), [3, 4, 5, 6]);
        assert_eq!(admitted_classes(warn.raw_passes_min_level().kind_filter(KindFilter::Leveled)), [3, 4, 5]);
        assert_eq!(admitted_classes(LogQuery::of_dn(Dn::root())), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(admitted_classes(LogQuery::of_dn(Dn::root()).kind_filter(KindFilter::Raw)), [6]);
    }

    #[test]
    fn cursors_parse_as_they_are_printed() {
        let cursor = LogCursor { store_id: 0xabc, seq: 12, missed: 0 };
        assert_eq!(cursor.to_string(), "0000000000000abc-12");
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for text in ["", "-", "abc-12", "0000000000000abc-+12", "0000000000000abc-12 "] {
            assert_eq!(text.parse::<LogCursor>(), Err(ParseCursorError(text.to_owned())));
        }
    }

    #[test]
    fn raw_only_with_a_minimum_level_is_rejected() {
        let query = LogQuery::of_dn(Dn::root()).kind_filter(KindFilter::Raw).min_level(Level::Info);
        assert_eq!(query.class_mask(), Err(QueryError::MinLevelOnRaw));
    }
}
