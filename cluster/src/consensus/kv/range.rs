//! Key ranges, range requests and their responses.

use std::fmt;
use std::num::NonZeroU32;

use super::{KeyValue, KvError, Revision};

/// A key, or all keys in a part of the sorted key space.
#[derive(Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every kind")]
pub enum KeyRange {
    /// One key.
    Key(Vec<u8>),
    /// All keys with this prefix; with an empty prefix, all keys.
    Prefix(Vec<u8>),
    /// All keys in `[start, end)`.
    Between {
        /// The first key.
        start: Vec<u8>,
        /// The end, exclusive.
        end: Vec<u8>,
    },
}

impl KeyRange {
    /// One key.
    pub fn single_key(key: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Key(key.into())
    }

    /// All keys with this prefix. For the keys below a name, end the prefix with a slash.
    pub fn prefix(prefix: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Prefix(prefix.into())
    }

    /// All keys in `[start, end)`.
    pub fn between(start: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Between { start: start.into(), end: end.into() }
    }

    /// All keys.
    pub fn all_keys() -> KeyRange {
        KeyRange::Prefix(Vec::new())
    }

    /// Checks that the range is valid: for implementations.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`]: a key has at least one byte.
    pub fn check_keys(&self) -> Result<(), KvError> {
        match self {
            KeyRange::Key(key) => check_key(key),
            KeyRange::Prefix(_) => Ok(()),
            KeyRange::Between { start, end } => check_key(start).and_then(|()| check_key(end)),
        }
    }

    /// Whether the range contains a key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeyRange::Key(this) => this == key,
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
            KeyRange::Between { start, end } => start.as_slice() <= key && key < end.as_slice(),
        }
    }
}

pub(super) fn check_key(key: &[u8]) -> Result<(), KvError> {
    match key.is_empty() {
        true => Err(KvError::InvalidKey { key: Vec::new(), problem: "must not be empty" }),
        false => Ok(()),
    }
}

impl fmt::Debug for KeyRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyRange::Key(key) => write!(f, "\"{}\"", key.escape_ascii()),
            KeyRange::Prefix(prefix) => write!(f, "\"{}…\"", prefix.escape_ascii()),
            KeyRange::Between { start, end } => {
                write!(f, "[\"{}\", \"{}\")", start.escape_ascii(), end.escape_ascii())
            }
        }
    }
}

/// A read. By default it returns all keys of the range, as they are now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RangeRequest {
    /// The keys.
    pub keys: KeyRange,
    /// The revision to read at; `None`: the newest.
    pub revision: Option<Revision>,
    /// The maximum number of keys; `None`: all.
    pub limit: Option<NonZeroU32>,
}

impl RangeRequest {
    /// Reads all keys of the range, as they are now.
    pub fn new(keys: KeyRange) -> RangeRequest {
        RangeRequest { keys, revision: None, limit: None }
    }

    /// Reads at this revision.
    #[must_use]
    pub fn at_revision(mut self, revision: Revision) -> RangeRequest {
        self.revision = Some(revision);
        self
    }

    /// Returns only the first `limit` keys.
    #[must_use]
    pub fn with_limit(mut self, limit: NonZeroU32) -> RangeRequest {
        self.limit = Some(limit);
        self
    }
}

/// The result of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RangeResponse {
    /// The newest revision at the time of the read, not the revision that was read.
    pub revision: Revision,
    /// The keys in their order, with their values.
    pub kvs: Vec<KeyValue>,
    /// Whether the limit has cut off further keys.
    pub more: bool,
}

impl RangeResponse {
    /// A result, read when `revision` was the newest.
    pub fn new(revision: Revision, kvs: Vec<KeyValue>, more: bool) -> RangeResponse {
        RangeResponse { revision, kvs, more }
    }
}
