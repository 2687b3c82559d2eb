//! The nodes' records in the cluster.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::{ClusterId, InvalidRecord, NodeId, NodeRecord};
use crate::consensus::kv::{Compare, KeyRange, KeyValue, KvError, KvStore, Op, Range, Txn};

/// How often an update is tried again after others have come in between.
const ATTEMPTS: usize = 16;

/// Where the records are, below the namespace that they are kept in.
const PREFIX: &str = "/nodes/";

/// Where the cluster's own id is, beside them.
const CLUSTER: &str = "/cluster";

/// The nodes' records: `/nodes/ID` in the namespace `cluster:enrolment`.
///
/// A record is made once, and then changed from the version that was read: nobody overwrites what he has not seen.
///
/// *Source:* the keys are those of Monogon's Smalltown of 2020, which had no change.
#[derive(Clone)]
pub struct NodeStore {
    kv: Arc<dyn KvStore>,
}

/// A record, and the version that it was read in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredNode {
    /// Whose it is.
    pub id: NodeId,
    /// The record.
    pub record: NodeRecord,
    kv: KeyValue,
}

/// Why a record can't be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The cluster could not be asked. Where it is [retryable](KvError::is_retryable), a retry may help; whether a write
    /// took effect is not known, and it can be made again.
    #[error("reach the record of {id}")]
    Kv {
        /// Whose record.
        id: String,
        /// Why.
        source: KvError,
    },
    /// The node has a record already, of another certificate. To let it in anew, remove that record first.
    #[error("node {id} is registered with another certificate")]
    Conflict {
        /// Which node.
        id: NodeId,
    },
    /// There is no record of the node.
    #[error("there is no record of node {id}")]
    Absent {
        /// Which node.
        id: NodeId,
    },
    /// A record is none. It stays as it is.
    #[error("read the record at {key}")]
    Invalid {
        /// Its key.
        key: String,
        /// What is wrong with it.
        source: InvalidRecord,
    },
    /// Others changed the record each time between reading and writing. A retry may help.
    #[error("the record of {id} is changed again and again")]
    Contended {
        /// Which node.
        id: NodeId,
    },
    /// The cluster does not tell which one it is: whoever founded it has not finished.
    #[error("the cluster does not tell which one it is")]
    NoCluster,
    /// The cluster could not be asked which one it is. A retry may help.
    #[error("ask which cluster this is")]
    Cluster(#[source] KvError),
}

impl RecordError {
    /// Whether the same call may succeed later, with nothing else done about it; also by another handle of the keys,
    /// where this one's member was stopped.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Kv { source, .. } | Self::Cluster(source) => {
                source.is_retryable() || matches!(source, KvError::Stopped)
            }
            Self::Contended { .. } => true,
            Self::Conflict { .. } | Self::Absent { .. } | Self::Invalid { .. } | Self::NoCluster => false,
        }
    }
}

impl NodeStore {
    /// The records in this namespace.
    pub fn new(kv: Arc<dyn KvStore>) -> Self {
        Self { kv }
    }

    /// Says which cluster this is, unless that was said. Tells what was said first.
    ///
    /// # Errors
    /// [`RecordError::Cluster`].
    pub async fn found(&self, cluster: ClusterId) -> Result<ClusterId, RecordError> {
        let found = Txn::new()
            .when(Compare::absent(CLUSTER))
            .then(Op::put(CLUSTER, cluster.as_bytes()))
            .otherwise(Op::get(CLUSTER));
        let done = self.kv.txn(found).await.map_err(RecordError::Cluster)?;
        match done.succeeded {
            true => Ok(cluster),
            false => cluster_id(done.read().next()),
        }
    }

    /// Which cluster this is.
    ///
    /// # Errors
    /// [`RecordError::NoCluster`], [`RecordError::Cluster`].
    pub async fn cluster(&self) -> Result<ClusterId, RecordError> {
        cluster_id(self.kv.get(CLUSTER.as_bytes()).await.map_err(RecordError::Cluster)?)
    }

    /// Makes the record of a node, unless there is one of the same certificate. Tells what is there then.
    ///
    /// # Errors
    /// [`RecordError::Conflict`], with nothing changed; [`RecordError::Kv`], [`RecordError::Invalid`].
    pub async fn create(&self, id: &NodeId, record: &NodeRecord) -> Result<StoredNode, RecordError> {
        let key = key(id);
        if !id.is_of(&record.certificate.public()) {
            return Err(RecordError::Invalid { key, source: InvalidRecord::OtherNode });
        }
        let create = Txn::new()
            .when(Compare::absent(key.as_str()))
            .then(Op::put(key.as_str(), record.encode()))
            .then(Op::get(key.as_str()))
            .otherwise(Op::get(key.as_str()));
        let done = self.kv.txn(create).await.map_err(|source| unreachable_kv(id, source))?;
        let Some(kv) = done.read().next() else { return Err(RecordError::Absent { id: id.clone() }) };
        let there = stored(kv)?;
        match there.record.certificate == record.certificate {
            true => Ok(there),
            false => Err(RecordError::Conflict { id: id.clone() }),
        }
    }

    /// The record of a node, if there is one.
    ///
    /// # Errors
    /// [`RecordError::Kv`], [`RecordError::Invalid`].
    pub async fn load(&self, id: &NodeId) -> Result<Option<StoredNode>, RecordError> {
        let kv = self.kv.get(key(id).as_bytes()).await.map_err(|source| unreachable_kv(id, source))?;
        kv.map(stored).transpose()
    }

    /// Changes a record from what it is; where another comes in between, from what it is then. One that stays the same
    /// is not written.
    ///
    /// # Errors
    /// [`RecordError::Absent`], [`RecordError::Contended`], [`RecordError::Kv`], [`RecordError::Invalid`].
    pub async fn update(
        &self,
        id: &NodeId,
        mut change: impl FnMut(&mut NodeRecord) + Send,
    ) -> Result<StoredNode, RecordError> {
        let key = key(id);
        let mut there = self.load(id).await?;
        for _ in 0..ATTEMPTS {
            let before = there.ok_or_else(|| RecordError::Absent { id: id.clone() })?;
            let mut record = before.record.clone();
            change(&mut record);
            if record == before.record {
                return Ok(before);
            }
            if !id.is_of(&record.certificate.public()) {
                return Err(RecordError::Invalid { key, source: InvalidRecord::OtherNode });
            }
            let update = Txn::new()
                .when(Compare::unchanged(&before.kv))
                .then(Op::put(key.as_str(), record.encode()))
                .then(Op::get(key.as_str()))
                .otherwise(Op::get(key.as_str()));
            let done = self.kv.txn(update).await.map_err(|source| unreachable_kv(id, source))?;
            let succeeded = done.succeeded;
            there = done.read().next().map(stored).transpose()?;
            if succeeded {
                return there.ok_or_else(|| RecordError::Absent { id: id.clone() });
            }
        }
        Err(RecordError::Contended { id: id.clone() })
    }

    /// All records, in the order of the nodes' names.
    ///
    /// # Errors
    /// [`RecordError::Kv`], [`RecordError::Invalid`].
    pub async fn list(&self) -> Result<Vec<StoredNode>, RecordError> {
        let range = Range::new(KeyRange::prefix(PREFIX));
        let all = self.kv.range(range).await;
        let all = all.map_err(|source| RecordError::Kv { id: "all nodes".to_owned(), source })?;
        all.kvs.into_iter().map(stored).collect()
    }
}

impl fmt::Debug for NodeStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeStore").finish_non_exhaustive()
    }
}

fn cluster_id(kv: Option<KeyValue>) -> Result<ClusterId, RecordError> {
    let bytes = kv.and_then(|kv| kv.value.try_into().ok());
    bytes.map(ClusterId::new).ok_or(RecordError::NoCluster)
}

fn key(id: &NodeId) -> String {
    format!("{PREFIX}{id}")
}

fn unreachable_kv(id: &NodeId, source: KvError) -> RecordError {
    RecordError::Kv { id: id.to_string(), source }
}

/// A record that is that of the node whose key it lies at.
fn stored(kv: KeyValue) -> Result<StoredNode, RecordError> {
    let invalid = |source| RecordError::Invalid { key: kv.key.escape_ascii().to_string(), source };
    let record = NodeRecord::parse(&kv.value).map_err(invalid)?;
    let name = std::str::from_utf8(&kv.key).ok().and_then(|key| key.strip_prefix(PREFIX)?.parse().ok());
    let id: NodeId = name.ok_or_else(|| invalid(InvalidRecord::OtherNode))?;
    match id.is_of(&record.certificate.public()) {
        true => Ok(StoredNode { id, record, kv }),
        false => Err(invalid(InvalidRecord::OtherNode)),
    }
}
