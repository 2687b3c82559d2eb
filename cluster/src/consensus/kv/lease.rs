//! Leases.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};

use super::KvError;

/// The number of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

/// Ends a lease at once.
pub type Revoke =
    Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = Result<(), KvError>> + Send>> + Send + Sync>;

/// A lease that is kept alive as long as this is held. Keys that were put with it end with it.
///
/// Dropped, it is kept alive no more, and ends within its time; [`revoke`](Self::revoke) ends it at once.
pub struct Lease {
    id: LeaseId,
    ttl: Duration,
    ended: CancellationToken,
    revoke: Revoke,
    _kept: DropGuard,
}

impl Lease {
    /// A lease, for implementations: `kept` is cancelled when the guard is dropped, and `ended` is to be cancelled when
    /// the store says that the lease is no more.
    pub fn new(
        id: LeaseId,
        ttl: Duration,
        kept: CancellationToken,
        ended: CancellationToken,
        revoke: Revoke,
    ) -> Lease {
        Lease { id, ttl, ended, revoke, _kept: kept.drop_guard() }
    }

    /// Its number, to put keys with.
    pub fn id(&self) -> LeaseId {
        self.id
    }

    /// How long it lives without being kept alive.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Resolves when the lease has ended although it was held: the store could not be reached for its time, or somebody
    /// revoked it.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Ends it, and removes its keys.
    ///
    /// # Errors
    /// [`KvError::Unavailable`]: then it ends within its time. One that has ended already is no error.
    pub async fn revoke(self) -> Result<(), KvError> {
        match (self.revoke)().await {
            Err(KvError::NoLease { .. }) => Ok(()),
            revoked => revoked,
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("id", &self.id).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}
