//! What the cluster has for its nodes: as a voter knows it, and as it tells it to the others.
//!
//! ```text
//!  the store ──▶ peers, records ──▶ Records ──▶ WatchRecords, Enrol ──▶ a worker
//! ```

use nodekeel_cluster::node::{ClusterId, InvalidNodeId, NodeId};
use thiserror::Error;

use super::config::{DN, is_valid_operator_name};
use super::identities::Identity;
use super::peers::Peer;
use crate::access::{Principal, PublicKey};
use crate::node_v1;

/// What a voter knows of the records of its cluster. It keeps what it knew while it is cut off.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Records {
    /// The nodes that have an API, this one too; `None` until it is in its cluster.
    pub(crate) nodes: Option<Vec<Peer>>,
    /// The operators; `None` until they were read.
    pub(crate) operators: Option<Vec<Identity>>,
}

impl Records {
    /// The node with this key.
    pub(crate) fn find_node(&self, key: PublicKey) -> Option<NodeId> {
        let mut nodes = self.nodes.iter().flatten();
        nodes.find(|node| node.key == key).map(|node| node.id.clone())
    }

    /// What a node of the cluster is told; `None` until it is known.
    pub(crate) fn message_to(&self, node: &str, cluster: ClusterId) -> Option<node_v1::ClusterRecords> {
        let voters = self.nodes.as_ref()?.iter().filter(|peer| !peer.is_worker).map(|peer| node_v1::Voter {
            node: peer.id.to_string(),
            key: peer.key.to_string(),
            address: peer.address.to_string(),
        });
        let operators = self.operators.as_ref()?.iter().filter_map(|operator| {
            let Principal::Operator(role) = operator.principal else { return None };
            let (name, key) = (operator.name.clone(), operator.key.to_string());
            Some(node_v1::Operator { name, key, role: role.to_string() })
        });
        Some(node_v1::ClusterRecords {
            node: node.to_owned(),
            cluster: cluster.to_string(),
            voters: voters.collect(),
            operators: operators.collect(),
        })
    }
}

/// What a worker was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToldRecords {
    /// The name of this node.
    pub(crate) node: NodeId,
    /// The id of the cluster.
    pub(crate) cluster: String,
    /// One at least.
    pub(crate) voters: Vec<Peer>,
    pub(crate) operators: Vec<Identity>,
}

/// The reason why a message is not understood.
#[derive(Debug, Error)]
pub(crate) enum InvalidRecords {
    #[error("the records of the cluster have no valid name of this node")]
    Node(#[source] InvalidNodeId),
    #[error("the records of the cluster name no voter")]
    NoVoter,
    #[error("the voter is in another cluster: it was reset")]
    OtherCluster,
}

impl ToldRecords {
    /// What this release does not understand is logged and left out: it admits nobody.
    pub(crate) fn parse(message: &node_v1::ClusterRecords) -> Result<Self, InvalidRecords> {
        let node = message.node.parse().map_err(InvalidRecords::Node)?;
        let voters: Vec<_> = message.voters.iter().filter_map(parse_voter).collect();
        let operators: Vec<_> = message.operators.iter().filter_map(parse_operator).collect();
        let unknown = message.voters.len() + message.operators.len() - voters.len() - operators.len();
        if unknown > 0 {
            tracing::warn!(dn = DN, "{unknown} records of the cluster are not understood, and admit nobody");
        }
        match voters.is_empty() {
            true => Err(InvalidRecords::NoVoter),
            false => Ok(Self { node, cluster: message.cluster.clone(), voters, operators }),
        }
    }
}

fn parse_voter(voter: &node_v1::Voter) -> Option<Peer> {
    let (id, key) = (voter.node.parse().ok()?, voter.key.parse().ok()?);
    Some(Peer { id, key, address: voter.address.parse().ok()?, is_worker: false })
}

pub(crate) fn parse_operator(operator: &node_v1::Operator) -> Option<Identity> {
    let (key, role) = (operator.key.parse().ok()?, operator.role.parse().ok()?);
    let name = operator.name.clone();
    let is_valid = is_valid_operator_name(&name);
    is_valid.then_some(Identity { name, key, principal: Principal::Operator(role) })
}
