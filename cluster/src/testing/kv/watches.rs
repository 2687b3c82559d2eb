//! Watches.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::{all_test_keys, put_text, test_key};
use crate::consensus::kv::{
    KeyEvent, KeyRange, KvError, KvStore, ListWatchUpdate, ListWatcher, Revision, Txn, TxnOp, WatchFrom,
    WatchResponse, WatchStream,
};

/// Far longer than a response takes.
const TIMEOUT: Duration = Duration::from_secs(20);

async fn next_response(watch: &mut WatchStream) -> Result<WatchResponse, KvError> {
    let message = timeout(TIMEOUT, watch.next_response()).await.expect("a response in time");
    message.expect("an open watch")
}

async fn next_events(watch: &mut WatchStream) -> Vec<(String, Option<String>)> {
    match next_response(watch).await.expect("a change") {
        WatchResponse::Events(changes) => changes.iter().map(event_pair).collect(),
        other => panic!("a change, not {other:?}"),
    }
}

fn event_pair(change: &KeyEvent) -> (String, Option<String>) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let name = text(change.key().strip_prefix(b"/conformance/").expect("a requested key"));
    let value = if let KeyEvent::Put(kv) = change { Some(text(&kv.value)) } else { None };
    (name, value)
}

fn put_event(name: &str, value: &str) -> (String, Option<String>) {
    (name.to_owned(), Some(value.to_owned()))
}

pub(super) async fn check_start_revisions(store: &dyn KvStore) {
    let first = put_text(store, "a", "1").await;
    put_text(store, "a", "2").await;
    let mut now = store.watch(all_test_keys(), WatchFrom::Now).await.expect("watch");
    let mut then = store.watch(all_test_keys(), WatchFrom::Revision(first)).await.expect("watch");
    let mut one = store.watch(KeyRange::single_key(test_key("b")), WatchFrom::Now).await.expect("watch");
    put_text(store, "a", "3").await;
    put_text(store, "b", "4").await;
    store.delete(KeyRange::single_key(test_key("a"))).await.expect("delete");
    store.delete(KeyRange::single_key(test_key("b"))).await.expect("delete");
    let gone = |name: &str| (name.to_owned(), None);
    let mut expected = vec![put_event("a", "1"), put_event("a", "2")];
    let later = [put_event("a", "3"), put_event("b", "4"), gone("a"), gone("b")];
    expected.extend(later.iter().cloned());
    assert_eq!(collect(&mut now, later.len()).await, later, "from now on, each change once and in order");
    assert_eq!(
        collect(&mut then, expected.len()).await,
        expected,
        "from that revision on, including changes before the call"
    );
    assert_eq!(collect(&mut one, 2).await, [put_event("b", "4"), gone("b")], "other keys were reported");
}

async fn collect(watch: &mut WatchStream, count: usize) -> Vec<(String, Option<String>)> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(next_events(watch).await);
    }
    all
}

pub(super) async fn check_txn_is_one_response(store: &dyn KvStore) {
    let mut watch = store.watch(all_test_keys(), WatchFrom::Now).await.expect("watch");
    let txn = Txn::new().then(TxnOp::put(test_key("x"), "1")).then(TxnOp::put(test_key("y"), "2"));
    let done = store.txn(txn).await.expect("txn");
    let WatchResponse::Events(events) = next_response(&mut watch).await.expect("a change") else {
        panic!("a change")
    };
    assert_eq!(events.iter().map(event_pair).collect::<Vec<_>>(), [put_event("x", "1"), put_event("y", "2")]);
    assert!(
        events.iter().all(|event| event.mod_revision() == done.revision),
        "all in one revision: {events:?}"
    );
    store.delete(all_test_keys()).await.expect("delete");
}

pub(super) async fn check_progress(store: &dyn KvStore) {
    let mut watch = store.watch(KeyRange::single_key(test_key("p")), WatchFrom::Now).await.expect("watch");
    let elsewhere = put_text(store, "q", "1").await;
    watch.request_progress();
    match next_response(&mut watch).await.expect("progress") {
        WatchResponse::Progress(revision) => {
            assert!(revision >= elsewhere, "earlier changes are covered: {revision:?}, {elsewhere:?}");
        }
        other => panic!("progress, not {other:?}"),
    }
    put_text(store, "p", "2").await;
    assert_eq!(next_events(&mut watch).await, [put_event("p", "2")], "and the watch continues");
    store.delete(all_test_keys()).await.expect("delete");
}

pub(super) async fn check_compaction(store: &dyn KvStore) {
    let first = put_text(store, "k", "1").await;
    put_text(store, "k", "2").await;
    let last = put_text(store, "k", "3").await;
    store.compact(last).await.expect("compact");
    let compacted = match store.watch(all_test_keys(), WatchFrom::Revision(first)).await {
        Ok(mut watch) => {
            let error = next_response(&mut watch).await.expect_err("lost changes are reported");
            assert!(watch.next_response().await.is_none(), "the watch has ended");
            error
        }
        Err(error) => error,
    };
    assert!(matches!(compacted, KvError::Compacted { .. }), "{compacted:?}");
    let mut watch = store.watch(all_test_keys(), WatchFrom::Revision(last.next())).await.expect("watch");
    put_text(store, "k", "4").await;
    assert_eq!(next_events(&mut watch).await, [put_event("k", "4")], "later changes are reported");
    store.delete(all_test_keys()).await.expect("delete");
}

/// Follows keys while they change and history is constantly compacted, and compares the result at the end.
pub(super) async fn check_list_watch(store: &Arc<dyn KvStore>) {
    const LAST: &str = "199";
    let mut follow = ListWatcher::new(Arc::clone(store), all_test_keys());
    let write = async {
        for count in 0..200 {
            let revision = put_text(&**store, &format!("f/{}", count % 7), &count.to_string()).await;
            tokio::task::yield_now().await;
            if count % 10 == 0 {
                store
                    .delete(KeyRange::single_key(test_key(&format!("f/{}", count % 3))))
                    .await
                    .expect("delete");
                store.compact(revision).await.expect("compact");
            }
        }
    };
    let read = async {
        let mut known = std::collections::BTreeMap::new();
        let mut newest = Revision::NONE;
        while !known.values().any(|value: &Vec<u8>| value == LAST.as_bytes()) {
            match timeout(TIMEOUT, follow.next_update()).await.expect("an update in time").expect("an update")
            {
                ListWatchUpdate::Snapshot { revision, kvs } => {
                    assert!(revision >= newest, "revisions never go back");
                    newest = revision;
                    known = kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
                }
                ListWatchUpdate::Events(changes) => {
                    for change in changes {
                        assert!(change.mod_revision() >= newest, "revisions never go back: {change:?}");
                        newest = change.mod_revision();
                        match change {
                            KeyEvent::Put(kv) => drop(known.insert(kv.key, kv.value)),
                            KeyEvent::Delete { key, .. } => drop(known.remove(&key)),
                        }
                    }
                }
            }
        }
        known
    };
    let ((), known) = futures_util::future::join(write, read).await;
    let existing =
        store.range(crate::consensus::kv::RangeRequest::new(all_test_keys())).await.expect("range");
    let existing: Vec<_> = existing.kvs.into_iter().map(|kv| (kv.key, kv.value)).collect();
    assert_eq!(known.into_iter().collect::<Vec<_>>(), existing, "the watcher's view differs from the store");
    store.delete(all_test_keys()).await.expect("delete");
}
