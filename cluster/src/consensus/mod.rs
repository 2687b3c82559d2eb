//! Consensus: the store that the members of a cluster agree on, and the list of members.
//!
//! [`Consensus`] runs this node's member. It prepares a runnable for the supervision tree and a watch of its
//! [`MemberStatus`]; the keys and the list of members are available in [`MemberStatus::Running`] alone. The
//! implementations are `memory`, for one process, and `etcd`, with the features of these names.
//!
//! ```text
//!  StartOptions ──▶ Consensus::prepare_member ──▶ PreparedMember { service: for the tree, status }
//!                                                                          │
//!        ClusterAccess { this member, root keys, keys by module and namespace, ClusterMembers }
//! ```

mod cluster_access;
mod condition;
mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
pub(crate) mod join;
pub mod kv;
#[cfg(test)]
pub(crate) mod listed_voters;
mod maintenance;
mod member;
#[cfg(feature = "memory")]
pub mod memory;
mod names;
mod recovery;
mod report;
mod start;
mod status;
#[cfg(any(feature = "etcd", feature = "memory"))]
mod status_reporter;

use std::fmt::Debug;

pub use cluster_access::{ClusterAccess, ClusterMembers};
pub use condition::{DataTransfer, MemberCondition, StoreAlarm, VoterReach};
pub use error::{ConsensusError, MembershipError, REMOVED_NODE, UNNAMED_CERTIFICATE};
pub use join::JoinRefusal;
pub use maintenance::{SnapshotStream, StoreMaintenance, check_defragment, check_disarm};
pub use member::{Member, MemberId, NewMember, Peer};
pub use names::{InvalidName, MemberName, PeerUrl};
pub use recovery::{LostMember, MemberRecovery, RecoveryError, RecoveryPlan, RecoveryState};
pub use report::{ClusterReport, MemberFacts, MemberReport, OpenPeerPort, StoreFacts};
pub use start::{StartMode, StartOptions};
pub use status::{MemberService, MemberStatus, PreparedMember, StatusWatch};
#[cfg(any(feature = "etcd", feature = "memory"))]
use status_reporter::StatusReporter;

/// The default port for connections between members.
///
/// *Source:* Monogon's `consensus` of 2020.
pub const DEFAULT_PEER_PORT: u16 = 7834;

/// Runs this node's member of the consensus.
///
/// # Contract
/// - `prepare_member` only prepares: the member runs when the supervision tree runs
///   [`PreparedMember::service`]. At most one service runs at a time for one location on the disk.
/// - The service is [`MemberStatus::Running`] once the member takes part (a learner: once it is promoted) and
///   serves linearizable reads. It signals ready to the tree then.
/// - A member that loses its majority, its leader, its room, its disk or its process is [`MemberStatus::Impaired`] within
///   five seconds, and not ready in the tree, with the reason; and `Running` and ready again once it takes part again.
/// - A restarted service resumes from the files on the disk, not from its original mode:
///   [`StartMode::NewCluster`] and [`StartMode::ExistingCluster`] take effect once, and can be killed at any
///   step.
/// - A member that has run and starts at another address is the same member, with the same key: it is
///   certified for the new address and listed there before it is `Running`.
/// - A member without data starts in an existing cluster only if a majority of that cluster lists it as a
///   learner that has never started, on this host or another: otherwise its status is [`MemberStatus::Refused`].
/// - A voter whose disk is older than a start of it that another member has seen does not start.
/// - No mode destroys existing data. Data that does not match the mode is an error that names it.
/// - When the service ends, for any reason, the status leaves `Running` before the service's future
///   completes. A [`ClusterAccess`] that is still held returns errors, and never accesses a later run.
pub trait Consensus: Debug + Send + Sync + 'static {
    /// Prepares a member with these options.
    fn prepare_member(&self, start: StartOptions) -> PreparedMember;
}
