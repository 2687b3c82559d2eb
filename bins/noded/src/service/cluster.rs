//! The node's place in a cluster, as a service of the node.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Settings};
use nodekeel_cluster::network::{Address, InterfaceNetwork, InterfaceService, Network, StaticNetwork};
use nodekeel_cluster::node::{Enrolment, EspEnrolment, LocalNames};
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::Directory;
use nodekeel_supervisor::{Context, SpawnError};

use crate::data::{self, DataError};
use crate::layout::{ClusterPart, OfCluster, Root};
use crate::plan::{self, Member};

/// The cluster, and what finds out where the node is reached.
#[derive(Debug, Clone)]
pub(crate) struct Prepared {
    pub(crate) cluster: Cluster,
    network: Option<InterfaceService>,
}

impl Prepared {
    /// Places what it keeps; it does nothing yet.
    pub(crate) fn new(plan: &plan::Cluster, root: &Root, grace: Duration) -> Result<Self, DataError> {
        let part = place(plan, root)?;
        let (network, service) = network(plan);
        let enrolment =
            part.state.extend::<EspEnrolment>().map_err(|error| data::placed(root.path(), error))?;
        let deps = Deps {
            state: Dir::open(part.state.path())?,
            enrolment: Enrolment::usual(enrolment.enrolment),
            network,
            volume: Arc::new(Directory::new(Dir::open(part.volume.path())?)),
            consensus: consensus(&plan.member, grace),
            local: LocalNames {
                hosts: Some(part.names.hosts),
                machine_id: Some(part.names.machine_id),
                set_hostname: plan.config.hostname,
            },
        };
        let mut settings = Settings::default();
        settings.deadline = plan.config.deadline;
        settings.golden_tickets = plan.config.golden_tickets;
        Ok(Self { cluster: Cluster::new(deps, settings), network: service })
    }
}

impl Prepared {
    /// Runs it below the root: first what it waits for.
    pub(crate) fn run(self, ctx: &Context) -> Result<(), SpawnError> {
        if let Some(network) = self.network {
            ctx.run("network", network)?;
        }
        ctx.run("cluster", self.cluster)
    }
}

fn place(plan: &plan::Cluster, root: &Root) -> Result<ClusterPart, DataError> {
    let placed = match plan.member {
        Member::Etcd { .. } => root.extend::<OfCluster>(),
        Member::Memory { .. } => {
            // What its members agreed on is gone, and with it the cluster that the files are of.
            Dir::open(root.run.path())?.remove_tree("cluster")?;
            root.run.extend::<OfCluster>()
        }
    };
    placed.map(|of| of.cluster).map_err(|error| data::placed(root.path(), error))
}

fn network(plan: &plan::Cluster) -> (Arc<dyn Network>, Option<InterfaceService>) {
    if let Some(address) = plan.config.address {
        let address = Address::try_new(address).expect("a parsed configuration has one of one host");
        return (Arc::new(StaticNetwork::new(address)), None);
    }
    let network = InterfaceNetwork::new(plan.config.interface.as_deref().unwrap_or_default());
    let service = network.service();
    (Arc::new(network), Some(service))
}

fn consensus(member: &Member, grace: Duration) -> ConsensusSource {
    match member {
        Member::Memory { .. } => ConsensusSource::anywhere(Arc::new(MemoryConsensus::new())),
        Member::Etcd { binary, config } => {
            let mut etcd = EtcdConfig::new(binary);
            etcd.client_port = config.client_port.get();
            etcd.peer_port = config.peer_port.get();
            etcd.extra_args.clone_from(&config.extra_args);
            etcd.grace = grace;
            ConsensusSource::etcd(etcd)
        }
    }
}
