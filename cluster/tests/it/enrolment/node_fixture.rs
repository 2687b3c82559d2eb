//! A node that can be started repeatedly: its disks, its address, its network; and a cluster that it can join.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryNetwork};
use nodekeel_cluster::consensus::{DEFAULT_PEER_PORT, Member, PeerUrl};
use nodekeel_cluster::enrolment::{
    ClusterNode, ConsensusFactory, Deps, EnrolCallError, Enroller, EnrolmentSettings, FailureReason,
    NodeMembership,
};
use nodekeel_cluster::network::{NodeAddress, StaticNetwork};
use nodekeel_cluster::node::{
    EnrolRequest, EnrolmentSource, EnrolmentSources, EspEnrolment, GoldenTicket, GoldenTicketIssuer,
    JoinTicket, JoinTicketLimits, LocalNames, StoredNode, TicketVoter, VoterKeyDigest,
};
use nodekeel_localstorage::tree::{LayoutFile, LayoutTarget};
use nodekeel_localstorage::volume::DirectoryVolume;
use nodekeel_localstorage::{Dir, FileMode, OsFileStore};
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Context, Failure, RestartPolicy, RunnableState, Supervisor, WaitReason,
};
use tempfile::TempDir;
use testbed::ReservedPort;

/// Longer than anything here takes, unless it hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A node with its disks.
pub(crate) struct NodeFixture {
    pub(crate) disks: TempDir,
    pub(crate) network: Arc<StaticNetwork>,
    pub(crate) consensus: ConsensusFactory,
    pub(crate) settings: EnrolmentSettings,
    /// Where the others reach its member.
    pub(crate) url: PeerUrl,
    /// Redeems its join ticket.
    pub(crate) enroller: Option<Arc<dyn Enroller>>,
    /// Those of an etcd.
    pub(crate) _ports: Vec<ReservedPort>,
}

impl NodeFixture {
    /// A node alone on its network.
    pub(crate) fn single_node() -> Self {
        Self::on_network(&MemoryNetwork::new(), "192.0.2.1")
    }

    /// A node at this address of a network.
    pub(crate) fn on_network(network: &MemoryNetwork, address: &str) -> Self {
        Self::in_memory(Arc::new(MemoryConsensus::on_network(network)), address)
    }

    /// A node with this consensus in memory.
    pub(crate) fn in_memory(consensus: Arc<MemoryConsensus>, address: &str) -> Self {
        Self::with_consensus(ConsensusFactory::without_volume(consensus), peer_url(address))
    }

    /// A node with this consensus, whose member is reached there.
    pub(crate) fn with_consensus(consensus: ConsensusFactory, url: PeerUrl) -> Self {
        // In memory, if the host has `/dev/shm`: these tests kill only the process, and each step syncs.
        let disks = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
        create_disks(disks.path());
        let mut settings = EnrolmentSettings::default();
        settings.bootstrap = true;
        let network = Arc::new(StaticNetwork::new(node_address(url.host())));
        Self { disks, network, consensus, settings, url, enroller: None, _ports: Vec::new() }
    }

    pub(crate) fn dir(&self, name: &str) -> Dir {
        Dir::open(self.disks.path().join(name)).expect("opened")
    }

    /// Where the node looks for its ticket.
    pub(crate) fn ticket_file(&self) -> LayoutFile {
        let files = OsFileStore::new(self.dir("esp"));
        let esp = self.disks.path().join("esp");
        let placed: EspEnrolment = LayoutTarget::new(Arc::new(files), esp).create_layout().expect("placed");
        placed.enrolment.clone()
    }

    pub(crate) fn give_ticket(&self, ticket: &GoldenTicket) {
        self.ticket_file().write(&ticket.to_config()).expect("written");
    }

    pub(crate) fn give_join_ticket(&self, ticket: &JoinTicket) {
        self.ticket_file().write(ticket.to_text().as_bytes()).expect("written");
    }

    /// The dependencies of the node at its start.
    pub(crate) fn deps(&self) -> Deps {
        let ticket = EnrolmentSource::EspFile(self.ticket_file());
        Deps {
            journal_dir: self.dir("esp"),
            enrolment: EnrolmentSources::new([ticket]),
            network: self.network.clone(),
            volume: Arc::new(DirectoryVolume::new(self.dir("data"))),
            consensus: self.consensus.clone(),
            local_names: LocalNames::default(),
            enroller: self.enroller.clone(),
        }
    }

    /// Starts the node.
    pub(crate) fn start(&self) -> NodeRun {
        NodeRun::start_once(ClusterNode::new(self.deps(), self.settings.clone()))
    }

    /// A run that has to succeed.
    pub(crate) async fn run_to_running(&self) -> (NodeRun, NodeMembership) {
        let run = self.start();
        let membership = run.wait_finished().await.expect("the node is in its cluster");
        (run, membership)
    }

    /// A run that has to fail.
    pub(crate) async fn run_to_failure(&self) -> FailureReason {
        let run = self.start();
        let reason = run.wait_finished().await.expect_err("the run fails");
        run.stop().await;
        reason
    }
}

/// A started node.
pub(crate) struct NodeRun {
    pub(crate) node: ClusterNode,
    supervisor: Supervisor,
    /// Of etcd's notification socket.
    _sockets: TempDir,
}

impl NodeRun {
    /// One run without restarts.
    pub(crate) fn start_once(cluster: ClusterNode) -> Self {
        Self::start_with_policy(
            cluster,
            ChildPolicy { restart: RestartPolicy::Never, ..ChildPolicy::default() },
        )
    }

    /// Runs that follow each other.
    pub(crate) fn start_with_restarts(cluster: ClusterNode) -> Self {
        let backoff = Backoff { initial: Duration::from_millis(1), ..Backoff::default() };
        Self::start_with_policy(cluster, ChildPolicy { backoff, ..ChildPolicy::default() })
    }

    fn start_with_policy(node: ClusterNode, policy: ChildPolicy) -> Self {
        let child = node.clone();
        let sockets = tempfile::tempdir().unwrap();
        let builder = Supervisor::builder().notify_directory(sockets.path());
        let supervisor = builder.start(move |ctx: Context| {
            let child = child.clone();
            async move {
                ctx.run_group([ChildSpec::new("cluster", child).policy(policy)])?;
                ctx.signal_ready()?;
                Err::<(), Failure>(ctx.canceled().await.into())
            }
        });
        Self { node, supervisor, _sockets: sockets }
    }

    /// The result of the run, which has to end soon.
    pub(crate) async fn wait_finished(&self) -> Result<NodeMembership, FailureReason> {
        // The run starts once the tree has started it: a handle that nothing runs would wait for ever.
        tokio::time::timeout(TIMEOUT, self.node.wait_finished()).await.expect("the run ends soon")
    }

    /// The phases of the run, in their order.
    pub(crate) fn phases(&self) -> String {
        let phases: Vec<_> = self.node.phase_history().iter().map(ToString::to_string).collect();
        phases.join(" ")
    }

    pub(crate) async fn list_members(&self) -> Vec<Member> {
        let members = self.node.cluster_members().expect("a running node");
        members.list_members().await.expect("listed")
    }

    pub(crate) async fn list_records(&self) -> Vec<StoredNode> {
        self.node.node_store().expect("a running node").list_records().await.expect("listed")
    }

    /// The node's state in the tree, and what it waits for; `None` before it is in the tree.
    pub(crate) fn status_in_tree(&self) -> Option<(RunnableState, WaitReason)> {
        let node = self.supervisor.snapshot().into_iter().find(|node| &*node.dn == "root.cluster");
        node.map(|node| (node.state, node.waiting_for))
    }

    /// Stops the node.
    pub(crate) async fn stop(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{:?}", report.stragglers);
    }
}

/// Creates the disks of a node in this directory.
pub(crate) fn create_disks(disks: &Path) {
    let top = Dir::open(disks).expect("opened");
    for name in ["esp", "data", "run"] {
        top.ensure_dir(name, FileMode::PRIVATE_DIR).expect("created");
    }
}

pub(crate) fn node_address(address: &str) -> NodeAddress {
    NodeAddress::try_new(parse_ip(address)).expect("a unicast address")
}

pub(crate) fn parse_ip(address: &str) -> IpAddr {
    address.parse().expect("an address")
}

/// The whole chain of an error.
pub(crate) fn error_chain(error: impl Into<Failure>) -> String {
    error.into().to_string()
}

/// The peer URL of a node in memory.
pub(crate) fn peer_url(address: &str) -> PeerUrl {
    PeerUrl::new(parse_ip(address), DEFAULT_PEER_PORT)
}

/// A voter that a node of this process calls, by this key.
#[derive(Debug)]
pub(crate) struct InProcessVoter {
    node: ClusterNode,
    key: String,
    /// False while it does not answer.
    pub(crate) is_reachable: AtomicBool,
}

impl InProcessVoter {
    pub(crate) fn new(node: &ClusterNode, key: &str) -> Self {
        Self { node: node.clone(), key: key.to_owned(), is_reachable: AtomicBool::new(true) }
    }

    pub(crate) async fn create_ticket(&self, limits: &JoinTicketLimits) -> JoinTicket {
        let voter = TicketVoter {
            address: "192.0.2.1:7836".parse().expect("an address"),
            key: VoterKeyDigest::of_spki(b"a key"),
        };
        let tickets = self.node.join_tickets().expect("a running node");
        tickets.create_ticket(limits, &[voter], SystemTime::now()).await.expect("created")
    }
}

#[async_trait]
impl Enroller for InProcessVoter {
    fn caller(&self) -> Option<String> {
        Some(self.key.clone())
    }

    async fn enrol(&self, voter: &TicketVoter, request: &EnrolRequest) -> Result<Vec<u8>, EnrolCallError> {
        let unavailable = |source| EnrolCallError::Unavailable { voter: voter.address, source };
        if !self.is_reachable.load(Ordering::SeqCst) {
            return Err(unavailable("no answer".into()));
        }
        let tickets = self.node.join_tickets().map_err(|error| unavailable(error.into()))?;
        tickets.redeem_ticket(&self.key, request, SystemTime::now()).await.map_err(|error| {
            if error.is_refusal() {
                EnrolCallError::Refused(error_chain(error))
            } else {
                unavailable(error.into())
            }
        })
    }
}

/// A cluster of one in memory, which issues tickets.
pub(crate) struct MemoryCluster {
    pub(crate) network: MemoryNetwork,
    pub(crate) first: NodeRun,
    _disks: NodeFixture,
}

impl MemoryCluster {
    pub(crate) async fn start() -> Self {
        let network = MemoryNetwork::new();
        let mut fixture = NodeFixture::on_network(&network, "192.0.2.1");
        fixture.settings.golden_tickets = true;
        let (first, _) = fixture.run_to_running().await;
        Self { network, first, _disks: fixture }
    }

    pub(crate) fn issuer(&self) -> GoldenTicketIssuer {
        self.first.node.ticket_issuer().expect("golden tickets are enabled")
    }

    pub(crate) async fn issue(&self, address: &str) -> GoldenTicket {
        self.issuer().issue_ticket(&peer_url(address)).await.expect("created")
    }

    /// A node at this address, without a ticket.
    pub(crate) fn node(&self, address: &str) -> NodeFixture {
        NodeFixture::on_network(&self.network, address)
    }

    /// A node at this address, with its ticket.
    pub(crate) async fn invite(&self, address: &str) -> (NodeFixture, GoldenTicket) {
        let (fixture, ticket) = (self.node(address), self.issue(address).await);
        fixture.give_ticket(&ticket);
        (fixture, ticket)
    }

    /// Stops the first node. No other cluster was created.
    pub(crate) async fn stop(self) {
        self.first.stop().await;
        assert_eq!(self.network.created_count(), 1, "a second cluster");
    }
}

/// Waits until the node says that it waits for its address.
pub(crate) async fn wait_without_address(run: &NodeRun) {
    wait_condition(run, "the address is not set").await;
}

/// Waits until this keeps the node from taking part in its cluster.
pub(crate) async fn wait_condition(run: &NodeRun, condition: &str) {
    let told = async {
        while run.node.condition().as_deref() != Some(condition) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, told).await.expect("it says so");
}
