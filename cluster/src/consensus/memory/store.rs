//! The store: a history that many share, with watches and leases.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::history::History;
use crate::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, LeaseId, Range, Ranged, Revision, Txn, TxnResult, Watch, WatchFrom,
    WatchMessage,
};

/// A store in memory. Clones share it.
///
/// It wakes nobody up while nothing changes: watches read on when there is a newer revision, and a lease costs nothing as
/// long as it is held.
#[derive(Clone)]
pub struct MemoryKv {
    shared: Arc<Shared>,
    /// Cancelled when this handle is of no use any more; the store may live on.
    stopped: CancellationToken,
}

struct Shared {
    history: Mutex<History>,
    /// The newest revision, for those who wait for one.
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
        let history = History::new();
        let (newest, _) = watch::channel(history.newest());
        MemoryKv {
            shared: Arc::new(Shared { history: Mutex::new(history), newest }),
            stopped: CancellationToken::new(),
        }
    }

    /// A handle of the same store that answers [`KvError::Stopped`] once the token is cancelled.
    pub(super) fn until(&self, stopped: CancellationToken) -> MemoryKv {
        MemoryKv { shared: Arc::clone(&self.shared), stopped }
    }

    fn check(&self) -> Result<(), KvError> {
        if self.stopped.is_cancelled() { Err(KvError::Stopped) } else { Ok(()) }
    }
}

impl Shared {
    fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the history, and tells those who wait.
    fn change<T>(&self, change: impl FnOnce(&mut History) -> T) -> T {
        let mut history = self.history();
        let changed = change(&mut history);
        let newest = history.newest();
        self.newest.send_if_modified(|known| std::mem::replace(known, newest) != newest);
        changed
    }
}

#[async_trait]
impl KvStore for MemoryKv {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        self.check()?;
        self.shared.history().range(&range)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        self.check()?;
        self.shared.change(|history| history.txn(&txn))
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        self.check()?;
        let next = match from {
            WatchFrom::Now => self.shared.history().newest().next(),
            WatchFrom::Revision(revision) => revision,
        };
        let progress = Arc::new(Notify::new());
        let watching = Watching {
            shared: Arc::clone(&self.shared),
            newest: self.shared.newest.subscribe(),
            stopped: self.stopped.clone(),
            progress: Arc::clone(&progress),
            keys,
            next,
            is_over: false,
        };
        let messages = stream::unfold(watching, |mut watching| async {
            let message = watching.message().await?;
            Some((message, watching))
        });
        Ok(Watch::new(messages, move || progress.notify_one()))
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.check()?;
        let ttl = Duration::from_secs(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0))
            .max(Duration::from_secs(1));
        let id = self.shared.change(History::grant);
        let (kept, ended) = (CancellationToken::new(), CancellationToken::new());
        tokio::spawn(expire(Arc::downgrade(&self.shared), id, ttl, kept.clone(), self.stopped.clone()));
        let (store, told) = (self.clone(), ended.clone());
        let revoke = Box::new(move || {
            let revoked: std::pin::Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(async move {
                store.check()?;
                let was = store.shared.change(|history| history.revoke(id));
                told.cancel();
                if was { Ok(()) } else { Err(KvError::NoLease { lease: id }) }
            });
            revoked
        });
        Ok(Lease::new(id, ttl, kept, ended, revoke))
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.check()?;
        self.shared.change(|history| history.compact(before))
    }
}

/// Ends a lease when its time is over, which begins when its guard, or the handle that granted it, is gone.
async fn expire(
    shared: Weak<Shared>,
    id: LeaseId,
    ttl: Duration,
    kept: CancellationToken,
    stopped: CancellationToken,
) {
    tokio::select! {
        () = kept.cancelled() => {}
        () = stopped.cancelled() => {}
    }
    tokio::time::sleep(ttl).await;
    if let Some(shared) = shared.upgrade() {
        shared.change(|history| history.revoke(id));
    }
}

/// Where a watch is.
struct Watching {
    shared: Arc<Shared>,
    newest: watch::Receiver<Revision>,
    stopped: CancellationToken,
    progress: Arc<Notify>,
    keys: KeyRange,
    next: Revision,
    is_over: bool,
}

impl Watching {
    async fn message(&mut self) -> Option<Result<WatchMessage, KvError>> {
        if self.is_over {
            return None;
        }
        let message = self.advance().await;
        self.is_over = message.is_err();
        Some(message)
    }

    async fn advance(&mut self) -> Result<WatchMessage, KvError> {
        let mut is_asked = false;
        loop {
            if self.stopped.is_cancelled() {
                return Err(KvError::Stopped);
            }
            // Seen before it is read: what changes after that wakes this up again.
            self.newest.borrow_and_update();
            let (found, newest) = {
                let history = self.shared.history();
                // The first revision that nobody has made yet is no lost one, however far the compaction went.
                let found = match self.next > history.newest() {
                    true => None,
                    false => history.changes_from(&self.keys, self.next)?,
                };
                (found, history.newest())
            };
            if let Some((at, changes)) = found {
                self.next = at.next();
                return Ok(WatchMessage::Changes(changes));
            }
            self.next = self.next.max(newest.next());
            if is_asked {
                return Ok(WatchMessage::Progress(newest));
            }
            tokio::select! {
                () = self.stopped.cancelled() => {}
                _ = self.newest.changed() => {}
                () = self.progress.notified() => is_asked = true,
            }
        }
    }
}

impl fmt::Debug for MemoryKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryKv").field("newest", &self.shared.history().newest().0).finish_non_exhaustive()
    }
}
