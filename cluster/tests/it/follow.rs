//! Following keys, where something always happens between the reading and the watching.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_cluster::consensus::kv::{
    Change, Follow, KeyRange, KvError, KvStore, Lease, Range, Ranged, Revision, Txn, TxnResult, Update,
    Watch, WatchFrom,
};
use nodekeel_cluster::consensus::memory::MemoryKv;

/// A store in which a key is written right before each watch begins, and as often as it says all before is forgotten.
#[derive(Debug)]
struct Busy {
    store: MemoryKv,
    compactions: AtomicU32,
}

#[async_trait]
impl KvStore for Busy {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        self.store.range(range).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        self.store.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        let written = self.store.put(b"/between", b"").await?;
        if self.compactions.load(Ordering::Relaxed) > 0 {
            self.compactions.fetch_sub(1, Ordering::Relaxed);
            self.store.put(b"/later", b"").await?;
            self.store.compact(written.next()).await?;
        }
        self.store.watch(keys, from).await
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.store.lease(ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.store.compact(before).await
    }
}

fn busy(compactions: u32) -> Follow {
    let store = Busy { store: MemoryKv::new(), compactions: AtomicU32::new(compactions) };
    Follow::new(Arc::new(store), KeyRange::all())
}

fn keys(update: &Update) -> Vec<&[u8]> {
    match update {
        Update::All { kvs, .. } => kvs.iter().map(|kv| kv.key.as_slice()).collect(),
        Update::Changes(changes) => changes.iter().map(Change::key).collect(),
        _ => panic!("another update"),
    }
}

#[tokio::test]
async fn what_changes_between_reading_and_watching_is_told_once() {
    let mut follow = busy(0);
    assert_eq!(keys(&follow.next().await.unwrap()), [b""; 0], "nothing was there");
    assert_eq!(keys(&follow.next().await.unwrap()), [b"/between"]);
    let more = tokio::time::timeout(Duration::from_millis(20), follow.next()).await;
    assert!(more.is_err(), "and nothing else");
}

#[tokio::test]
async fn what_was_forgotten_between_reading_and_watching_is_read_again() {
    let mut follow = busy(3);
    let mut known = Vec::new();
    while known.len() < 2 {
        let update = follow.next().await.unwrap();
        if matches!(update, Update::All { .. }) {
            known.clear();
        }
        for key in keys(&update) {
            if !known.contains(&key.to_vec()) {
                known.push(key.to_vec());
            }
        }
    }
    assert_eq!(known, [b"/between".to_vec(), b"/later".to_vec()]);
}
