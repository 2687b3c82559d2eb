//! The contract of a store, as a conformance check.

mod changes;
mod leases;
mod watches;

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::consensus::kv::{
    Compare, CompareOp, CompareTarget, KeyRange, KvError, KvStore, RangeRequest, Revision, Txn, TxnOp,
};

/// Checks that a store meets the contract of [`KvStore`].
///
/// It writes below `/conformance/`, which must be empty, compacts the store, and removes what it has written.
/// It takes a few seconds, because leases have to expire.
///
/// # Panics
/// If the store breaks the contract; the text says how.
pub async fn kv_conformance(store: Arc<dyn KvStore>) {
    check_revisions(&*store).await;
    check_ranges(&*store).await;
    changes::check_comparisons(&*store).await;
    changes::check_transactions(&*store).await;
    changes::check_rejections(&*store).await;
    changes::check_concurrent_creates(&store).await;
    watches::check_start_revisions(&*store).await;
    watches::check_txn_is_one_response(&*store).await;
    watches::check_progress(&*store).await;
    leases::check_lease_end(&*store).await;
    leases::check_keep_alive(&*store).await;
    check_history(&*store).await;
    watches::check_compaction(&*store).await;
    watches::check_list_watch(&store).await;
    store.delete(all_test_keys()).await.expect("delete");
    assert!(read_text(&*store, RangeRequest::new(all_test_keys())).await.is_empty(), "keys are left");
}

fn all_test_keys() -> KeyRange {
    KeyRange::prefix("/conformance/")
}

fn test_key(name: &str) -> Vec<u8> {
    format!("/conformance/{name}").into_bytes()
}

async fn put_text(store: &dyn KvStore, name: &str, value: &str) -> Revision {
    store.put(&test_key(name), value.as_bytes()).await.expect("put")
}

async fn read_text(store: &dyn KvStore, range: RangeRequest) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let read = store.range(range).await.expect("range");
    let name = |key: &[u8]| text(key.strip_prefix(b"/conformance/").expect("a requested key"));
    read.kvs.iter().map(|kv| (name(&kv.key), text(&kv.value))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn check_revisions(store: &dyn KvStore) {
    assert!(
        store.get(&test_key("a")).await.expect("get").is_none(),
        "the store must be empty below /conformance/"
    );
    let first = put_text(store, "a", "1").await;
    let made = store.get(&test_key("a")).await.expect("get").expect("the key was put");
    assert_eq!((made.create_revision, made.mod_revision, made.version), (first, first, 1), "a new key");
    assert_eq!((made.value.as_slice(), made.lease), (&b"1"[..], None));
    let second = put_text(store, "a", "2").await;
    assert_eq!(second, first.next(), "each change has a new revision");
    let written = store.get(&test_key("a")).await.expect("get").expect("the key was put");
    assert_eq!(
        (written.create_revision, written.mod_revision, written.version),
        (first, second, 2),
        "a key written twice"
    );
    assert_eq!(store.delete(KeyRange::single_key(test_key("a"))).await.expect("delete"), 1);
    assert_eq!(
        store.delete(KeyRange::single_key(test_key("a"))).await.expect("delete"),
        0,
        "it is already deleted"
    );
    let again = put_text(store, "a", "").await;
    assert_eq!(again, second.next().next(), "a delete without effect is not a change");
    let made = store.get(&test_key("a")).await.expect("get").expect("an empty value is a value");
    assert_eq!(
        (made.create_revision, made.version),
        (again, 1),
        "a key that is created again starts at version 1"
    );
    store.delete(all_test_keys()).await.expect("delete");
}

async fn check_ranges(store: &dyn KvStore) {
    for name in ["b", "a/2", "a/1", "a", "ab"] {
        put_text(store, name, name).await;
    }
    let names = |keys: KeyRange| async {
        let read = read_text(store, RangeRequest::new(keys)).await;
        read.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(names(all_test_keys()).await, ["a", "a/1", "a/2", "ab", "b"], "keys are sorted");
    assert_eq!(names(KeyRange::prefix(test_key("a/"))).await, ["a/1", "a/2"]);
    assert_eq!(names(KeyRange::single_key(test_key("a"))).await, ["a"], "one key is not a prefix");
    let half = KeyRange::between(test_key("a/1"), test_key("ab"));
    assert_eq!(names(half).await, ["a/1", "a/2"], "the end is exclusive");
    let limit =
        |count| RangeRequest::new(all_test_keys()).with_limit(NonZeroU32::new(count).expect("not zero"));
    let some = store.range(limit(2)).await.expect("range");
    assert!(some.kvs.len() == 2 && some.more, "a limit reports that there are more keys");
    assert!(!store.range(limit(5)).await.expect("range").more, "and that there are not");
    store.delete(all_test_keys()).await.expect("delete");
}

async fn check_history(store: &dyn KvStore) {
    let first = put_text(store, "h", "1").await;
    let second = put_text(store, "h", "2").await;
    let gone = store.txn(Txn::new().then(TxnOp::delete(test_key("h")))).await.expect("delete").revision;
    let last = put_text(store, "other", "3").await;
    let at = |revision| RangeRequest::new(KeyRange::single_key(test_key("h"))).at_revision(revision);
    assert_eq!(read_text(store, at(first)).await, pairs(&[("h", "1")]), "as it was");
    assert_eq!(read_text(store, at(second)).await, pairs(&[("h", "2")]));
    assert_eq!(read_text(store, at(gone)).await, pairs(&[]));
    let ahead = store.range(at(Revision(last.0 + 1000))).await;
    assert!(matches!(ahead, Err(KvError::FutureRevision { .. })), "{ahead:?}");
    let ahead = store.compact(Revision(last.0 + 1000)).await;
    assert!(matches!(ahead, Err(KvError::FutureRevision { .. })), "{ahead:?}");
    store.compact(second).await.expect("compact");
    assert_eq!(read_text(store, at(second)).await, pairs(&[("h", "2")]), "the named revision is kept");
    let lost = store.range(at(first)).await;
    assert!(matches!(lost, Err(KvError::Compacted { .. })), "{lost:?}");
    store.compact(second).await.expect("compacting again succeeds");
    assert_eq!(
        read_text(store, RangeRequest::new(all_test_keys())).await,
        pairs(&[("other", "3")]),
        "present keys remain"
    );
    store.delete(all_test_keys()).await.expect("delete");
}

fn compare(name: &str, is: CompareOp, to: CompareTarget) -> Compare {
    Compare::new(test_key(name), is, to)
}
