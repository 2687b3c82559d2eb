//! Takes a node out of its cluster.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_supervisor::Failure;
use thiserror::Error;
use tokio::time::{Instant, sleep};

use super::{GoldenTicketIssuer, InvalidNodeId, NodeId, NodeStore, NodeStoreError, TicketIssueError};
use crate::consensus::kv::{KeyRange, KvError, KvStore};
use crate::consensus::{ClusterAccess, InvalidName, Member, MembershipError, PeerUrl};
use crate::pki::{CaError, CaSealing, SubjectNames};

/// The time for which a step is tried again: a cluster whose leader was removed elects another one in some seconds.
pub(super) const RETRY_WITHIN: Duration = Duration::from_secs(20);
/// The pause between these attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Key prefix of nodes that leave, by their names.
pub(super) const DEPARTURES: &str = "/etcd-departures/";

/// A step of a removal. Each can be repeated, and finds what an earlier run has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the steps of one operation")]
pub enum RemovalStep {
    /// Withdraw its invitation, and remove its member: the only step that the cluster may refuse, and so the first.
    Member,
    /// Revoke its certificates, and seal the private key of the CA to the other voters alone.
    Certificates,
    /// Delete the ticket that it has joined by, if it is still stored: its certificates are revoked.
    Ticket,
    /// Delete its record: as long as it exists, the removal is not complete.
    Record,
}

impl RemovalStep {
    /// All steps, in their order.
    pub const ALL: [RemovalStep; 4] = [Self::Member, Self::Certificates, Self::Ticket, Self::Record];
}

/// Takes nodes out of the cluster: another one that runs, is dead, or leads it, or this one.
///
/// What is left of a node is its own journal: a removal that was interrupted is completed by another, on any node.
#[derive(Clone)]
pub struct NodeRemover {
    running: ClusterAccess,
    nodes: NodeStore,
    tickets: GoldenTicketIssuer,
}

/// A failure to remove or replace a node. Repeating the call completes what was begun.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NodeRemovalError {
    /// A node can't remove itself: with its member, it loses the access to everything else that it has in the cluster.
    #[error("node {node} is this node: type `nodectl cluster leave`, or remove it on another member")]
    ThisNode {
        /// The node.
        node: NodeId,
    },
    /// The cluster would have no voter.
    #[error(
        "node {node} is the last voter of its cluster, which would be lost with it: to give it up, type `nodectl reset`"
    )]
    LastNode {
        /// The node.
        node: NodeId,
    },
    /// This node's member has no name of a node, or the others can't go on without it.
    #[error("can't leave the cluster to the other members")]
    PrepareLeave(#[source] MembershipError),
    /// Its member was stopped or restarted before the cluster had removed it, as far as it knows.
    #[error(
        "this node was stopped while it left: once it runs again, repeat `nodectl cluster leave`, unless it says that it \
         was removed"
    )]
    Interrupted {
        /// The node.
        node: NodeId,
        /// The cause.
        source: Box<NodeRemovalError>,
    },
    /// That it leaves could not be recorded or withdrawn.
    #[error("can't record or withdraw that node {node} leaves")]
    Departure {
        /// The node.
        node: NodeId,
        /// The cause.
        source: KvError,
    },
    /// The cluster has neither a member, nor a record, nor a ticket, nor a valid certificate of it.
    #[error("the cluster has no node {node}: see the list of members")]
    Unknown {
        /// The node.
        node: NodeId,
    },
    /// The list of members could not be read or changed.
    #[error("can't remove the member of node {node}")]
    Member {
        /// The node.
        node: NodeId,
        /// The cause.
        source: MembershipError,
    },
    /// No other voter can open the private key of the cluster's CA, without which no node could be added or removed any more.
    #[error(
        "node {node} is the only voter that can open the private key of the cluster's CA: replace the others before, by \
         `nodectl cluster replace NODE`"
    )]
    OnlySigner {
        /// The node.
        node: NodeId,
    },
    /// Its certificates could not be revoked.
    #[error("can't revoke the certificates of node {node}")]
    Certificates {
        /// The node.
        node: NodeId,
        /// The cause.
        source: CaError,
    },
    /// Its ticket could not be read or deleted.
    #[error("can't read or delete the ticket of node {node}")]
    Ticket {
        /// The node.
        node: NodeId,
        /// The cause.
        source: TicketIssueError,
    },
    /// Its record could not be read or deleted.
    #[error("can't delete the record of node {node}")]
    Record {
        /// The node.
        node: NodeId,
        /// The cause.
        source: NodeStoreError,
    },
    /// The cluster has no peer URL of it, which its successor would get.
    #[error("the cluster has no address of node {node}: give that of its successor by --address")]
    NoAddress {
        /// The node.
        node: NodeId,
    },
    /// It is being replaced by a node at another URL than the given one.
    #[error(
        "node {node} is being replaced by one at {successor}: repeat the command without an address, or revoke that \
         ticket first"
    )]
    OtherSuccessor {
        /// The node.
        node: NodeId,
        /// The URL of its successor.
        successor: PeerUrl,
    },
    /// A worker has no place that a successor could get.
    #[error(
        "node {node} is a worker: type `nodectl cluster remove {node}`, and join another one, `nodectl cluster ticket create --role worker`"
    )]
    Worker {
        /// The node.
        node: NodeId,
    },
    /// The ticket of its successor could not be issued.
    #[error("can't issue the ticket of the successor of node {node}")]
    Successor {
        /// The node.
        node: NodeId,
        /// The cause.
        source: TicketIssueError,
    },
}

impl NodeRemovalError {
    /// Returns whether the run of this node's member has ended.
    fn is_end_of_run(&self) -> bool {
        let causes = std::iter::successors(Some(self as &dyn std::error::Error), |error| error.source());
        causes.into_iter().any(|cause| {
            matches!(cause.downcast_ref(), Some(KvError::Stopped))
                || matches!(cause.downcast_ref(), Some(MembershipError::Stopped))
        })
    }

    /// Returns whether the member is certainly not removed.
    fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Certificates { source: CaError::Sealed, .. }
                | Self::Member {
                    source: MembershipError::QuorumLoss | MembershipError::UnhealthyCluster { .. },
                    ..
                }
        )
    }

    /// Returns whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::ThisNode { .. }
            | Self::LastNode { .. }
            | Self::OnlySigner { .. }
            | Self::Interrupted { .. }
            | Self::Unknown { .. }
            | Self::NoAddress { .. }
            | Self::Worker { .. }
            | Self::OtherSuccessor { .. } => false,
            // A refusal names what has to change first.
            Self::Member { source, .. } | Self::PrepareLeave(source) => {
                matches!(source, MembershipError::Unavailable { .. })
            }
            Self::Certificates { source, .. } => source.is_retryable(),
            Self::Ticket { source, .. } | Self::Successor { source, .. } => source.is_retryable(),
            Self::Record { source, .. } => source.is_retryable(),
            Self::Departure { source, .. } => source.is_retryable(),
        }
    }
}

/// Makes a call that can be repeated, again and again until this time.
pub(super) async fn retry_until<T, Attempt: Future<Output = Result<T, NodeRemovalError>>>(
    deadline: Instant,
    call: impl Fn() -> Attempt,
) -> Result<T, NodeRemovalError> {
    loop {
        match call().await {
            // Nothing notifies of a leader.
            Err(error) if error.is_retryable() && Instant::now() < deadline => sleep(RETRY_PAUSE).await,
            result => return result,
        }
    }
}

impl NodeRemover {
    /// Removes nodes of the cluster in which this member takes part.
    ///
    /// # Errors
    /// [`InvalidName`], which these namespaces never cause.
    pub fn new(running: ClusterAccess) -> Result<Self, InvalidName> {
        let (module, namespace) = super::NODES_NAMESPACE;
        let nodes = NodeStore::new(running.namespaced_kv(module, namespace)?);
        // It issues no ticket, so that it needs no prefix of names.
        let tickets = GoldenTicketIssuer::with_prefix(running.clone(), "")?;
        Ok(Self { running, nodes, tickets })
    }

    /// Removes a node: its member, its certificates, its ticket and its record. A step that fails since the cluster does not
    /// answer is tried again for 20 seconds. The keys of its volume stay, without which
    /// it could not open it to be reset. Of a worker, nothing stays.
    ///
    /// # Errors
    /// [`NodeRemovalError`]. If the cluster refuses to remove the member, nothing is changed.
    pub async fn remove_node(&self, node: &NodeId) -> Result<(), NodeRemovalError> {
        self.check_other(node)?;
        let deadline = Instant::now() + RETRY_WITHIN;
        if !retry_until(deadline, || self.is_known(node)).await? {
            return Err(NodeRemovalError::Unknown { node: node.clone() });
        }
        if retry_until(deadline, || self.is_worker(node)).await? {
            let failed = |source| NodeRemovalError::Record { node: node.clone(), source };
            return retry_until(deadline, async || self.nodes.delete_worker(node).await.map_err(failed))
                .await;
        }
        // It was to be replaced, and now it is not.
        retry_until(deadline, || self.forget_replacement(node)).await?;
        for step in RemovalStep::ALL {
            // The first one may have removed the leader.
            retry_until(deadline, || self.run_step(node, step)).await?;
        }
        Ok(())
    }

    /// Removes all other nodes, when this one is the only member of its cluster: those with a record, and those with a certificate
    /// that is not revoked, also if they have never joined. Returns them. The workers stay, which have no copy of the store. It can
    /// be repeated.
    ///
    /// # Errors
    /// [`NodeRemovalError`].
    pub(crate) async fn remove_all_others(&self) -> Result<Vec<NodeId>, NodeRemovalError> {
        let deadline = Instant::now() + RETRY_WITHIN;
        let this = self.this_node()?;
        let mut nodes = retry_until(deadline, || self.list_known(&this)).await?;
        nodes.remove(&this);
        for node in &nodes {
            retry_until(deadline, || self.forget_replacement(node)).await?;
            for step in RemovalStep::ALL {
                retry_until(deadline, || self.run_step(node, step)).await?;
            }
        }
        Ok(nodes.into_iter().collect())
    }

    /// The nodes that have a record or a valid certificate, without the workers.
    async fn list_known(&self, this: &NodeId) -> Result<BTreeSet<NodeId>, NodeRemovalError> {
        let records = self.nodes.list_records().await;
        let records = records.map_err(|source| NodeRemovalError::Record { node: this.clone(), source })?;
        let (issued, revoked) = self.list_certificates(this).await?;
        let valid = issued.iter().filter(|certificate| !revoked.is_revoked(certificate));
        // Those of other clients have other names.
        let certified = valid.filter_map(|certificate| certificate.common_name()?.parse().ok());
        let voters = records.into_iter().filter(|stored| !stored.record.roles.is_worker());
        Ok(voters.map(|stored| stored.id).chain(certified).collect())
    }

    /// The certificates that were issued, and those of them that are revoked.
    async fn list_certificates(
        &self,
        node: &NodeId,
    ) -> Result<(Vec<Certificate>, RevocationList), NodeRemovalError> {
        let failed = |source| NodeRemovalError::Certificates { node: node.clone(), source };
        let cluster_ca = self.running.load_ca().await.map_err(failed)?;
        let issued = cluster_ca.list_issued().await.map_err(failed)?;
        Ok((issued, cluster_ca.revocation_list().await.map_err(failed)?))
    }

    /// Takes this node out of the cluster: its member, after the leadership is moved to another voter. All else that the cluster
    /// has of it is removed by the others, and not before: a node that was interrupted is still whole, and leaves if this is
    /// repeated. Returns its name.
    ///
    /// # Errors
    /// [`NodeRemovalError`]. If the others can't go on without it, nothing is changed.
    pub async fn leave(&self) -> Result<NodeId, NodeRemovalError> {
        let node = self.this_node()?;
        let deadline = Instant::now() + RETRY_WITHIN;
        retry_until(deadline, || self.prepare_leave(&node)).await?;
        if let Some(sealing) = self.sealing() {
            let failed = |source| NodeRemovalError::Certificates { node: node.clone(), source };
            let stays = async || sealing.has_other_opener(node.as_str()).await.map_err(failed);
            if !retry_until(deadline, stays).await? {
                return Err(NodeRemovalError::OnlySigner { node });
            }
        }
        retry_until(deadline, || self.announce_leave(&node)).await?;
        match retry_until(deadline, || self.run_step(&node, RemovalStep::Member)).await {
            Ok(()) => Ok(node),
            // The run of a removed member ends, also before it has the answer.
            Err(error) if error.is_end_of_run() => match self.running.is_removed() {
                true => Ok(node),
                false => Err(NodeRemovalError::Interrupted { node, source: Box::new(error) }),
            },
            Err(error) => {
                // After an unknown outcome it stays announced: this node may be no member any more.
                if error.is_refusal() {
                    withdraw_own_departure(&self.running).await;
                }
                Err(error)
            }
        }
    }

    /// Has the others remove the rest of a node, once it is no member any more: the first step of [`leave`](Self::leave). A node
    /// that starts again as a member withdraws it.
    ///
    /// # Errors
    /// [`NodeRemovalError::Departure`].
    pub async fn announce_leave(&self, node: &NodeId) -> Result<(), NodeRemovalError> {
        let announced = self.running.root_kv().put(departure_key(node.as_str()).as_bytes(), b"").await;
        announced.map(drop).map_err(|source| NodeRemovalError::Departure { node: node.clone(), source })
    }

    fn this_node(&self) -> Result<NodeId, NodeRemovalError> {
        let name = self.running.this_member().name.as_deref().unwrap_or_default();
        name.parse().map_err(|error: InvalidNodeId| {
            NodeRemovalError::PrepareLeave(MembershipError::Rejected {
                operation: "find this node's name",
                source: error.into(),
            })
        })
    }

    /// The CA's private key, as this node sees it if it is a voter.
    fn sealing(&self) -> Option<CaSealing> {
        let voter = self.running.voter()?;
        Some(CaSealing::new(self.running.root_kv(), self.running.cluster_members(), voter))
    }

    async fn prepare_leave(&self, node: &NodeId) -> Result<(), NodeRemovalError> {
        self.running.cluster_members().prepare_leave().await.map_err(|error| match error {
            MembershipError::QuorumLoss => NodeRemovalError::LastNode { node: node.clone() },
            other => NodeRemovalError::PrepareLeave(other),
        })
    }

    /// Refuses this node.
    pub(super) fn check_other(&self, node: &NodeId) -> Result<(), NodeRemovalError> {
        if self.running.this_member().name.as_deref() == Some(node.as_str()) {
            return Err(NodeRemovalError::ThisNode { node: node.clone() });
        }
        Ok(())
    }

    pub(super) async fn forget_replacement(&self, node: &NodeId) -> Result<(), NodeRemovalError> {
        let forgotten = self.tickets.forget_replacement(node).await;
        forgotten.map_err(|source| NodeRemovalError::Ticket { node: node.clone(), source })
    }

    /// The peer URL of a node, as far as its member or its ticket has it.
    pub(super) async fn find_peer_url(&self, node: &NodeId) -> Result<Option<PeerUrl>, NodeRemovalError> {
        let members = self.list_members_of(node).await?;
        let listed = members.iter().flat_map(|member| &member.peer_urls).find_map(|url| url.parse().ok());
        if listed.is_some() {
            return Ok(listed);
        }
        Ok(self.list_tickets_of(node).await?.into_iter().next())
    }

    pub(super) async fn is_known(&self, node: &NodeId) -> Result<bool, NodeRemovalError> {
        let record = self.nodes.load_record(node).await;
        let record = record.map_err(|source| NodeRemovalError::Record { node: node.clone(), source })?;
        Ok(record.is_some()
            || !self.list_tickets_of(node).await?.is_empty()
            || !self.list_members_of(node).await?.is_empty()
            || self.has_valid_certificate(node).await?)
    }

    /// For example of a node whose removal was interrupted, and that had not got a record yet.
    async fn has_valid_certificate(&self, node: &NodeId) -> Result<bool, NodeRemovalError> {
        let (issued, revoked) = self.list_certificates(node).await?;
        let is_of_node =
            |certificate: &&Certificate| SubjectNames::from_certificate(certificate).is_named(node.as_str());
        Ok(issued.iter().filter(is_of_node).any(|certificate| !revoked.is_revoked(certificate)))
    }

    pub(super) async fn is_worker(&self, node: &NodeId) -> Result<bool, NodeRemovalError> {
        let record = self.nodes.load_record(node).await;
        let record = record.map_err(|source| NodeRemovalError::Record { node: node.clone(), source })?;
        Ok(record.is_some_and(|stored| stored.record.roles.is_worker()))
    }

    async fn list_members_of(&self, node: &NodeId) -> Result<Vec<Member>, NodeRemovalError> {
        let listed = self.running.cluster_members().list_members().await;
        let mut listed = listed.map_err(|source| NodeRemovalError::Member { node: node.clone(), source })?;
        let tickets = self.list_tickets_of(node).await?;
        // A learner that has never started has no name: its ticket has its URL.
        let has_ticket = |member: &Member| tickets.iter().any(|url| member.has_peer_url(url));
        listed.retain(|member| match &member.name {
            Some(name) => name == node.as_str(),
            None => member.is_learner && has_ticket(member),
        });
        Ok(listed)
    }

    async fn list_tickets_of(&self, node: &NodeId) -> Result<Vec<PeerUrl>, NodeRemovalError> {
        let tickets = self.tickets.list_tickets_of(node).await;
        tickets.map_err(|source| NodeRemovalError::Ticket { node: node.clone(), source })
    }

    /// Runs one step of a removal.
    ///
    /// # Errors
    /// The error of this step.
    pub async fn run_step(&self, node: &NodeId, step: RemovalStep) -> Result<(), NodeRemovalError> {
        let id = || node.clone();
        match step {
            RemovalStep::Member => {
                // Otherwise the next step, which has to sign, could not follow.
                let failed = |source| NodeRemovalError::Certificates { node: id(), source };
                if !self.running.load_ca().await.map_err(failed)?.can_sign() {
                    return Err(failed(CaError::Sealed));
                }
                // Before: a node that has not joined yet would be added again.
                let withdrawn = self.tickets.withdraw_invitation_of(node).await;
                withdrawn.map_err(|source| NodeRemovalError::Ticket { node: id(), source })?;
                let members = self.running.cluster_members();
                for member in self.list_members_of(node).await? {
                    let removed = members.remove_member(member.id).await;
                    removed.map_err(|source| NodeRemovalError::Member { node: id(), source })?;
                }
            }
            RemovalStep::Certificates => {
                let failed = |source| NodeRemovalError::Certificates { node: id(), source };
                let cluster_ca = self.running.load_ca().await.map_err(failed)?;
                match cluster_ca.revoke_name(node.as_str()).await {
                    Ok(_) | Err(CaError::UnknownName { .. }) => {}
                    Err(error) => return Err(failed(error)),
                }
                if let Some(sealing) = self.sealing() {
                    sealing.exclude(node.as_str()).await.map_err(failed)?;
                }
            }
            RemovalStep::Ticket => {
                let deleted = self.tickets.delete_tickets_of(node).await;
                deleted.map_err(|source| NodeRemovalError::Ticket { node: id(), source })?;
            }
            RemovalStep::Record => {
                let deleted = self.nodes.delete_record(node).await;
                deleted.map_err(|source| NodeRemovalError::Record { node: id(), source })?;
            }
        }
        Ok(())
    }
}

/// Withdraws the departure of this node, which remains a member: it was interrupted or refused. Before the node can announce another.
pub(crate) async fn withdraw_own_departure(access: &ClusterAccess) {
    let name = access.this_member().name.as_deref().unwrap_or_default();
    if let Err(error) = withdraw_departure(&*access.root_kv(), name).await {
        // Harmless: the others see that it is still a member.
        tracing::debug!("can't withdraw the departure of this node: {}", Failure::new(error));
    }
}

pub(super) async fn withdraw_departure(root: &dyn KvStore, name: &str) -> Result<(), KvError> {
    let key = departure_key(name);
    // Mostly there is none, and a deletion would be an entry in the log of each member.
    match root.get(key.as_bytes()).await? {
        Some(_) => root.delete(KeyRange::single_key(key)).await.map(drop),
        None => Ok(()),
    }
}

fn departure_key(name: &str) -> String {
    format!("{DEPARTURES}{name}")
}

impl fmt::Debug for NodeRemover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeRemover").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    #[cfg(feature = "memory")]
    use std::sync::Arc;

    #[cfg(feature = "memory")]
    use tokio_util::sync::CancellationToken;

    use super::*;
    #[cfg(feature = "memory")]
    use crate::consensus::{ClusterMembers, MemberId, NewMember, memory::MemoryKv};
    #[cfg(feature = "memory")]
    use crate::pki::PendingCa;

    fn no_leader() -> NodeRemovalError {
        let source = KvError::Unavailable { operation: "get", source: "etcdserver: leader changed".into() };
        let source = CaError::Store { operation: "read the CA", source };
        NodeRemovalError::Certificates { node: node(), source }
    }

    fn node() -> NodeId {
        "nodekeel-00112233445566778899aabbccddeeff".parse().unwrap()
    }

    /// A cluster of this node, whose removal fails.
    #[cfg(feature = "memory")]
    #[derive(Debug)]
    struct FailingRemoval {
        failure: fn() -> MembershipError,
        /// Canceled by the removal, if it takes place.
        removed: Option<CancellationToken>,
    }

    #[cfg(feature = "memory")]
    #[async_trait::async_trait]
    impl ClusterMembers for FailingRemoval {
        async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
            Ok(vec![this_member()])
        }

        async fn add_learner(&self, _: &NewMember) -> Result<Member, MembershipError> {
            Err(MembershipError::TooManyLearners)
        }

        async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError> {
            Err(MembershipError::MemberNotFound { id })
        }

        async fn remove_member(&self, _: MemberId) -> Result<(), MembershipError> {
            if let Some(removed) = &self.removed {
                removed.cancel();
            }
            Err((self.failure)())
        }

        async fn prepare_leave(&self) -> Result<(), MembershipError> {
            Ok(())
        }
    }

    #[cfg(feature = "memory")]
    fn this_member() -> Member {
        Member::new(MemberId(2), Some(node().to_string()), vec!["https://192.0.2.2:7834".to_owned()], false)
    }

    /// Leaves a cluster whose answer is this failure. Returns whether the announcement is left, too.
    #[cfg(feature = "memory")]
    async fn leave(
        failure: fn() -> MembershipError,
        is_removal: bool,
    ) -> (Result<NodeId, NodeRemovalError>, bool) {
        let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
        PendingCa::generate().unwrap().save_to(Arc::clone(&root)).await.unwrap();
        let removed = CancellationToken::new();
        let members = FailingRemoval { failure, removed: is_removal.then(|| removed.clone()) };
        let access = ClusterAccess::new(this_member(), Arc::clone(&root), Arc::new(members));
        let left = NodeRemover::new(access.with_removal(removed)).unwrap().leave().await;
        (left, root.get(departure_key(node().as_str()).as_bytes()).await.unwrap().is_some())
    }

    #[cfg(feature = "memory")]
    #[tokio::test]
    async fn a_leave_that_a_stop_or_a_restart_ends_is_no_success_and_one_that_the_removal_ends_is() {
        let (left, is_announced) = leave(|| MembershipError::Stopped, false).await;
        assert!(matches!(left, Err(NodeRemovalError::Interrupted { .. })) && is_announced, "{left:?}");
        let (left, is_announced) = leave(|| MembershipError::Stopped, true).await;
        assert_eq!((left.unwrap(), is_announced), (node(), true));
    }

    #[cfg(feature = "memory")]
    #[tokio::test(start_paused = true)]
    async fn a_leave_that_is_refused_is_announced_no_longer_and_one_of_unknown_outcome_is() {
        let unhealthy = || MembershipError::UnhealthyCluster { operation: "", condition: String::new() };
        let unknown = || MembershipError::Unavailable { operation: "", source: "lost".into() };
        let outcomes: [(fn() -> MembershipError, bool); 3] =
            [(|| MembershipError::QuorumLoss, false), (unhealthy, false), (unknown, true)];
        for (outcome, expected) in outcomes {
            let (left, is_announced) = leave(outcome, false).await;
            assert!(matches!(left, Err(NodeRemovalError::Member { .. })), "{left:?}");
            assert_eq!(is_announced, expected, "{left:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_is_tried_again_until_the_cluster_has_a_leader_or_the_deadline() {
        let attempts = Cell::new(0);
        let fails_first = |failures| {
            attempts.set(0);
            let attempts = &attempts;
            move || async move {
                attempts.set(attempts.get() + 1);
                if attempts.get() <= failures { Err(no_leader()) } else { Ok(()) }
            }
        };
        let deadline = || Instant::now() + RETRY_WITHIN;
        retry_until(deadline(), fails_first(9)).await.unwrap();
        assert_eq!(attempts.get(), 10);
        let started_at = Instant::now();
        let failed = retry_until(deadline(), fails_first(u32::MAX)).await.unwrap_err();
        assert!(failed.is_retryable(), "{failed:?}");
        assert_eq!(started_at.elapsed(), RETRY_WITHIN);
        let refused = retry_until(deadline(), || async {
            Err::<(), _>(NodeRemovalError::Member { node: node(), source: MembershipError::QuorumLoss })
        });
        assert!(!refused.await.unwrap_err().is_retryable());
        assert_eq!(started_at.elapsed(), RETRY_WITHIN, "without a pause");
    }
}
