//! The cluster unlock keys of the nodes' volumes: beside the records, and changed from the version that was read.

use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore};
use nodekeel_cluster::node::{
    InvalidRecord, NodeId, NodeRecord, NodeStore, NodeStoreError, SecretBytes, StoredUnlockKeys,
};

use super::records::{node_and_record, store_pair};

const VOLUME: &str = "8f0f4f3e-0000-4000-8000-000000000001";
const OTHER: &str = "8f0f4f3e-0000-4000-8000-000000000002";

fn secrets(keys: &[&[u8]]) -> Vec<SecretBytes> {
    keys.iter().map(|key| SecretBytes::new(key.to_vec())).collect()
}

fn exposed(stored: &StoredUnlockKeys) -> Vec<&[u8]> {
    stored.keys().iter().map(SecretBytes::expose_bytes).collect()
}

async fn load(nodes: &NodeStore, id: &NodeId, volume: &str) -> StoredUnlockKeys {
    nodes.load_unlock_keys(id, volume).await.expect("read")
}

/// Stores, rotates and replaces the keys of a node in an empty store.
pub(crate) async fn check_unlock_keys(kv: Arc<dyn KvStore>) {
    let ((id, record), nodes) = (node_and_record(), NodeStore::new(Arc::clone(&kv)));
    let none = load(&nodes, &id, VOLUME).await;
    assert!(none.keys().is_empty());
    let unknown = nodes.replace_unlock_keys(&none, &secrets(&[b"one"])).await;
    assert!(matches!(&unknown, Err(NodeStoreError::NotFound { id: named }) if *named == id), "{unknown:?}");
    nodes.create_record(&id, &record).await.expect("created");
    let first = nodes.replace_unlock_keys(&none, &secrets(&[b"one"])).await.expect("stored");
    assert_eq!(exposed(&first), [b"one"]);
    let other = load(&nodes, &id, OTHER).await;
    assert!(other.keys().is_empty(), "the key of another volume");
    nodes.replace_unlock_keys(&other, &secrets(&[b"other"])).await.expect("stored");

    // Only the latest version can be changed: nothing that was read is overwritten unseen.
    let late = nodes.replace_unlock_keys(&first, &secrets(&[b"late"])).await;
    assert!(matches!(&late, Err(NodeStoreError::Contended { id: named }) if *named == id), "{late:?}");
    let read = load(&nodes, &id, VOLUME).await;
    let both = nodes.replace_unlock_keys(&read, &secrets(&[b"one", b"two"])).await.expect("stored");
    assert_eq!(exposed(&both), [b"one", b"two"]);
    let last = nodes.replace_unlock_keys(&both, &secrets(&[b"two"])).await.expect("stored");
    assert_eq!(exposed(&last), [b"two"]);
    assert_eq!(exposed(&load(&nodes, &id, VOLUME).await), [b"two"]);
    assert_eq!(exposed(&load(&nodes, &id, OTHER).await), [b"other"]);
    assert!(!format!("{last:?}").contains("two"), "a key is printed");

    // Other records, and the record of the node, are what they were.
    assert_eq!(nodes.list_records().await.expect("listed").len(), 1);
    assert_eq!(nodes.load_record(&id).await.expect("read").expect("it exists").record, record);
    kv.delete(KeyRange::single_key(format!("/nodes/{id}"))).await.expect("deleted");
    let removed = nodes.replace_unlock_keys(&last, &secrets(&[b"three"])).await;
    assert!(matches!(removed, Err(NodeStoreError::NotFound { .. })), "{removed:?}");
}

#[tokio::test]
async fn unlock_keys_are_kept_beside_the_record_of_their_node() {
    check_unlock_keys(store_pair().0).await;
}

#[tokio::test]
async fn unlock_keys_are_written_in_bytes_that_never_change() {
    let ((id, record), (kv, nodes)) = (node_and_record(), store_pair());
    nodes.create_record(&id, &record).await.expect("created");
    let none = load(&nodes, &id, "volume").await;
    nodes.replace_unlock_keys(&none, &secrets(&[b"one", b"two"])).await.expect("stored");
    let stored = kv.get(format!("/unlock-keys/{id}").as_bytes()).await.expect("read").expect("it exists");
    // Fields 1 of a list; in each, the volume as field 1 and the key as field 2.
    assert_eq!(stored.value, b"\x0a\x0d\x0a\x06volume\x12\x03one\x0a\x0d\x0a\x06volume\x12\x03two");
}

#[tokio::test]
async fn a_key_in_a_record_of_2020_is_read_and_moved_beside_it() {
    let ((id, record), (_, nodes)) = (node_and_record(), store_pair());
    let former = Some(SecretBytes::new(b"former".to_vec()));
    let with_key = NodeRecord { former_unlock_key: former, ..record.clone() };
    nodes.create_record(&id, &with_key).await.expect("created");
    let read = load(&nodes, &id, VOLUME).await;
    assert_eq!(exposed(&read), [b"former"]);
    // A change of the record loses no key, and no key that was read before replaces it.
    let updated = nodes.update_record(&id, |record| record.address = None).await.expect("updated");
    assert_eq!(updated.record.former_unlock_key, with_key.former_unlock_key);
    let late = nodes.replace_unlock_keys(&read, &secrets(&[b"new"])).await;
    assert!(matches!(late, Err(NodeStoreError::Contended { .. })), "{late:?}");

    let read = load(&nodes, &id, VOLUME).await;
    let moved = nodes.replace_unlock_keys(&read, &secrets(&[b"former", b"new"])).await.expect("moved");
    assert_eq!(exposed(&moved), [&b"former"[..], b"new"]);
    let stored = nodes.load_record(&id).await.expect("read").expect("it exists").record;
    assert_eq!(stored, NodeRecord { address: None, ..record });
}

#[tokio::test]
async fn invalid_unlock_keys_are_an_error_that_names_their_key() {
    let ((id, record), (kv, nodes)) = (node_and_record(), store_pair());
    nodes.create_record(&id, &record).await.expect("created");
    let key = format!("/unlock-keys/{id}");
    for wrong in [&b"\xff"[..], b"\x0a\x01x"] {
        kv.put(key.as_bytes(), wrong).await.expect("put");
        let error = nodes.load_unlock_keys(&id, VOLUME).await.expect_err("invalid");
        let NodeStoreError::Invalid { key: named, source: InvalidRecord::UnlockKeys } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(*named, key);
    }
}
