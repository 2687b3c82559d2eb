//! The network of the cluster: the address of an interface.

use std::fmt;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::Path;
use std::sync::Arc;

use nodekeel_cluster::network::{InterfaceNetwork, Network};

use super::PartDeps;
use crate::config::check::reject_field;
use crate::config::{ClusterConfig, ConfigViolation, NodedConfig};
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};

/// The part that watches `cluster.interface`, unless the program provides the network.
pub(super) struct NetworkPart {
    is_provided: bool,
}

impl NetworkPart {
    pub(super) fn new(deps: &PartDeps) -> Self {
        Self { is_provided: deps.network.is_some() }
    }
}

impl Part for NetworkPart {
    fn name(&self) -> &str {
        "network"
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        match &config.cluster {
            Some(ClusterConfig { address: None, interface: None, .. }) if !self.is_provided => {
                reject_field("cluster", "requires cluster.address or cluster.interface; set one of the two")
            }
            _ => Ok(()),
        }
    }

    /// The cluster waits for the address itself.
    fn dependencies(&self, _: &NodedConfig) -> Vec<DependencyEntry> {
        Vec::new()
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(cluster) = &planner.config().cluster else { return };
        let Some(interface) = cluster.interface.clone().filter(|_| !self.is_provided) else { return };
        // The cluster reports it too, as a problem.
        let skipped = check_reachable(cluster);
        planner.add(PlannedService::new("root.network", NetworkPlan { interface }).skip(skipped));
    }
}

/// The watch of an interface.
#[derive(Debug)]
struct NetworkPlan {
    interface: String,
}

impl fmt::Display for NetworkPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the address of {}", self.interface)
    }
}

impl PlannedRunnable for NetworkPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let network = InterfaceNetwork::new(&self.interface);
        let service = network.watch_service();
        // The cluster is prepared after this part, and finds the network by this type.
        node.extensions().insert::<Arc<dyn Network>>(Arc::new(network));
        Ok(PreparedRunnable::new(service))
    }
}

/// The reason why other nodes could not reach this one with its configured address.
pub(super) fn check_reachable(cluster: &ClusterConfig) -> Option<String> {
    if let Some(address) = cluster.address {
        // A bind succeeds only at an address of this machine, and UDP port 0 conflicts with no program.
        return match UdpSocket::bind((address, 0)) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Some(format!(
                "no interface of this machine has the address {address}: add it, or correct cluster.address"
            )),
            // Any other error does not mean that the address is missing.
            _ => None,
        };
    }
    let interface = cluster.interface.as_deref()?;
    let exists = Path::new("/sys/class/net").join(interface).exists();
    (!exists).then(|| format!("interface {interface} does not exist: add it, or correct cluster.interface"))
}
