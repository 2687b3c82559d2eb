//! What a program provides instead of the defaults of the shipped parts.

use std::sync::Arc;

use nodekeel_cluster::enrolment::ConsensusFactory;
use nodekeel_cluster::network::Network;
use nodekeel_localstorage::volume::DataVolume;

use super::storage::unlock::ClusterKeySource;

/// What the shipped parts use instead of their defaults.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartDeps {
    /// The data volume of the node: everything that must survive its machine is on it. `root.storage` opens it, and
    /// creates it if it is blank. Default: the directory `data` below the data directory.
    pub(crate) volume: Option<Arc<dyn DataVolume>>,
    /// The network of the cluster. Default: `cluster.address`, or the address of `cluster.interface`.
    pub(crate) network: Option<Arc<dyn Network>>,
    /// The consensus of the cluster. Default: etcd.
    pub(crate) consensus: Option<ConsensusFactory>,
    /// Where a node that starts cold gets its cluster unlock key: for `storage.cold_start = "peers"`. Default: none.
    pub(crate) cluster_keys: Option<Arc<dyn ClusterKeySource>>,
}
