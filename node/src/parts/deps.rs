//! Replacements of the defaults of the shipped parts.

use std::sync::Arc;

use nodekeel_cluster::enrolment::ConsensusFactory;
use nodekeel_cluster::network::Network;
use nodekeel_localstorage::volume::DataVolume;

use super::storage::unlock::ClusterKeySource;

/// The things that a program provides instead of the defaults of the shipped parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartDeps {
    /// The data volume of the node: everything that must survive its machine is on it. `root.storage` opens it, and
    /// creates it if it is blank. Default: the directory `data` below the data directory.
    pub(crate) volume: Option<Arc<dyn DataVolume>>,
    /// The network of the cluster. Default: `cluster.address`, or the address of `cluster.interface`.
    pub(crate) network: Option<Arc<dyn Network>>,
    /// The consensus of the cluster. Default: etcd.
    pub(crate) consensus: Option<ConsensusFactory>,
    /// The source of the cluster unlock key of a node that starts cold: for `storage.cold_start = "peers"`.
    /// Default: the other nodes of the cluster, by their `[api]`.
    pub(crate) cluster_keys: Option<Arc<dyn ClusterKeySource>>,
}
