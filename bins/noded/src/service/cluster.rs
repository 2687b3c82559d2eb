//! Cluster membership as a service of the node.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::{BootstrapRecord, ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::{InterfaceNetwork, InterfaceService, Network, NodeAddress, StaticNetwork};
use nodekeel_cluster::node::{EnrolmentSource, EnrolmentSources, EspEnrolment, LocalNames};
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_localstorage::volume::DirectoryVolume;
use nodekeel_supervisor::{AddChildError, Context};

use crate::data::{self, DataError};
use crate::layout::{ClusterDir, ClusterLayout, DataLayout};
use crate::plan::{self, ConsensusBackend};

/// The cluster, and the service that watches the node's address.
#[derive(Debug, Clone)]
pub(crate) struct ClusterService {
    pub(crate) cluster: ClusterNode,
    network: Option<InterfaceService>,
}

impl ClusterService {
    /// Places its directories; starts nothing yet.
    pub(crate) fn new(
        plan: &plan::ClusterPlan,
        root: &DataLayout,
        grace: Duration,
    ) -> Result<Self, DataError> {
        let part = place_cluster(plan, root)?;
        let (network, service) = new_network(plan);
        let deps = Deps {
            journal_dir: Dir::open(part.state.path())?,
            enrolment: enrolment_sources(&part.state),
            network,
            volume: Arc::new(DirectoryVolume::new(Dir::open(part.volume.path())?)),
            consensus: new_consensus(&plan.consensus, grace),
            local_names: LocalNames {
                hosts: Some(part.names.hosts),
                machine_id: Some(part.names.machine_id),
                set_hostname: plan.config.hostname,
            },
        };
        let mut settings = EnrolmentSettings::default();
        settings.deadline = plan.config.deadline;
        settings.golden_tickets = plan.config.golden_tickets;
        settings.bootstrap = plan.config.bootstrap;
        settings.bootstrap_record = Some(BootstrapRecord::new(&plan.bootstrap_record));
        Ok(Self { cluster: ClusterNode::new(deps, settings), network: service })
    }
}

impl ClusterService {
    /// Starts its runnables below the root: the network first, since the cluster waits for it.
    pub(crate) fn start_children(self, ctx: &Context) -> Result<(), AddChildError> {
        if let Some(network) = self.network {
            ctx.run_child("network", network)?;
        }
        ctx.run_child("cluster", self.cluster)
    }
}

/// Where the ticket may be. What is at its path but is not a file concerns only a node that reads it: one in its
/// cluster does not.
fn enrolment_sources(state: &LayoutDir) -> EnrolmentSources {
    match state.add_layout::<EspEnrolment>() {
        Ok(placed) => EnrolmentSources::default_sources(placed.enrolment),
        Err(_) => EnrolmentSources::new([EnrolmentSource::FwCfg(state.path().join("enrolment.pb"))]),
    }
}

fn place_cluster(plan: &plan::ClusterPlan, root: &DataLayout) -> Result<ClusterDir, DataError> {
    let placed = match plan.consensus {
        ConsensusBackend::Etcd { .. } => root.add_layout::<ClusterLayout>(),
        ConsensusBackend::Memory { .. } => {
            // The keys of a cluster in memory are lost with the process, so files of the former one are
            // stale.
            Dir::open(root.run.path())?.remove_tree("cluster")?;
            root.run.add_layout::<ClusterLayout>()
        }
    };
    placed.map(|of| of.cluster).map_err(|error| data::placement_error(root.path(), error))
}

fn new_network(plan: &plan::ClusterPlan) -> (Arc<dyn Network>, Option<InterfaceService>) {
    if let Some(address) = plan.config.address {
        let address = NodeAddress::try_new(address).expect("the configuration checks its address");
        return (Arc::new(StaticNetwork::new(address)), None);
    }
    let network = InterfaceNetwork::new(plan.config.interface.as_deref().unwrap_or_default());
    let service = network.watch_service();
    (Arc::new(network), Some(service))
}

fn new_consensus(backend: &ConsensusBackend, grace: Duration) -> ConsensusFactory {
    match backend {
        ConsensusBackend::Memory { .. } => ConsensusFactory::without_volume(Arc::new(MemoryConsensus::new())),
        ConsensusBackend::Etcd { binary, config } => {
            let mut etcd = EtcdConfig::new(binary);
            etcd.client_port = config.client_port.get();
            etcd.peer_port = config.peer_port.get();
            etcd.extra_args.clone_from(&config.extra_args);
            etcd.grace = grace;
            ConsensusFactory::etcd_on_volume(etcd)
        }
    }
}
