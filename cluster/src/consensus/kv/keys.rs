//! Keys with their values, and ranges of them.

use std::fmt;

use super::KvError;

/// The number of a change. The first change of a new store has a revision of at least 2; revisions never
/// decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub i64);

impl Revision {
    /// The next revision.
    #[must_use]
    pub fn next(self) -> Revision {
        Revision(self.0.saturating_add(1))
    }
}

/// A key with its value.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// The value. It may be a secret, so `Debug` prints only its length.
    pub value: Vec<u8>,
    /// The revision that last wrote it.
    pub mod_revision: Revision,
    /// The number of writes since its creation: 1 for a new key.
    pub version: i64,
}

impl KeyValue {
    /// A key that this revision has created; set the version afterwards.
    pub fn new(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, mod_revision: Revision) -> KeyValue {
        KeyValue { key: key.into(), value: value.into(), mod_revision, version: 1 }
    }
}

impl fmt::Debug for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyValue")
            .field("key", &self.key.escape_ascii().to_string())
            .field("value", &format_args!("{} bytes", self.value.len()))
            .field("mod_revision", &self.mod_revision.0)
            .field("version", &self.version)
            .finish()
    }
}

/// A key, or all keys with a prefix.
#[derive(Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every kind")]
pub enum KeyRange {
    /// One key.
    Key(Vec<u8>),
    /// All keys with this prefix; with an empty prefix, all keys.
    Prefix(Vec<u8>),
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

    /// All keys.
    pub fn all_keys() -> KeyRange {
        KeyRange::Prefix(Vec::new())
    }

    /// Checks that the range is valid: for implementations.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`]: a key has at least one byte.
    pub fn check_keys(&self) -> Result<(), KvError> {
        if let KeyRange::Key(key) = self { check_key(key) } else { Ok(()) }
    }

    /// Returns whether the range contains a key.
    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            KeyRange::Key(this) => this == key,
            KeyRange::Prefix(prefix) => key.starts_with(prefix),
        }
    }
}

pub(super) fn check_key(key: &[u8]) -> Result<(), KvError> {
    if key.is_empty() {
        return Err(KvError::InvalidKey { key: Vec::new(), problem: "must not be empty" });
    }
    Ok(())
}

impl fmt::Debug for KeyRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyRange::Key(key) => write!(f, "\"{}\"", key.escape_ascii()),
            KeyRange::Prefix(prefix) => write!(f, "\"{}…\"", prefix.escape_ascii()),
        }
    }
}

/// The result of a read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RangeResponse {
    /// The newest revision of the store at the time of the read.
    pub revision: Revision,
    /// The keys in their order, with their values.
    pub kvs: Vec<KeyValue>,
}

impl RangeResponse {
    /// A result, read when `revision` was the newest.
    pub fn new(revision: Revision, kvs: Vec<KeyValue>) -> RangeResponse {
        RangeResponse { revision, kvs }
    }
}
