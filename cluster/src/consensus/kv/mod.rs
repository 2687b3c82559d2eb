//! Keys and values that the members agree on; each change has a revision.
//!
//! The model is etcd's, as far as it is needed: one key space, one revision number that grows with each change,
//! transactions that compare and swap, and watches from any kept revision. *Source:* etcd's API reference,
//! `rpc.proto` of etcd v3.

mod error;
mod keys;
mod list_watcher;
mod namespaced;
mod txn;
mod watch;

use std::fmt::Debug;

use async_trait::async_trait;

pub use error::KvError;
pub use keys::{KeyRange, KeyValue, RangeResponse, Revision};
pub use list_watcher::{ListWatchUpdate, ListWatcher};
pub use namespaced::NamespacedKv;
pub use txn::{Compare, KeyCondition, Txn, TxnOp, TxnResponse};
pub use watch::{KeyEvent, WatchStream};

/// A store of keys and values with revisions.
///
/// # Contract
/// - All calls are linearizable: a read returns every change that completed before the read was made.
/// - A transaction is one change with one revision, for any number of keys; one that writes
///   nothing gets no revision, and returns the newest.
/// - A key has at least one byte. Values may be empty.
/// - A call that fails as [`KvError::Unavailable`] may have taken effect, or may still. All other failed
///   calls have not.
/// - Dropping a call's future discards its answer, but does not cancel the call.
///
/// `testing::kv_conformance` checks it.
#[async_trait]
pub trait KvStore: Debug + Send + Sync {
    /// Reads keys.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`]; [`KvError::Unavailable`], [`KvError::Stopped`] and [`KvError::Rejected`], as for
    /// every call.
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError>;

    /// Checks conditions, and performs one of two lists of operations, atomically.
    ///
    /// # Errors
    /// [`KvError::InvalidKey`], [`KvError::DuplicateKey`], and those of [`range`](Self::range).
    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError>;

    /// Watches keys: delivers their changes at this revision and later ones. To continue after a read, watch from
    /// the [next](Revision::next) revision. The watch is active when this returns: no later change is missed.
    ///
    /// # Errors
    /// Those of [`range`](Self::range). [`KvError::Compacted`], if the store no longer keeps these changes, is
    /// returned by this call, or as the watch's first response.
    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError>;

    /// Reads one key.
    ///
    /// # Errors
    /// Those of [`range`](Self::range).
    async fn get(&self, key: &[u8]) -> Result<Option<KeyValue>, KvError> {
        Ok(self.range(KeyRange::single_key(key)).await?.kvs.into_iter().next())
    }

    /// Writes one key, whether or not it exists.
    ///
    /// # Errors
    /// Those of [`txn`](Self::txn).
    async fn put(&self, key: &[u8], value: &[u8]) -> Result<Revision, KvError> {
        Ok(self.txn(Txn::new().then(TxnOp::put(key, value))).await?.revision)
    }

    /// Deletes keys; returns how many existed.
    ///
    /// # Errors
    /// Those of [`txn`](Self::txn).
    async fn delete(&self, keys: KeyRange) -> Result<u64, KvError> {
        Ok(self.txn(Txn::new().then(TxnOp::Delete(keys))).await?.deleted)
    }
}
