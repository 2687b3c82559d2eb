//! A running member, and the list of members.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::kv::{KvStore, NamespacedKv};
use super::{ClusterReport, InvalidName, Member, MemberId, MembershipError, NewMember, StoreMaintenance};
use crate::pki::{CaError, ClusterCa, Voter};

/// A member that takes part. It is cheap to clone; once its run has ended, all its calls fail.
#[derive(Clone, Debug)]
pub struct ClusterAccess {
    this_member: Member,
    root_kv: Arc<dyn KvStore>,
    cluster_members: Arc<dyn ClusterMembers>,
    report: Option<watch::Receiver<ClusterReport>>,
    maintenance: Option<Arc<dyn StoreMaintenance>>,
    voter: Option<Arc<Voter>>,
    removed: CancellationToken,
}

impl ClusterAccess {
    /// A member with its keys and the list of members: for implementations.
    pub fn new(
        this_member: Member,
        root_kv: Arc<dyn KvStore>,
        cluster_members: Arc<dyn ClusterMembers>,
    ) -> ClusterAccess {
        ClusterAccess {
            this_member,
            root_kv,
            cluster_members,
            report: None,
            maintenance: None,
            voter: None,
            removed: CancellationToken::new(),
        }
    }

    /// The same, with the newest report of the members.
    #[must_use]
    pub fn with_report(self, report: watch::Receiver<ClusterReport>) -> ClusterAccess {
        ClusterAccess { report: Some(report), ..self }
    }

    /// The same, with the maintenance of its store.
    #[must_use]
    pub fn with_maintenance(self, maintenance: Arc<dyn StoreMaintenance>) -> ClusterAccess {
        ClusterAccess { maintenance: Some(maintenance), ..self }
    }

    /// The same, with the key by which this node opens the private key of the CA; without it, only one that is not sealed is used.
    #[must_use]
    pub fn with_voter(self, voter: Option<Arc<Voter>>) -> ClusterAccess {
        ClusterAccess { voter, ..self }
    }

    /// The same, with a token that is canceled once it is known that the cluster has removed this member: before its calls fail as
    /// stopped.
    #[must_use]
    pub fn with_removal(self, removed: CancellationToken) -> ClusterAccess {
        ClusterAccess { removed, ..self }
    }

    /// Returns whether the run of this member has ended since the cluster has removed it, and not for a stop or a restart.
    pub fn is_removed(&self) -> bool {
        self.removed.is_cancelled()
    }

    /// This node as a voter, if the implementation seals the private key of the CA.
    pub fn voter(&self) -> Option<Arc<Voter>> {
        self.voter.clone()
    }

    /// The cluster's CA. It can sign if its private key is sealed to this node.
    ///
    /// # Errors
    /// Those of [`ClusterCa::load_sealed`].
    pub async fn load_ca(&self) -> Result<ClusterCa, CaError> {
        match &self.voter {
            Some(voter) => ClusterCa::load_sealed(self.root_kv(), voter).await,
            None => ClusterCa::load_ca(self.root_kv()).await,
        }
    }

    /// The maintenance of the store; `None` if the implementation needs none.
    pub fn store_maintenance(&self) -> Option<Arc<dyn StoreMaintenance>> {
        self.maintenance.clone()
    }

    /// What the members report of themselves, as of the last check; empty if the implementation does not check.
    pub fn cluster_report(&self) -> ClusterReport {
        self.report.as_ref().map(|report| report.borrow().clone()).unwrap_or_default()
    }

    /// This node's member, as it was listed when it started to take part.
    pub fn this_member(&self) -> &Member {
        &self.this_member
    }

    /// All keys of the cluster, including those of every module.
    pub fn root_kv(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.root_kv)
    }

    /// The keys of one module's namespace. Their prefix is `MODULE:NAMESPACE`, and they start with a slash:
    /// `cluster:enrolment/nodes/x`.
    ///
    /// # Errors
    /// [`InvalidName::Namespace`].
    pub fn namespaced_kv(&self, module: &str, namespace: &str) -> Result<Arc<dyn KvStore>, InvalidName> {
        Ok(Arc::new(NamespacedKv::new(self.root_kv(), module, namespace)?))
    }

    /// The list of members.
    pub fn cluster_members(&self) -> Arc<dyn ClusterMembers> {
        Arc::clone(&self.cluster_members)
    }
}

/// The list of members, and its changes.
///
/// # Contract
/// - The cluster answers each call, never a local copy of the list.
/// - Whether a call that fails as [`MembershipError::Unavailable`] took effect is unknown. All calls can be
///   repeated: `add_learner` of an added member returns that member; `promote_member` of a voter and
///   `remove_member` of a removed member succeed.
/// - Voting members promote a learner as soon as it is in sync. `promote_member` is for callers that do not
///   want to rely on that.
/// - Dropping a call's future discards its answer, but does not cancel the call.
#[async_trait]
pub trait ClusterMembers: Debug + Send + Sync {
    /// All members, in the order of their ids.
    ///
    /// # Errors
    /// [`MembershipError::Unavailable`], [`MembershipError::Stopped`], [`MembershipError::Rejected`].
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError>;

    /// Adds a learner, or returns the member that already has this URL. The cluster has one learner at a
    /// time.
    ///
    /// # Errors
    /// [`MembershipError::TooManyLearners`], [`MembershipError::QuorumLoss`], and those of
    /// [`list_members`](Self::list_members).
    async fn add_learner(&self, member: &NewMember) -> Result<Member, MembershipError>;

    /// Gives a learner its vote.
    ///
    /// # Errors
    /// [`MembershipError::LearnerNotReady`], [`MembershipError::MemberNotFound`], and those of
    /// [`list_members`](Self::list_members).
    async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError>;

    /// Removes a member, unless it is the last one, or the others would lose quorum without it.
    ///
    /// # Errors
    /// [`MembershipError::QuorumLoss`], and those of [`list_members`](Self::list_members).
    async fn remove_member(&self, id: MemberId) -> Result<(), MembershipError>;

    /// Prepares the removal of this member by itself: moves the leadership to another voter, if this member leads.
    ///
    /// # Errors
    /// [`MembershipError::QuorumLoss`] if there is no other voter, [`MembershipError::UnhealthyCluster`] if no majority of the
    /// others answers, and those of [`list_members`](Self::list_members).
    async fn prepare_leave(&self) -> Result<(), MembershipError>;
}
