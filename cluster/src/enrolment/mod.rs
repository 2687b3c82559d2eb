//! Enrolment of a node: bootstrap a cluster, join one, or restart as a member; journalled, resumable, and
//! never by guessing.
//!
//! ```text
//!            Waiting  for a ticket, for a voter to redeem it, or for the permission to bootstrap
//!               ▲ ▼
//!               │ │  ┌──▶ CreatingCluster ──┐
//!  New ── decide ─┴──┼──▶ Joining ──────────┼──▶ Running
//!                    └──▶ Restarting ───────┤
//!                                           └──▶ Failed(reason)      from New and Waiting too
//! ```
//!
//! # How a node becomes a member
//!
//! 1. **Inspect.** [`ClusterNode`] is a runnable; each run of it starts in [`EnrolmentState::New`]. It opens the
//!    journal (`journal.rs`), and looks for a ticket (`node::EnrolmentSources`). A journal or a ticket that can't be
//!    read fails the run.
//! 2. **Decide.** `plan.rs` decides by the journal and the ticket alone, in one table: bootstrap, join, restart, wait
//!    or fail. A node with neither waits, unless it may bootstrap; `bootstrap_record.rs` makes that permission good
//!    for one cluster.
//!    A join ticket is redeemed while the node waits (`driver.rs`): the node writes keys of its own next to the ticket, calls
//!    the voters until one admits it, and replaces both by a golden ticket. From then on it joins by that, as by any other.
//! 3. **Record the decision.** `journal.rs` writes it durably before anything is changed. From now on the node never
//!    takes another way (an operator can [reset](reset_enrolment) it).
//! 4. **Run the steps**, in the order of [`EnrolmentStep`]. The state machine (`fsm.rs`: inputs in, actions out, no
//!    tasks, no clock, no IO) returns the next action; `driver.rs` performs it and returns the result as an input;
//!    `steps.rs` has the effect of each step. A step that leaves something is recorded in the journal once it is
//!    done. A run that follows a killed one runs all steps again: those that are recorded only open and check what
//!    they find.
//! 5. **Running.** After the last step the node is in its cluster, and the run lasts until it is stopped, its member
//!    fails, or its address changes.
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
//! To add a step: its place and its name in the journal are in [`EnrolmentStep`] (`step.rs`), its effect is an
//! arm of `StepRunner::run` (`steps.rs`), its row is in the table above. A journal of a release without the step is read as
//! one whose step is still to be done. The simulation (`simulation_test/`) needs the step's effect on disk and
//! cluster, and the check that a recorded step is done.
//!
//! Existing data is never destroyed: a data volume that holds anything is rejected, even if the journal names it,
//! unless an operator has named what may be erased ([`EnrolmentSettings::erase`]).
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
mod journal;
mod plan;
mod progress;
#[cfg(test)]
mod simulation_test;
mod state;
mod step;
mod steps;

pub use bootstrap_record::BootstrapRecord;
pub use cluster_node::{
    BootstrapRefusal, ClusterNode, ClusterRecoveryError, EnrolmentSettings, KvAccessError, NodeUnavailable,
    TicketAccessError,
};
pub use deps::{ConsensusFactory, Deps, EnrolCallError, Enroller};
pub use failure::{EnrolmentActivity, FailureReason, StepError};
pub use journal::reset_enrolment;
#[cfg(any(test, feature = "testing"))]
pub(crate) use progress::check_arbitrary_progress;
pub use progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress, InvalidProgress};
pub use state::{EnrolmentPhase, EnrolmentRun, EnrolmentState, NodeMembership, WaitCause};
pub use step::EnrolmentStep;
