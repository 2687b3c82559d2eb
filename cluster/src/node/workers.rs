//! The workers of a cluster: nodes without a member. They are in it by their records alone.

use nodekeel_localstorage::pki::Certificate;

use super::known_nodes::api_key;
use super::node_store::{kv_error, parse_stored, record_key};
use super::unlock_keys::keys_key;
use super::{InvalidRecord, NodeApi, NodeId, NodeRecord, NodeRoles, NodeStore, NodeStoreError};
use crate::consensus::kv::{KeyRange, Txn, TxnOp};

/// The keys and values of a new worker, in the namespace of the records.
pub(super) fn new_worker(node: &NodeId, certificate: &Certificate, api: NodeApi) -> [(String, Vec<u8>); 2] {
    let mut roles = NodeRoles::empty();
    roles.set_kubernetes_worker(node.as_str()).expect("it had no role");
    let record = NodeRecord {
        certificate: certificate.clone(),
        former_unlock_key: None,
        // That of its API is beside it, and may change.
        address: None,
        roles,
    };
    [(record_key(node), record.to_bytes()), (api_key(node), api.to_bytes())]
}

impl NodeStore {
    /// The API of a worker; `None` if the cluster has no node of this name.
    ///
    /// # Errors
    /// [`NodeStoreError::Conflict`]: the node is no worker; [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub(super) async fn find_worker(&self, node: &NodeId) -> Result<Option<NodeApi>, NodeStoreError> {
        let read = Txn::new().then(TxnOp::get(record_key(node))).then(TxnOp::get(api_key(node)));
        let mut found = self.kv.txn(read).await.map_err(|source| kv_error(node, source))?.kvs.into_iter();
        let Some(record) = found.next().filter(|kv| kv.key == record_key(node).as_bytes()) else {
            return Ok(None);
        };
        let conflict = || NodeStoreError::Conflict { id: node.clone() };
        if !parse_stored(record)?.record.roles.is_worker() {
            return Err(conflict());
        }
        let api = found.next().ok_or_else(conflict)?;
        let invalid = |source: InvalidRecord| NodeStoreError::Invalid { key: api_key(node), source };
        NodeApi::from_bytes(&api.value).map(Some).map_err(invalid)
    }

    /// Deletes all that the cluster has of a worker, in one step.
    ///
    /// # Errors
    /// [`NodeStoreError::Kv`].
    pub(super) async fn delete_worker(&self, node: &NodeId) -> Result<(), NodeStoreError> {
        let keys = [record_key(node), api_key(node), keys_key(node)];
        let delete = keys.map(|key| TxnOp::Delete(KeyRange::single_key(key)));
        let deleted = self.kv.txn(delete.into_iter().fold(Txn::new(), Txn::then)).await;
        deleted.map(drop).map_err(|source| kv_error(node, source))
    }
}
