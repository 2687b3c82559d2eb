//! The store: the present keys, and their latest changes for watches.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use futures_util::stream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::consensus::kv::{
    KeyEvent, KeyRange, KeyValue, KvError, KvStore, RangeResponse, Revision, Txn, TxnOp, TxnResponse,
    WatchStream,
};

/// The number of changes that are kept for watches: one that is further behind reads the present keys again.
const KEPT_CHANGES: usize = 1000;

/// A store in memory. Clones share it.
///
/// It keeps the last 1000 changes. It causes no wakeups while nothing changes: watches read on when a newer
/// revision appears.
#[derive(Clone, Default)]
pub struct MemoryKv {
    shared: Arc<SharedKeys>,
    /// Canceled when this handle becomes unusable; the store may continue.
    stop_token: CancellationToken,
}

#[derive(Default)]
struct SharedKeys {
    keys: Mutex<Keys>,
    /// The newest revision, for waiting watches.
    newest: watch::Sender<Revision>,
}

/// Plain data, without tasks and IO.
struct Keys {
    present: BTreeMap<Vec<u8>, KeyValue>,
    newest: Revision,
    /// The events of the newest revisions, one entry each.
    changes: VecDeque<Vec<KeyEvent>>,
}

impl Default for Keys {
    fn default() -> Keys {
        // An empty etcd is at revision 1, and its first change has 2.
        Keys { present: BTreeMap::new(), newest: Revision(1), changes: VecDeque::new() }
    }
}

impl MemoryKv {
    /// An empty store.
    pub fn new() -> MemoryKv {
        MemoryKv::default()
    }

    /// A handle of the same store that returns [`KvError::Stopped`] once the token is canceled.
    pub(super) fn with_stop_token(&self, stopped: CancellationToken) -> MemoryKv {
        MemoryKv { shared: Arc::clone(&self.shared), stop_token: stopped }
    }

    fn lock_keys(&self) -> Result<MutexGuard<'_, Keys>, KvError> {
        if self.stop_token.is_cancelled() {
            return Err(KvError::Stopped);
        }
        Ok(self.shared.keys.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[async_trait]
impl KvStore for MemoryKv {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        keys.check_keys()?;
        let stored = self.lock_keys()?;
        Ok(RangeResponse::new(stored.newest, stored.range(&keys).cloned().collect()))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        txn.check_keys()?;
        let mut stored = self.lock_keys()?;
        let done = stored.apply(txn);
        let newest = stored.newest;
        // While the keys are still locked: the published revision never goes back.
        self.shared.newest.send_if_modified(|known| std::mem::replace(known, newest) != newest);
        Ok(done)
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        keys.check_keys()?;
        // Only to fail if the store is stopped.
        self.lock_keys().map(drop)?;
        let newest = self.shared.newest.subscribe();
        let cursor = WatchCursor { kv: self.clone(), newest, keys, next: from };
        Ok(WatchStream::new(stream::try_unfold(cursor, |mut cursor| async {
            let events = cursor.next_events().await?;
            Ok(Some((events, cursor)))
        })))
    }
}

impl Keys {
    fn range<'a>(&'a self, keys: &'a KeyRange) -> impl Iterator<Item = &'a KeyValue> {
        // A key sorts directly before all keys that it is a prefix of, so one scan serves both kinds.
        let (KeyRange::Key(start) | KeyRange::Prefix(start)) = keys;
        let from = (Bound::Included(start.as_slice()), Bound::Unbounded);
        self.present.range::<[u8], _>(from).map(|(_, kv)| kv).take_while(|kv| keys.contains(&kv.key))
    }

    fn apply(&mut self, txn: Txn) -> TxnResponse {
        let holds = txn.when.iter().all(|compare| compare.is_satisfied_by(self.range(&compare.keys())));
        let mut done = TxnResponse { succeeded: holds, ..TxnResponse::default() };
        // One revision for all operations; it is used only if one of them changes anything.
        let (revision, mut events) = (self.newest.next(), Vec::new());
        for op in if holds { txn.then } else { txn.or_else } {
            match op {
                TxnOp::Put { key, value } => {
                    let mut kv = KeyValue::new(key.clone(), value, revision);
                    kv.version = self.present.get(&key).map_or(1, |before| before.version + 1);
                    self.present.insert(key, kv.clone());
                    events.push(KeyEvent::Put(kv));
                }
                TxnOp::Delete(keys) => {
                    let deleted: Vec<_> = self.range(&keys).map(|kv| kv.key.clone()).collect();
                    for key in deleted {
                        self.present.remove(&key);
                        events.push(KeyEvent::Delete { key, mod_revision: revision });
                        done.deleted += 1;
                    }
                }
                TxnOp::Range(keys) => done.kvs.extend(self.range(&keys).cloned()),
            }
        }
        if !events.is_empty() {
            self.newest = revision;
            // Only the newest changes are kept: a watch that starts further back fails as after a compaction of
            // etcd.
            self.changes.push_back(events);
            if self.changes.len() > KEPT_CHANGES {
                self.changes.pop_front();
            }
        }
        done.revision = self.newest;
        done
    }

    /// The kept events of this revision and later ones, one entry for each revision.
    fn changes_from(&self, from: Revision) -> Result<impl Iterator<Item = &Vec<KeyEvent>>, KvError> {
        // Every change has the revision after that of the change before.
        let forgotten = self.newest.0 - i64::try_from(self.changes.len()).unwrap_or(i64::MAX);
        let skipped = usize::try_from(from.0 - forgotten - 1).map_err(|_| KvError::Compacted)?;
        Ok(self.changes.iter().skip(skipped))
    }
}

/// The position of a watch.
struct WatchCursor {
    kv: MemoryKv,
    newest: watch::Receiver<Revision>,
    keys: KeyRange,
    /// The first revision that was not delivered.
    next: Revision,
}

impl WatchCursor {
    async fn next_events(&mut self) -> Result<Vec<KeyEvent>, KvError> {
        loop {
            // Marked as seen before the read: a later change wakes this task again.
            self.newest.borrow_and_update();
            {
                // The block ends before the wait: a guard must not be held across an await.
                let stored = self.kv.lock_keys()?;
                for events in stored.changes_from(self.next)? {
                    self.next = self.next.next();
                    let is_watched = |event: &&KeyEvent| self.keys.contains(event.key());
                    let watched: Vec<_> = events.iter().filter(is_watched).cloned().collect();
                    if !watched.is_empty() {
                        return Ok(watched);
                    }
                }
            }
            tokio::select! {
                // The next look at the keys returns the error.
                () = self.kv.stop_token.cancelled() => {}
                _ = self.newest.changed() => {}
            }
        }
    }
}

/// Without the values, which may be secrets.
impl fmt::Debug for MemoryKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryKv").finish_non_exhaustive()
    }
}
