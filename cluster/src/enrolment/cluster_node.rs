//! A node in its cluster: the runnable that enrols it, and the handle for everything else.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::volume::ErasePolicy;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;
use tokio::sync::watch;

use super::bootstrap_record::BootstrapRecord;
use super::data_volume::MountedVolume;
use super::deps::Deps;
use super::driver;
use super::failure::FailureReason;
use super::journal::TestHook;
use super::state::{EnrolmentPhase, EnrolmentState, NodeMembership, WaitCause};
use crate::consensus::kv::KvStore;
use crate::consensus::{
    self, InvalidName, MemberRecovery, MembershipError, RecoveryError, RecoveryPlan, RecoveryState,
    StatusWatch,
};
use crate::node::{
    DEFAULT_NODE_PREFIX, GoldenTicketIssuer, JoinTickets, NODES_NAMESPACE, NodeId, NodeRemover, NodeStore,
    TicketIssueError,
};

/// The settings of a node's enrolment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EnrolmentSettings {
    /// Prefix of nodes' names. Default: [`DEFAULT_NODE_PREFIX`].
    pub node_prefix: String,
    /// Longest time a run may take until the node is in the cluster, including the wait for an address; the time in which
    /// its member receives data of the cluster does not count.
    /// Default: two minutes; etcd starts in less than two seconds, and a DHCP lease may take a minute.
    pub deadline: Duration,
    /// True if the node bootstraps a cluster if it has no ticket, once: see [`BootstrapRecord`]. Default: no, it
    /// waits for a ticket. [`ClusterNode::request_bootstrap`] does the same by hand.
    pub bootstrap: bool,
    /// The record that the permission to bootstrap is used up. Default: a file in
    /// [`Deps::journal_dir`], which is outside of the data volume. If the two are on one disk, choose another.
    pub bootstrap_record: Option<BootstrapRecord>,
    /// The file with the snapshot of [`ClusterNode::request_restore`], on a disk with room for it. It is removed once it is
    /// restored. Default: none, and no restore.
    pub snapshot: Option<PathBuf>,
    /// The data that the creation of the data volume may destroy. Default: nothing. Ignored once the node is in a
    /// cluster.
    pub erase: ErasePolicy,
    /// True if the node is a Kubernetes worker. Default: yes.
    pub kubernetes_worker: bool,
    /// True if this node issues golden tickets. Default: no. A golden ticket is a bearer credential of its
    /// node.
    pub golden_tickets: bool,
}

impl Default for EnrolmentSettings {
    fn default() -> Self {
        Self {
            node_prefix: DEFAULT_NODE_PREFIX.to_owned(),
            deadline: Duration::from_secs(120),
            bootstrap: false,
            bootstrap_record: None,
            snapshot: None,
            erase: ErasePolicy::Nothing,
            kubernetes_worker: true,
            golden_tickets: false,
        }
    }
}

/// A node in its cluster: a runnable that enrols it, and a cloneable handle for everything else.
///
/// It signals ready in [`EnrolmentState::Running`], while its member takes part; otherwise it is not ready, with
/// its [condition](Self::condition). A failed run returns its [`FailureReason`] as the error;
/// the supervisor's policy decides whether another run follows. A run also ends when the node's address
/// changes, since other nodes no longer reach its member: the next run starts the member at the new address.
/// Each run resumes from the journal, with a new state machine that starts in [`EnrolmentState::New`].
/// The supervisor runs one run at a time.
#[derive(Clone)]
pub struct ClusterNode(pub(super) Arc<SharedState>);

pub(super) struct SharedState {
    pub(super) deps: Deps,
    pub(super) settings: EnrolmentSettings,
    pub(super) volume: MountedVolume,
    pub(super) test_hook: TestHook,
    published: watch::Sender<PublishedState>,
    /// An operator has asked the node for a cluster, and no ticket has been found since.
    pub(super) cluster_request: watch::Sender<Option<ClusterRequest>>,
    /// Changes when an operator has requested the recovery of the cluster from this node.
    pub(super) recovery_requests: watch::Sender<()>,
}

/// What an operator asks of a node that waits for a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterRequest {
    /// Bootstrap a cluster.
    Bootstrap,
    /// Restore one from the staged snapshot.
    Restore,
}

/// The state that all handles see.
#[derive(Clone, Debug)]
pub(super) struct PublishedState {
    pub(super) state: EnrolmentState,
    pub(super) phase_history: Vec<EnrolmentPhase>,
    /// The status of the member, once it was started.
    pub(super) member: Option<StatusWatch>,
    /// The recovery of the cluster from that member.
    pub(super) recovery: Option<Arc<dyn MemberRecovery>>,
    /// The condition that keeps the node from taking part at present, if it is known.
    pub(super) condition: Option<Arc<str>>,
    /// The failure of the run before, until the node is in its cluster.
    pub(super) last_failure: Option<Arc<str>>,
}

/// The node is not in a cluster at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NodeUnavailable {
    /// The node is not [`EnrolmentState::Running`].
    #[error("the node's enrolment is {state}: the cluster is accessible once it is Running")]
    NotRunning {
        /// The present state.
        state: EnrolmentPhase,
    },
    /// The node is running, but its member has exited and is being restarted: wait, or retry.
    #[error("the node's etcd member does not serve requests yet: wait until it does")]
    MemberNotServing,
}

/// The cause for which a node does not bootstrap or restore a cluster on request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BootstrapRefusal {
    /// Only a node that [waits](EnrolmentState::Waiting) for a ticket bootstraps or restores a cluster.
    #[error(
        "the node's enrolment is {state}: only a node that is Waiting for a ticket can bootstrap or restore a cluster"
    )]
    NotWaiting {
        /// The present state.
        state: EnrolmentPhase,
    },
    /// This host has been in a cluster before, or has a ticket.
    #[error("{0}")]
    UsedUp(WaitCause),
}

/// The cause for which keys are not available.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KvAccessError {
    /// The node is not in a cluster at the moment.
    #[error("can't read or write the cluster's keys in etcd")]
    Unavailable(#[source] NodeUnavailable),
    /// The module or namespace is invalid.
    #[error("invalid key namespace in the cluster's etcd")]
    Namespace(#[source] InvalidName),
}

/// The cause for which tickets are not available here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TicketAccessError {
    /// Tickets are disabled: see [`EnrolmentSettings::golden_tickets`].
    #[error("this node does not issue golden tickets")]
    Disabled,
    /// The node is not in a cluster at the moment.
    #[error("can't issue or revoke a ticket")]
    Unavailable(#[source] NodeUnavailable),
    /// The cluster's tickets are not accessible.
    #[error("can't read or change the cluster's tickets")]
    Issue(#[source] TicketIssueError),
}

/// The cause for which the cluster was not recovered from this node.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClusterRecoveryError {
    /// Its member is not started, or it is not in a cluster yet.
    #[error(
        "the node's enrolment is {state}: a cluster is recovered from a node that has been in it, while its member starts"
    )]
    NoMember {
        /// The present state.
        state: EnrolmentPhase,
    },
    /// The node is not the one that was named.
    #[error(
        "this is node {node}: run the command on node {given}, or name this one to recover the cluster from it"
    )]
    OtherNode {
        /// The name that was given.
        given: NodeId,
        /// The node.
        node: NodeId,
    },
    /// Its cluster is in memory.
    #[error("the cluster's store is in memory: nothing of it can be recovered")]
    InMemory,
    /// The member refuses.
    #[error("the cluster is not recovered from this node")]
    Member(#[source] RecoveryError),
    /// A majority of the voters answered when the member started again. Nothing was changed.
    #[error(
        "a majority of the voters has come back: the cluster goes on with its members, and nothing was changed"
    )]
    MajorityReturned,
    /// The recovered cluster does not list its members.
    #[error("the recovery has ended, and the list of members can't be read")]
    Members(#[source] MembershipError),
}

impl ClusterNode {
    /// A node that has not started enrolment: run it.
    pub fn new(deps: Deps, settings: EnrolmentSettings) -> Self {
        Self::build(deps, settings, Arc::new(|_: &str| {}))
    }

    /// Like [`new`](Self::new), with a hook that is called by name at each point at which a test may kill the
    /// run. A panic of the hook is a panic of the run, which ends at that point.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_test_hook(
        deps: Deps,
        settings: EnrolmentSettings,
        hook: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        Self::build(deps, settings, Arc::new(hook))
    }

    fn build(deps: Deps, settings: EnrolmentSettings, hook: TestHook) -> Self {
        let start = PublishedState {
            state: EnrolmentState::New,
            phase_history: vec![EnrolmentPhase::New],
            member: None,
            recovery: None,
            condition: None,
            last_failure: None,
        };
        let published = watch::Sender::new(start);
        Self(Arc::new(SharedState {
            deps,
            settings,
            volume: MountedVolume::default(),
            test_hook: hook,
            published,
            cluster_request: watch::Sender::new(None),
            recovery_requests: watch::Sender::new(()),
        }))
    }

    /// The state now.
    pub fn current_state(&self) -> EnrolmentState {
        self.0.published.borrow().state.clone()
    }

    /// Closes and unmounts the data volume between two runs, so that its disk can be closed: the next run opens it again.
    /// It blocks, and does nothing if the volume is not open. A volume that can't be unmounted is logged, and stays
    /// mounted.
    pub fn release_volume(&self) {
        if let Err(error) = self.0.volume.release(&*self.0.deps.volume) {
            tracing::warn!("can't unmount the cluster's data volume: {}", Failure::new(error));
        }
    }

    /// The condition that keeps the node from taking part in its cluster at present, as a clause: what it waits for,
    /// or the failure of its last run. `None` if nothing is known to, as while it is [`EnrolmentState::Running`] and its
    /// member takes part.
    pub fn condition(&self) -> Option<Arc<str>> {
        let published = self.0.published.borrow();
        let failed = |failure: &Arc<str>| format!("the last run failed: {failure}").into();
        published.condition.clone().or_else(|| published.last_failure.as_ref().map(failed))
    }

    /// Tells a node that waits for a ticket to bootstrap a cluster. A ticket that it finds replaces the request, also
    /// one that it rejects, or that is removed before the node has its address.
    ///
    /// # Errors
    /// [`BootstrapRefusal`].
    pub fn request_bootstrap(&self) -> Result<(), BootstrapRefusal> {
        // The borrow keeps the state from changing until the request is set.
        let published = self.0.published.borrow();
        match &published.state {
            EnrolmentState::Waiting(WaitCause::NoInstruction) => {}
            EnrolmentState::Waiting(cause) => return Err(BootstrapRefusal::UsedUp(cause.clone())),
            other => return Err(BootstrapRefusal::NotWaiting { state: other.phase() }),
        }
        self.0.cluster_request.send_replace(Some(ClusterRequest::Bootstrap));
        Ok(())
    }

    /// Tells a node that waits for a ticket to restore a cluster from the snapshot that was staged at
    /// [`EnrolmentSettings::snapshot`]: as a new node, the only one of that cluster. A ticket that it finds replaces the
    /// request.
    ///
    /// # Errors
    /// [`BootstrapRefusal`].
    pub fn request_restore(&self) -> Result<(), BootstrapRefusal> {
        let published = self.0.published.borrow();
        match &published.state {
            EnrolmentState::Waiting(cause @ WaitCause::Redemption) => {
                return Err(BootstrapRefusal::UsedUp(cause.clone()));
            }
            EnrolmentState::Waiting(_) => {}
            other => return Err(BootstrapRefusal::NotWaiting { state: other.phase() }),
        }
        self.0.cluster_request.send_replace(Some(ClusterRequest::Restore));
        Ok(())
    }

    /// Withdraws what was requested by [`request_bootstrap`](Self::request_bootstrap) or
    /// [`request_restore`](Self::request_restore): the next run of a node that was reset waits for a ticket again.
    pub fn withdraw_request(&self) {
        self.0.cluster_request.send_replace(None);
    }

    /// The states of the present run, the current one last. A run that was [`EnrolmentPhase::Running`] and
    /// has ended shows [`EnrolmentPhase::Failed`] after it.
    pub fn phase_history(&self) -> Vec<EnrolmentPhase> {
        self.0.published.borrow().phase_history.clone()
    }

    /// Waits until the state differs from the one given, and returns it.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_phase_left(&self, kind: EnrolmentPhase) -> EnrolmentState {
        let mut published = self.0.published.subscribe();
        let left = published.wait_for(|now| now.state.phase() != kind).await;
        let left = left.map(|now| now.state.clone());
        match left {
            Ok(state) => state,
            // The sender exists as long as this handle.
            Err(_) => std::future::pending().await,
        }
    }

    /// Waits until the run has finished, and returns its result; at once if it already has. Any number of
    /// tasks may wait.
    ///
    /// # Errors
    /// The cause for which the node is not in a cluster: [`FailureReason::RunEnded`] if it was. Does not wait for a run that
    /// may follow.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_finished(&self) -> Result<NodeMembership, FailureReason> {
        let mut published = self.0.published.subscribe();
        loop {
            match &published.borrow_and_update().state {
                EnrolmentState::Running(membership) => return Ok(membership.clone()),
                EnrolmentState::Failed(reason) => return Err(reason.clone()),
                EnrolmentState::New
                | EnrolmentState::Waiting(_)
                | EnrolmentState::CreatingCluster(_)
                | EnrolmentState::Joining { .. }
                | EnrolmentState::Restarting(_) => {}
            }
            if published.changed().await.is_err() {
                // The sender exists as long as this handle.
                return std::future::pending().await;
            }
        }
    }

    /// Waits until the node does not take part in its cluster, and returns the [condition](Self::condition) that keeps it from that;
    /// at once if it does not.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_condition(&self) -> Arc<str> {
        let mut published = self.0.published.subscribe();
        let takes_part =
            |now: &PublishedState| matches!(now.state, EnrolmentState::Running(_)) && now.condition.is_none();
        // The sender exists as long as this handle.
        let _ = published.wait_for(|now| !takes_part(now)).await;
        let phase = || format!("its enrolment is {}", self.current_state().phase()).into();
        self.condition().unwrap_or_else(phase)
    }

    /// The node's membership in its cluster.
    ///
    /// # Errors
    /// [`NodeUnavailable::NotRunning`].
    pub fn cluster_identity(&self) -> Result<NodeMembership, NodeUnavailable> {
        match &self.0.published.borrow().state {
            EnrolmentState::Running(membership) => Ok(membership.clone()),
            other => Err(NodeUnavailable::NotRunning { state: other.phase() }),
        }
    }

    /// The node's member, and access to everything that it offers.
    ///
    /// # Errors
    /// [`NodeUnavailable`].
    pub fn cluster_access(&self) -> Result<consensus::ClusterAccess, NodeUnavailable> {
        // The member may serve before the enrolment is complete: only a node that is Running gives access to
        // it.
        self.cluster_identity()?;
        let member = self.0.published.borrow().member.clone();
        member
            .and_then(|status| status.current_status().cluster_access().cloned())
            .ok_or(NodeUnavailable::MemberNotServing)
    }

    /// The keys of one module's namespace.
    ///
    /// # Errors
    /// [`KvAccessError`].
    pub fn namespaced_kv(&self, module: &str, namespace: &str) -> Result<Arc<dyn KvStore>, KvAccessError> {
        let member = self.cluster_access().map_err(KvAccessError::Unavailable)?;
        member.namespaced_kv(module, namespace).map_err(KvAccessError::Namespace)
    }

    /// All keys, including those of every module.
    ///
    /// # Errors
    /// [`NodeUnavailable`].
    pub fn root_kv(&self) -> Result<Arc<dyn KvStore>, NodeUnavailable> {
        Ok(self.cluster_access()?.root_kv())
    }

    /// The list of members, and its changes.
    ///
    /// # Errors
    /// [`NodeUnavailable`].
    pub fn cluster_members(&self) -> Result<Arc<dyn consensus::ClusterMembers>, NodeUnavailable> {
        Ok(self.cluster_access()?.cluster_members())
    }

    /// The records of the cluster's nodes.
    ///
    /// # Errors
    /// [`KvAccessError::Unavailable`].
    pub fn node_store(&self) -> Result<NodeStore, KvAccessError> {
        let (module, namespace) = NODES_NAMESPACE;
        Ok(NodeStore::new(self.namespaced_kv(module, namespace)?))
    }
}

impl ClusterNode {
    /// Takes other nodes out of the cluster.
    ///
    /// # Errors
    /// [`KvAccessError`].
    pub fn node_remover(&self) -> Result<NodeRemover, KvAccessError> {
        let member = self.cluster_access().map_err(KvAccessError::Unavailable)?;
        NodeRemover::new(member).map_err(KvAccessError::Namespace)
    }

    /// The members that a recovery of the cluster from this node, of this name, takes out.
    ///
    /// # Errors
    /// [`ClusterRecoveryError`].
    pub async fn plan_recovery(&self, node: &NodeId) -> Result<RecoveryPlan, ClusterRecoveryError> {
        self.member_recovery(node)?.plan().await.map_err(ClusterRecoveryError::Member)
    }

    /// Makes a cluster of one of this node, of this name, when a majority of the voters is lost for ever: with its data, and without
    /// all other nodes, which can't come back. Returns once the node is in it.
    ///
    /// # Errors
    /// [`ClusterRecoveryError`].
    ///
    /// # Cancel safety
    /// Once it is requested, the recovery goes on without this future.
    pub async fn recover_cluster(&self, node: &NodeId) -> Result<RecoveryPlan, ClusterRecoveryError> {
        let recovery = self.member_recovery(node)?;
        let plan = recovery.request().await.map_err(ClusterRecoveryError::Member)?;
        self.0.recovery_requests.send_replace(());
        let mut published = self.0.published.subscribe();
        loop {
            let is_running = matches!(published.borrow_and_update().state, EnrolmentState::Running(_));
            if is_running
                && recovery.state().await.map_err(ClusterRecoveryError::Member)? == RecoveryState::None
            {
                break;
            }
            if published.changed().await.is_err() {
                // The sender exists as long as this handle.
                return std::future::pending().await;
            }
        }
        match self.cluster_members() {
            Ok(members) => match members.list_members().await.map_err(ClusterRecoveryError::Members)?.len() {
                1 => Ok(plan),
                _ => Err(ClusterRecoveryError::MajorityReturned),
            },
            // It restarts, and is recovered.
            Err(_) => Ok(plan),
        }
    }

    fn member_recovery(&self, given: &NodeId) -> Result<Arc<dyn MemberRecovery>, ClusterRecoveryError> {
        let published = self.0.published.borrow();
        let node = match &published.state {
            EnrolmentState::Running(membership) => Some(&membership.node_id),
            EnrolmentState::Restarting(run) => run.node_id(),
            _ => None,
        };
        let no_member = || ClusterRecoveryError::NoMember { state: published.state.phase() };
        let node = node.ok_or_else(no_member)?;
        if node != given {
            return Err(ClusterRecoveryError::OtherNode { given: given.clone(), node: node.clone() });
        }
        if published.member.is_none() {
            return Err(no_member());
        }
        published.recovery.clone().ok_or(ClusterRecoveryError::InMemory)
    }

    /// Issues golden tickets for nodes that are to join, if [enabled](EnrolmentSettings::golden_tickets).
    ///
    /// # Errors
    /// [`TicketAccessError`].
    pub fn ticket_issuer(&self) -> Result<GoldenTicketIssuer, TicketAccessError> {
        if !self.0.settings.golden_tickets {
            return Err(TicketAccessError::Disabled);
        }
        self.any_ticket_issuer()
    }

    /// The cluster's join tickets.
    ///
    /// # Errors
    /// [`TicketAccessError`].
    pub fn join_tickets(&self) -> Result<JoinTickets, TicketAccessError> {
        self.any_ticket_issuer().map(JoinTickets::new)
    }

    fn any_ticket_issuer(&self) -> Result<GoldenTicketIssuer, TicketAccessError> {
        let member = self.cluster_access().map_err(TicketAccessError::Unavailable)?;
        GoldenTicketIssuer::new(member, self.0.settings.node_prefix.as_str())
            .map_err(TicketAccessError::Issue)
    }
}

impl SharedState {
    /// Publishes a state. The failure of a run stays known until the node is in its cluster; a request to bootstrap,
    /// until the node finds a ticket or is in a cluster.
    pub(super) fn publish(&self, mut published: PublishedState) {
        self.published.send_modify(|before| {
            // Within the change of the state, which `request_bootstrap` excludes while it sets the request.
            if published.state.ends_bootstrap_request() {
                self.cluster_request.send_replace(None);
            }
            published.last_failure = match &published.state {
                EnrolmentState::Running(_) => None,
                // A run that was stopped has not failed: the next one resumes it.
                EnrolmentState::Failed(FailureReason::Stopped { .. } | FailureReason::RunEnded) => None,
                EnrolmentState::Failed(reason) => Some(Failure::new(reason.clone()).to_string().into()),
                // A new run keeps the failure of the one before until it is in its cluster.
                _ => before.last_failure.take(),
            };
            *before = published;
        });
    }
}

impl Runnable for ClusterNode {
    fn run(&self, ctx: Context) -> RunFuture {
        let shared = Arc::clone(&self.0);
        Box::pin(driver::run_enrolment(shared, ctx))
    }
}

impl fmt::Debug for ClusterNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterNode").field("state", &self.current_state().phase()).finish_non_exhaustive()
    }
}
