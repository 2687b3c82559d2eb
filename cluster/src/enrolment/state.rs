//! The states, and the transitions between them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::failure::{EnrolmentActivity, FailureReason};
use super::fsm::StepOutput;
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};
use super::step::EnrolmentStep;
use crate::node::{ClusterId, GoldenTicket, NodeId};

/// The state of a node's enrolment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EnrolmentState {
    /// Nothing is decided.
    New,
    /// The node waits for a ticket, for a voter to redeem it, or for the permission to bootstrap a cluster.
    Waiting(WaitCause),
    /// The node bootstraps a cluster, or restores one.
    CreatingCluster(EnrolmentRun),
    /// The node joins a cluster.
    Joining {
        /// The ticket it joins by; `None` if an earlier run has stored everything from it.
        ticket: Option<Arc<GoldenTicket>>,
        /// The progress of the run.
        run: EnrolmentRun,
    },
    /// The node is in a cluster, and starts its member again.
    Restarting(EnrolmentRun),
    /// The node is in a cluster, and its member serves.
    Running(NodeMembership),
    /// The run has failed and ended. What was recorded stays, and another run resumes with it.
    Failed(FailureReason),
}

/// The cause for which a node waits, as a clause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitCause {
    /// The node has no ticket, and neither its configuration nor an operator asks it to bootstrap a cluster.
    NoInstruction,
    /// The node has a join ticket, and no voter has redeemed it yet.
    Redemption,
    /// The node has no ticket and no data, although this host has been in a cluster before. It bootstraps no second
    /// cluster.
    DataLost {
        /// The file that records it.
        record: PathBuf,
    },
}

impl fmt::Display for WaitCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoInstruction => {
                f.write_str("waits for a ticket: it has none, and is not configured to bootstrap a cluster")
            }
            Self::Redemption => f.write_str("waits for a voter to redeem its join ticket"),
            Self::DataLost { record } => write!(
                f,
                "waits for a ticket: this host has been in a cluster before, as {} records, and its data is not \
                 here; it bootstraps no second cluster: restore the data and restart it, or join by a ticket",
                record.display()
            ),
        }
    }
}

/// A run in progress.
#[derive(Clone, Debug)]
pub struct EnrolmentRun {
    pub(super) progress: EnrolmentProgress,
    pub(super) activity: CurrentActivity,
    /// Found by this run itself.
    pub(super) node_id: Option<NodeId>,
    pub(super) cluster_id: Option<ClusterId>,
}

#[derive(Clone, Debug)]
pub(super) enum CurrentActivity {
    /// Records the decision.
    RecordingDecision,
    RunningStep(EnrolmentStep),
    /// The step is done; records that.
    Recording(EnrolmentStep, EnrolmentProgress),
}

impl EnrolmentRun {
    pub(super) fn new(progress: EnrolmentProgress, activity: CurrentActivity) -> Self {
        Self { progress, activity, node_id: None, cluster_id: None }
    }

    /// The record in the journal.
    pub fn progress(&self) -> &EnrolmentProgress {
        &self.progress
    }

    /// The present activity.
    pub fn activity(&self) -> EnrolmentActivity {
        match self.activity {
            CurrentActivity::RecordingDecision => EnrolmentActivity::RecordingDecision,
            CurrentActivity::RunningStep(step) => EnrolmentActivity::RunningStep(step),
            CurrentActivity::Recording(step, _) => EnrolmentActivity::Recording(step),
        }
    }

    /// The node's name, once it is known.
    pub fn node_id(&self) -> Option<&NodeId> {
        self.node_id.as_ref().or(self.progress.node_id.as_ref())
    }

    /// Applies the output of a step, and compares it with the record.
    pub(super) fn apply_output(&mut self, output: StepOutput) -> Result<(), FailureReason> {
        match output {
            StepOutput::Done => {}
            StepOutput::Node(found) => {
                // The journal and the volume belong to different nodes.
                if let Some(recorded) = self.progress.node_id.clone().filter(|node_id| *node_id != found) {
                    return Err(FailureReason::NodeMismatch { recorded, found });
                }
                self.node_id = Some(found);
            }
            StepOutput::Cluster(found) => {
                // Compared also at the first start of a bootstrap, whose attempt determines the id.
                let expected = self.progress.expected_cluster();
                if let Some(expected) = expected.filter(|cluster_id| *cluster_id != found) {
                    return Err(FailureReason::ClusterMismatch { expected, found });
                }
                self.cluster_id = Some(found);
            }
        }
        Ok(())
    }
}

/// A node's membership in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMembership {
    /// The node.
    pub node_id: NodeId,
    /// The cluster.
    pub cluster_id: ClusterId,
    /// The way in which the node was enrolled.
    pub enrolment_kind: EnrolmentKind,
    /// The attempt that enrolled it.
    pub enrolment_id: EnrolmentId,
}

/// The names of the states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EnrolmentPhase {
    /// [`EnrolmentState::New`].
    New,
    /// [`EnrolmentState::Waiting`].
    Waiting,
    /// [`EnrolmentState::CreatingCluster`].
    CreatingCluster,
    /// [`EnrolmentState::Joining`].
    Joining,
    /// [`EnrolmentState::Restarting`].
    Restarting,
    /// [`EnrolmentState::Running`].
    Running,
    /// [`EnrolmentState::Failed`].
    Failed,
}

impl EnrolmentPhase {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::New,
        Self::Waiting,
        Self::CreatingCluster,
        Self::Joining,
        Self::Restarting,
        Self::Running,
        Self::Failed,
    ];

    /// Returns whether that state may follow this one. This is the whole table: every other transition is rejected.
    pub(super) const fn can_lead_to(self, to: Self) -> bool {
        match self {
            // A run always goes through a state with steps: also the member of a known cluster has to be
            // started.
            Self::New => !matches!(to, Self::New | Self::Running),
            Self::Waiting => !matches!(to, Self::New | Self::Waiting | Self::Running),
            Self::CreatingCluster | Self::Joining | Self::Restarting => {
                matches!(to, Self::Running | Self::Failed)
            }
            Self::Running | Self::Failed => false,
        }
    }

    /// Returns whether this state ends the run.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Failed)
    }
}

impl fmt::Display for EnrolmentPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "New",
            Self::Waiting => "Waiting",
            Self::CreatingCluster => "CreatingCluster",
            Self::Joining => "Joining",
            Self::Restarting => "Restarting",
            Self::Running => "Running",
            Self::Failed => "Failed",
        })
    }
}

impl EnrolmentState {
    /// The name of the state.
    pub fn phase(&self) -> EnrolmentPhase {
        match self {
            Self::New => EnrolmentPhase::New,
            Self::Waiting(_) => EnrolmentPhase::Waiting,
            Self::CreatingCluster(_) => EnrolmentPhase::CreatingCluster,
            Self::Joining { .. } => EnrolmentPhase::Joining,
            Self::Restarting(_) => EnrolmentPhase::Restarting,
            Self::Running(_) => EnrolmentPhase::Running,
            Self::Failed(_) => EnrolmentPhase::Failed,
        }
    }

    /// Returns whether an operator's request to bootstrap a cluster ends here: the node has found a ticket, also one that it
    /// rejects, or is in a cluster.
    pub(super) fn ends_bootstrap_request(&self) -> bool {
        match self {
            Self::Joining { .. } | Self::Restarting(_) | Self::Running(_) => true,
            Self::Failed(reason) => reason.concerns_ticket(),
            Self::New | Self::Waiting(_) | Self::CreatingCluster(_) => false,
        }
    }

    /// The run in progress, if any.
    pub fn active_run(&self) -> Option<&EnrolmentRun> {
        match self {
            Self::CreatingCluster(run) | Self::Joining { run, .. } | Self::Restarting(run) => Some(run),
            Self::New | Self::Waiting(_) | Self::Running(_) | Self::Failed(_) => None,
        }
    }

    pub(super) fn active_run_mut(&mut self) -> Option<&mut EnrolmentRun> {
        match self {
            Self::CreatingCluster(run) | Self::Joining { run, .. } | Self::Restarting(run) => Some(run),
            Self::New | Self::Waiting(_) | Self::Running(_) | Self::Failed(_) => None,
        }
    }
}
