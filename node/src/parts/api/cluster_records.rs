//! What the cluster has for its nodes: as a voter knows it, and as it tells it to the others.
//!
//! ```text
//!  the store ──▶ peers, records ──▶ Records ──▶ WatchRecords, Enrol ──▶ a worker
//! ```

use nodekeel_cluster::node::ClusterId;

use super::config::is_valid_operator_name;
use super::identities::{Identity, Source};
use super::peers::Peer;
use crate::access::Principal;
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

/// The operator in a message; `None` if this release does not understand it.
pub(crate) fn parse_operator(operator: &node_v1::Operator) -> Option<Identity> {
    let (key, role) = (operator.key.parse().ok()?, operator.role.parse().ok()?);
    let name = operator.name.clone();
    let is_valid = is_valid_operator_name(&name);
    is_valid.then_some(Identity { name, key, principal: Principal::Operator(role), source: Source::Cluster })
}
