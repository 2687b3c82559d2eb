//! Leases.

use std::time::Duration;

use tokio::time::timeout;

use super::{all, key, pairs, put, read};
use crate::consensus::kv::{
    Change, KeyRange, KvError, KvStore, Op, Range, Txn, Watch, WatchFrom, WatchMessage,
};

const TTL: Duration = Duration::from_secs(1);
/// Far more than the end of a lease takes, with an etcd that rounds its time up.
const WITHIN: Duration = Duration::from_secs(30);

async fn gone(watch: &mut Watch) -> Vec<Vec<u8>> {
    match timeout(WITHIN, watch.message()).await.expect("an end in time").expect("a message") {
        Ok(WatchMessage::Changes(changes)) => {
            assert!(changes.iter().all(|change| matches!(change, Change::Deleted { .. })), "{changes:?}");
            changes.into_iter().map(|change| change.key().to_vec()).collect()
        }
        other => panic!("keys that end, not {other:?}"),
    }
}

pub(super) async fn a_lease_ends_with_its_keys(store: &dyn KvStore) {
    let lease = store.lease(TTL).await.expect("lease");
    let (id, leased) = (lease.id(), |name: &str| Op::put_leased(key(name), name, lease.id()));
    assert!(lease.ttl() >= TTL, "a time may be longer, not shorter");
    let txn = Txn::new().then(leased("one")).then(leased("two")).then(leased("kept"));
    store.txn(txn).await.expect("put with a lease");
    put(store, "kept", "without").await;
    let one = store.get(&key("one")).await.expect("get").expect("it was put");
    assert_eq!(one.lease, Some(id));
    assert_eq!(
        store.get(&key("kept")).await.expect("get").and_then(|kv| kv.lease),
        None,
        "a later put takes it off"
    );
    let mut watch = store.watch(all(), WatchFrom::Now).await.expect("watch");
    lease.revoke().await.expect("revoke");
    let left = read(store, Range::new(all())).await;
    assert_eq!(left, pairs(&[("kept", "without")]), "its keys are gone when it is revoked");
    assert_eq!(gone(&mut watch).await, [key("one"), key("two")], "and watches are told");
    let refused = store.txn(Txn::new().then(Op::put_leased(key("late"), "", id))).await;
    assert!(matches!(refused, Err(KvError::NoLease { .. })), "{refused:?}");
    store.delete(all()).await.expect("delete");
}

pub(super) async fn a_held_lease_lives(store: &dyn KvStore) {
    let lease = store.lease(TTL).await.expect("lease");
    let put = Op::put_leased(key("held"), "", lease.id());
    store.txn(Txn::new().then(put)).await.expect("put with a lease");
    let mut watch = store.watch(KeyRange::key(key("held")), WatchFrom::Now).await.expect("watch");
    let ended = timeout(3 * lease.ttl(), lease.ended()).await;
    assert!(ended.is_err(), "a lease that is held does not end");
    assert!(store.get(&key("held")).await.expect("get").is_some(), "nor do its keys");
    drop(lease);
    assert_eq!(gone(&mut watch).await, [key("held")], "one that was dropped ends by itself");
}
