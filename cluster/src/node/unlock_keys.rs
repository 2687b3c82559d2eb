//! The cluster unlock keys of the nodes' volumes: the cluster's halves of the keys that open them.

use std::fmt;

use prost::Message as _;

use super::node_store::{kv_error, parse_stored, record_key};
use super::{InvalidRecord, NodeId, NodeStore, NodeStoreError, SecretBytes, wire};
use crate::consensus::kv::{Compare, KeyValue, Txn, TxnOp};

/// Prefix of the keys, in the namespace of the records.
pub(super) const UNLOCK_KEYS_PREFIX: &str = "/unlock-keys/";

/// The cluster unlock keys of one volume of a node, and the version in which they were read.
#[derive(Clone)]
pub struct StoredUnlockKeys {
    node: NodeId,
    volume: String,
    keys: Vec<SecretBytes>,
    /// Those of other volumes of the node.
    others: Vec<wire::UnlockKey>,
    kv: Option<KeyValue>,
    /// The record, if it contains a key itself.
    record: Option<KeyValue>,
}

impl StoredUnlockKeys {
    /// The keys, the oldest first: two during a rotation, as either may be the one that opens the volume.
    pub fn keys(&self) -> &[SecretBytes] {
        &self.keys
    }

    /// The number of keys of other volumes of the node.
    pub fn other_count(&self) -> usize {
        self.others.len()
    }

    fn key_name(&self) -> String {
        keys_key(&self.node)
    }
}

/// Without the keys.
impl fmt::Debug for StoredUnlockKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredUnlockKeys")
            .field("node", &self.node)
            .field("volume", &self.volume)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

impl NodeStore {
    /// The cluster unlock keys of a node's volume, which is known by its UUID; a key that a release of 2020 has put into
    /// the node's record is one of each volume.
    ///
    /// # Errors
    /// [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub async fn load_unlock_keys(
        &self,
        node: &NodeId,
        volume: &str,
    ) -> Result<StoredUnlockKeys, NodeStoreError> {
        // One transaction: a key that moves from the record to its own place is read in one of the two.
        let read = Txn::new().then(TxnOp::get(keys_key(node))).then(TxnOp::get(record_key(node)));
        let done = self.kv.txn(read).await.map_err(|source| kv_error(node, source))?;
        parse_keys(node, volume, done.kvs)
    }

    /// Replaces the cluster unlock keys of a volume by these, from the version that was read, and returns what the
    /// cluster then has. The keys of other volumes remain; a key in the node's record is removed from it.
    ///
    /// # Errors
    /// [`NodeStoreError::NotFound`]: the node was removed from the cluster; [`NodeStoreError::Contended`]: the keys were
    /// changed since they were read; with nothing changed. [`NodeStoreError::Kv`]: it may have taken effect: read again.
    pub async fn replace_unlock_keys(
        &self,
        read: &StoredUnlockKeys,
        keys: &[SecretBytes],
    ) -> Result<StoredUnlockKeys, NodeStoreError> {
        let (node, name) = (&read.node, read.key_name());
        // Only from the version that was read: a concurrent rotation must not lose a key that opens the volume.
        let unchanged = match &read.kv {
            Some(kv) => Compare::key_unchanged(kv),
            None => Compare::key_absent(name.as_str()),
        };
        let mut replace = Txn::new().when(unchanged).then(TxnOp::put(name.as_str(), encode_keys(read, keys)));
        // A key in the record moves in the same transaction, so that it is never in neither place.
        replace = match &read.record {
            Some(record) => {
                let mut moved = parse_stored(record.clone())?.record;
                moved.former_unlock_key = None;
                let moved = TxnOp::put(&*record.key, moved.to_bytes());
                replace.when(Compare::key_unchanged(record)).then(moved)
            }
            // A node that was removed from the cluster gets no keys.
            None => replace.when(Compare::key_present(record_key(node))),
        };
        let replace = replace
            .then(TxnOp::get(name.as_str()))
            .then(TxnOp::get(record_key(node)))
            .or_else(TxnOp::get(record_key(node)));
        let done = self.kv.txn(replace).await.map_err(|source| kv_error(node, source))?;
        if done.succeeded {
            return parse_keys(node, &read.volume, done.kvs);
        }
        // Without the record, the node is no longer in the cluster.
        Err(if done.kvs.is_empty() {
            NodeStoreError::NotFound { id: node.clone() }
        } else {
            NodeStoreError::Contended { id: node.clone() }
        })
    }
}

pub(super) fn keys_key(node: &NodeId) -> String {
    format!("{UNLOCK_KEYS_PREFIX}{node}")
}

fn encode_keys(read: &StoredUnlockKeys, keys: &[SecretBytes]) -> Vec<u8> {
    let to_wire =
        |key: &SecretBytes| wire::UnlockKey { volume: read.volume.clone(), key: key.expose_bytes().to_vec() };
    wire::UnlockKeys { keys: read.others.iter().cloned().chain(keys.iter().map(to_wire)).collect() }
        .encode_to_vec()
}

/// Parses what was read of the keys and of the record.
fn parse_keys(node: &NodeId, volume: &str, found: Vec<KeyValue>) -> Result<StoredUnlockKeys, NodeStoreError> {
    let name = keys_key(node);
    let mut read = StoredUnlockKeys {
        node: node.clone(),
        volume: volume.to_owned(),
        keys: Vec::new(),
        others: Vec::new(),
        kv: None,
        record: None,
    };
    for kv in found {
        if kv.key == name.as_bytes() {
            let invalid =
                |_| NodeStoreError::Invalid { key: name.clone(), source: InvalidRecord::UnlockKeys };
            for mut key in wire::UnlockKeys::decode(&*kv.value).map_err(invalid)?.keys {
                if key.volume == volume {
                    read.keys.push(SecretBytes::new(std::mem::take(&mut key.key)))
                } else {
                    read.others.push(key)
                }
            }
            read.kv = Some(kv);
        } else if let Some(key) = parse_stored(kv.clone())?.record.former_unlock_key {
            // The key in the record is older than any in a place of its own.
            read.keys.insert(0, key);
            read.record = Some(kv);
        }
    }
    Ok(read)
}

/// Arbitrary bytes as the keys of a node.
#[cfg(any(test, feature = "testing"))]
pub(super) fn check_arbitrary_keys(bytes: &[u8]) {
    if let Ok(keys) = wire::UnlockKeys::decode(bytes) {
        let again = wire::UnlockKeys::decode(&*keys.encode_to_vec()).expect("written by us");
        assert!(again == keys, "the keys are written differently");
    }
}
