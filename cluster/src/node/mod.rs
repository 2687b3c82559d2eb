//! The node's identity: its name, its record in the cluster, and its enrolment configuration.

mod admission;
mod cluster_id;
#[cfg(any(feature = "etcd", feature = "memory"))]
mod departure;
mod enrolment_config;
mod enrolment_ticket;
mod golden_ticket;
mod join_ticket;
mod join_tickets;
mod known_nodes;
mod local_names;
mod node_id;
mod node_record;
mod node_removal;
mod node_replacement;
mod node_store;
mod restored_cluster;
mod secret;
mod ticket_issuer;
mod unlock_keys;
mod wire;
mod workers;

pub use admission::{EnrolRequest, InvalidJoinRole, JoinRole, WorkerRequest};
pub use cluster_id::ClusterId;
#[cfg(any(feature = "etcd", feature = "memory"))]
pub(crate) use departure::complete_departures;
pub use enrolment_config::{
    EnrolmentConfigError, EnrolmentSource, EnrolmentSources, EspEnrolment, FW_CFG_PATH,
};
pub use enrolment_ticket::{EnrolmentTicket, PendingJoin};
pub use golden_ticket::{GoldenTicket, TicketError, TicketId, TicketParts};
pub use join_ticket::{
    InvalidJoinTicket, InvalidTicketId, JoinSecret, JoinTicket, JoinTicketId, MAX_TICKET_VOTERS, TicketVoter,
    VoterKeyDigest,
};
pub use join_tickets::{
    EnrolError, JoinTicketError, JoinTicketLimits, JoinTickets, MAX_TICKET_USES, Redemption, StoredJoinTicket,
};
pub use known_nodes::{KnownNode, NodeApi, NodesWatcher};
pub use local_names::{LocalNames, LocalNamesDir, LocalNamesError};
pub use node_id::{DEFAULT_NODE_PREFIX, InvalidNodeId, NodeId};
pub use node_record::{InvalidRecord, NodeRecord, NodeRoles, RoleConflict};
#[cfg(any(feature = "etcd", feature = "memory"))]
pub(crate) use node_removal::withdraw_own_departure;
pub use node_removal::{NodeRemovalError, NodeRemover, RemovalStep};
pub use node_replacement::NodeReplacer;
pub(crate) use node_store::NODES_NAMESPACE;
pub use node_store::{NodeStore, NodeStoreError, StoredNode};
pub(crate) use restored_cluster::expel_others;
pub use secret::SecretBytes;
pub use ticket_issuer::{GoldenTicketIssuer, TicketIssueError};
#[cfg(feature = "etcd")]
pub(crate) use ticket_issuer::{find_unnamed_ticket, unused_tickets};
pub use unlock_keys::StoredUnlockKeys;

/// Arbitrary bytes as what is read about a node from files and from the cluster.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_files(bytes: &[u8]) {
    enrolment_ticket::check_arbitrary_ticket(bytes);
    join_tickets::check_arbitrary_record(bytes);
    node_record::check_arbitrary_record(bytes);
    unlock_keys::check_arbitrary_keys(bytes);
    known_nodes::check_arbitrary_api(bytes);
}
