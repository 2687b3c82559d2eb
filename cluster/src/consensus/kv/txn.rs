//! Transactions.

use std::fmt;

use super::range::check_key;
use super::{KeyRange, KeyValue, KvError, LeaseId, RangeRequest, RangeResponse, Revision};

/// How a value compares to the given one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every operator")]
pub enum CompareOp {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// Greater; for bytes, later in their order.
    Greater,
    /// Less; for bytes, earlier in their order.
    Less,
}

impl CompareOp {
    /// Whether `left` compares to `right` like this.
    pub fn is_satisfied<T: Ord + ?Sized>(self, left: &T, right: &T) -> bool {
        match self {
            CompareOp::Equal => left == right,
            CompareOp::NotEqual => left != right,
            CompareOp::Greater => left > right,
            CompareOp::Less => left < right,
        }
    }
}

/// What is compared, and with which value. For a key that does not exist the numbers are zero, and no
/// comparison of its value holds.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every target")]
pub enum CompareTarget {
    /// The revision that created the key.
    CreateRevision(Revision),
    /// The revision that last wrote it.
    ModRevision(Revision),
    /// The number of writes.
    Version(i64),
    /// Its value.
    Value(Vec<u8>),
}

impl fmt::Debug for CompareTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompareTarget::CreateRevision(revision) => write!(f, "Created({})", revision.0),
            CompareTarget::ModRevision(revision) => write!(f, "Modified({})", revision.0),
            CompareTarget::Version(version) => write!(f, "Version({version})"),
            CompareTarget::Value(value) => write!(f, "Value({} bytes)", value.len()),
        }
    }
}

/// A comparison of a key.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compare {
    /// The key.
    pub key: Vec<u8>,
    /// The operator.
    pub op: CompareOp,
    /// The operand.
    pub target: CompareTarget,
}

impl Compare {
    /// A comparison of one key.
    pub fn new(key: impl Into<Vec<u8>>, op: CompareOp, target: CompareTarget) -> Compare {
        Compare { key: key.into(), op, target }
    }

    /// The key does not exist.
    pub fn key_absent(key: impl Into<Vec<u8>>) -> Compare {
        Compare::new(key, CompareOp::Equal, CompareTarget::CreateRevision(Revision::NONE))
    }

    /// The key exists.
    pub fn key_present(key: impl Into<Vec<u8>>) -> Compare {
        Compare::new(key, CompareOp::NotEqual, CompareTarget::CreateRevision(Revision::NONE))
    }

    /// The key was not written since it was read. A key that was deleted and created again was written.
    pub fn key_unchanged(read: &KeyValue) -> Compare {
        Compare::new(&*read.key, CompareOp::Equal, CompareTarget::ModRevision(read.mod_revision))
    }

    /// Whether the comparison holds for the present value.
    pub fn is_satisfied_by(&self, found: Option<&KeyValue>) -> bool {
        let number = |of: fn(&KeyValue) -> Revision| found.map_or(Revision::NONE, of);
        match &self.target {
            CompareTarget::CreateRevision(revision) => {
                self.op.is_satisfied(&number(|kv| kv.create_revision), revision)
            }
            CompareTarget::ModRevision(revision) => {
                self.op.is_satisfied(&number(|kv| kv.mod_revision), revision)
            }
            CompareTarget::Version(version) => {
                self.op.is_satisfied(&found.map_or(0, |kv| kv.version), version)
            }
            CompareTarget::Value(value) => found.is_some_and(|kv| self.op.is_satisfied(&kv.value, value)),
        }
    }
}

impl fmt::Debug for Compare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" {:?} {:?}", self.key.escape_ascii(), self.op, self.target)
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
        /// Its value.
        value: Vec<u8>,
        /// The lease that deletes it; `None` also removes an earlier lease.
        lease: Option<LeaseId>,
    },
    /// Deletes keys.
    Delete(KeyRange),
    /// Reads keys. The read sees what the transaction has written before it.
    Range(RangeRequest),
}

impl TxnOp {
    /// Writes a key, without a lease.
    pub fn put(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> TxnOp {
        TxnOp::Put { key: key.into(), value: value.into(), lease: None }
    }

    /// Writes a key, which the lease deletes.
    pub fn put_with_lease(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, lease: LeaseId) -> TxnOp {
        TxnOp::Put { key: key.into(), value: value.into(), lease: Some(lease) }
    }

    /// Deletes a key.
    pub fn delete(key: impl Into<Vec<u8>>) -> TxnOp {
        TxnOp::Delete(KeyRange::single_key(key))
    }

    /// Reads a key.
    pub fn get(key: impl Into<Vec<u8>>) -> TxnOp {
        TxnOp::Range(RangeRequest::new(KeyRange::single_key(key)))
    }
}

impl fmt::Debug for TxnOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TxnOp::Put { key, value, lease } => f
                .debug_struct("Put")
                .field("key", &key.escape_ascii().to_string())
                .field("value", &format_args!("{} bytes", value.len()))
                .field("lease", lease)
                .finish(),
            TxnOp::Delete(keys) => f.debug_tuple("Delete").field(keys).finish(),
            TxnOp::Range(range) => f.debug_tuple("Range").field(range).finish(),
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
}

impl Txn {
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
                let is_removed = |op: &TxnOp| matches!(op, TxnOp::Delete(keys) if keys.contains(key));
                if written.contains(&key.as_slice()) || ops.iter().any(is_removed) {
                    return Err(KvError::DuplicateKey);
                }
                written.push(key);
            }
            TxnOp::Delete(keys) => keys.check_keys()?,
            TxnOp::Range(range) => range.keys.check_keys()?,
        }
    }
    Ok(())
}

/// The result of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a store has to handle every operation")]
pub enum TxnOpResponse {
    /// A key was written.
    Put,
    /// The number of deleted keys.
    Delete(u64),
    /// The keys that were read.
    Range(RangeResponse),
}

/// The result of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TxnResponse {
    /// The revision of its change; the newest, if it changed nothing.
    pub revision: Revision,
    /// Whether all comparisons held.
    pub succeeded: bool,
    /// The results of the operations of the list that was performed, in order.
    pub responses: Vec<TxnOpResponse>,
}

impl TxnResponse {
    /// The result of a transaction.
    pub fn new(revision: Revision, succeeded: bool, responses: Vec<TxnOpResponse>) -> TxnResponse {
        TxnResponse { revision, succeeded, responses }
    }

    /// The number of keys deleted by all its operations.
    pub fn deleted_count(&self) -> u64 {
        let deleted =
            |result: &TxnOpResponse| if let TxnOpResponse::Delete(count) = result { *count } else { 0 };
        self.responses.iter().map(deleted).sum()
    }

    /// All keys that were read, in the order of the operations.
    pub fn into_key_values(self) -> impl Iterator<Item = KeyValue> {
        let kvs = |result| if let TxnOpResponse::Range(ranged) = result { ranged.kvs } else { Vec::new() };
        self.responses.into_iter().flat_map(kvs)
    }
}
