//! Errors of a member and of the list of members.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::pki::PkiError;
use thiserror::Error;

use super::kv::KvError;
use super::{JoinRefusal, MemberId, MemberName, PeerUrl};
use crate::BoxError;
use crate::pki::CaError;

/// What a node that was removed says of it, wherever it finds that out, as a clause with the remedy.
pub const REMOVED_NODE: &str =
    "this node was removed from its cluster: type `nodectl reset` here, and join it by another ticket";

/// What a node says whose certificate is rejected, and has no name of a member, as a clause with the remedy.
pub const UNNAMED_CERTIFICATE: &str = "an earlier release issued it, without the name of a member; if this node was not removed, delete \
     `data/cluster/etcd/peer_name` in the data directory of each voter that rejects it, and restart that; if it was removed: \
     `nodectl reset` here";

/// How a node whose data can't be used any more is replaced, as a clause.
pub(super) const REPLACE_NODE: &str = "type `nodectl cluster replace NODE` on another node and `nodectl reset` here, and join \
                                       it by the new ticket";

/// The cause for which a member could not start, or had to exit.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConsensusError {
    /// Credentials on the disk could not be read, checked, created or written. They stay unchanged; the
    /// source names the file.
    #[error("can't load the etcd member's credentials")]
    Credentials(#[source] PkiError),
    /// The data of a member exists without its credentials: restore them. Nothing was changed.
    #[error(
        "{} holds an etcd member's data, but the member's credentials are missing: restore them",
        .data.display()
    )]
    CredentialsMissing {
        /// The data directory.
        data: PathBuf,
    },
    /// A restart was requested, but no member has data here: create a cluster or join one.
    #[error(
        "can't restart the etcd member: {} holds no member's data; restore it, or reset the node and join \
         again",
        .data.display()
    )]
    NoMember {
        /// The data directory.
        data: PathBuf,
    },
    /// A new or joining member was requested, but another member's identity is present: restart that member,
    /// or remove its files by hand. Nothing was changed.
    #[error(
        "{} holds the credentials of another member or cluster: restore this node's, or attach its disk",
        .directory.display()
    )]
    ForeignCredentials {
        /// The directory of the credentials.
        directory: PathBuf,
    },
    /// The certificate is for another name or address. A member may change its address only after it has run
    /// at the one it was added with.
    #[error(
        "certificate {} was not issued to member {name} at {address}: restore this node's credentials, or \
         correct its address",
        .certificate.display()
    )]
    CertificateMismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The requested name.
        name: MemberName,
        /// The requested address.
        address: IpAddr,
    },
    /// The member runs at its former address too: one of the two is a copy of the other's data. Nothing was started.
    #[error(
        "member {name} already runs at {}: two hosts must not run a copy of the same node's data; reset one \
         of the two and join it by a ticket, or stop it there to move it here",
        .url.as_str()
    )]
    RunsElsewhere {
        /// The member.
        name: MemberName,
        /// The URL at which it answers.
        url: PeerUrl,
    },
    /// The data is older than the file outside of the data volume: it was put back alone. Nothing was started.
    #[error(
        "the data of member {name} is older than this node: it has its start {own}, and {} has {seen}; put the newest \
         data back; if no newer data exists, join again by a new ticket; in a cluster without other members, which then \
         loses what was written since, remove {}",
        .record.display(), .record.display()
    )]
    OlderData {
        /// The member.
        name: MemberName,
        /// The last start that the data has.
        own: u64,
        /// The last start that the file has.
        seen: u64,
        /// The file.
        record: PathBuf,
    },
    /// Another member has seen a later start of this one than its disk: this is a copy of it that was put back, which
    /// has forgotten what the member has acknowledged since. Nothing was started.
    #[error(
        "the disk of member {name} is an older copy: it has its start {own}, and member {witness} has seen start \
         {seen}; starting it would lose writes; let this node join again as a new member: `nodectl cluster replace {name}` \
         on another node, `nodectl reset` here, and the new ticket"
    )]
    OlderDisk {
        /// The member.
        name: MemberName,
        /// The last start that the disk has.
        own: u64,
        /// The last start that the other member has seen.
        seen: u64,
        /// The other member.
        witness: String,
    },
    /// The certificate is revoked: the node was expelled.
    #[error(
        "{} (its certificate {} is revoked)",
        REMOVED_NODE, .certificate.display()
    )]
    CertificateRevoked {
        /// The certificate's file.
        certificate: PathBuf,
    },
    /// An older etcd than the one that has written the data: it would damage it. Nothing was started or changed.
    #[error(
        "can't start etcd {version} ({}): {} was written by etcd {written}, and etcd can't go back; set \
         `services.etcd.binary` to an etcd {written} and restart noded",
        .binary.display(), .directory.display()
    )]
    EtcdDowngrade {
        /// The program.
        binary: PathBuf,
        /// Its minor release.
        version: String,
        /// The data directory.
        directory: PathBuf,
        /// The minor release that has written the data.
        written: String,
    },
    /// An etcd more than one minor release newer than the data. Nothing was started or changed.
    #[error(
        "can't start etcd {version} ({}): {} was written by etcd {written}, and etcd upgrades by one minor \
         release at a time; set `services.etcd.binary` to an etcd {next} first and restart noded",
        .binary.display(), .directory.display()
    )]
    EtcdUpgradeTooFar {
        /// The program.
        binary: PathBuf,
        /// Its minor release.
        version: String,
        /// The data directory.
        directory: PathBuf,
        /// The minor release that has written the data.
        written: String,
        /// The minor release that may start with it.
        next: String,
    },
    /// The program did not print its version in time, and its data needs a certain one. Nothing was started.
    #[error(
        "can't start {}: `{} --version` does not print the version of an etcd, and the data needs an etcd {data}",
        .binary.display(), .binary.display()
    )]
    EtcdVersionUnknown {
        /// The program.
        binary: PathBuf,
        /// The minor release that has written the data.
        data: String,
    },
    /// The data differs from that of a majority of the voters, by a record of an earlier run: it is not started, and serves
    /// nothing. Nothing was changed.
    #[error(
        "this member's data in {} differs from that of a majority of the voters, and is not served: {}; the record of that is {}",
        .data.display(), REPLACE_NODE, .record.display()
    )]
    DataDiffers {
        /// The data directory.
        data: PathBuf,
        /// The record. Without it, the member starts, and is compared again.
        record: PathBuf,
    },
    /// The cluster has removed the member, by a record of an earlier run, or by its list. It is not started.
    #[error("{}", REMOVED_NODE)]
    Removed,
    /// A release that recorded no claims has begun to join this member, which may have started on another host since. Nothing
    /// was started.
    #[error(
        "an earlier release has begun to join member {name}, and did not record whether another host has used its ticket: type \
         `nodectl reset` here, and join it by another ticket; if no other host has used it: touch {}",
        .claim.display()
    )]
    Unclaimed {
        /// The member.
        name: MemberName,
        /// The file by which an operator vouches for that.
        claim: PathBuf,
    },
    /// The cluster does not admit the member. Nothing was started.
    #[error("can't join the cluster")]
    JoinRefused(#[source] JoinRefusal),
    /// The cluster's CA could not be saved, or the saved one is invalid.
    #[error("can't save or load the cluster's CA")]
    Ca(#[source] CaError),
    /// The list of revoked certificates is missing, and etcd's data has none either: etcd would accept revoked certificates.
    /// Nothing was started.
    #[error(
        "the list of revoked certificates {} is missing, and no copy of it can be read in {}: restore it from another member, \
         which has the same in its directory, or let this node join again as a new member: `nodectl cluster replace {name}` on \
         another node, and `nodectl reset` here",
        .list.display(), .data.display()
    )]
    RevocationListMissing {
        /// The member.
        name: MemberName,
        /// The list's file.
        list: PathBuf,
        /// The data directory.
        data: PathBuf,
    },
    /// The cluster was restored from a snapshot: the next start has it.
    #[error("the cluster was restored from a snapshot: restarting etcd with it")]
    ClusterRestored,
    /// etcd's tool that restores snapshots is not beside it. Nothing was started.
    #[error(
        "can't restore the cluster without {}, of the same release as {}: put it there (Debian: apt-get install etcd-client)",
        .tool.display(), .binary.display()
    )]
    NoRestoreTool {
        /// The tool.
        tool: PathBuf,
        /// The etcd.
        binary: PathBuf,
    },
    /// The running store did not answer. A retry may help.
    #[error("can't {operation}")]
    Kv {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: KvError,
    },
    /// The list of members could not be read or changed. A retry may help.
    #[error("can't find this member in the cluster's list of members")]
    Membership(#[source] MembershipError),
    /// The member's process exits before it is ready: its log shows why. It is restarted.
    #[error("the etcd member's process keeps failing: {failure} (see the log of {log})")]
    Process {
        /// The last exit.
        failure: Arc<str>,
        /// The DN of its log.
        log: String,
    },
    /// The implementation failed: its files, its process, its client.
    #[error("can't {operation}")]
    Backend {
        /// The operation.
        operation: String,
        /// The cause.
        #[source]
        source: BoxError,
    },
}

#[cfg(feature = "etcd")]
impl ConsensusError {
    /// The operation failed with an error of the implementation.
    pub(super) fn backend<E: Into<BoxError>>(operation: &str) -> impl FnOnce(E) -> Self + use<E> {
        let operation = operation.to_owned();
        move |source| Self::Backend { operation, source: source.into() }
    }
}

/// A failure to read or change the list of members.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// No member has this id; it may have been removed.
    #[error("the cluster has no member {id}: see the list of members")]
    MemberNotFound {
        /// The id given.
        id: MemberId,
    },
    /// The cluster already has a learner: wait until it is promoted, or remove it.
    #[error("the cluster already has a learner (a member without a vote yet), and takes one at a time")]
    TooManyLearners,
    /// The learner has not caught up with the leader yet, or has not started: try again later.
    #[error("learner {id} can't be promoted, since it is not in sync with the leader yet: try again later")]
    LearnerNotReady {
        /// The learner.
        id: MemberId,
    },
    /// Without this member, or with one more, the running members would not be a majority: start the others
    /// first.
    #[error("the change would lose quorum: start the other members first")]
    QuorumLoss,
    /// etcd changes its members only while those that vote have been connected to each other for five seconds,
    /// and they were not, also after a wait. Nothing was changed.
    #[error("can't {operation}: {condition}")]
    UnhealthyCluster {
        /// The operation.
        operation: &'static str,
        /// The members that do not answer, and the remedy.
        condition: String,
    },
    /// The cluster did not answer. Whether the call took effect is unknown; it can be repeated.
    #[error("can't {operation}: the cluster's etcd does not answer")]
    Unavailable {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: BoxError,
    },
    /// This node's member was stopped: this handle stays unusable.
    #[error("this node's etcd member has been stopped")]
    Stopped,
    /// The cluster rejected the call for another reason. A retry does not help.
    #[error("can't {operation}: the cluster's etcd rejected the request")]
    Rejected {
        /// The operation.
        operation: &'static str,
        /// The cause.
        #[source]
        source: BoxError,
    },
}

impl MembershipError {
    /// Returns whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::TooManyLearners
                | Self::LearnerNotReady { .. }
                | Self::QuorumLoss
                | Self::UnhealthyCluster { .. }
                | Self::Unavailable { .. }
        )
    }
}
