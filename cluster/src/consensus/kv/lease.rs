//! Leases.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};

use super::KvError;

/// The id of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

/// Revokes a lease.
pub type RevokeFn =
    Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = Result<(), KvError>> + Send>> + Send + Sync>;

/// A lease that is kept alive as long as this guard exists. Keys that were put with it are deleted with it.
///
/// A dropped guard stops the keep-alive, and the lease expires within its TTL; [`revoke`](Self::revoke) ends
/// it at once.
pub struct Lease {
    id: LeaseId,
    ttl: Duration,
    ended: CancellationToken,
    revoke: RevokeFn,
    _dropped: DropGuard,
}

impl Lease {
    /// A lease, for implementations: `dropped` is cancelled when the guard is dropped, and the implementation
    /// cancels `ended` when the store reports that the lease no longer exists, or can't be kept alive.
    pub fn new(
        id: LeaseId,
        ttl: Duration,
        dropped: CancellationToken,
        ended: CancellationToken,
        revoke: RevokeFn,
    ) -> Lease {
        Lease { id, ttl, ended, revoke, _dropped: dropped.drop_guard() }
    }

    /// Its id, to put keys with.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// Its time to live without a keep-alive.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Completes when the lease has ended although the guard exists: the store was unreachable for its TTL,
    /// another client revoked it, or the run of the member that granted it has ended, so that nothing keeps it
    /// alive. It completes before the store may give the lease's keys to another holder.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_ended(&self) {
        self.ended.cancelled().await;
    }

    /// Revokes the lease, and deletes its keys.
    ///
    /// # Errors
    /// [`KvError::Unavailable`]: the lease then expires within its TTL. A lease that has already ended is not
    /// an error.
    pub async fn revoke(self) -> Result<(), KvError> {
        match (self.revoke)().await {
            Err(KvError::LeaseNotFound { .. }) => Ok(()),
            revoked => revoked,
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}
