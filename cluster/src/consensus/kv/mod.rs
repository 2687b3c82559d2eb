//! Keys and values that the members agree on, each change with a revision of its own.
//!
//! The model is etcd's: one sorted space of keys, one number that grows with each change, watches from any revision that
//! is still kept. *Source:* etcd's API reference, `rpc.proto` of etcd v3.

mod error;
mod follow;
mod lease;
mod namespaced;
mod range;
mod txn;
mod watch;

use std::fmt::{self, Debug};
use std::time::Duration;

use async_trait::async_trait;

pub use error::KvError;
pub use follow::{Follow, Update};
pub use lease::{Lease, LeaseId, Revoke};
pub use namespaced::Namespaced;
pub use range::{KeyRange, Range, Ranged};
pub use txn::{Compare, CompareTo, Is, Op, OpResult, Txn, TxnResult};
pub use watch::{Change, Watch, WatchFrom, WatchMessage};

/// The number of a change. The first change of a new store has a number of at least 2; it never goes down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub i64);

impl Revision {
    /// That of a key which isn't there.
    pub const NONE: Revision = Revision(0);

    /// The next one.
    #[must_use]
    pub fn next(self) -> Revision {
        Revision(self.0.saturating_add(1))
    }
}

/// A key with its value and where they come from.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyValue {
    /// The key.
    pub key: Vec<u8>,
    /// The value. It may be a secret, so `Debug` tells nothing but its length.
    pub value: Vec<u8>,
    /// The change that made the key.
    pub created: Revision,
    /// The change that wrote it last.
    pub modified: Revision,
    /// How often it was written since it was made: 1 for a new one.
    pub version: i64,
    /// The lease with which it ends, if any.
    pub lease: Option<LeaseId>,
}

impl KeyValue {
    /// A key that was made by this change, with no lease: the rest is set by whoever makes one.
    pub fn new(key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>, revision: Revision) -> KeyValue {
        KeyValue {
            key: key.into(),
            value: value.into(),
            created: revision,
            modified: revision,
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
            .field("created", &self.created.0)
            .field("modified", &self.modified.0)
            .field("version", &self.version)
            .field("lease", &self.lease)
            .finish()
    }
}

/// A store of keys and values with revisions.
///
/// # Contract
/// - All calls are linearizable: a read sees every change that was answered before it was made.
/// - A transaction is one change with one revision, whatever number of keys it writes; one that writes nothing has none
///   of its own, and tells the newest.
/// - A key has at least one byte. Values may be empty.
/// - A call that fails as [`KvError::Unavailable`] may have taken effect, or may yet. All others have not.
/// - Dropping a call's future gives up its answer, not the call.
///
/// `testing::kv_conformance` checks it.
#[async_trait]
pub trait KvStore: Debug + Send + Sync {
    /// Reads keys, now or as of an earlier revision.
    async fn range(&self, range: Range) -> Result<Ranged, KvError>;

    /// Compares, and does one of two lists of operations, as one.
    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError>;

    /// Watches keys. When it returns, the store watches already: no change after that is missed.
    ///
    /// A revision that isn't kept any more is told by the watch's first message, or by this call.
    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError>;

    /// Grants a lease, and keeps it alive until the guard is dropped: keys that are put with it live as long.
    ///
    /// The time is rounded up to whole seconds, and may be made longer by the store.
    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError>;

    /// Forgets what was before a revision: neither reads nor watches go further back. Newest values stay.
    async fn compact(&self, before: Revision) -> Result<(), KvError>;

    /// Reads one key.
    async fn get(&self, key: &[u8]) -> Result<Option<KeyValue>, KvError> {
        let ranged = self.range(Range::new(KeyRange::key(key))).await?;
        Ok(ranged.kvs.into_iter().next())
    }

    /// Writes one key, whatever it holds.
    async fn put(&self, key: &[u8], value: &[u8]) -> Result<Revision, KvError> {
        let done = self.txn(Txn::new().then(Op::put(key, value))).await?;
        Ok(done.revision)
    }

    /// Removes keys; tells how many there were.
    async fn delete(&self, keys: KeyRange) -> Result<u64, KvError> {
        let done = self.txn(Txn::new().then(Op::Delete(keys))).await?;
        Ok(done.deleted())
    }
}
