//! Transactions.

use std::sync::Arc;

use futures_util::future::join_all;

use super::{all, compare, key, pairs, put, read};
use crate::consensus::kv::{
    Compare, CompareTo, Is, KeyRange, KvError, KvStore, LeaseId, Op, OpResult, Range, Revision, Txn,
};

async fn holds(store: &dyn KvStore, compare: Compare) -> bool {
    store.txn(Txn::new().when(compare)).await.expect("a transaction that does nothing").succeeded
}

pub(super) async fn comparisons(store: &dyn KvStore) {
    let first = put(store, "c", "m").await;
    let second = put(store, "c", "n").await;
    let before = Revision(first.0 - 1);
    for (is, smaller, same, greater) in [
        (Is::Equal, false, true, false),
        (Is::NotEqual, true, false, true),
        (Is::Greater, true, false, false),
        (Is::Less, false, false, true),
    ] {
        let table = [
            (CompareTo::Created(before), smaller),
            (CompareTo::Created(first), same),
            (CompareTo::Created(second), greater),
            (CompareTo::Modified(first), smaller),
            (CompareTo::Modified(second), same),
            (CompareTo::Modified(second.next()), greater),
            (CompareTo::Version(1), smaller),
            (CompareTo::Version(2), same),
            (CompareTo::Version(3), greater),
            (CompareTo::Value(b"m".to_vec()), smaller),
            (CompareTo::Value(b"n".to_vec()), same),
            (CompareTo::Value(b"na".to_vec()), greater),
        ];
        for (to, expected) in table {
            let compare = compare("c", is, to);
            assert_eq!(holds(store, compare.clone()).await, expected, "{compare:?}");
        }
        let absent = compare("absent", is, CompareTo::Value(Vec::new()));
        assert!(!holds(store, absent).await, "no comparison of a value holds where there is none");
    }
    assert!(
        holds(store, Compare::absent(key("absent"))).await && !holds(store, Compare::absent(key("c"))).await
    );
    assert!(
        holds(store, Compare::present(key("c"))).await
            && !holds(store, Compare::present(key("absent"))).await
    );
    let read = store.get(&key("c")).await.expect("get").expect("it was put");
    assert!(holds(store, Compare::unchanged(&read)).await);
    put(store, "c", "n").await;
    assert!(!holds(store, Compare::unchanged(&read)).await, "the same value written again is a change");
    store.delete(all()).await.expect("delete");
}

pub(super) async fn transactions(store: &dyn KvStore) {
    let create = |value: &str| {
        let get = Op::get(key("t"));
        Txn::new().when(Compare::absent(key("t"))).then(Op::put(key("t"), value)).otherwise(get)
    };
    let made = store.txn(create("first")).await.expect("txn");
    assert!(made.succeeded && made.results == [OpResult::Put]);
    let refused = store.txn(create("second")).await.expect("txn");
    assert!(!refused.succeeded, "a key is created once");
    assert_eq!(refused.revision, made.revision, "what changes nothing has no revision of its own");
    let found: Vec<_> = refused.read().map(|kv| kv.value).collect();
    assert_eq!(found, [b"first".to_vec()], "the other list was done");
    let both = Txn::new()
        .then(Op::put(key("u"), "1"))
        .then(Op::put(key("v"), "2"))
        .then(Op::delete(key("t")))
        .then(Op::Range(Range::new(all())));
    let done = store.txn(both).await.expect("txn");
    assert_eq!(done.deleted(), 1);
    let seen: Vec<_> = done.clone().read().map(|kv| (kv.key, kv.modified)).collect();
    assert_eq!(
        seen,
        [(key("u"), done.revision), (key("v"), done.revision)],
        "one change, which its reads see"
    );
    let neither =
        Txn::new().when(Compare::present(key("u"))).when(Compare::present(key("t"))).then(Op::Delete(all()));
    assert!(!store.txn(neither).await.expect("txn").succeeded, "all comparisons have to hold");
    assert_eq!(read(store, Range::new(all())).await, pairs(&[("u", "1"), ("v", "2")]));
    store.delete(all()).await.expect("delete");
}

pub(super) async fn refusals(store: &dyn KvStore) {
    let empty = store.put(b"", b"v").await;
    assert!(matches!(empty, Err(KvError::InvalidKey { .. })), "an empty key is none: {empty:?}");
    let empty = store.get(b"").await;
    assert!(matches!(empty, Err(KvError::InvalidKey { .. })), "an empty key is none: {empty:?}");
    let twice = Txn::new().then(Op::put(key("d"), "1")).then(Op::put(key("d"), "2"));
    let both = Txn::new().then(Op::Delete(all())).then(Op::put(key("d"), "1"));
    for txn in [twice, both] {
        let refused = store.txn(txn).await;
        assert!(matches!(refused, Err(KvError::DuplicateKey)), "{refused:?}");
    }
    let unknown = LeaseId(0x7fff_ffff);
    let refused = store.txn(Txn::new().then(Op::put_leased(key("d"), "1", unknown))).await;
    assert!(matches!(refused, Err(KvError::NoLease { .. })), "{refused:?}");
    assert!(read(store, Range::new(all())).await.is_empty(), "nothing of a refused transaction is done");
}

/// Many at once create a key, and then count in it, each time from what they have read.
pub(super) async fn one_of_many_wins(store: &Arc<dyn KvStore>) {
    const MANY: usize = 8;
    let create = |who: usize| async move {
        let txn = Txn::new().when(Compare::absent(key("w"))).then(Op::put(key("w"), [0]));
        let txn = txn.then(Op::put(key(&format!("who/{who}")), ""));
        store.txn(txn).await.expect("txn").succeeded
    };
    let won = join_all((0..MANY).map(create)).await;
    assert_eq!(won.iter().filter(|won| **won).count(), 1, "one creates it");
    assert_eq!(
        read(&**store, Range::new(KeyRange::prefix(key("who/")))).await.len(),
        1,
        "and nothing of the others"
    );
    let count = |_| async {
        loop {
            let read = store.get(&key("w")).await.expect("get").expect("it was created");
            let next = [read.value[0] + 1];
            let txn = Txn::new().when(Compare::unchanged(&read)).then(Op::put(key("w"), next));
            if store.txn(txn).await.expect("txn").succeeded {
                return;
            }
        }
    };
    join_all((0..MANY).map(count)).await;
    let counted = store.get(&key("w")).await.expect("get").expect("it was created");
    assert_eq!(counted.value, [u8::try_from(MANY).expect("few")], "no count is lost");
    store.delete(all()).await.expect("delete");
}
