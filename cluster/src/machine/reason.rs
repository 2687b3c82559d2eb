//! Why a node is not in a cluster.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::journal;
use nodekeel_localstorage::pki::PkiError;
use nodekeel_localstorage::tree::PlaceError;
use nodekeel_localstorage::volume::VolumeError;
use thiserror::Error;

use super::step::{InvalidProgress, Step};
use crate::node::{ClusterId, EnrolmentError, InvalidNodeId, NodeId, RecordError, TicketDigest, TicketError};

/// What a run was doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Activity {
    /// It looked at what is there.
    Examining,
    /// It recorded what is to be done.
    Deciding,
    /// It did this.
    Performing(Step),
    /// It recorded that this is done.
    Recording(Step),
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Examining => f.write_str("examining what is there"),
            Self::Deciding => f.write_str("recording the decision"),
            Self::Performing(step) => write!(f, "step {step}"),
            Self::Recording(step) => write!(f, "recording step {step}"),
        }
    }
}

/// Why a run has failed. What was recorded stays: the next run goes on with it.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum Reason {
    /// Something that was to be done could not be. The source says what to do about it.
    #[error("{during} failed")]
    Step {
        /// What was being done.
        during: Activity,
        /// Why it could not be.
        source: Arc<StepError>,
    },
    /// The time was up: see to what it was waiting for, or give it more.
    #[error("the time was up during {during}{}", of(.trouble))]
    Deadline {
        /// What was being done.
        during: Activity,
        /// What kept it waiting, where something has said so.
        trouble: Option<Arc<str>>,
    },
    /// The run was stopped before its end.
    #[error("stopped during {during}")]
    Stopped {
        /// What was being done.
        during: Activity,
    },
    /// The node was in its cluster, and the run has ended: it was stopped, or has got another address. Another run goes back
    /// to the same cluster.
    #[error("the node was in its cluster, and its run has ended")]
    Ended,
    /// A node that was founding a cluster has been given a ticket for another. Remove the ticket to go on, or
    /// [forget](super::forget) what was begun, and give up its data, to join by it.
    #[error(
        "a cluster was begun to be founded, and now there is a ticket to join another: remove it to go on, or give up what was \
         begun to join by it"
    )]
    TicketAfterCreation,
    /// The ticket by which a node was joining is not there any more, and is still needed: put it back, or have it made
    /// again. Or [forget](super::forget) what was begun, and give up its data.
    #[error(
        "the ticket {begun}, by which joining was begun, is gone: put it back, or have it made again, or give up what was begun"
    )]
    TicketGone {
        /// By which joining was begun.
        begun: TicketDigest,
    },
    /// The ticket by which a node was joining has become another node's: put it back, or have it made again. Or
    /// [forget](super::forget) what was begun, and give up its data.
    #[error(
        "joining was begun by ticket {begun}, and now there is {found}, another node's: put the first one back, or give up \
         what was begun to join by the other"
    )]
    TicketChanged {
        /// By which joining was begun.
        begun: TicketDigest,
        /// What is there now.
        found: TicketDigest,
    },
    /// The data volume has the key of another node than the journal: one of the two is not this machine's.
    #[error("the journal is of node {recorded}, and the data volume of {found}")]
    OtherIdentity {
        /// Whom the journal knows.
        recorded: NodeId,
        /// Whose key the data volume has.
        found: NodeId,
    },
    /// The member serves in another cluster than the one that the node is in, or has founded.
    #[error("the node is in cluster {expected}, and its member serves in {found}")]
    OtherCluster {
        /// Which the journal knows.
        expected: ClusterId,
        /// In which the member serves.
        found: ClusterId,
    },
}

fn of(trouble: &Option<Arc<str>>) -> String {
    trouble.as_ref().map(|trouble| format!(": {trouble}")).unwrap_or_default()
}

/// Why a step could not be done.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The journal can't be opened.
    #[error("open the journal of the enrolment")]
    Journal(#[source] journal::Error),
    /// The journal can't be gone on with.
    #[error("go on with the journal of the enrolment")]
    Steps(#[source] journal::StepsError),
    /// The journal is whole, and what it holds is no progress.
    #[error("read the progress in journal {}", .path.display())]
    Progress {
        /// The journal's file.
        path: PathBuf,
        /// What is wrong with it.
        source: InvalidProgress,
    },
    /// The enrolment configuration can't be read or is none. It is never taken for absent.
    #[error("read the enrolment configuration")]
    Enrolment(#[source] EnrolmentError),
    /// There are no random numbers to be had.
    #[error("draw random numbers")]
    Random(#[source] io::Error),
    /// No address has come, and none will: whoever tells addresses has ended.
    #[error("the network tells no addresses any more")]
    NoNetwork,
    /// The data volume can't be made or opened. Where it holds something, [`VolumeError::Occupied`] tells what; to give
    /// that up, say so with [`Settings::erase`](super::Settings::erase).
    #[error("open the data volume")]
    Volume(#[source] VolumeError),
    /// The data volume is another attempt's, or another node's.
    #[error("the data volume below {} is of another enrolment than the journal", .path.display())]
    ForeignVolume {
        /// Its top directory.
        path: PathBuf,
    },
    /// Whose the data volume is could not be read or written.
    #[error("mark the data volume")]
    Mark(#[source] nodekeel_localstorage::Error),
    /// Directories could not be placed on the data volume.
    #[error("place directories on the data volume")]
    Place(#[source] PlaceError),
    /// The node's credentials can't be made, stored or loaded.
    #[error("take the node's credentials")]
    Credentials(#[source] PkiError),
    /// The data volume has credentials, and not those of the ticket. They stay as they are.
    #[error("the credentials in {} are not those of the ticket", .path.display())]
    OtherCredentials {
        /// The directory.
        path: PathBuf,
    },
    /// The node's name is none, with the prefix that was configured.
    #[error("name the node")]
    Name(#[source] InvalidNodeId),
    /// A child of that name could not be added to the tree.
    #[error("add the member to the tree")]
    Tree(#[source] nodekeel_supervisor::SpawnError),
    /// The node was known, and now there are no credentials in this directory: restore them.
    #[error("the credentials in {} are gone", .path.display())]
    CredentialsGone {
        /// The directory.
        path: PathBuf,
    },
    /// The ticket's content does not hold together.
    #[error("take what the ticket brings")]
    Ticket(#[source] TicketError),
    /// The member of the cluster's store can't be started, or does not serve.
    #[error("start the member of the cluster's store")]
    Consensus(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The node's record can't be put into the cluster.
    #[error("put the node's record into the cluster")]
    Record(#[source] RecordError),
    /// The system could not be told its name.
    #[error("tell the system its name")]
    Local(#[source] crate::node::LocalError),
}
