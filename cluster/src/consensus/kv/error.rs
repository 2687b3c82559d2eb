//! Errors of a store.

use thiserror::Error;

use crate::BoxError;

/// A failed call to a store.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvError {
    /// The key is invalid in this store: empty, or in a namespace without a leading slash. Nothing was done.
    #[error("invalid key \"{}\": {problem}", .key.escape_ascii())]
    InvalidKey {
        /// The key, or the start or end of a range.
        key: Vec<u8>,
        /// The defect.
        problem: &'static str,
    },
    /// One transaction writes a key twice: make it one operation. Nothing was done.
    #[error("the transaction writes a key twice, and was not executed")]
    DuplicateKey,
    /// The revision was compacted: read the present keys, and continue from there
    /// ([`ListWatcher`](super::ListWatcher) does).
    #[error(
        "the requested revision has been compacted: read the present keys, and continue from their revision"
    )]
    Compacted,
    /// The store did not answer, or reported that it has no leader. The call may have taken effect. A retry
    /// may help.
    #[error("can't {operation}: the cluster's etcd does not answer")]
    Unavailable {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: BoxError,
    },
    /// The store was stopped: this handle stays unusable.
    #[error("this node's etcd client has been stopped")]
    Stopped,
    /// The store rejected the call for another reason. A retry does not help.
    #[error("can't {operation}: the cluster's etcd rejected the request")]
    Rejected {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: BoxError,
    },
}

impl KvError {
    /// Returns whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        matches!(self, KvError::Unavailable { .. })
    }
}
