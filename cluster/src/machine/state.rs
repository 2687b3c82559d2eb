//! The states, and which may follow which.

use std::fmt;
use std::sync::Arc;

use super::core::Outcome;
use super::reason::{Activity, Reason};
use super::step::{EnrolmentId, Flow, Progress, Step};
use crate::node::{ClusterId, GoldenTicket, NodeId};

/// How far a node is on its way into a cluster.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature: whoever matches on it must know all")]
pub enum State {
    /// Nothing is decided.
    New,
    /// It founds a cluster.
    CreatingCluster(Work),
    /// It joins one.
    Joining {
        /// By this; none where all that it brings was stored by an earlier run.
        ticket: Option<Arc<GoldenTicket>>,
        /// How far it is.
        work: Work,
    },
    /// It is in a cluster, and starts its part of it again.
    Restarting(Work),
    /// It is in a cluster, and its part of it serves.
    Running(Membership),
    /// It is not, and this run does no more about it. What was recorded stays, and another run goes on with it.
    Failed(Reason),
}

/// What is being done.
#[derive(Clone, Debug)]
pub struct Work {
    pub(super) progress: Progress,
    pub(super) doing: Doing,
    /// What this run has seen for itself.
    pub(super) node: Option<NodeId>,
    pub(super) cluster: Option<ClusterId>,
}

#[derive(Clone, Debug)]
pub(super) enum Doing {
    /// The decision is being recorded.
    Deciding,
    Performing(Step),
    /// The step is done, and that is being recorded.
    Recording(Step, Progress),
}

impl Work {
    pub(super) fn new(progress: Progress, doing: Doing) -> Self {
        Self { progress, doing, node: None, cluster: None }
    }

    /// What is recorded.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// What is being done at the moment.
    pub fn activity(&self) -> Activity {
        match self.doing {
            Doing::Deciding => Activity::Deciding,
            Doing::Performing(step) => Activity::Performing(step),
            Doing::Recording(step, _) => Activity::Recording(step),
        }
    }

    /// The node's name, once it is known.
    pub fn node(&self) -> Option<&NodeId> {
        self.node.as_ref().or(self.progress.node.as_ref())
    }
}

/// A node's place in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The node.
    pub node: NodeId,
    /// The cluster.
    pub cluster: ClusterId,
    /// How it got there.
    pub flow: Flow,
    /// By which attempt.
    pub enrolment: EnrolmentId,
}

/// The states' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Kind {
    /// [`State::New`].
    New,
    /// [`State::CreatingCluster`].
    CreatingCluster,
    /// [`State::Joining`].
    Joining,
    /// [`State::Restarting`].
    Restarting,
    /// [`State::Running`].
    Running,
    /// [`State::Failed`].
    Failed,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::New, Self::CreatingCluster, Self::Joining, Self::Restarting, Self::Running, Self::Failed];

    /// Whether that state may follow this one. The whole table; what is not in it is refused.
    pub const fn leads_to(self, to: Self) -> bool {
        match (self, to) {
            (Self::New, Self::CreatingCluster | Self::Joining | Self::Restarting | Self::Failed) => true,
            (Self::CreatingCluster | Self::Joining | Self::Restarting, Self::Running | Self::Failed) => true,
            (Self::New, Self::New | Self::Running) => false,
            (
                Self::CreatingCluster | Self::Joining | Self::Restarting,
                Self::New | Self::CreatingCluster | Self::Joining | Self::Restarting,
            ) => false,
            (
                Self::Running | Self::Failed,
                Self::New
                | Self::CreatingCluster
                | Self::Joining
                | Self::Restarting
                | Self::Running
                | Self::Failed,
            ) => false,
        }
    }

    /// Whether nothing follows it in this run.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Running | Self::Failed)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::New => "New",
            Self::CreatingCluster => "CreatingCluster",
            Self::Joining => "Joining",
            Self::Restarting => "Restarting",
            Self::Running => "Running",
            Self::Failed => "Failed",
        })
    }
}

impl State {
    /// Its name.
    pub fn kind(&self) -> Kind {
        match self {
            Self::New => Kind::New,
            Self::CreatingCluster(_) => Kind::CreatingCluster,
            Self::Joining { .. } => Kind::Joining,
            Self::Restarting(_) => Kind::Restarting,
            Self::Running(_) => Kind::Running,
            Self::Failed(_) => Kind::Failed,
        }
    }

    /// What is being done, where something is.
    pub fn work(&self) -> Option<&Work> {
        match self {
            Self::CreatingCluster(work) | Self::Joining { work, .. } | Self::Restarting(work) => Some(work),
            Self::New | Self::Running(_) | Self::Failed(_) => None,
        }
    }

    pub(super) fn work_mut(&mut self) -> Option<&mut Work> {
        match self {
            Self::CreatingCluster(work) | Self::Joining { work, .. } | Self::Restarting(work) => Some(work),
            Self::New | Self::Running(_) | Self::Failed(_) => None,
        }
    }
}

impl Work {
    /// Takes in what a step has told, and holds it against what is recorded.
    pub(super) fn see(&mut self, outcome: Outcome) -> Result<(), Reason> {
        match outcome {
            Outcome::Identity(found) => {
                if let Some(recorded) = self.progress.node.clone().filter(|node| *node != found) {
                    return Err(Reason::OtherIdentity { recorded, found });
                }
                self.node = Some(found);
            }
            Outcome::Consensus(found) => {
                if let Some(expected) = self.progress.expected_cluster().filter(|cluster| *cluster != found) {
                    return Err(Reason::OtherCluster { expected, found });
                }
                self.cluster = Some(found);
            }
            Outcome::Network | Outcome::Storage | Outcome::Record | Outcome::Local => {}
        }
        Ok(())
    }
}
