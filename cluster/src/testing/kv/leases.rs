//! Leases.

use std::time::Duration;

use tokio::time::timeout;

use super::{all_test_keys, pairs, put_text, read_text, test_key};
use crate::consensus::kv::{
    KeyEvent, KeyRange, KvError, KvStore, RangeRequest, Txn, TxnOp, WatchFrom, WatchResponse, WatchStream,
};

const TTL: Duration = Duration::from_secs(1);
/// Far longer than a lease takes to expire, with an etcd that rounds its TTL up.
const TIMEOUT: Duration = Duration::from_secs(30);

async fn expect_deletes(watch: &mut WatchStream) -> Vec<Vec<u8>> {
    match timeout(TIMEOUT, watch.next_response()).await.expect("an end in time").expect("a message") {
        Ok(WatchResponse::Events(changes)) => {
            assert!(changes.iter().all(|change| matches!(change, KeyEvent::Delete { .. })), "{changes:?}");
            changes.into_iter().map(|change| change.key().to_vec()).collect()
        }
        other => panic!("keys that end, not {other:?}"),
    }
}

pub(super) async fn check_lease_end(store: &dyn KvStore) {
    let lease = store.grant_lease(TTL).await.expect("lease");
    let (id, leased) = (lease.id(), |name: &str| TxnOp::put_with_lease(test_key(name), name, lease.id()));
    assert!(lease.ttl() >= TTL, "a TTL may be extended, but not shortened");
    let txn = Txn::new().then(leased("one")).then(leased("two")).then(leased("kept"));
    store.txn(txn).await.expect("put with a lease");
    put_text(store, "kept", "without").await;
    let one = store.get(&test_key("one")).await.expect("get").expect("the key was put");
    assert_eq!(one.lease, Some(id));
    assert_eq!(
        store.get(&test_key("kept")).await.expect("get").and_then(|kv| kv.lease),
        None,
        "a later put detaches the key from its lease"
    );
    let mut watch = store.watch(all_test_keys(), WatchFrom::Now).await.expect("watch");
    lease.revoke().await.expect("revoke");
    let left = read_text(store, RangeRequest::new(all_test_keys())).await;
    assert_eq!(left, pairs(&[("kept", "without")]), "revoking a lease deletes its keys");
    assert_eq!(expect_deletes(&mut watch).await, [test_key("one"), test_key("two")], "watches are notified");
    let refused = store.txn(Txn::new().then(TxnOp::put_with_lease(test_key("late"), "", id))).await;
    assert!(matches!(refused, Err(KvError::LeaseNotFound { .. })), "{refused:?}");
    store.delete(all_test_keys()).await.expect("delete");
}

pub(super) async fn check_keep_alive(store: &dyn KvStore) {
    let lease = store.grant_lease(TTL).await.expect("lease");
    let put = TxnOp::put_with_lease(test_key("held"), "", lease.id());
    store.txn(Txn::new().then(put)).await.expect("put with a lease");
    let mut watch = store.watch(KeyRange::single_key(test_key("held")), WatchFrom::Now).await.expect("watch");
    let ended = timeout(3 * lease.ttl(), lease.wait_ended()).await;
    assert!(ended.is_err(), "a lease ended although its guard exists");
    assert!(store.get(&test_key("held")).await.expect("get").is_some(), "a key ended before its lease");
    drop(lease);
    assert_eq!(expect_deletes(&mut watch).await, [test_key("held")], "a dropped lease expires");
}
