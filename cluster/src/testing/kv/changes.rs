//! Transactions.

use std::sync::Arc;

use futures_util::future::join_all;

use super::{all_test_keys, compare, pairs, put_text, read_text, test_key};
use crate::consensus::kv::{
    Compare, CompareOp, CompareTarget, KeyRange, KvError, KvStore, LeaseId, RangeRequest, Revision, Txn,
    TxnOp, TxnOpResponse,
};

async fn holds(store: &dyn KvStore, compare: Compare) -> bool {
    store.txn(Txn::new().when(compare)).await.expect("a transaction that does nothing").succeeded
}

pub(super) async fn check_comparisons(store: &dyn KvStore) {
    let first = put_text(store, "c", "m").await;
    let second = put_text(store, "c", "n").await;
    let before = Revision(first.0 - 1);
    for (is, smaller, same, greater) in [
        (CompareOp::Equal, false, true, false),
        (CompareOp::NotEqual, true, false, true),
        (CompareOp::Greater, true, false, false),
        (CompareOp::Less, false, false, true),
    ] {
        let table = [
            (CompareTarget::CreateRevision(before), smaller),
            (CompareTarget::CreateRevision(first), same),
            (CompareTarget::CreateRevision(second), greater),
            (CompareTarget::ModRevision(first), smaller),
            (CompareTarget::ModRevision(second), same),
            (CompareTarget::ModRevision(second.next()), greater),
            (CompareTarget::Version(1), smaller),
            (CompareTarget::Version(2), same),
            (CompareTarget::Version(3), greater),
            (CompareTarget::Value(b"m".to_vec()), smaller),
            (CompareTarget::Value(b"n".to_vec()), same),
            (CompareTarget::Value(b"na".to_vec()), greater),
        ];
        for (to, expected) in table {
            let compare = compare("c", is, to);
            assert_eq!(holds(store, compare.clone()).await, expected, "{compare:?}");
        }
        let absent = compare("absent", is, CompareTarget::Value(Vec::new()));
        assert!(!holds(store, absent).await, "a comparison of a missing value holds");
    }
    assert!(
        holds(store, Compare::key_absent(test_key("absent"))).await
            && !holds(store, Compare::key_absent(test_key("c"))).await
    );
    assert!(
        holds(store, Compare::key_present(test_key("c"))).await
            && !holds(store, Compare::key_present(test_key("absent"))).await
    );
    let read = store.get(&test_key("c")).await.expect("get").expect("the key was put");
    assert!(holds(store, Compare::key_unchanged(&read)).await);
    put_text(store, "c", "n").await;
    assert!(!holds(store, Compare::key_unchanged(&read)).await, "writing the same value again is a change");
    store.delete(all_test_keys()).await.expect("delete");
}

pub(super) async fn check_transactions(store: &dyn KvStore) {
    let create = |value: &str| {
        let get = TxnOp::get(test_key("t"));
        Txn::new()
            .when(Compare::key_absent(test_key("t")))
            .then(TxnOp::put(test_key("t"), value))
            .or_else(get)
    };
    let made = store.txn(create("first")).await.expect("txn");
    assert!(made.succeeded && made.responses == [TxnOpResponse::Put]);
    let refused = store.txn(create("second")).await.expect("txn");
    assert!(!refused.succeeded, "a key is created once");
    assert_eq!(refused.revision, made.revision, "a transaction without a change has the newest revision");
    let found: Vec<_> = refused.into_key_values().map(|kv| kv.value).collect();
    assert_eq!(found, [b"first".to_vec()], "the other list was performed");
    let both = Txn::new()
        .then(TxnOp::put(test_key("u"), "1"))
        .then(TxnOp::put(test_key("v"), "2"))
        .then(TxnOp::delete(test_key("t")))
        .then(TxnOp::Range(RangeRequest::new(all_test_keys())));
    let done = store.txn(both).await.expect("txn");
    assert_eq!(done.deleted_count(), 1);
    let seen: Vec<_> = done.clone().into_key_values().map(|kv| (kv.key, kv.mod_revision)).collect();
    assert_eq!(
        seen,
        [(test_key("u"), done.revision), (test_key("v"), done.revision)],
        "one change, which its reads see"
    );
    let neither = Txn::new()
        .when(Compare::key_present(test_key("u")))
        .when(Compare::key_present(test_key("t")))
        .then(TxnOp::Delete(all_test_keys()));
    assert!(!store.txn(neither).await.expect("txn").succeeded, "all comparisons must hold");
    assert_eq!(read_text(store, RangeRequest::new(all_test_keys())).await, pairs(&[("u", "1"), ("v", "2")]));
    store.delete(all_test_keys()).await.expect("delete");
}

pub(super) async fn check_rejections(store: &dyn KvStore) {
    let empty = store.put(b"", b"v").await;
    assert!(matches!(empty, Err(KvError::InvalidKey { .. })), "an empty key is invalid: {empty:?}");
    let empty = store.get(b"").await;
    assert!(matches!(empty, Err(KvError::InvalidKey { .. })), "an empty key is invalid: {empty:?}");
    let twice = Txn::new().then(TxnOp::put(test_key("d"), "1")).then(TxnOp::put(test_key("d"), "2"));
    let both = Txn::new().then(TxnOp::Delete(all_test_keys())).then(TxnOp::put(test_key("d"), "1"));
    for txn in [twice, both] {
        let refused = store.txn(txn).await;
        assert!(matches!(refused, Err(KvError::DuplicateKey)), "{refused:?}");
    }
    let unknown = LeaseId(0x7fff_ffff);
    let refused = store.txn(Txn::new().then(TxnOp::put_with_lease(test_key("d"), "1", unknown))).await;
    assert!(matches!(refused, Err(KvError::LeaseNotFound { .. })), "{refused:?}");
    assert!(
        read_text(store, RangeRequest::new(all_test_keys())).await.is_empty(),
        "a rejected transaction took effect"
    );
}

/// Concurrent callers create a key, and then increment it, each time from the value that they have read.
pub(super) async fn check_concurrent_creates(store: &Arc<dyn KvStore>) {
    const MANY: usize = 8;
    let create = |caller: usize| async move {
        let txn = Txn::new().when(Compare::key_absent(test_key("w"))).then(TxnOp::put(test_key("w"), [0]));
        let txn = txn.then(TxnOp::put(test_key(&format!("caller/{caller}")), ""));
        store.txn(txn).await.expect("txn").succeeded
    };
    let won = join_all((0..MANY).map(create)).await;
    assert_eq!(won.iter().filter(|won| **won).count(), 1, "exactly one caller creates the key");
    assert_eq!(
        read_text(&**store, RangeRequest::new(KeyRange::prefix(test_key("caller/")))).await.len(),
        1,
        "and nothing of the others"
    );
    let count = |_| async {
        loop {
            let read = store.get(&test_key("w")).await.expect("get").expect("the key was created");
            let next = [read.value[0] + 1];
            let txn = Txn::new().when(Compare::key_unchanged(&read)).then(TxnOp::put(test_key("w"), next));
            if store.txn(txn).await.expect("txn").succeeded {
                return;
            }
        }
    };
    join_all((0..MANY).map(count)).await;
    let counted = store.get(&test_key("w")).await.expect("get").expect("the key was created");
    assert_eq!(counted.value, [u8::try_from(MANY).expect("few")], "no count is lost");
    store.delete(all_test_keys()).await.expect("delete");
}
