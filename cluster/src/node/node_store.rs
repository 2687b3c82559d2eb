//! The nodes' records in the cluster.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::known_nodes::api_key;
use super::{ClusterId, InvalidRecord, NodeId, NodeRecord};
use crate::consensus::kv::{Compare, KeyRange, KeyValue, KvError, KvStore, Txn, TxnOp};
use crate::pki::CaError;

/// The namespace of the nodes' records: module and namespace.
pub(crate) const NODES_NAMESPACE: (&str, &str) = ("cluster", "enrolment");

/// The number of times that an update is retried after concurrent changes.
const UPDATE_ATTEMPTS: usize = 16;

/// Prefix of the records' keys, in their namespace.
pub(super) const RECORD_PREFIX: &str = "/nodes/";

/// Key of the cluster's id, in the same namespace.
const CLUSTER_ID_KEY: &str = "/cluster";

/// The nodes' records: `/nodes/ID` in the namespace `cluster:enrolment`, their cluster unlock keys at
/// `/unlock-keys/ID`, and their APIs at `/api/ID`.
///
/// A record is created once, and later changed only from the version that was read: an update never
/// overwrites a concurrent change.
///
/// *Source:* the keys are those of Monogon's Smalltown of 2020, which had no updates.
#[derive(Clone)]
pub struct NodeStore {
    pub(super) kv: Arc<dyn KvStore>,
}

/// A record, and the version in which it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredNode {
    /// The node.
    pub id: NodeId,
    /// The record.
    pub record: NodeRecord,
    kv: KeyValue,
}

/// A failure to read or write a record.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeStoreError {
    /// The cluster's store failed. If [retryable](KvError::is_retryable), a retry may help; whether a write
    /// took effect is unknown, and it can be repeated.
    #[error("can't read or write the record of node {id} in the cluster's etcd")]
    Kv {
        /// The node.
        id: String,
        /// The cause.
        source: KvError,
    },
    /// The node already has a record with another certificate. To readmit it, remove that record first.
    #[error("node {id} is registered in the cluster with another certificate than this one")]
    Conflict {
        /// The node.
        id: NodeId,
    },
    /// The node has no record.
    #[error("node {id} is not registered in the cluster: it has not joined, or was removed")]
    NotFound {
        /// The node.
        id: NodeId,
    },
    /// The key of its API is that of another node, which would be taken for it.
    #[error(
        "another node of the cluster, {owner}, has the key of the API of node {id}: if this machine was that node, type \
         `nodectl cluster remove {owner}` on a voter; else remove api/key below its data directory, and restart it, which makes \
         another key"
    )]
    KeyTaken {
        /// The node.
        id: NodeId,
        /// The other one.
        owner: NodeId,
    },
    /// A record is invalid. It stays unchanged.
    #[error("can't parse the node record at key {key} of the cluster's etcd")]
    Invalid {
        /// The key.
        key: String,
        /// The defect.
        source: InvalidRecord,
    },
    /// Others changed the record each time between read and write. A retry may help.
    #[error(
        "can't update the record of node {id} in the cluster's etcd: too many concurrent changes; try again"
    )]
    Contended {
        /// The node.
        id: NodeId,
    },
    /// The certificates of the nodes of a restored cluster could not be revoked.
    #[error("can't revoke the certificates of the lost nodes of the restored cluster")]
    Certificates(#[source] CaError),
    /// The cluster has no id: its first node has not finished bootstrapping.
    #[error("the cluster has no id yet: its first node is still bootstrapping")]
    ClusterIdMissing,
    /// The cluster's id could not be read or written. A retry may help.
    #[error("can't read or write the cluster's id in the cluster's etcd")]
    ClusterId(#[source] KvError),
}

impl NodeStoreError {
    /// Returns whether the same call may succeed later without any other change; if this member was stopped, with
    /// another handle of the keys.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Kv { source, .. } | Self::ClusterId(source) => {
                // The next run of the member has other handles, with which the call may succeed.
                source.is_retryable() || matches!(source, KvError::Stopped)
            }
            Self::Contended { .. } => true,
            Self::Certificates(source) => source.is_retryable(),
            Self::Conflict { .. }
            | Self::NotFound { .. }
            | Self::KeyTaken { .. }
            | Self::Invalid { .. }
            | Self::ClusterIdMissing => false,
        }
    }
}

impl NodeStore {
    /// The records in this namespace.
    pub fn new(kv: Arc<dyn KvStore>) -> Self {
        Self { kv }
    }

    /// Writes the cluster's id unless it has one, and returns the id that it has then.
    ///
    /// # Errors
    /// [`NodeStoreError::ClusterId`].
    pub async fn init_cluster_id(&self, cluster: ClusterId) -> Result<ClusterId, NodeStoreError> {
        // The first writer wins, and a repeated call, after a lost answer, finds its own id.
        let found = Txn::new()
            .when(Compare::key_absent(CLUSTER_ID_KEY))
            .then(TxnOp::put(CLUSTER_ID_KEY, cluster.as_bytes()))
            .or_else(TxnOp::get(CLUSTER_ID_KEY));
        let done = self.kv.txn(found).await.map_err(NodeStoreError::ClusterId)?;
        if done.succeeded { Ok(cluster) } else { parse_cluster_id(done.into_first()) }
    }

    /// The cluster's id.
    ///
    /// # Errors
    /// [`NodeStoreError::ClusterIdMissing`], [`NodeStoreError::ClusterId`].
    pub async fn cluster_id(&self) -> Result<ClusterId, NodeStoreError> {
        parse_cluster_id(self.kv.get(CLUSTER_ID_KEY.as_bytes()).await.map_err(NodeStoreError::ClusterId)?)
    }

    /// Creates the record of a node, unless it has one with the same certificate. Returns the record that it
    /// has then.
    ///
    /// # Errors
    /// [`NodeStoreError::Conflict`], with nothing changed; [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub async fn create_record(
        &self,
        id: &NodeId,
        record: &NodeRecord,
    ) -> Result<StoredNode, NodeStoreError> {
        let key = record_key(id);
        if !id.matches_key(&record.certificate.public_key()) {
            return Err(NodeStoreError::Invalid { key, source: InvalidRecord::NodeMismatch });
        }
        // Both branches read the record: the answer has the one that exists afterwards.
        let create = Txn::new()
            .when(Compare::key_absent(key.as_str()))
            .then(TxnOp::put(key.as_str(), record.to_bytes()))
            .then(TxnOp::get(key.as_str()))
            .or_else(TxnOp::get(key.as_str()));
        let done = self.kv.txn(create).await.map_err(|source| kv_error(id, source))?;
        let Some(kv) = done.into_first() else {
            return Err(NodeStoreError::NotFound { id: id.clone() });
        };
        let current = parse_stored(kv)?;
        // A repeated call, after a lost answer, finds its own record.
        if current.record.certificate == record.certificate {
            Ok(current)
        } else {
            Err(NodeStoreError::Conflict { id: id.clone() })
        }
    }

    /// The record of a node, if it has one.
    ///
    /// # Errors
    /// [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub async fn load_record(&self, id: &NodeId) -> Result<Option<StoredNode>, NodeStoreError> {
        let kv = self.kv.get(record_key(id).as_bytes()).await.map_err(|source| kv_error(id, source))?;
        kv.map(parse_stored).transpose()
    }

    /// Changes a record from its present version; after a concurrent change, from the new version. An
    /// unchanged record is not written.
    ///
    /// # Errors
    /// [`NodeStoreError::NotFound`], [`NodeStoreError::Contended`], [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub async fn update_record(
        &self,
        id: &NodeId,
        mut change: impl FnMut(&mut NodeRecord) + Send,
    ) -> Result<StoredNode, NodeStoreError> {
        let key = record_key(id);
        let mut current = self.load_record(id).await?;
        for _ in 0..UPDATE_ATTEMPTS {
            let before = current.ok_or_else(|| NodeStoreError::NotFound { id: id.clone() })?;
            let mut record = before.record.clone();
            change(&mut record);
            // Nothing to write: no revision is spent, and no watcher is woken.
            if record == before.record {
                return Ok(before);
            }
            if !id.matches_key(&record.certificate.public_key()) {
                return Err(NodeStoreError::Invalid { key, source: InvalidRecord::NodeMismatch });
            }
            // A concurrent change makes this fail, and the answer then has the newer record for the next
            // attempt.
            let update = Txn::new()
                .when(Compare::key_unchanged(&before.kv))
                .then(TxnOp::put(key.as_str(), record.to_bytes()))
                .then(TxnOp::get(key.as_str()))
                .or_else(TxnOp::get(key.as_str()));
            let done = self.kv.txn(update).await.map_err(|source| kv_error(id, source))?;
            let succeeded = done.succeeded;
            current = done.into_first().map(parse_stored).transpose()?;
            if succeeded {
                return current.ok_or_else(|| NodeStoreError::NotFound { id: id.clone() });
            }
        }
        Err(NodeStoreError::Contended { id: id.clone() })
    }

    /// Deletes the record of a node that was removed from the cluster, if it has one, and its API with it.
    ///
    /// # Errors
    /// [`NodeStoreError::Kv`].
    pub(super) async fn delete_record(&self, id: &NodeId) -> Result<(), NodeStoreError> {
        let delete = |key: String| TxnOp::Delete(KeyRange::single_key(key));
        let deleted = self.kv.txn(Txn::new().then(delete(record_key(id))).then(delete(api_key(id)))).await;
        deleted.map(drop).map_err(|source| kv_error(id, source))
    }

    /// All records, in the order of the nodes' names.
    ///
    /// # Errors
    /// [`NodeStoreError::Kv`], [`NodeStoreError::Invalid`].
    pub async fn list_records(&self) -> Result<Vec<StoredNode>, NodeStoreError> {
        let all = self.kv.range(KeyRange::prefix(RECORD_PREFIX)).await;
        let all = all.map_err(|source| NodeStoreError::Kv { id: "all nodes".to_owned(), source })?;
        all.kvs.into_iter().map(parse_stored).collect()
    }
}

impl fmt::Debug for NodeStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStore").finish_non_exhaustive()
    }
}

fn parse_cluster_id(kv: Option<KeyValue>) -> Result<ClusterId, NodeStoreError> {
    let bytes = kv.and_then(|kv| kv.value.try_into().ok());
    bytes.map(ClusterId::from_bytes).ok_or(NodeStoreError::ClusterIdMissing)
}

pub(super) fn record_key(id: &NodeId) -> String {
    format!("{RECORD_PREFIX}{id}")
}

pub(super) fn kv_error(id: &NodeId, source: KvError) -> NodeStoreError {
    NodeStoreError::Kv { id: id.to_string(), source }
}

/// Parses a record, and checks that it belongs to the node of its key.
pub(super) fn parse_stored(kv: KeyValue) -> Result<StoredNode, NodeStoreError> {
    let invalid = |source| NodeStoreError::Invalid { key: kv.key.escape_ascii().to_string(), source };
    let record = NodeRecord::from_bytes(&kv.value).map_err(invalid)?;
    let name =
        std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(RECORD_PREFIX)?.parse().ok());
    let id: NodeId = name.ok_or_else(|| invalid(InvalidRecord::NodeMismatch))?;
    if id.matches_key(&record.certificate.public_key()) {
        Ok(StoredNode { id, record, kv })
    } else {
        Err(invalid(InvalidRecord::NodeMismatch))
    }
}
