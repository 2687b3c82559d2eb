//! Enrolment of a node: bootstrap a cluster, join one, or restart as a member; journalled, resumable, and
//! never by guessing.
//!
//! ```text
//!            Waiting  for a ticket, or for the permission to bootstrap
//!               ▲ ▼
//!               │ │  ┌──▶ CreatingCluster ──┐
//!  New ── decide ─┴──┼──▶ Joining ──────────┼──▶ Running
//!                    └──▶ Restarting ───────┤
//!                                           └──▶ Failed(reason)      from New and Waiting too
//! ```
//!
//! [`EnrolmentFsm`] decides: inputs in, actions out, no tasks, no clock, no IO. [`ClusterNode`] performs the
//! actions, as a runnable, and publishes the state. The decision is recorded before anything is changed, and
//! each step once it is done; the next run resumes a run that was killed:
//!
//! | Step | Bootstrap | Join | Restart |
//! |---|---|---|---|
//! | network | wait for an address | the same | the same |
//! | storage, recorded | create the data volume and mark it | the same | open it, check the mark |
//! | identity, recorded | generate a key, derive the node's name from it | store the ticket's | load, compare the name |
//! | consensus, recorded | a cluster of one, with a new cluster id | the learner that the ticket's issuer added; once promoted, read the cluster's id | start the member, also at another address than before; compare the cluster's id |
//! | record, recorded | create the node's record | the same | update its address |
//! | local | hosts, machine id, hostname | the same | the same |
//!
//! Existing data is never destroyed: a data volume that holds anything is rejected, whatever the journal
//! says, unless an operator has named what may be erased ([`EnrolmentSettings::erase`]); an unreadable
//! enrolment configuration is an error, never treated as absent; a node never switches from one way to
//! another (an operator can [reset](reset_enrolment) it).
//!
//! *Source:* Monogon's `core/cluster/manager.go` of 2020, without its known defects: it created a new
//! cluster, and a new data partition, at every boot without a ticket; an error in a handler left the state as
//! it was, so that waiters waited for ever; a rejected transition of a running node made it fail.

mod bootstrap_record;
mod cluster_node;
mod data_volume;
mod deps;
mod driver;
mod failure;
mod fsm;
#[cfg(test)]
mod fsm_test;
mod inspection;
mod journal;
mod plan;
mod progress;
#[cfg(test)]
mod simulation_test;
mod state;
mod steps;

pub use self::fsm::{
    ActionId, EnrolmentAction, EnrolmentFsm, EnrolmentInput, EnrolmentStepOutput, RejectedInput,
};
pub use bootstrap_record::BootstrapRecord;
pub use cluster_node::{
    BootstrapRefusal, ClusterNode, EnrolmentSettings, KvAccessError, NodeUnavailable, TicketAccessError,
};
pub use deps::{ConsensusFactory, Deps};
pub use failure::{EnrolmentActivity, FailureReason, StepError};
pub use journal::reset_enrolment;
pub use plan::{BootstrapPermission, InspectionResult};
#[cfg(any(test, feature = "testing"))]
pub(crate) use progress::check_arbitrary_progress;
pub use progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress, EnrolmentStep, InvalidProgress, StepMode};
pub use state::{EnrolmentPhase, EnrolmentRun, EnrolmentState, NodeMembership, WaitCause};
