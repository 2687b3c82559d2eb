//! The causes for which a node is not in a cluster.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::pki::PkiError;
use nodekeel_localstorage::step_journal;
use nodekeel_localstorage::tree::LayoutError;
use nodekeel_localstorage::volume::VolumeError;
use thiserror::Error;

use super::deps::EnrolCallError;
use super::progress::InvalidProgress;
use super::step::EnrolmentStep;
use crate::consensus::{JoinRefusal, RecoveryError};
use crate::node::{
    ClusterId, EnrolmentConfigError, InvalidNodeId, NodeId, NodeRemovalError, NodeStoreError, TicketError,
    TicketId,
};

/// The activity of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EnrolmentActivity {
    /// Inspecting what is on the disk.
    Inspecting,
    /// Recording the decision.
    RecordingDecision,
    /// Running this step.
    RunningStep(EnrolmentStep),
    /// Recording that this step is done.
    Recording(EnrolmentStep),
}

impl fmt::Display for EnrolmentActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inspecting => f.write_str("inspecting the data volume and the ticket"),
            Self::RecordingDecision => f.write_str("recording in its journal whether to bootstrap or join"),
            Self::RunningStep(step) => write!(f, "running step {step}"),
            Self::Recording(step) => write!(f, "recording in its journal that step {step} is complete"),
        }
    }
}

/// The cause of a failed run. The journal stays: the next run resumes with it.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum FailureReason {
    /// An action failed. The source names the remedy.
    #[error("enrolment failed while {during}")]
    ActionFailed {
        /// The activity that failed.
        during: EnrolmentActivity,
        /// The cause.
        source: Arc<StepError>,
    },
    /// The deadline has passed: check what the run was waiting for, or extend the deadline.
    #[error("enrolment timed out while {during}{}", condition_suffix(.condition))]
    DeadlineExceeded {
        /// The activity that failed.
        during: EnrolmentActivity,
        /// The condition that the run was waiting for, if known.
        condition: Option<Arc<str>>,
    },
    /// The run was stopped before its end.
    #[error("enrolment was stopped while {during}; the next start resumes it")]
    Stopped {
        /// The activity that failed.
        during: EnrolmentActivity,
    },
    /// The node was in its cluster, and the run has ended: it was stopped, or the node's address changed.
    /// Another run returns to the same cluster.
    #[error(
        "the node left Running: it was stopped, or its address changed; the next run returns to the same cluster"
    )]
    RunEnded,
    /// A node that is bootstrapping a cluster has been given a ticket for another. Remove the ticket to
    /// resume, or [reset](super::reset_enrolment) the node, and erase its data, to join by the ticket.
    #[error(
        "bootstrap or restore is in progress, but a join ticket is present: remove the ticket to resume, or reset the node to \
         join by it"
    )]
    TicketDuringBootstrap,
    /// The ticket by which a node is joining is missing, and is still needed: restore it, or have it
    /// reissued. Or [reset](super::reset_enrolment) the node, and erase its data.
    #[error(
        "join ticket {started_with}, with which this node started to join, is missing: restore it, have it \
         reissued, or reset the node"
    )]
    TicketMissing {
        /// The ticket by which joining was started.
        started_with: TicketId,
    },
    /// The ticket by which a node is joining was replaced by another node's: restore it, or have it reissued.
    /// Or [reset](super::reset_enrolment) the node, and erase its data.
    #[error(
        "join ticket changed: joining was started with {started_with}, but {found} is another node's: restore the \
         first one, or reset the node to join by the other"
    )]
    TicketChanged {
        /// The ticket by which joining was started.
        started_with: TicketId,
        /// The ticket that is present now.
        found: TicketId,
    },
    /// The data volume has the key of another node than the journal: one of the two belongs to another host.
    #[error(
        "the enrolment journal belongs to node {recorded}, but the data volume to node {found}: attach the \
         disk of node {recorded}, or reset the node"
    )]
    NodeMismatch {
        /// The node in the journal.
        recorded: NodeId,
        /// The node whose key is on the data volume.
        found: NodeId,
    },
    /// The member serves in another cluster than the one that the node has joined or bootstrapped.
    #[error(
        "the node was enrolled in cluster {expected}, but the data of its etcd member is of cluster {found}: \
         restore this node's data, or reset the node and join again"
    )]
    ClusterMismatch {
        /// The cluster in the journal.
        expected: ClusterId,
        /// The cluster in which the member serves.
        found: ClusterId,
    },
}

impl FailureReason {
    /// Returns whether the run has failed because of a ticket.
    pub(super) fn concerns_ticket(&self) -> bool {
        match self {
            Self::TicketDuringBootstrap | Self::TicketMissing { .. } | Self::TicketChanged { .. } => true,
            Self::ActionFailed { source, .. } => {
                matches!(
                    **source,
                    StepError::Ticket(_)
                        | StepError::EnrolmentConfig(_)
                        | StepError::NoEnroller
                        | StepError::NotAdmitted(_)
                )
            }
            Self::DeadlineExceeded { .. }
            | Self::Stopped { .. }
            | Self::RunEnded
            | Self::NodeMismatch { .. }
            | Self::ClusterMismatch { .. } => false,
        }
    }
}

fn condition_suffix(condition: &Option<Arc<str>>) -> String {
    condition.as_ref().map(|condition| format!(": {condition}")).unwrap_or_default()
}

/// The cause of a failed step.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The journal can't be opened.
    #[error("can't open the enrolment journal, which records this node's progress")]
    Journal(#[source] step_journal::JournalError),
    /// The journal can't be resumed.
    #[error("can't resume the enrolment from its journal")]
    Steps(#[source] step_journal::StepListError),
    /// The journal is complete, but its content is not an enrolment progress record.
    #[error("can't parse the progress in enrolment journal {}", .path.display())]
    Progress {
        /// The journal's file.
        path: PathBuf,
        /// The defect.
        source: InvalidProgress,
    },
    /// The enrolment configuration can't be read, or is invalid. It is never treated as absent.
    #[error("can't read or replace the enrolment configuration")]
    EnrolmentConfig(#[source] EnrolmentConfigError),
    /// The kernel supplied no random numbers.
    #[error("can't get random bytes for the enrolment's id")]
    Random(#[source] io::Error),
    /// No address is known, and the network will report none any more.
    #[error("the network stopped reporting the node's address")]
    AddressWatchClosed,
    /// The data volume can't be created or opened. If it holds something, [`VolumeError::Occupied`] reports
    /// what; to permit its erasure, set [`EnrolmentSettings::erase`](super::EnrolmentSettings::erase).
    #[error("can't open the data volume")]
    Volume(#[source] VolumeError),
    /// The record of the bootstrap can't be read or written: it must be on a file system that this node can
    /// write. Nothing else was changed.
    #[error(
        "can't read or write the bootstrap record {}, which says whether this host has bootstrapped a \
         cluster",
        .path.display()
    )]
    BootstrapRecord {
        /// The record.
        path: PathBuf,
        /// The cause.
        source: nodekeel_localstorage::Error,
    },
    /// Another enrolment than this one has used up the permission to bootstrap: two nodes may share the record.
    #[error("the bootstrap record {} was written by another enrolment, so another node may be bootstrapping with it: keep it, and reset this node to join by a ticket; to make a second cluster, give this node another record", .path.display())]
    ForeignBootstrapRecord {
        /// The record.
        path: PathBuf,
    },
    /// The data volume belongs to another attempt, or to another node.
    #[error("the data volume at {} belongs to another enrolment than the journal: attach this node's disk, or reset the node and erase the volume", .path.display())]
    ForeignVolume {
        /// The root directory of the volume.
        path: PathBuf,
    },
    /// The mark that names the volume's enrolment could not be read or written.
    #[error(
        "can't read or write {}, the file that says which enrolment the data volume belongs to",
        .path.display()
    )]
    Mark {
        /// The mark.
        path: PathBuf,
        /// The cause.
        source: nodekeel_localstorage::Error,
    },
    /// The root directory of the data volume could not be opened again or listed.
    #[error("can't read the data volume at {}", .path.display())]
    VolumeRoot {
        /// The directory.
        path: PathBuf,
        /// The cause.
        source: nodekeel_localstorage::Error,
    },
    /// The node's directories could not be created on the data volume.
    #[error("can't create the directories on the data volume")]
    Place(#[source] LayoutError),
    /// The node's credentials can't be created, stored or loaded.
    #[error("can't create or load the node's credentials")]
    Credentials(#[source] PkiError),
    /// The data volume has other credentials than the ticket. They stay unchanged.
    #[error("the data volume has the credentials of another ticket in {}, which were kept: restore that ticket, or reset the node and erase the volume to join by this one", .path.display())]
    CredentialsMismatch {
        /// The directory.
        path: PathBuf,
    },
    /// The configured prefix makes an invalid node name.
    #[error("the configured prefix of node names does not make a valid node name")]
    Name(#[source] InvalidNodeId),
    /// A child of that name could not be added to the supervision tree.
    #[error("can't add the etcd member to the supervision tree")]
    Tree(#[source] nodekeel_supervisor::AddChildError),
    /// The node has an identity, but its credentials are missing from this directory: restore them.
    #[error("the node's credentials in {} are missing: restore them", .path.display())]
    CredentialsMissing {
        /// The directory.
        path: PathBuf,
    },
    /// The ticket is inconsistent, or is for another address or port.
    #[error("can't join the cluster with the ticket")]
    Ticket(#[source] TicketError),
    /// The node has a join ticket, and nothing that calls the voters: see [`Deps::enroller`](super::Deps::enroller).
    #[error(
        "a join ticket is redeemed through the node's API, which is disabled: set api.address, or join by a golden ticket"
    )]
    NoEnroller,
    /// The cluster refuses the join ticket, or the node.
    #[error("the cluster does not admit this node by its join ticket")]
    NotAdmitted(#[source] EnrolCallError),
    /// The member of the cluster's store can't be started, or does not serve.
    #[error("can't start this node's etcd member")]
    Consensus(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The cluster does not admit the node's member. Nothing was started.
    #[error("can't join the cluster")]
    JoinRefused(#[source] JoinRefusal),
    /// The recovery of the cluster from this node can't be completed. The next run repeats it.
    #[error("can't complete the recovery of the cluster from this node")]
    Recovery(#[source] RecoveryError),
    /// What the recovered cluster has of its former nodes can't be removed. The next run repeats it.
    #[error("can't remove the lost nodes from the recovered cluster")]
    LostNodes(#[source] NodeRemovalError),
    /// The node's record can't be written into the cluster.
    #[error("can't register the node in the cluster's etcd")]
    Record(#[source] NodeStoreError),
    /// The local names could not be set.
    #[error("can't set this host's hostname, /etc/machine-id or /etc/hosts")]
    LocalNames(#[source] crate::node::LocalNamesError),
}

impl StepError {
    /// The root directory of the data volume could not be read.
    pub(super) fn volume_root(path: &Path) -> impl FnOnce(nodekeel_localstorage::Error) -> Self + use<> {
        let path = path.to_owned();
        |source| Self::VolumeRoot { path, source }
    }
}
