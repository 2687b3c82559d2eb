//! Who a node is: its name, its record in the cluster, and how it is told the way into one.

mod cluster_id;
mod enrolment;
mod id;
mod issue;
mod local;
mod record;
mod secret;
mod store;
mod ticket;
mod wire;

/// Where the nodes' records are: module and space.
pub(crate) const NODES: (&str, &str) = ("cluster", "enrolment");

pub use cluster_id::ClusterId;
pub use enrolment::{Enrolment, EnrolmentError, EnrolmentSource, EspEnrolment, FIRMWARE};
pub use id::{DEFAULT_PREFIX, InvalidNodeId, NodeId};
pub use issue::{GoldenTickets, IssueError};
pub use local::{EphemeralHosts, LocalError, LocalNames};
pub use record::{HasRole, InvalidRecord, NodeRecord, Roles};
pub use secret::Secret;
pub use store::{NodeStore, RecordError, StoredNode};
pub use ticket::{GoldenTicket, TicketDigest, TicketError, TicketParts};

/// What is read of a node from files and from the cluster, over arbitrary bytes.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn arbitrary(bytes: &[u8]) {
    ticket::arbitrary(bytes);
    record::arbitrary(bytes);
}
