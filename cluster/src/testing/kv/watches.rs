//! Watches.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::{all, key, put};
use crate::consensus::kv::{
    Change, Follow, KeyRange, KvError, KvStore, Op, Revision, Txn, Update, Watch, WatchFrom, WatchMessage,
};

/// Far more than a message takes.
const WITHIN: Duration = Duration::from_secs(20);

async fn message(watch: &mut Watch) -> Result<WatchMessage, KvError> {
    let message = timeout(WITHIN, watch.message()).await.expect("a message comes in time");
    message.expect("a watch goes on")
}

async fn changes(watch: &mut Watch) -> Vec<(String, Option<String>)> {
    match message(watch).await.expect("a change") {
        WatchMessage::Changes(changes) => changes.iter().map(shown).collect(),
        other => panic!("a change, not {other:?}"),
    }
}

fn shown(change: &Change) -> (String, Option<String>) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let name = text(change.key().strip_prefix(b"/conformance/").expect("no other key was asked for"));
    let value = if let Change::Put(kv) = change { Some(text(&kv.value)) } else { None };
    (name, value)
}

fn wrote(name: &str, value: &str) -> (String, Option<String>) {
    (name.to_owned(), Some(value.to_owned()))
}

pub(super) async fn from_now_and_from_then(store: &dyn KvStore) {
    let first = put(store, "a", "1").await;
    put(store, "a", "2").await;
    let mut now = store.watch(all(), WatchFrom::Now).await.expect("watch");
    let mut then = store.watch(all(), WatchFrom::Revision(first)).await.expect("watch");
    let mut one = store.watch(KeyRange::key(key("b")), WatchFrom::Now).await.expect("watch");
    put(store, "a", "3").await;
    put(store, "b", "4").await;
    store.delete(KeyRange::key(key("a"))).await.expect("delete");
    store.delete(KeyRange::key(key("b"))).await.expect("delete");
    let gone = |name: &str| (name.to_owned(), None);
    let mut expected = vec![wrote("a", "1"), wrote("a", "2")];
    let later = [wrote("a", "3"), wrote("b", "4"), gone("a"), gone("b")];
    expected.extend(later.iter().cloned());
    assert_eq!(collect(&mut now, later.len()).await, later, "from now on, each change once and in order");
    assert_eq!(
        collect(&mut then, expected.len()).await,
        expected,
        "from then on, with what was before the call"
    );
    assert_eq!(collect(&mut one, 2).await, [wrote("b", "4"), gone("b")], "nothing of other keys");
}

async fn collect(watch: &mut Watch, count: usize) -> Vec<(String, Option<String>)> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(changes(watch).await);
    }
    all
}

pub(super) async fn a_transaction_is_one_message(store: &dyn KvStore) {
    let mut watch = store.watch(all(), WatchFrom::Now).await.expect("watch");
    let txn = Txn::new().then(Op::put(key("x"), "1")).then(Op::put(key("y"), "2"));
    let done = store.txn(txn).await.expect("txn");
    let WatchMessage::Changes(told) = message(&mut watch).await.expect("a change") else {
        panic!("a change")
    };
    assert_eq!(told.iter().map(shown).collect::<Vec<_>>(), [wrote("x", "1"), wrote("y", "2")]);
    assert!(told.iter().all(|change| change.modified() == done.revision), "all by one revision: {told:?}");
    store.delete(all()).await.expect("delete");
}

pub(super) async fn progress(store: &dyn KvStore) {
    let mut watch = store.watch(KeyRange::key(key("p")), WatchFrom::Now).await.expect("watch");
    let elsewhere = put(store, "q", "1").await;
    watch.request_progress();
    match message(&mut watch).await.expect("progress") {
        WatchMessage::Progress(revision) => {
            assert!(revision >= elsewhere, "what was before it is told: {revision:?}, {elsewhere:?}");
        }
        other => panic!("progress, not {other:?}"),
    }
    put(store, "p", "2").await;
    assert_eq!(changes(&mut watch).await, [wrote("p", "2")], "and the watch goes on");
    store.delete(all()).await.expect("delete");
}

pub(super) async fn compaction_is_told(store: &dyn KvStore) {
    let first = put(store, "k", "1").await;
    put(store, "k", "2").await;
    let last = put(store, "k", "3").await;
    store.compact(last).await.expect("compact");
    let told = match store.watch(all(), WatchFrom::Revision(first)).await {
        Ok(mut watch) => {
            let told = message(&mut watch).await.expect_err("what is lost is told");
            assert!(watch.message().await.is_none(), "then the watch has ended");
            told
        }
        Err(error) => error,
    };
    assert!(matches!(told, KvError::Compacted { .. }), "{told:?}");
    let mut watch = store.watch(all(), WatchFrom::Revision(last.next())).await.expect("watch");
    put(store, "k", "4").await;
    assert_eq!(changes(&mut watch).await, [wrote("k", "4")], "what comes after it is told");
    store.delete(all()).await.expect("delete");
}

/// Follows keys while they change and history is compacted all the time, and compares what it knows at the end.
pub(super) async fn following_loses_nothing(store: &Arc<dyn KvStore>) {
    const LAST: &str = "199";
    let mut follow = Follow::new(Arc::clone(store), all());
    let write = async {
        for count in 0..200 {
            let revision = put(&**store, &format!("f/{}", count % 7), &count.to_string()).await;
            tokio::task::yield_now().await;
            if count % 10 == 0 {
                store.delete(KeyRange::key(key(&format!("f/{}", count % 3)))).await.expect("delete");
                store.compact(revision).await.expect("compact");
            }
        }
    };
    let read = async {
        let mut known = std::collections::BTreeMap::new();
        let mut newest = Revision::NONE;
        while !known.values().any(|value: &Vec<u8>| value == LAST.as_bytes()) {
            match timeout(WITHIN, follow.next()).await.expect("an update in time").expect("an update") {
                Update::All { revision, kvs } => {
                    assert!(revision >= newest, "it never goes back");
                    newest = revision;
                    known = kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
                }
                Update::Changes(changes) => {
                    for change in changes {
                        assert!(change.modified() >= newest, "it never goes back: {change:?}");
                        newest = change.modified();
                        match change {
                            Change::Put(kv) => drop(known.insert(kv.key, kv.value)),
                            Change::Deleted { key, .. } => drop(known.remove(&key)),
                        }
                    }
                }
            }
        }
        known
    };
    let ((), known) = futures_util::future::join(write, read).await;
    let there = store.range(crate::consensus::kv::Range::new(all())).await.expect("range");
    let there: Vec<_> = there.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
    assert_eq!(known.into_iter().collect::<Vec<_>>(), there, "who follows knows what is there");
    store.delete(all()).await.expect("delete");
}
