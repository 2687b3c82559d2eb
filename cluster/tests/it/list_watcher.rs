//! List and watch, with a change between every list and its watch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_cluster::consensus::kv::{
    KeyEvent, KeyRange, KvError, KvStore, ListWatchUpdate, ListWatcher, RangeResponse, Revision, Txn,
    TxnResponse, WatchStream,
};
use nodekeel_cluster::consensus::memory::MemoryKv;

/// A store that writes a key right before each watch starts, and reports that change as compacted `compactions`
/// times: by the call, and as the watch's response, in turn.
#[derive(Debug)]
struct BusyStore {
    store: MemoryKv,
    compactions: AtomicU32,
}

#[async_trait]
impl KvStore for BusyStore {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        self.store.range(keys).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        self.store.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        self.store.put(b"/between", b"").await?;
        match self.compactions.load(Ordering::Relaxed) {
            0 => return self.store.watch(keys, from).await,
            left => self.compactions.store(left - 1, Ordering::Relaxed),
        }
        self.store.put(b"/later", b"").await?;
        if self.compactions.load(Ordering::Relaxed).is_multiple_of(2) {
            return Err(KvError::Compacted);
        }
        Ok(WatchStream::new(futures_util::stream::iter([Err(KvError::Compacted)])))
    }
}

fn busy_list_watcher(compactions: u32) -> ListWatcher {
    let store = BusyStore { store: MemoryKv::new(), compactions: AtomicU32::new(compactions) };
    ListWatcher::new(Arc::new(store), KeyRange::all_keys())
}

fn update_keys(update: &ListWatchUpdate) -> Vec<&[u8]> {
    match update {
        ListWatchUpdate::Snapshot(kvs) => kvs.iter().map(|kv| kv.key.as_slice()).collect(),
        ListWatchUpdate::Events(changes) => changes.iter().map(KeyEvent::key).collect(),
        _ => panic!("an unknown update"),
    }
}

#[tokio::test]
async fn a_change_between_list_and_watch_is_reported_once() {
    let mut follow = busy_list_watcher(0);
    assert_eq!(update_keys(&follow.next_update().await.unwrap()), [b""; 0], "the store is empty at first");
    assert_eq!(update_keys(&follow.next_update().await.unwrap()), [b"/between"]);
    let more = tokio::time::timeout(Duration::from_millis(20), follow.next_update()).await;
    assert!(more.is_err(), "a further update");
}

#[tokio::test]
async fn a_compaction_between_list_and_watch_causes_a_new_list() {
    let mut follow = busy_list_watcher(3);
    let mut known = Vec::new();
    while known.len() < 2 {
        let update = follow.next_update().await.unwrap();
        if matches!(update, ListWatchUpdate::Snapshot(_)) {
            known.clear();
        }
        for key in update_keys(&update) {
            if !known.contains(&key.to_vec()) {
                known.push(key.to_vec());
            }
        }
    }
    assert_eq!(known, [b"/between".to_vec(), b"/later".to_vec()]);
}
