//! The contract of a store, as a conformance check.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::timeout;

use crate::consensus::kv::{
    Compare, KeyEvent, KeyRange, KeyValue, KvError, KvStore, ListWatchUpdate, ListWatcher, Revision, Txn,
    TxnOp, WatchStream,
};

/// Far longer than a response takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Checks that a store meets the contract of [`KvStore`].
///
/// It writes below `/conformance/`, which must be empty, and removes what it has written.
///
/// # Panics
/// If the store breaks the contract; the text names the broken rule.
pub async fn kv_conformance(store: Arc<dyn KvStore>) {
    let check = Conformance { store };
    check.check_revisions().await;
    check.check_ranges().await;
    check.check_conditions().await;
    check.check_transactions().await;
    check.check_rejections().await;
    check.check_concurrent_changes().await;
    check.check_watches().await;
    check.check_list_watch().await;
    assert_eq!(check.read(all_keys()).await, pairs(&[]), "keys are left");
}

struct Conformance {
    store: Arc<dyn KvStore>,
}

fn all_keys() -> KeyRange {
    KeyRange::prefix("/conformance/")
}

fn key(name: &str) -> Vec<u8> {
    format!("/conformance/{name}").into_bytes()
}

fn one(name: &str) -> KeyRange {
    KeyRange::single_key(key(name))
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A key's name without the prefix.
fn name_of(key: &[u8]) -> String {
    text(key.strip_prefix(b"/conformance/").expect("a requested key"))
}

/// `name=value` for a put, `name` for a delete.
fn describe(event: &KeyEvent) -> String {
    match event {
        KeyEvent::Put(kv) => format!("{}={}", name_of(&kv.key), text(&kv.value)),
        KeyEvent::Delete { key, .. } => name_of(key),
    }
}

async fn next_events(watch: &mut WatchStream) -> Vec<KeyEvent> {
    let events = timeout(TIMEOUT, watch.next_events()).await.expect("a response in time");
    events.expect("an open watch").expect("events")
}

async fn collect_events(watch: &mut WatchStream, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(next_events(watch).await.iter().map(describe));
    }
    all
}

impl Conformance {
    async fn put(&self, name: &str, value: &str) -> Revision {
        self.store.put(&key(name), value.as_bytes()).await.expect("put")
    }

    async fn get(&self, name: &str) -> Option<KeyValue> {
        self.store.get(&key(name)).await.expect("get")
    }

    async fn delete(&self, keys: KeyRange) -> u64 {
        self.store.delete(keys).await.expect("delete")
    }

    async fn read(&self, keys: KeyRange) -> Vec<(String, String)> {
        let read = self.store.range(keys).await.expect("range");
        read.kvs.iter().map(|kv| (name_of(&kv.key), text(&kv.value))).collect()
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> WatchStream {
        self.store.watch(keys, from).await.expect("watch")
    }

    async fn check_revisions(&self) {
        assert!(self.get("a").await.is_none(), "the store must be empty below /conformance/");
        let read = async || self.get("a").await.map(|kv| (text(&kv.value), kv.mod_revision, kv.version));
        let first = self.put("a", "1").await;
        assert_eq!(read().await, Some(("1".to_owned(), first, 1)), "a new key");
        let second = self.put("a", "2").await;
        assert_eq!(second, first.next(), "each change has a new revision");
        assert_eq!(read().await, Some(("2".to_owned(), second, 2)), "a key written twice");
        assert_eq!(self.delete(one("a")).await, 1);
        assert_eq!(self.delete(one("a")).await, 0, "it is already deleted");
        let again = self.put("a", "").await;
        assert_eq!(again, second.next().next(), "a delete without effect is not a change");
        assert_eq!(read().await, Some((String::new(), again, 1)), "an empty value is a value of a new key");
        self.delete(all_keys()).await;
    }

    async fn check_ranges(&self) {
        for name in ["b", "a/2", "a/1", "a", "ab"] {
            self.put(name, name).await;
        }
        let names = async |keys| self.read(keys).await.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(all_keys()).await, ["a", "a/1", "a/2", "ab", "b"], "keys are sorted");
        assert_eq!(names(KeyRange::prefix(key("a/"))).await, ["a/1", "a/2"]);
        assert_eq!(names(one("a")).await, ["a"], "one key is not a prefix");
        self.delete(all_keys()).await;
    }

    async fn check_conditions(&self) {
        let holds = async |compare| self.store.txn(Txn::new().when(compare)).await.expect("txn").succeeded;
        self.put("c", "1").await;
        assert!(
            holds(Compare::key_absent(key("absent"))).await && !holds(Compare::key_absent(key("c"))).await
        );
        assert!(
            holds(Compare::key_present(key("c"))).await && !holds(Compare::key_present(key("absent"))).await
        );
        let read = self.get("c").await.expect("the key was put");
        assert!(holds(Compare::key_unchanged(&read)).await);
        self.put("c", "1").await;
        assert!(!holds(Compare::key_unchanged(&read)).await, "writing the same value again is a change");
        let not_written =
            |prefix: &str, revision| holds(Compare::prefix_not_written_since(key(prefix), revision));
        let (first, second) = (self.put("p/1", "1").await, self.put("p/2", "1").await);
        assert!(not_written("p/", second).await && !not_written("p/", first).await);
        assert!(not_written("none/", first).await, "no key at all");
        self.delete(one("p/2")).await;
        assert!(not_written("p/", first).await, "a delete is no write");
        self.delete(all_keys()).await;
        assert!(!holds(Compare::key_unchanged(&read)).await, "so is a delete");
    }

    async fn check_transactions(&self) {
        let create = async |value: &str| {
            let txn = Txn::new()
                .when(Compare::key_absent(key("t")))
                .then(TxnOp::put(key("t"), value))
                .or_else(TxnOp::get(key("t")));
            self.store.txn(txn).await.expect("txn")
        };
        let created = create("first").await;
        assert!(created.succeeded && created.kvs.is_empty());
        // The second call must find the key of the first, and read it in the same transaction.
        let refused = create("second").await;
        assert!(!refused.succeeded, "a key is created once");
        assert_eq!(
            refused.revision, created.revision,
            "a transaction without a change has the newest revision"
        );
        let found = refused.into_first().map(|kv| kv.value);
        assert_eq!(found, Some(b"first".to_vec()), "the other list was performed");
        let several = Txn::new()
            .then(TxnOp::put(key("u"), "1"))
            .then(TxnOp::put(key("v"), "2"))
            .then(TxnOp::Delete(one("t")))
            .then(TxnOp::Range(all_keys()));
        let done = self.store.txn(several).await.expect("txn");
        assert_eq!(done.deleted, 1);
        let seen: Vec<_> = done.kvs.iter().map(|kv| (name_of(&kv.key), kv.mod_revision)).collect();
        let expected = [("u".to_owned(), done.revision), ("v".to_owned(), done.revision)];
        assert_eq!(seen, expected, "one change, which its reads see");
        let neither = Txn::new()
            .when(Compare::key_present(key("u")))
            .when(Compare::key_present(key("t")))
            .then(TxnOp::Delete(all_keys()));
        assert!(!self.store.txn(neither).await.expect("txn").succeeded, "all comparisons must hold");
        assert_eq!(self.read(all_keys()).await, pairs(&[("u", "1"), ("v", "2")]));
        self.delete(all_keys()).await;
    }

    async fn check_rejections(&self) {
        for empty in [self.store.put(b"", b"v").await.map(drop), self.store.get(b"").await.map(drop)] {
            assert!(matches!(empty, Err(KvError::InvalidKey { .. })), "an empty key is invalid: {empty:?}");
        }
        let twice = Txn::new().then(TxnOp::put(key("d"), "1")).then(TxnOp::put(key("d"), "2"));
        let both = Txn::new().then(TxnOp::Delete(all_keys())).then(TxnOp::put(key("d"), "1"));
        for txn in [twice, both] {
            let refused = self.store.txn(txn).await;
            assert!(matches!(refused, Err(KvError::DuplicateKey)), "{refused:?}");
        }
        assert_eq!(self.read(all_keys()).await, pairs(&[]), "a rejected transaction took effect");
    }

    /// Concurrent callers create a key, and then increment it, each time from the value that they have read.
    async fn check_concurrent_changes(&self) {
        const MANY: usize = 8;
        let create = async |caller: usize| {
            let txn = Txn::new().when(Compare::key_absent(key("w"))).then(TxnOp::put(key("w"), [0]));
            let txn = txn.then(TxnOp::put(key(&format!("caller/{caller}")), ""));
            self.store.txn(txn).await.expect("txn").succeeded
        };
        let won = join_all((0..MANY).map(create)).await;
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "exactly one caller creates the key");
        let callers = self.read(KeyRange::prefix(key("caller/"))).await;
        assert_eq!(callers.len(), 1, "and nothing of the others");
        let count = async |_| loop {
            let read = self.get("w").await.expect("the key was created");
            let next = [read.value[0] + 1];
            let txn = Txn::new().when(Compare::key_unchanged(&read)).then(TxnOp::put(key("w"), next));
            if self.store.txn(txn).await.expect("txn").succeeded {
                return;
            }
        };
        join_all((0..MANY).map(count)).await;
        let counted = self.get("w").await.expect("the key was created");
        assert_eq!(counted.value, [u8::try_from(MANY).expect("few")], "no count is lost");
        self.delete(all_keys()).await;
    }

    async fn check_watches(&self) {
        let first = self.put("a", "1").await;
        let second = self.put("a", "2").await;
        let mut now = self.watch(all_keys(), second.next()).await;
        let mut then = self.watch(all_keys(), first).await;
        let mut single = self.watch(one("b"), second.next()).await;
        self.put("a", "3").await;
        self.put("b", "4").await;
        self.delete(one("a")).await;
        self.delete(one("b")).await;
        // The watch from the next revision gets only these; the one from the first gets the history as well.
        let later = ["a=3", "b=4", "a", "b"];
        assert_eq!(collect_events(&mut now, 4).await, later, "each change once and in order");
        let all = ["a=1", "a=2", "a=3", "b=4", "a", "b"];
        assert_eq!(collect_events(&mut then, 6).await, all, "including changes before the call");
        assert_eq!(collect_events(&mut single, 2).await, ["b=4", "b"], "other keys were reported");

        let txn = Txn::new().then(TxnOp::put(key("x"), "1")).then(TxnOp::put(key("y"), "2"));
        let done = self.store.txn(txn).await.expect("txn");
        let events = next_events(&mut now).await;
        assert_eq!(events.iter().map(describe).collect::<Vec<_>>(), ["x=1", "y=2"], "one response");
        assert!(events.iter().all(|event| event.mod_revision() == done.revision), "one revision: {events:?}");
        self.delete(all_keys()).await;
    }

    /// Follows keys while they change, and compares the result at the end.
    async fn check_list_watch(&self) {
        const LAST: &str = "199";
        let mut follow = ListWatcher::new(Arc::clone(&self.store), all_keys());
        let write = async {
            for count in 0..200 {
                self.put(&format!("f/{}", count % 7), &count.to_string()).await;
                tokio::task::yield_now().await;
                if count % 10 == 0 {
                    self.delete(one(&format!("f/{}", count % 3))).await;
                }
            }
        };
        let read = async {
            let (mut known, mut newest) = (BTreeMap::new(), Revision::default());
            while !known.values().any(|value: &Vec<u8>| value == LAST.as_bytes()) {
                let update = timeout(TIMEOUT, follow.next_update()).await.expect("an update in time");
                let update = update.expect("an update");
                if let ListWatchUpdate::Events(events) = &update {
                    for event in events {
                        assert!(event.mod_revision() >= newest, "revisions never go back: {event:?}");
                        newest = event.mod_revision();
                    }
                }
                update.apply_to(&mut known);
            }
            known
        };
        let ((), known) = join(write, read).await;
        let known: Vec<_> = known.iter().map(|(key, value)| (name_of(key), text(value))).collect();
        assert_eq!(known, self.read(all_keys()).await, "the watcher's view differs from the store");
        self.delete(all_keys()).await;
    }
}
