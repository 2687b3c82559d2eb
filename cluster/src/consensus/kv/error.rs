//! What a store answers instead.

use thiserror::Error;

use super::{LeaseId, Revision};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a call to a store failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvError {
    /// The key is none of this store: empty, or in a namespace without a slash at its start. Nothing was done.
    #[error("key \"{}\" {problem}", .key.escape_ascii())]
    InvalidKey {
        /// The key, or the begin or end of a range.
        key: Vec<u8>,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// One transaction writes a key twice: make it one operation. Nothing was done.
    #[error("the transaction writes a key twice")]
    DuplicateKey,
    /// The revision was compacted: read what is there now, and go on from there ([`Follow`](super::Follow) does).
    #[error("the revision is not kept any more")]
    Compacted {
        /// The oldest that is kept; [`Revision::NONE`] where the store doesn't tell.
        oldest: Revision,
    },
    /// The revision has not been reached.
    #[error("revision {} has not been reached", .revision.0)]
    FutureRevision {
        /// The revision asked for.
        revision: Revision,
    },
    /// The lease has ended, or there never was one: grant another.
    #[error("there is no lease {}", .lease.0)]
    NoLease {
        /// The lease, zero where the store doesn't tell.
        lease: LeaseId,
    },
    /// No answer came, or that there is no leader now. The call may have taken effect. A retry may help.
    #[error("{operation}: no answer")]
    Unavailable {
        /// What was asked.
        operation: &'static str,
        /// Why.
        #[source]
        source: Source,
    },
    /// The store was stopped: this handle is of no use any more.
    #[error("the store has been stopped")]
    Stopped,
    /// The store refused for another reason. A retry doesn't help.
    #[error("{operation}: refused")]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// Why.
        #[source]
        source: Source,
    },
}

impl KvError {
    /// Whether the same call may succeed later, with nothing else done about it.
    pub fn is_retryable(&self) -> bool {
        matches!(self, KvError::Unavailable { .. })
    }
}
