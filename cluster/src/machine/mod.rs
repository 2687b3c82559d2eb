//! A node's way into its cluster: found one, join one, or start its part of one again; journalled, resumable, and never
//! by guessing.
//!
//! ```text
//!                  ┌──▶ CreatingCluster ──┐
//!  New ── decide ──┼──▶ Joining ──────────┼──▶ Running
//!                  └──▶ Restarting ───────┤
//!                                         └──▶ Failed(reason)      from New too
//! ```
//!
//! [`Machine`] decides: inputs in, actions out, no tasks, no clock, no IO. [`Cluster`] does what it says, as a runnable,
//! and shows the state to everybody. What is decided is recorded before anything is changed, and each step once it is
//! done; a run that was killed is gone on with by the next one:
//!
//! | Step | Create | Join | Restart |
//! |---|---|---|---|
//! | network | wait for an address | the same | the same |
//! | storage, recorded | make the data volume and mark it | the same | open it, check the mark |
//! | identity, recorded | make a key, name the node by it | store the ticket's | load, compare the name |
//! | consensus, recorded | a cluster of one, with an id of its own | the learner that the ticket's maker added; once promoted, read the cluster's id | start the member, also at another address than before; compare the cluster's id |
//! | record, recorded | make the node's record | the same | change its address |
//! | local | hosts, machine id, hostname | the same | the same |
//!
//! Nothing that is there is destroyed: a data volume that holds anything is refused, whatever the journal says, unless an
//! operator has named what he gives up ([`Settings::erase`]); an enrolment configuration that can't be read is never
//! taken for absent; a node that began one way does not go another ([`forget`] is for who knows better).
//!
//! *Source:* Monogon's `core/cluster/manager.go` of 2020, without its known defects: it made a new cluster, and a new
//! data partition, at every boot without a ticket; a handler's error left the state where it was, and whoever waited
//! waited for ever; a refused transition of a node that runs made it fail.

mod book;
mod cluster;
mod core;
#[cfg(test)]
mod core_test;
mod decide;
mod drive;
mod reason;
#[cfg(test)]
mod simulation_test;
mod state;
mod step;
mod steps;
mod volume;

pub use self::core::{Action, Input, Machine, Outcome, Rejected, Sequence};
pub use book::forget;
pub use cluster::{Cluster, ConsensusSource, Deps, KvAccessError, Settings, TicketAccessError, Unavailable};
pub use decide::Found;
pub use reason::{Activity, Reason, StepError};
pub use state::{Kind, Membership, State, Work};
#[cfg(any(test, feature = "testing"))]
pub(crate) use step::arbitrary;
pub use step::{EnrolmentId, Flow, InvalidProgress, Mode, Progress, Step};
