//! The keepers of this node's cluster unlock keys: its cluster, by its own member or by the voters, or Tang servers.

use std::sync::Arc;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{NodeId, NodeStore, SecretBytes, StoredUnlockKeys};
use nodekeel_localstorage::volume::UnlockKey;

use super::VolumeKeyError;
use crate::node_v1::ReplaceUnlockKeysRequest;
use crate::parts::api::Api;
use crate::parts::storage::tang::TangKeyStore;

/// Keeps the cluster unlock keys of a volume.
pub(super) trait ClusterKeyStore: Sync {
    /// The version in which keys were read.
    type Version: Send + Sync;

    /// Reads the keys of the volume with this UUID, the oldest first.
    fn load_keys(
        &self,
        volume: &str,
    ) -> impl Future<Output = Result<(Vec<UnlockKey>, Self::Version), VolumeKeyError>> + Send;

    /// Replaces the keys, if nothing else has changed them since they were read.
    fn replace_keys(
        &self,
        read: Self::Version,
        keys: &[UnlockKey],
    ) -> impl Future<Output = Result<(), VolumeKeyError>> + Send;
}

/// The keys of this node, in the cluster's etcd.
pub(super) struct NodeKeyStore {
    nodes: NodeStore,
    id: NodeId,
}

impl NodeKeyStore {
    /// The keys of this node.
    pub(super) fn open(cluster: &ClusterNode) -> Result<Self, VolumeKeyError> {
        let nodes = cluster.node_store().map_err(VolumeKeyError::Cluster)?;
        let id = cluster.cluster_identity().map_err(VolumeKeyError::Identity)?.node_id;
        Ok(Self { nodes, id })
    }
}

impl ClusterKeyStore for NodeKeyStore {
    type Version = StoredUnlockKeys;

    async fn load_keys(&self, volume: &str) -> Result<(Vec<UnlockKey>, StoredUnlockKeys), VolumeKeyError> {
        let read = self.nodes.load_unlock_keys(&self.id, volume).await.map_err(VolumeKeyError::Store)?;
        // Bytes of another length open no volume.
        let keys = read.keys().iter().filter_map(|key| UnlockKey::from_bytes(key.expose_bytes()).ok());
        Ok((keys.collect(), read))
    }

    async fn replace_keys(&self, read: StoredUnlockKeys, keys: &[UnlockKey]) -> Result<(), VolumeKeyError> {
        let keys: Vec<_> = keys.iter().map(|key| SecretBytes::new(key.expose_bytes().to_vec())).collect();
        // The cluster refuses the change if the keys have changed since they were read.
        self.nodes.replace_unlock_keys(&read, &keys).await.map(drop).map_err(VolumeKeyError::Store)
    }
}

/// The keys of a worker, which the voters write into the cluster's etcd.
pub(super) struct VoterKeyStore(pub(super) Arc<Api>);

impl ClusterKeyStore for VoterKeyStore {
    /// The volume, and the keys that were read.
    type Version = (String, Vec<Vec<u8>>);

    async fn load_keys(&self, volume: &str) -> Result<(Vec<UnlockKey>, Self::Version), VolumeKeyError> {
        let read = self.0.load_unlock_keys(volume).await.map_err(VolumeKeyError::Voters)?;
        // Bytes of another length open no volume.
        let keys = read.iter().filter_map(|key| UnlockKey::from_bytes(key).ok()).collect();
        Ok((keys, (volume.to_owned(), read)))
    }

    async fn replace_keys(
        &self,
        (volume, read): Self::Version,
        keys: &[UnlockKey],
    ) -> Result<(), VolumeKeyError> {
        let keys = keys.iter().map(|key| key.expose_bytes().to_vec()).collect();
        let request = ReplaceUnlockKeysRequest { volume, read, keys };
        self.0.replace_unlock_keys(request).await.map_err(VolumeKeyError::Voters)
    }
}

impl ClusterKeyStore for TangKeyStore {
    /// The volume. One process changes its bindings, one change at a time.
    type Version = String;

    async fn load_keys(&self, volume: &str) -> Result<(Vec<UnlockKey>, String), VolumeKeyError> {
        let keys = self.load(volume).await.map_err(VolumeKeyError::Tang)?;
        Ok((keys, volume.to_owned()))
    }

    async fn replace_keys(&self, volume: String, keys: &[UnlockKey]) -> Result<(), VolumeKeyError> {
        self.replace(&volume, keys).await.map_err(VolumeKeyError::Tang)
    }
}
