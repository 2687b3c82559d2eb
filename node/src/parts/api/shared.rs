//! The API for other machines, as the node's parts and the control API share it.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::watch;

use super::cluster_records::Records;
use super::config::{ApiConfig, NAME};
use super::identities::{Identities, Source};
use super::peers::{Peer, PeersFile};
use crate::access::PrivateKey;
use crate::config::NodedConfig;
use crate::running::RunningNode;

/// The API for other machines.
#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    pub(crate) key: Arc<PrivateKey>,
    pub(crate) identities: Arc<Identities>,
    pub(crate) cluster_operators: bool,
    /// The other nodes of the cluster.
    pub(crate) peers: PeersFile,
    /// What this node, a voter, knows of the records of its cluster.
    pub(crate) records: watch::Sender<Records>,
    /// Of a worker, whether it is in a cluster, as far as it knows.
    pub(crate) worker_joined: Option<watch::Receiver<bool>>,
}

impl Api {
    /// Returns whether the cluster has another voter with an API.
    pub(crate) fn has_peers(&self) -> bool {
        if let Some(joined) = &self.worker_joined {
            return *joined.borrow();
        }
        let own = self.key.public_key();
        let is_other = |peer: &Peer| !peer.is_worker && peer.key != own;
        match &self.records.borrow().nodes {
            Some(nodes) => nodes.iter().any(is_other),
            // As the file has them.
            None => self.identities.has_some_of(Source::Nodes),
        }
    }
}

/// The API of a running node. A reload that switches it off leaves the extension.
pub(crate) fn running_api(running: &RunningNode) -> Option<Arc<Api>> {
    running.extension::<Arc<Api>>().filter(|_| is_on(&running.plan().config))
}

/// Returns whether the node has an API for other machines.
pub(crate) fn is_on(config: &NodedConfig) -> bool {
    config.section::<ApiConfig>(NAME).is_some()
}
