//! The store: a shared history, with watches and leases.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::key_history::KeyHistory;
use crate::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, LeaseId, RangeRequest, RangeResponse, Revision, Txn, TxnResponse,
    WatchFrom, WatchResponse, WatchStream,
};

/// A store in memory. Clones share it.
///
/// It causes no wakeups while nothing changes: watches read on when a newer revision appears, and a held
/// lease needs no timer.
#[derive(Clone)]
pub struct MemoryKv {
    shared: Arc<SharedHistory>,
    /// Cancelled when this handle becomes unusable; the store may continue.
    stop_token: CancellationToken,
}

struct SharedHistory {
    history: Mutex<KeyHistory>,
    /// The newest revision, for waiting watches.
    newest: watch::Sender<Revision>,
}

impl Default for MemoryKv {
    fn default() -> MemoryKv {
        MemoryKv::new()
    }
}

impl MemoryKv {
    /// An empty store.
    pub fn new() -> MemoryKv {
        let history = KeyHistory::new();
        let (newest, _) = watch::channel(history.newest_revision());
        MemoryKv {
            shared: Arc::new(SharedHistory { history: Mutex::new(history), newest }),
            stop_token: CancellationToken::new(),
        }
    }

    /// A handle of the same store that returns [`KvError::Stopped`] once the token is cancelled.
    pub(super) fn with_stop_token(&self, stopped: CancellationToken) -> MemoryKv {
        MemoryKv { shared: Arc::clone(&self.shared), stop_token: stopped }
    }

    fn check_not_stopped(&self) -> Result<(), KvError> {
        if self.stop_token.is_cancelled() { Err(KvError::Stopped) } else { Ok(()) }
    }
}

impl SharedHistory {
    fn history(&self) -> MutexGuard<'_, KeyHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the history, and notifies waiting watches.
    fn update<T>(&self, change: impl FnOnce(&mut KeyHistory) -> T) -> T {
        let mut history = self.history();
        let changed = change(&mut history);
        let newest = history.newest_revision();
        self.newest.send_if_modified(|known| std::mem::replace(known, newest) != newest);
        changed
    }
}

#[async_trait]
impl KvStore for MemoryKv {
    async fn range(&self, range: RangeRequest) -> Result<RangeResponse, KvError> {
        self.check_not_stopped()?;
        self.shared.history().range(&range)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        self.check_not_stopped()?;
        self.shared.update(|history| history.txn(&txn))
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<WatchStream, KvError> {
        self.check_not_stopped()?;
        let next_revision = match from {
            WatchFrom::Now => self.shared.history().newest_revision().next(),
            WatchFrom::Revision(revision) => revision,
        };
        let progress = Arc::new(Notify::new());
        let cursor = WatchCursor {
            shared: Arc::clone(&self.shared),
            newest: self.shared.newest.subscribe(),
            stopped: self.stop_token.clone(),
            progress: Arc::clone(&progress),
            keys,
            next_revision,
            is_finished: false,
        };
        let messages = stream::unfold(cursor, |mut cursor| async {
            let message = cursor.next_response().await?;
            Some((message, cursor))
        });
        Ok(WatchStream::new(messages, move || progress.notify_one()))
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.check_not_stopped()?;
        let ttl = Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0))
            .max(Duration::from_secs(1));
        let id = self.shared.update(KeyHistory::grant_lease);
        let (dropped, ended) = (CancellationToken::new(), CancellationToken::new());
        tokio::spawn(expire_lease(
            Arc::downgrade(&self.shared),
            id,
            ttl,
            dropped.clone(),
            self.stop_token.clone(),
            ended.clone(),
        ));
        let (store, on_revoke) = (self.clone(), ended.clone());
        let revoke = Box::new(move || {
            let revoked: std::pin::Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(async move {
                store.check_not_stopped()?;
                let was = store.shared.update(|history| history.revoke_lease(id));
                on_revoke.cancel();
                if was { Ok(()) } else { Err(KvError::LeaseNotFound { lease: id }) }
            });
            revoked
        });
        Ok(Lease::new(id, ttl, dropped, ended, revoke))
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.check_not_stopped()?;
        self.shared.update(|history| history.compact(before))
    }
}

/// Ends a lease when its TTL is over. The TTL starts when the guard, or the handle that granted it, is
/// dropped.
async fn expire_lease(
    shared: Weak<SharedHistory>,
    id: LeaseId,
    ttl: Duration,
    dropped: CancellationToken,
    stopped: CancellationToken,
    ended: CancellationToken,
) {
    tokio::select! {
        () = dropped.cancelled() => {}
        () = stopped.cancelled() => ended.cancel(),
    }
    tokio::time::sleep(ttl).await;
    if let Some(shared) = shared.upgrade() {
        shared.update(|history| history.revoke_lease(id));
    }
}

/// The position of a watch.
struct WatchCursor {
    shared: Arc<SharedHistory>,
    newest: watch::Receiver<Revision>,
    stopped: CancellationToken,
    progress: Arc<Notify>,
    keys: KeyRange,
    next_revision: Revision,
    is_finished: bool,
}

impl WatchCursor {
    async fn next_response(&mut self) -> Option<Result<WatchResponse, KvError>> {
        if self.is_finished {
            return None;
        }
        let message = self.advance().await;
        self.is_finished = message.is_err();
        Some(message)
    }

    async fn advance(&mut self) -> Result<WatchResponse, KvError> {
        let mut is_requested = false;
        loop {
            if self.stopped.is_cancelled() {
                return Err(KvError::Stopped);
            }
            // Marked as seen before the read: a later change wakes this task again.
            self.newest.borrow_and_update();
            let (found, newest) = {
                let history = self.shared.history();
                // The next revision, which does not exist yet, is never lost to a compaction.
                let found = match self.next_revision > history.newest_revision() {
                    true => None,
                    false => history.events_from(&self.keys, self.next_revision)?,
                };
                (found, history.newest_revision())
            };
            if let Some((at, changes)) = found {
                self.next_revision = at.next();
                return Ok(WatchResponse::Events(changes));
            }
            self.next_revision = self.next_revision.max(newest.next());
            if is_requested {
                return Ok(WatchResponse::Progress(newest));
            }
            tokio::select! {
                () = self.stopped.cancelled() => {}
                _ = self.newest.changed() => {}
                () = self.progress.notified() => is_requested = true,
            }
        }
    }
}

impl fmt::Debug for MemoryKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryKv")
            .field("newest", &self.shared.history().newest_revision().0)
            .finish_non_exhaustive()
    }
}
