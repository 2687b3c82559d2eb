//! Transactions.

use std::fmt;

use super::keys::check_key;
use super::{KeyRange, KeyValue, KvError, Revision};

/// A comparison of a key, or of those with a prefix.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compare {
    /// The key, or the prefix.
    pub key: Vec<u8>,
    /// The condition that must hold for it.
    pub condition: KeyCondition,
}

/// A condition of a key for which a transaction succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every condition")]
pub enum KeyCondition {
    /// The key does not exist.
    Absent,
    /// The key exists.
    Present,
    /// This revision was the last to write it. A key that was deleted and created again was written.
    WrittenBy(Revision),
    /// No key with this prefix was written after this revision. One that was deleted does not count.
    PrefixNotWrittenSince(Revision),
}

impl Compare {
    /// The key does not exist.
    pub fn key_absent(key: impl Into<Vec<u8>>) -> Compare {
        Compare { key: key.into(), condition: KeyCondition::Absent }
    }

    /// The key exists.
    pub fn key_present(key: impl Into<Vec<u8>>) -> Compare {
        Compare { key: key.into(), condition: KeyCondition::Present }
    }

    /// The key was not written since it was read.
    pub fn key_unchanged(read: &KeyValue) -> Compare {
        Compare { key: read.key.clone(), condition: KeyCondition::WrittenBy(read.mod_revision) }
    }

    /// No key with the prefix was written since this revision, in which they were read.
    pub fn prefix_not_written_since(prefix: impl Into<Vec<u8>>, revision: Revision) -> Compare {
        Compare { key: prefix.into(), condition: KeyCondition::PrefixNotWrittenSince(revision) }
    }

    /// The keys that it compares.
    pub fn keys(&self) -> KeyRange {
        match self.condition {
            KeyCondition::PrefixNotWrittenSince(_) => KeyRange::prefix(self.key.clone()),
            _ => KeyRange::single_key(self.key.clone()),
        }
    }

    /// Returns whether the comparison holds for the present values of its keys.
    pub fn is_satisfied_by<'a>(&self, found: impl IntoIterator<Item = &'a KeyValue>) -> bool {
        let mut found = found.into_iter();
        match self.condition {
            KeyCondition::Absent => found.next().is_none(),
            KeyCondition::Present => found.next().is_some(),
            KeyCondition::WrittenBy(revision) => found.next().is_some_and(|kv| kv.mod_revision == revision),
            KeyCondition::PrefixNotWrittenSince(revision) => found.all(|kv| kv.mod_revision <= revision),
        }
    }
}

impl fmt::Debug for Compare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" {:?}", self.key.escape_ascii(), self.condition)
    }
}

/// An operation of a transaction.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every operation")]
pub enum TxnOp {
    /// Writes a key.
    Put {
        /// The key.
        key: Vec<u8>,
        /// The value.
        value: Vec<u8>,
    },
    /// Deletes keys.
    Delete(KeyRange),
    /// Reads keys. The read sees what the transaction has written before it.
    Range(KeyRange),
}

impl TxnOp {
    /// Writes a key.
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> TxnOp {
        TxnOp::Put { key: key.into(), value: value.into() }
    }

    /// Reads a key.
    pub fn get(key: impl Into<Vec<u8>>) -> TxnOp {
        TxnOp::Range(KeyRange::single_key(key))
    }
}

impl fmt::Debug for TxnOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TxnOp::Put { key, value } => f
                .debug_struct("Put")
                .field("key", &key.escape_ascii().to_string())
                .field("value", &format_args!("{} bytes", value.len()))
                .finish(),
            TxnOp::Delete(keys) => f.debug_tuple("Delete").field(keys).finish(),
            TxnOp::Range(keys) => f.debug_tuple("Range").field(keys).finish(),
        }
    }
}

/// Performs one list of operations if all comparisons hold, and the other list otherwise, as one change.
///
/// A list writes each key at most once: neither two puts nor a put and a delete of one key are allowed.
///
/// ```
/// use nodekeel_cluster::consensus::kv::{Compare, Txn, TxnOp};
///
/// let create_only = Txn::new()
///     .when(Compare::key_absent("/nodes/n1"))
///     .then(TxnOp::put("/nodes/n1", "record"))
///     .or_else(TxnOp::get("/nodes/n1"));
/// assert_eq!(create_only.then.len(), 1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Txn {
    /// The comparisons. An empty list always holds.
    pub when: Vec<Compare>,
    /// The operations if all comparisons hold.
    pub then: Vec<TxnOp>,
    /// The operations otherwise.
    pub or_else: Vec<TxnOp>,
}

impl Txn {
    /// A transaction without operations.
    pub fn new() -> Txn {
        Txn::default()
    }

    /// Adds a comparison.
    #[must_use]
    pub fn when(mut self, compare: Compare) -> Txn {
        self.when.push(compare);
        self
    }

    /// Adds an operation for the case that all comparisons hold.
    #[must_use]
    pub fn then(mut self, op: TxnOp) -> Txn {
        self.then.push(op);
        self
    }

    /// Adds an operation for the other case.
    #[must_use]
    pub fn or_else(mut self, op: TxnOp) -> Txn {
        self.or_else.push(op);
        self
    }

    /// Checks that the transaction is valid: for implementations.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`], and [`KvError::DuplicateKey`]: etcd rejects a list that writes a key twice.
    pub fn check_keys(&self) -> Result<(), KvError> {
        self.when.iter().try_for_each(|compare| check_key(&compare.key))?;
        check_ops(&self.then)?;
        check_ops(&self.or_else)
    }
}

fn check_ops(ops: &[TxnOp]) -> Result<(), KvError> {
    let mut written: Vec<&[u8]> = Vec::new();
    for op in ops {
        match op {
            TxnOp::Put { key, .. } => {
                check_key(key)?;
                // etcd rejects a put and a delete of one key in any order, so the whole list is searched.
                let is_deleted = |op: &TxnOp| matches!(op, TxnOp::Delete(keys) if keys.contains(key));
                if written.contains(&key.as_slice()) || ops.iter().any(is_deleted) {
                    return Err(KvError::DuplicateKey);
                }
                written.push(key);
            }
            TxnOp::Delete(keys) | TxnOp::Range(keys) => keys.check_keys()?,
        }
    }
    Ok(())
}

/// The result of a transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxnResponse {
    /// The revision of its change; the newest, if it changed nothing.
    pub revision: Revision,
    /// True if all comparisons held.
    pub succeeded: bool,
    /// All keys that were read, in the order of the operations.
    pub kvs: Vec<KeyValue>,
    /// The number of keys deleted by all operations.
    pub deleted: u64,
}

impl TxnResponse {
    /// The first key that was read, if any: the answer to a single [`TxnOp::get`].
    pub fn into_first(self) -> Option<KeyValue> {
        self.kvs.into_iter().next()
    }
}
