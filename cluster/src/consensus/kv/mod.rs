//! Keys and values that the members agree on; each change has a revision.
//!
//! The model is etcd's: one sorted key space, one revision number that grows with each change, watches from
//! any kept revision. *Source:* etcd's API reference, `rpc.proto` of etcd v3.

mod error;
mod lease;
mod list_watcher;
mod namespaced;
mod range;
mod txn;
mod watch;

use std::fmt::{self, Debug};
use std::time::Duration;

use async_trait::async_trait;

pub use error::KvError;
pub use lease::{Lease, LeaseId, RevokeFn};
pub use list_watcher::{ListWatchUpdate, ListWatcher};
pub use namespaced::NamespacedKv;
pub use range::{KeyRange, RangeRequest, RangeResponse};
pub use txn::{Compare, CompareOp, CompareTarget, Txn, TxnOp, TxnOpResponse, TxnResponse};
pub use watch::{KeyEvent, WatchFrom, WatchResponse, WatchStream};

/// The number of a change. The first change of a new store has a revision of at least 2; revisions never
/// decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub i64);

impl Revision {
    /// The revision of a key that does not exist.
    pub const NONE: Revision = Revision(0);

    /// The next revision.
    #[must_use]
    pub fn next(self) -> Revision {
        Revision(self.0.saturating_add(1))
    }
}

/// A key with its value and revisions.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// The value. It may be a secret, so `Debug` prints only its length.
    pub value: Vec<u8>,
    /// The revision that created the key.
    pub create_revision: Revision,
    /// The revision that last wrote it.
    pub mod_revision: Revision,
    /// The number of writes since its creation: 1 for a new key.
    pub version: i64,
    /// The lease that deletes it, if any.
    pub lease: Option<LeaseId>,
}

impl KeyValue {
    /// A key created by this revision, without a lease; set other fields afterwards.
    pub fn new(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, revision: Revision) -> KeyValue {
        KeyValue {
            key: key.into(),
            value: value.into(),
            create_revision: revision,
            mod_revision: revision,
            version: 1,
            lease: None,
        }
    }
}

impl Debug for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyValue")
            .field("key", &self.key.escape_ascii().to_string())
            .field("value", &format_args!("{} bytes", self.value.len()))
            .field("create_revision", &self.create_revision.0)
            .field("mod_revision", &self.mod_revision.0)
            .field("version", &self.version)
            .field("lease", &self.lease)
            .finish()
    }
}

/// A store of keys and values with revisions.
///
/// # Contract
/// - All calls are linearizable: a read returns every change that completed before the read was made.
/// - A transaction is one change with one revision, whatever number of keys it writes; one that writes
///   nothing gets no revision, and returns the newest.
/// - A key has at least one byte. Values may be empty.
/// - A call that fails as [`KvError::Unavailable`] may have taken effect, or may still. All other failed
///   calls have not.
/// - Dropping a call's future discards its answer, but does not cancel the call.
///
/// `testing::kv_conformance` checks it.
#[async_trait]
pub trait KvStore: Debug + Send + Sync {
    /// Reads keys, now or as of an earlier revision.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`], [`KvError::Compacted`], [`KvError::FutureRevision`];
    /// [`KvError::Unavailable`], [`KvError::Stopped`] and [`KvError::Rejected`], as for every call.
    async fn range(&self, range: RangeRequest) -> Result<RangeResponse, KvError>;

    /// Evaluates comparisons, and performs one of two lists of operations, atomically.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`], [`KvError::DuplicateKey`], [`KvError::LeaseNotFound`], and those of
    /// [`range`](Self::range).
    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError>;

    /// Watches keys. The watch is active when this returns: no later change is missed.
    ///
    /// # Errors
    /// Those of [`range`](Self::range). [`KvError::Compacted`] is returned by this call, or as the watch's
    /// first response.
    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<WatchStream, KvError>;

    /// Grants a lease, and keeps it alive until the guard is dropped.
    ///
    /// The TTL is rounded up to whole seconds, and the store may extend it.
    ///
    /// # Errors
    /// [`KvError::Unavailable`], [`KvError::Stopped`], [`KvError::Rejected`].
    async fn grant_lease(&self, ttl: Duration) -> Result<Lease, KvError>;

    /// Discards the history before a revision: reads and watches go no further back. The newest values
    /// remain.
    ///
    /// # Errors
    /// [`KvError::FutureRevision`], [`KvError::Unavailable`], [`KvError::Stopped`], [`KvError::Rejected`].
    async fn compact(&self, before: Revision) -> Result<(), KvError>;

    /// Reads one key.
    ///
    /// # Errors
    /// Those of [`range`](Self::range).
    async fn get(&self, key: &[u8]) -> Result<Option<KeyValue>, KvError> {
        let ranged = self.range(RangeRequest::new(KeyRange::single_key(key))).await?;
        Ok(ranged.kvs.into_iter().next())
    }

    /// Writes one key, whether or not it exists.
    ///
    /// # Errors
    /// Those of [`txn`](Self::txn).
    async fn put(&self, key: &[u8], value: &[u8]) -> Result<Revision, KvError> {
        let done = self.txn(Txn::new().then(TxnOp::put(key, value))).await?;
        Ok(done.revision)
    }

    /// Deletes keys; returns how many existed.
    ///
    /// # Errors
    /// Those of [`txn`](Self::txn).
    async fn delete(&self, keys: KeyRange) -> Result<u64, KvError> {
        let done = self.txn(Txn::new().then(TxnOp::Delete(keys))).await?;
        Ok(done.deleted_count())
    }
}
