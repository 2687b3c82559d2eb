//! The nodes of the cluster as each other node knows them: the key and the address of their APIs, and the keys of their volumes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use prost::Message as _;

use super::node_store::{RECORD_PREFIX, kv_error, record_key};
use super::unlock_keys::{UNLOCK_KEYS_PREFIX, keys_key};
use super::{InvalidRecord, NodeId, NodeRecord, NodeStore, NodeStoreError, SecretBytes, wire};
use crate::consensus::kv::{
    Compare, KeyEvent, KeyRange, KeyValue, KvError, ListWatchUpdate, ListWatcher, Revision, Txn, TxnOp,
};

/// Prefix of the keys of the nodes' APIs, in the namespace of the records.
pub(super) const API_PREFIX: &str = "/api/";

/// The number of times that a node records its API again after concurrent changes.
const ATTEMPTS: usize = 16;

/// The API of a node: the Ed25519 public key by which others know it there, and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain record without invariants")]
pub struct NodeApi {
    /// The bytes of the key.
    pub key: [u8; 32],
    /// The address at which other nodes reach it.
    pub address: SocketAddr,
}

/// A node of the cluster that has an API.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain record without invariants")]
pub struct KnownNode {
    /// The node.
    pub id: NodeId,
    /// True if it is a worker, which has no member.
    pub is_worker: bool,
    /// Its API.
    pub api: NodeApi,
    /// The cluster unlock keys of its volumes, by the UUID of the volume.
    pub unlock_keys: Vec<(String, SecretBytes)>,
}

impl NodeApi {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        wire::NodeApi { key: self.key.to_vec(), address: self.address.to_string() }.encode_to_vec()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, InvalidRecord> {
        let wire = wire::NodeApi::decode(bytes).map_err(|_| InvalidRecord::Api)?;
        let key = wire.key.try_into().map_err(|_| InvalidRecord::Api)?;
        Ok(Self { key, address: wire.address.parse().map_err(|_| InvalidRecord::Api)? })
    }
}

impl NodeStore {
    /// Records the API of a node, unless it is recorded already. It goes with the node's record.
    ///
    /// # Errors
    /// [`NodeStoreError::NotFound`]: the node has no record, since it was removed from the cluster; [`NodeStoreError::KeyTaken`],
    /// [`NodeStoreError::Contended`], [`NodeStoreError::Kv`].
    pub async fn record_api(&self, node: &NodeId, api: NodeApi) -> Result<(), NodeStoreError> {
        let (key, value) = (api_key(node), api.to_bytes());
        for _ in 0..ATTEMPTS {
            let known = self.kv.get(key.as_bytes()).await.map_err(|source| kv_error(node, source))?;
            // Nothing to write: no watcher is woken.
            if known.is_some_and(|known| known.value == value) {
                return Ok(());
            }
            let (read_at, record) = (self.check_key(node, &api.key).await?, record_key(node));
            let put = Txn::new()
                .when(Compare::prefix_not_written_since(API_PREFIX, read_at))
                .when(Compare::key_present(record.as_str()))
                .then(TxnOp::put(key.as_str(), &*value))
                .or_else(TxnOp::get(record.as_str()));
            let done = self.kv.txn(put).await.map_err(|source| kv_error(node, source))?;
            if done.succeeded {
                return Ok(());
            }
            if done.kvs.is_empty() {
                return Err(NodeStoreError::NotFound { id: node.clone() });
            }
        }
        Err(NodeStoreError::Contended { id: node.clone() })
    }

    /// Refuses the key of another node's API. That holds until the next write below [`API_PREFIX`] after this revision.
    ///
    /// # Errors
    /// [`NodeStoreError::KeyTaken`], [`NodeStoreError::Kv`].
    pub(super) async fn check_key(&self, node: &NodeId, key: &[u8; 32]) -> Result<Revision, NodeStoreError> {
        let read = self.kv.range(KeyRange::prefix(API_PREFIX)).await;
        let read = read.map_err(|source| kv_error(node, source))?;
        let has_key = |kv: &&KeyValue| NodeApi::from_bytes(&kv.value).is_ok_and(|api| api.key == *key);
        let mut owners = read.kvs.iter().filter(has_key).filter_map(|kv| parse_api_key(&kv.key));
        match owners.find(|owner| owner != node) {
            Some(owner) => Err(NodeStoreError::KeyTaken { id: node.clone(), owner }),
            None => Ok(read.revision),
        }
    }

    /// Watches the nodes that have an API.
    pub fn watch_nodes(&self) -> NodesWatcher {
        NodesWatcher {
            watcher: ListWatcher::new(Arc::clone(&self.kv), KeyRange::all_keys()),
            stored: BTreeMap::new(),
        }
    }
}

/// Watches the nodes of a cluster that have an API.
pub struct NodesWatcher {
    watcher: ListWatcher,
    /// The values by which nodes are known.
    stored: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl NodesWatcher {
    /// All nodes, once at first and after each change of one, in the order of their names. A node without a record is not in the
    /// cluster any more; what can't be read, since a later release wrote it, is logged and left out.
    ///
    /// # Errors
    /// Those of [`ListWatcher::next_update`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again: no change is lost.
    pub async fn next_nodes(&mut self) -> Result<Vec<KnownNode>, KvError> {
        loop {
            let is_changed = match self.watcher.next_update().await? {
                ListWatchUpdate::Snapshot(present) => {
                    self.stored.clear();
                    present.into_iter().for_each(|kv| _ = self.put(kv));
                    true
                }
                ListWatchUpdate::Events(events) => {
                    let apply = |event| match event {
                        KeyEvent::Put(kv) => self.put(kv),
                        KeyEvent::Delete { key, .. } => self.stored.remove(&key).is_some(),
                    };
                    // Each of them is applied.
                    events.into_iter().map(apply).fold(false, |before, changed| before | changed)
                }
            };
            if is_changed {
                return Ok(self.nodes());
            }
        }
    }

    /// Keeps a value by which nodes are known. Returns whether it is another one.
    fn put(&mut self, KeyValue { key, value, .. }: KeyValue) -> bool {
        let is_below = |prefix: &str| key.starts_with(prefix.as_bytes());
        let value = if is_below(RECORD_PREFIX) {
            // That there is one counts, and whether it is that of a worker.
            vec![NodeRecord::from_bytes(&value).is_ok_and(|record| record.roles.is_worker()).into()]
        } else if is_below(API_PREFIX) || is_below(UNLOCK_KEYS_PREFIX) {
            value
        } else {
            return false;
        };
        let is_changed = self.stored.get(&key) != Some(&value);
        self.stored.insert(key, value);
        is_changed
    }

    fn nodes(&self) -> Vec<KnownNode> {
        let apis = self.stored.iter().filter_map(|(key, value)| Some((parse_api_key(key)?, value)));
        let in_cluster = apis.filter_map(|(id, value)| {
            let is_worker = *self.stored.get(record_key(&id).as_bytes())? == [1];
            Some((id, is_worker, value))
        });
        let parsed = in_cluster.filter_map(|(id, is_worker, value)| {
            let unreadable = |error: &InvalidRecord| tracing::warn!("node {id} is left out: {error}");
            let api = NodeApi::from_bytes(value).inspect_err(unreadable).ok()?;
            let unlock_keys = self.unlock_keys(&id).inspect_err(unreadable).unwrap_or_default();
            Some(KnownNode { id, is_worker, api, unlock_keys })
        });
        parsed.collect()
    }

    fn unlock_keys(&self, id: &NodeId) -> Result<Vec<(String, SecretBytes)>, InvalidRecord> {
        let Some(value) = self.stored.get(keys_key(id).as_bytes()) else {
            return Ok(Vec::new());
        };
        let keys = wire::UnlockKeys::decode(&**value).map_err(|_| InvalidRecord::UnlockKeys)?.keys;
        // Moved, not copied: the message wipes only what it still has when it is dropped.
        let to_secret = |mut key: wire::UnlockKey| {
            (std::mem::take(&mut key.volume), SecretBytes::new(std::mem::take(&mut key.key)))
        };
        Ok(keys.into_iter().map(to_secret).collect())
    }
}

/// Without the values, which may be secrets.
impl fmt::Debug for NodesWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodesWatcher").field("watcher", &self.watcher).finish_non_exhaustive()
    }
}

pub(super) fn api_key(node: &NodeId) -> String {
    format!("{API_PREFIX}{node}")
}

fn parse_api_key(key: &[u8]) -> Option<NodeId> {
    std::str::from_utf8(key).ok()?.strip_prefix(API_PREFIX)?.parse().ok()
}

/// Arbitrary bytes as the API of a node.
#[cfg(any(test, feature = "testing"))]
pub(super) fn check_arbitrary_api(bytes: &[u8]) {
    if let Ok(api) = NodeApi::from_bytes(bytes) {
        assert_eq!(NodeApi::from_bytes(&api.to_bytes()), Ok(api), "the API of a node survives a round trip");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consensus::kv::KvStore as _;
    use crate::consensus::memory::MemoryKv;

    fn node(digit: char) -> NodeId {
        format!("nodekeel-{}", digit.to_string().repeat(32)).parse().unwrap()
    }

    fn api(key: u8) -> NodeApi {
        NodeApi { key: [key; 32], address: ([192, 0, 2, key], 7001).into() }
    }

    async fn add_record(kv: &MemoryKv, node: &NodeId) {
        kv.put(record_key(node).as_bytes(), b"a record").await.unwrap();
    }

    #[tokio::test]
    async fn a_node_records_its_api_as_long_as_it_is_in_the_cluster() {
        let kv = Arc::new(MemoryKv::new());
        let (nodes, one) = (NodeStore::new(kv.clone()), node('1'));
        let refused = nodes.record_api(&one, api(1)).await;
        assert!(matches!(refused, Err(NodeStoreError::NotFound { .. })), "{refused:?}");
        add_record(&kv, &one).await;
        nodes.record_api(&one, api(1)).await.unwrap();
        let first = kv.get(api_key(&one).as_bytes()).await.unwrap().unwrap();
        nodes.record_api(&one, api(1)).await.unwrap();
        assert_eq!(kv.get(&first.key).await.unwrap().unwrap(), first, "a repetition changes nothing");
        nodes.record_api(&one, api(2)).await.unwrap();
        assert_eq!(NodeApi::from_bytes(&kv.get(&first.key).await.unwrap().unwrap().value), Ok(api(2)));
        nodes.delete_record(&one).await.unwrap();
        assert_eq!(kv.range(KeyRange::all_keys()).await.unwrap().kvs, []);
        let removed = nodes.record_api(&one, api(2)).await;
        assert!(matches!(removed, Err(NodeStoreError::NotFound { .. })), "{removed:?}");
    }

    #[tokio::test]
    async fn the_key_of_another_nodes_api_is_refused_by_its_name_until_that_node_is_removed() {
        let kv = Arc::new(MemoryKv::new());
        let (nodes, one, two) = (NodeStore::new(kv.clone()), node('1'), node('2'));
        add_record(&kv, &one).await;
        add_record(&kv, &two).await;
        nodes.record_api(&one, api(1)).await.unwrap();
        nodes.record_api(&two, api(2)).await.unwrap();
        let refused = nodes.record_api(&two, api(1)).await.unwrap_err();
        assert!(refused.to_string().contains(&format!("type `nodectl cluster remove {one}` on a voter")));
        assert!(!refused.is_retryable(), "{refused}");
        let known = nodes.watch_nodes().next_nodes().await.unwrap();
        assert_eq!(known[1].api, api(2), "nothing is changed");
        nodes.delete_record(&one).await.unwrap();
        nodes.record_api(&two, api(1)).await.unwrap();
    }

    #[tokio::test]
    async fn each_change_of_a_node_is_seen_and_no_other() {
        let kv = Arc::new(MemoryKv::new());
        let (nodes, one, two) = (NodeStore::new(kv.clone()), node('1'), node('2'));
        for (id, key) in [(&one, 1), (&two, 2)] {
            add_record(&kv, id).await;
            nodes.record_api(id, api(key)).await.unwrap();
        }
        let mut watcher = nodes.watch_nodes();
        let known = |id: &NodeId, key| KnownNode {
            id: id.clone(),
            is_worker: false,
            api: api(key),
            unlock_keys: Vec::new(),
        };
        assert_eq!(watcher.next_nodes().await.unwrap(), [known(&one, 1), known(&two, 2)]);
        // Another version of a record, and a key of another kind, are no change.
        add_record(&kv, &one).await;
        kv.put(b"/cluster", b"id").await.unwrap();
        let value =
            wire::UnlockKeys { keys: vec![wire::UnlockKey { volume: "volume".into(), key: vec![171; 32] }] };
        kv.put(keys_key(&two).as_bytes(), &value.encode_to_vec()).await.unwrap();
        let with_key = KnownNode {
            unlock_keys: vec![("volume".into(), SecretBytes::new(vec![171; 32]))],
            ..known(&two, 2)
        };
        assert_eq!(watcher.next_nodes().await.unwrap(), [known(&one, 1), with_key.clone()]);
        assert!(!format!("{with_key:?}").contains("171"), "{with_key:?}");
        // Its keys stay, and it is no node of the cluster.
        nodes.delete_record(&two).await.unwrap();
        assert_eq!(watcher.next_nodes().await.unwrap(), [known(&one, 1)]);
        // A record of a later release hides no other node.
        add_record(&kv, &two).await;
        watcher.next_nodes().await.unwrap();
        kv.put(api_key(&two).as_bytes(), b"\xff").await.unwrap();
        assert_eq!(watcher.next_nodes().await.unwrap(), [known(&one, 1)]);
    }
}
