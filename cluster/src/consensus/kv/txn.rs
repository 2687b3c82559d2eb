//! Transactions.

use std::fmt;

use super::range::check_key;
use super::{KeyRange, KeyValue, KvError, LeaseId, Range, Ranged, Revision};

/// How a value has to be to the one given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum Is {
    /// The same.
    Equal,
    /// Another.
    NotEqual,
    /// Greater; of bytes, later in their order.
    Greater,
    /// Less; of bytes, earlier in their order.
    Less,
}

impl Is {
    /// Whether `left` is so to `right`.
    pub fn holds<T: Ord + ?Sized>(self, left: &T, right: &T) -> bool {
        match self {
            Is::Equal => left == right,
            Is::NotEqual => left != right,
            Is::Greater => left > right,
            Is::Less => left < right,
        }
    }
}

/// What of a key is compared, and with what. Of a key that isn't there the numbers are zero, and no comparison of its
/// value holds.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum CompareTo {
    /// The change that made it.
    Created(Revision),
    /// The change that wrote it last.
    Modified(Revision),
    /// How often it was written.
    Version(i64),
    /// Its value.
    Value(Vec<u8>),
}

impl fmt::Debug for CompareTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompareTo::Created(revision) => write!(f, "Created({})", revision.0),
            CompareTo::Modified(revision) => write!(f, "Modified({})", revision.0),
            CompareTo::Version(version) => write!(f, "Version({version})"),
            CompareTo::Value(value) => write!(f, "Value({} bytes)", value.len()),
        }
    }
}

/// A comparison that has to hold.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compare {
    /// Of which key.
    pub key: Vec<u8>,
    /// How it has to be.
    pub is: Is,
    /// To what.
    pub to: CompareTo,
}

impl Compare {
    /// A comparison of one key.
    pub fn new(key: impl Into<Vec<u8>>, is: Is, to: CompareTo) -> Compare {
        Compare { key: key.into(), is, to }
    }

    /// The key isn't there.
    pub fn absent(key: impl Into<Vec<u8>>) -> Compare {
        Compare::new(key, Is::Equal, CompareTo::Created(Revision::NONE))
    }

    /// The key is there.
    pub fn present(key: impl Into<Vec<u8>>) -> Compare {
        Compare::new(key, Is::NotEqual, CompareTo::Created(Revision::NONE))
    }

    /// The key was not written since it was read so. A key that was removed and made again was.
    pub fn unchanged(read: &KeyValue) -> Compare {
        Compare::new(&*read.key, Is::Equal, CompareTo::Modified(read.modified))
    }

    /// Whether it holds for what is there.
    pub fn holds(&self, found: Option<&KeyValue>) -> bool {
        let number = |of: fn(&KeyValue) -> Revision| found.map_or(Revision::NONE, of);
        match &self.to {
            CompareTo::Created(revision) => self.is.holds(&number(|kv| kv.created), revision),
            CompareTo::Modified(revision) => self.is.holds(&number(|kv| kv.modified), revision),
            CompareTo::Version(version) => self.is.holds(&found.map_or(0, |kv| kv.version), version),
            CompareTo::Value(value) => found.is_some_and(|kv| self.is.holds(&kv.value, value)),
        }
    }
}

impl fmt::Debug for Compare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" {:?} {:?}", self.key.escape_ascii(), self.is, self.to)
    }
}

/// What a transaction does.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum Op {
    /// Writes a key.
    Put {
        /// The key.
        key: Vec<u8>,
        /// Its value.
        value: Vec<u8>,
        /// The lease with which it ends; none: with none, also where it had one.
        lease: Option<LeaseId>,
    },
    /// Removes keys.
    Delete(KeyRange),
    /// Reads keys. What the transaction has written before this is seen.
    Range(Range),
}

impl Op {
    /// Writes a key, which ends with no lease.
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Op {
        Op::Put { key: key.into(), value: value.into(), lease: None }
    }

    /// Writes a key, which ends with the lease.
    pub fn put_leased(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, lease: LeaseId) -> Op {
        Op::Put { key: key.into(), value: value.into(), lease: Some(lease) }
    }

    /// Removes a key.
    pub fn delete(key: impl Into<Vec<u8>>) -> Op {
        Op::Delete(KeyRange::key(key))
    }

    /// Reads a key.
    pub fn get(key: impl Into<Vec<u8>>) -> Op {
        Op::Range(Range::new(KeyRange::key(key)))
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Put { key, value, lease } => f
                .debug_struct("Put")
                .field("key", &key.escape_ascii().to_string())
                .field("value", &format_args!("{} bytes", value.len()))
                .field("lease", lease)
                .finish(),
            Op::Delete(keys) => f.debug_tuple("Delete").field(keys).finish(),
            Op::Range(range) => f.debug_tuple("Range").field(range).finish(),
        }
    }
}

/// If all comparisons hold, one list of operations; otherwise the other. All of it is one change.
///
/// No key is written twice by one list: not by two puts, and not by a put and a removal.
///
/// ```
/// use nodekeel_cluster::consensus::kv::{Compare, Op, Txn};
///
/// let create_only = Txn::new()
///     .when(Compare::absent("/nodes/n1"))
///     .then(Op::put("/nodes/n1", "record"))
///     .otherwise(Op::get("/nodes/n1"));
/// assert_eq!(create_only.then.len(), 1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Txn {
    /// What has to hold. Nothing always does.
    pub when: Vec<Compare>,
    /// What is done then.
    pub then: Vec<Op>,
    /// What is done otherwise.
    pub otherwise: Vec<Op>,
}

impl Txn {
    /// One that does nothing.
    pub fn new() -> Txn {
        Txn::default()
    }

    /// Adds a comparison.
    #[must_use]
    pub fn when(mut self, compare: Compare) -> Txn {
        self.when.push(compare);
        self
    }

    /// Adds what is done if all comparisons hold.
    #[must_use]
    pub fn then(mut self, op: Op) -> Txn {
        self.then.push(op);
        self
    }

    /// Adds what is done otherwise.
    #[must_use]
    pub fn otherwise(mut self, op: Op) -> Txn {
        self.otherwise.push(op);
        self
    }
}

impl Txn {
    /// Whether it can be done at all: for implementations.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`], and [`KvError::DuplicateKey`]: etcd refuses what one list writes twice.
    pub fn check(&self) -> Result<(), KvError> {
        self.when.iter().try_for_each(|compare| check_key(&compare.key))?;
        check_ops(&self.then)?;
        check_ops(&self.otherwise)
    }
}

fn check_ops(ops: &[Op]) -> Result<(), KvError> {
    let mut written: Vec<&[u8]> = Vec::new();
    for op in ops {
        match op {
            Op::Put { key, .. } => {
                check_key(key)?;
                let is_removed = |op: &Op| matches!(op, Op::Delete(keys) if keys.contains(key));
                if written.contains(&key.as_slice()) || ops.iter().any(is_removed) {
                    return Err(KvError::DuplicateKey);
                }
                written.push(key);
            }
            Op::Delete(keys) => keys.check()?,
            Op::Range(range) => range.keys.check()?,
        }
    }
    Ok(())
}

/// What an operation gave.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to know them all")]
pub enum OpResult {
    /// A key was written.
    Put,
    /// So many keys were removed.
    Deleted(u64),
    /// Keys were read.
    Ranged(Ranged),
}

/// What a transaction gave.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxnResult {
    /// The revision of its change; the newest, where it changed nothing.
    pub revision: Revision,
    /// Whether all comparisons held.
    pub succeeded: bool,
    /// What each operation of the list that was done gave, in order.
    pub results: Vec<OpResult>,
}

impl TxnResult {
    /// What a transaction gave.
    pub fn new(revision: Revision, succeeded: bool, results: Vec<OpResult>) -> TxnResult {
        TxnResult { revision, succeeded, results }
    }

    /// How many keys were removed by all its operations.
    pub fn deleted(&self) -> u64 {
        let deleted = |result: &OpResult| if let OpResult::Deleted(count) = result { *count } else { 0 };
        self.results.iter().map(deleted).sum()
    }

    /// All that was read, in the order of the operations.
    pub fn read(self) -> impl Iterator<Item = KeyValue> {
        let kvs = |result| if let OpResult::Ranged(ranged) = result { ranged.kvs } else { Vec::new() };
        self.results.into_iter().flat_map(kvs)
    }
}
