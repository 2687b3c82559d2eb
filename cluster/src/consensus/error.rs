//! What goes wrong with a member and with the list of members.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::pki::PkiError;
use thiserror::Error;

use super::kv::KvError;
use super::{MemberId, MemberName};
use crate::pki::AuthorityError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a member could not start, or had to end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConsensusError {
    /// Credentials on the disk could not be read, checked, made or written. They stay as they are; the source names the
    /// file.
    #[error("load the member's credentials")]
    Credentials(#[source] PkiError),
    /// There is data of a member, but not the credentials of one: restore them. Nothing was changed.
    #[error("{} holds a member's data, and no credentials are beside it", .data.display())]
    NoCredentials {
        /// Where the data is.
        data: PathBuf,
    },
    /// It was to go on as a member, and there is none: create a cluster or join one.
    #[error("there is no member to go on with in {}", .data.display())]
    NoMember {
        /// Where its data would be.
        data: PathBuf,
    },
    /// It was to create or join a cluster, and there is another member's identity: go on with that (restart), or remove it
    /// by hand. Nothing was changed.
    #[error("{} holds the credentials of another member or cluster", .directory.display())]
    AnotherMember {
        /// The directory of the credentials.
        directory: PathBuf,
    },
    /// The certificate is not one of this name and address. A member that has run can have another address, and one that has
    /// not runs first where it is expected.
    #[error("{} certifies neither {name} at {address}", .certificate.display())]
    NotCertified {
        /// The certificate's file.
        certificate: PathBuf,
        /// The name that the member was to start with.
        name: MemberName,
        /// The address.
        address: IpAddr,
    },
    /// The certificate is on the list of those revoked: the node was expelled.
    #[error("{} has been revoked", .certificate.display())]
    Revoked {
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// The cluster that it was to join doesn't expect it: have it added, or give the node the address that was added.
    #[error("the cluster has no member {name} at {address}")]
    NotAdded {
        /// The name that the member was to start with.
        name: MemberName,
        /// The address.
        address: IpAddr,
    },
    /// The cluster's authority could not be saved, or what is saved is not right.
    #[error("save or load the cluster's authority")]
    Authority(#[source] AuthorityError),
    /// The keys could not be reached once it ran. A retry may help.
    #[error("{operation}")]
    Kv {
        /// What for.
        operation: &'static str,
        /// Why.
        #[source]
        source: KvError,
    },
    /// The list of members could not be had. A retry may help.
    #[error("look for this member in the list")]
    Membership(#[source] MembershipError),
    /// The member's process ends before it works: its log says why. It is tried again.
    #[error("the member's process does not work: {failure} (the log of {log} says why)")]
    Process {
        /// How it ended last.
        failure: Arc<str>,
        /// The name under which it has logged.
        log: String,
    },
    /// What runs the member failed: its files, its process, its client.
    #[error("{operation}")]
    Backend {
        /// What was tried.
        operation: String,
        /// Why.
        #[source]
        source: Source,
    },
}

/// Why the list of members could not be had or changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// No member has this number; it may have been removed.
    #[error("no member has the id {id}")]
    Unknown {
        /// The number given.
        id: MemberId,
    },
    /// There is a learner already: wait until it is promoted, or remove it.
    #[error("there is a learner already")]
    TooManyLearners,
    /// The learner has not caught up yet, or has not started: try again later.
    #[error("member {id} is not in sync yet")]
    NotInSync {
        /// The learner.
        id: MemberId,
    },
    /// Without this member, or with one more, those that run would have no majority: start the others first.
    #[error("the change would cost the members that run their majority")]
    NoQuorum,
    /// The cluster gave no answer. Whether the call took effect is not known; it can be made again.
    #[error("{operation}: no answer")]
    Unavailable {
        /// What was asked.
        operation: &'static str,
        /// Why.
        #[source]
        source: Source,
    },
    /// This node's member was stopped: this handle is of no use any more.
    #[error("the member has been stopped")]
    Stopped,
    /// The cluster refused for another reason. A retry doesn't help.
    #[error("{operation}: refused")]
    Refused {
        /// What was asked.
        operation: &'static str,
        /// Why.
        #[source]
        source: Source,
    },
}

impl MembershipError {
    /// Whether the same call may succeed later, with nothing else done about it.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::TooManyLearners | Self::NotInSync { .. } | Self::NoQuorum | Self::Unavailable { .. }
        )
    }
}
