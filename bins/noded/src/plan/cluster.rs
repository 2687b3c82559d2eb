//! Plans cluster membership on this machine.

use std::fmt;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};

use super::{PLACED_IN_MEMORY, PlannedService, Planner, ServicePlan};
use crate::config::{ClusterConfig, EtcdConfig};
use crate::layout::ClusterLayout;

/// Cluster membership of the node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClusterPlan {
    /// Consensus with the other members.
    pub consensus: ConsensusBackend,
    /// Its directory.
    pub directory: PathBuf,
    /// The file that records that the node has been in a cluster. A cluster in memory has its own.
    pub bootstrap_record: PathBuf,
    /// Its settings.
    pub config: ClusterConfig,
}

/// Consensus with the other members of a cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConsensusBackend {
    /// An etcd.
    Etcd {
        /// The program.
        binary: PathBuf,
        /// Its settings.
        config: EtcdConfig,
    },
    /// In the memory of this process, for development without etcd; lost when noded exits.
    Memory {
        /// Why etcd is not used.
        reason: String,
    },
}

impl Planner<'_> {
    pub(super) fn plan_cluster(&mut self, cluster: &ClusterConfig, etcd: &EtcdConfig) {
        let given = etcd.binary.as_deref().unwrap_or(Path::new("etcd"));
        let (binary, reason) =
            self.find_binary("cluster", Some(given), "Debian: apt-get install etcd-server");
        let consensus = match reason {
            Some(reason) => ConsensusBackend::Memory { reason },
            None => ConsensusBackend::Etcd { binary, config: etcd.clone() },
        };
        let unreachable = check_reachable(cluster);
        // The address of an interface is known when the node runs.
        if let (None, Some(address), ConsensusBackend::Etcd { .. }) =
            (&unreachable, cluster.address, &consensus)
        {
            self.check_ports(address, etcd);
        }
        let skipped = unreachable.and_then(|reason| self.skip_or_report("cluster", reason));
        let skipped = skipped.or_else(|| {
            let needs_root = cluster.hostname && !nix::unistd::geteuid().is_root();
            let reason =
                "setting the hostname needs root: run noded as root, or set cluster.hostname = false";
            needs_root.then(|| self.skip_or_report("cluster", reason.into())).flatten()
        });
        let directory = match consensus {
            ConsensusBackend::Etcd { .. } => {
                self.root.add_layout::<ClusterLayout>().expect(PLACED_IN_MEMORY).cluster.path().to_owned()
            }
            ConsensusBackend::Memory { .. } => {
                self.root.run.add_layout::<ClusterLayout>().expect(PLACED_IN_MEMORY).cluster.path().to_owned()
            }
        };
        let bootstrap_record = match &consensus {
            ConsensusBackend::Etcd { .. } => bootstrap_record(cluster, self.root.path()),
            ConsensusBackend::Memory { .. } => directory.join("state/bootstrapped"),
        };
        if cluster.bootstrap_record.is_some() && bootstrap_record.starts_with(self.root.path()) {
            self.problems.push(format!(
                "cluster.bootstrap_record: {} is in the data directory and would be lost with it: use a file outside",
                bootstrap_record.display()
            ));
        }
        let planned = ClusterPlan { consensus, directory, bootstrap_record, config: cluster.clone() };
        self.services.push(PlannedService {
            dn: "root.cluster".into(),
            service: ServicePlan::Cluster(Box::new(planned)),
            skip_reason: skipped,
        });
    }
}

/// The configured record of the bootstrap, or the one beside the data directory.
fn bootstrap_record(cluster: &ClusterConfig, data: &Path) -> PathBuf {
    cluster.bootstrap_record.clone().unwrap_or_else(|| {
        let mut beside = data.as_os_str().to_owned();
        beside.push(".bootstrapped");
        beside.into()
    })
}

/// Why other nodes could not reach this one with its configured address.
fn check_reachable(cluster: &ClusterConfig) -> Option<String> {
    if let Some(address) = cluster.address {
        return match UdpSocket::bind((address, 0)) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Some(format!(
                "no interface of this machine has the address {address}: add it, or correct cluster.address"
            )),
            _ => None,
        };
    }
    let interface = cluster.interface.as_deref()?;
    let exists = Path::new("/sys/class/net").join(interface).exists();
    (!exists).then(|| format!("interface {interface} does not exist: add it, or correct cluster.interface"))
}

impl fmt::Display for ClusterPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bootstrap =
            if self.config.bootstrap { "bootstraps a cluster once if it has no ticket, " } else { "" };
        match (&self.config.address, &self.config.interface) {
            (Some(address), _) => write!(f, "a member at {address}, ")?,
            (None, interface) => {
                write!(f, "a member at the address of {}, ", interface.as_deref().unwrap_or_default())?;
            }
        }
        f.write_str(bootstrap)?;
        match &self.consensus {
            ConsensusBackend::Etcd { binary, config } => write!(
                f,
                "by {}, clients on port {}, peers on {}, data in {}",
                binary.display(),
                config.client_port,
                config.peer_port,
                self.directory.display()
            ),
            ConsensusBackend::Memory { reason } => write!(f, "in memory, lost when noded exits: {reason}"),
        }
    }
}
