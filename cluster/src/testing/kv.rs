//! The contract of a store, as a check.

mod changes;
mod leases;
mod watches;

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::consensus::kv::{Compare, CompareTo, Is, KeyRange, KvError, KvStore, Op, Range, Revision, Txn};

/// Checks that a store keeps the contract of [`KvStore`].
///
/// It writes below `/conformance/`, which must be empty, compacts the store, and removes what it has written. It takes a
/// few seconds, because leases have to end.
///
/// # Panics
/// The store breaks the contract; the text says which part of it.
pub async fn kv_conformance(store: Arc<dyn KvStore>) {
    revisions(&*store).await;
    ranges(&*store).await;
    changes::comparisons(&*store).await;
    changes::transactions(&*store).await;
    changes::refusals(&*store).await;
    changes::one_of_many_wins(&store).await;
    watches::from_now_and_from_then(&*store).await;
    watches::a_transaction_is_one_message(&*store).await;
    watches::progress(&*store).await;
    leases::a_lease_ends_with_its_keys(&*store).await;
    leases::a_held_lease_lives(&*store).await;
    history(&*store).await;
    watches::compaction_is_told(&*store).await;
    watches::following_loses_nothing(&store).await;
    store.delete(all()).await.expect("delete");
    assert!(read(&*store, Range::new(all())).await.is_empty(), "nothing is left");
}

fn all() -> KeyRange {
    KeyRange::prefix("/conformance/")
}

fn key(name: &str) -> Vec<u8> {
    format!("/conformance/{name}").into_bytes()
}

async fn put(store: &dyn KvStore, name: &str, value: &str) -> Revision {
    store.put(&key(name), value.as_bytes()).await.expect("put")
}

async fn read(store: &dyn KvStore, range: Range) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let read = store.range(range).await.expect("range");
    let name = |key: &[u8]| text(key.strip_prefix(b"/conformance/").expect("no other key was asked for"));
    read.kvs.iter().map(|kv| (name(&kv.key), text(&kv.value))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn revisions(store: &dyn KvStore) {
    assert!(store.get(&key("a")).await.expect("get").is_none(), "the store is empty where it is checked");
    let first = put(store, "a", "1").await;
    let made = store.get(&key("a")).await.expect("get").expect("it was put");
    assert_eq!((made.created, made.modified, made.version), (first, first, 1), "a new key");
    assert_eq!((made.value.as_slice(), made.lease), (&b"1"[..], None));
    let second = put(store, "a", "2").await;
    assert_eq!(second, first.next(), "each change has a revision of its own");
    let written = store.get(&key("a")).await.expect("get").expect("it was put");
    assert_eq!(
        (written.created, written.modified, written.version),
        (first, second, 2),
        "a key written twice"
    );
    assert_eq!(store.delete(KeyRange::key(key("a"))).await.expect("delete"), 1);
    assert_eq!(store.delete(KeyRange::key(key("a"))).await.expect("delete"), 0, "it is gone already");
    let again = put(store, "a", "").await;
    assert_eq!(again, second.next().next(), "a removal that removes nothing is no change");
    let made = store.get(&key("a")).await.expect("get").expect("an empty value is one");
    assert_eq!((made.created, made.version), (again, 1), "a key that is made again begins anew");
    store.delete(all()).await.expect("delete");
}

async fn ranges(store: &dyn KvStore) {
    for name in ["b", "a/2", "a/1", "a", "ab"] {
        put(store, name, name).await;
    }
    let names = |keys: KeyRange| async {
        let read = read(store, Range::new(keys)).await;
        read.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(names(all()).await, ["a", "a/1", "a/2", "ab", "b"], "keys come in their order");
    assert_eq!(names(KeyRange::prefix(key("a/"))).await, ["a/1", "a/2"]);
    assert_eq!(names(KeyRange::key(key("a"))).await, ["a"], "one key is no prefix");
    let half = KeyRange::between(key("a/1"), key("ab"));
    assert_eq!(names(half).await, ["a/1", "a/2"], "the end is not in it");
    let limit = |count| Range::new(all()).limit(NonZeroU32::new(count).expect("not zero"));
    let some = store.range(limit(2)).await.expect("range");
    assert!(some.kvs.len() == 2 && some.more, "a limit says that there is more");
    assert!(!store.range(limit(5)).await.expect("range").more, "and that there is not");
    store.delete(all()).await.expect("delete");
}

async fn history(store: &dyn KvStore) {
    let first = put(store, "h", "1").await;
    let second = put(store, "h", "2").await;
    let gone = store.txn(Txn::new().then(Op::delete(key("h")))).await.expect("delete").revision;
    let last = put(store, "other", "3").await;
    let at = |revision| Range::new(KeyRange::key(key("h"))).at(revision);
    assert_eq!(read(store, at(first)).await, pairs(&[("h", "1")]), "as it was");
    assert_eq!(read(store, at(second)).await, pairs(&[("h", "2")]));
    assert_eq!(read(store, at(gone)).await, pairs(&[]));
    let ahead = store.range(at(Revision(last.0 + 1000))).await;
    assert!(matches!(ahead, Err(KvError::FutureRevision { .. })), "{ahead:?}");
    let ahead = store.compact(Revision(last.0 + 1000)).await;
    assert!(matches!(ahead, Err(KvError::FutureRevision { .. })), "{ahead:?}");
    store.compact(second).await.expect("compact");
    assert_eq!(read(store, at(second)).await, pairs(&[("h", "2")]), "the revision that is named is kept");
    let lost = store.range(at(first)).await;
    assert!(matches!(lost, Err(KvError::Compacted { .. })), "{lost:?}");
    store.compact(second).await.expect("what is compacted can be compacted");
    assert_eq!(read(store, Range::new(all())).await, pairs(&[("other", "3")]), "what is there now stays");
    store.delete(all()).await.expect("delete");
}

fn compare(name: &str, is: Is, to: CompareTo) -> Compare {
    Compare::new(key(name), is, to)
}
