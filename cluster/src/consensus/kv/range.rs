//! Which keys, and what was read of them.

use std::fmt;
use std::num::NonZeroU32;

use super::{KeyValue, KvError, Revision};

/// Keys: one, or all in a part of the sorted space.
#[derive(Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum KeyRange {
    /// One key.
    Key(Vec<u8>),
    /// All that begin so; of an empty prefix, all.
    Prefix(Vec<u8>),
    /// All in `[start, end)`.
    Between {
        /// The first one.
        start: Vec<u8>,
        /// The first one that is not meant.
        end: Vec<u8>,
    },
}

impl KeyRange {
    /// One key.
    pub fn key(key: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Key(key.into())
    }

    /// All that begin so. For what lies below a name, end it with a slash.
    pub fn prefix(prefix: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Prefix(prefix.into())
    }

    /// All in `[start, end)`.
    pub fn between(start: impl Into<Vec<u8>>, end: impl Into<Vec<u8>>) -> KeyRange {
        KeyRange::Between { start: start.into(), end: end.into() }
    }

    /// All keys.
    pub fn all() -> KeyRange {
        KeyRange::Prefix(Vec::new())
    }

    /// Whether they can be asked for: for implementations.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`]: a key has at least one byte.
    pub fn check(&self) -> Result<(), KvError> {
        match self {
            KeyRange::Key(key) => check_key(key),
            KeyRange::Prefix(_) => Ok(()),
            KeyRange::Between { start, end } => check_key(start).and_then(|()| check_key(end)),
        }
    }

    /// Whether a key is among them.
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
        true => Err(KvError::InvalidKey { key: Vec::new(), problem: "is empty" }),
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

/// A read. By default of all the keys asked for, as they are now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Range {
    /// Which keys.
    pub keys: KeyRange,
    /// As of which revision; none: the newest.
    pub revision: Option<Revision>,
    /// How many at most; none: all.
    pub limit: Option<NonZeroU32>,
}

impl Range {
    /// All of these, as they are now.
    pub fn new(keys: KeyRange) -> Range {
        Range { keys, revision: None, limit: None }
    }

    /// As they were after this change.
    #[must_use]
    pub fn at(mut self, revision: Revision) -> Range {
        self.revision = Some(revision);
        self
    }

    /// The first `limit` of them.
    #[must_use]
    pub fn limit(mut self, limit: NonZeroU32) -> Range {
        self.limit = Some(limit);
        self
    }
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ranged {
    /// The newest revision when it was read, which is not the one that it was read as of.
    pub revision: Revision,
    /// The keys in their order, with their values.
    pub kvs: Vec<KeyValue>,
    /// Whether there are more than the limit let through.
    pub more: bool,
}

impl Ranged {
    /// What was read when `revision` was the newest.
    pub fn new(revision: Revision, kvs: Vec<KeyValue>, more: bool) -> Ranged {
        Ranged { revision, kvs, more }
    }
}
