//! What each member of a cluster reports of itself, as this node's member sees it.

use std::collections::BTreeSet;
use std::time::SystemTime;

use super::{Member, PeerUrl};

/// The members of a cluster with their own reports, as of the last check of this node's member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClusterReport {
    /// The members, in the order of their ids; empty before the first check.
    pub members: Vec<MemberReport>,
    /// Since when the data of this node's member could not be compared with that of any other voter, so that nobody would see
    /// damage to it; `None` if it was at the last attempt, or is the only voter.
    pub uncompared_since: Option<SystemTime>,
    /// Why the peer port of this node's member admits each certificate of the cluster's CA; `None` if it admits members alone.
    pub open_peer_port: Option<OpenPeerPort>,
}

/// The reason for which a peer port admits certificates of the cluster's CA that are no member's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenPeerPort {
    /// There are, or may be, certificates of a release that gave members no name of their own.
    Unnamed {
        /// The names of members that present a certificate without one.
        members: BTreeSet<String>,
        /// The names of members that present none now.
        silent: BTreeSet<String>,
        /// The URLs of unused tickets with such a certificate, and of members that have not started.
        tickets: BTreeSet<PeerUrl>,
    },
    /// No member and no ticket has such a certificate any more: from the next start on, the member's etcd requires the name.
    Restart,
}

/// A member, and its report.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberReport {
    /// The member as the cluster lists it.
    pub member: Member,
    /// When it was first found not to answer; `None` if it answers, or has not started yet.
    pub silent_since: Option<SystemTime>,
    /// What it answers; `None` if it does not answer.
    pub facts: Option<MemberFacts>,
    /// True if its data was compared, and differs from that of a majority, which this node's member is of.
    pub differs: bool,
}

/// What a member answers of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberFacts {
    /// The version of its program.
    pub version: String,
    /// Its store, which it reports to its own node alone.
    pub store: Option<StoreFacts>,
}

/// A member's report of its store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreFacts {
    /// The index of the last entry of the log that it has applied.
    pub applied_index: u64,
    /// The size of its database, in bytes.
    pub store_bytes: u64,
    /// The part of it in use, in bytes: what is left after a defragmentation.
    pub used_bytes: u64,
    /// The size at which it rejects writes, in bytes; `None` if its release does not report it.
    pub quota_bytes: Option<u64>,
}

impl ClusterReport {
    /// A report of these members.
    pub fn new(members: Vec<MemberReport>) -> ClusterReport {
        ClusterReport { members, uncompared_since: None, open_peer_port: None }
    }

    /// The voters that do not answer, each with the time since when.
    pub fn silent_voters(&self) -> impl Iterator<Item = (&Member, SystemTime)> {
        let voters = self.members.iter().filter(|report| !report.member.is_learner);
        voters.filter_map(|report| Some((&report.member, report.silent_since?)))
    }

    /// The number of voters.
    pub fn voter_count(&self) -> usize {
        self.members.iter().filter(|report| !report.member.is_learner).count()
    }
}

impl MemberReport {
    /// A member that answers, or has not started yet.
    pub fn new(member: Member, facts: Option<MemberFacts>) -> MemberReport {
        MemberReport { member, silent_since: None, facts, differs: false }
    }

    /// A member that has not answered since this time.
    pub fn silent(member: Member, since: SystemTime) -> MemberReport {
        MemberReport { member, silent_since: Some(since), facts: None, differs: false }
    }
}
