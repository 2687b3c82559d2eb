//! What a configured cluster comes to on this machine.

use std::fmt;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};

use super::{Planned, Planner, SHORT, Service};
use crate::config::{ClusterConfig, EtcdConfig};
use crate::layout::OfCluster;

/// The node's place in a cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Cluster {
    /// What agrees with the other members.
    pub member: Member,
    /// What the node keeps of it.
    pub directory: PathBuf,
    /// Its settings.
    pub config: ClusterConfig,
}

/// What agrees with the other members of a cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Member {
    /// An etcd.
    Etcd {
        /// The program.
        binary: PathBuf,
        /// Its settings.
        config: EtcdConfig,
    },
    /// This process alone, until it ends: for development, where there is no etcd.
    Memory {
        /// Why.
        why: String,
    },
}

impl Planner<'_> {
    pub(super) fn cluster(&mut self, cluster: &ClusterConfig, etcd: &EtcdConfig) {
        let given = etcd.binary.as_deref().unwrap_or(Path::new("etcd"));
        let (binary, why) = self.binary("cluster", Some(given), "Debian: apt-get install etcd-server");
        let member = match why {
            Some(why) => Member::Memory { why },
            None => Member::Etcd { binary, config: etcd.clone() },
        };
        let unreachable = unreachable(cluster);
        // The address of an interface is known when the node runs.
        if let (None, Some(address), Member::Etcd { .. }) = (&unreachable, cluster.address, &member) {
            self.ports(address, etcd);
        }
        let skipped = unreachable.and_then(|reason| self.missing("cluster", reason));
        let skipped = skipped.or_else(|| {
            let needs_root = cluster.hostname && !nix::unistd::geteuid().is_root();
            let reason =
                "setting the hostname needs root: run noded as root, or set cluster.hostname = false";
            needs_root.then(|| self.missing("cluster", reason.into())).flatten()
        });
        let directory = match member {
            Member::Etcd { .. } => self.root.extend::<OfCluster>().expect(SHORT).cluster.path().to_owned(),
            Member::Memory { .. } => {
                self.root.run.extend::<OfCluster>().expect(SHORT).cluster.path().to_owned()
            }
        };
        let planned = Cluster { member, directory, config: cluster.clone() };
        self.services.push(Planned {
            dn: "root.cluster".into(),
            service: Service::Cluster(Box::new(planned)),
            skipped,
        });
    }
}

/// Why no other node could reach this one as it is configured.
fn unreachable(cluster: &ClusterConfig) -> Option<String> {
    if let Some(address) = cluster.address {
        return match UdpSocket::bind((address, 0)) {
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => Some(format!(
                "no interface of this machine has the address {address}: add it, or correct cluster.address"
            )),
            _ => None,
        };
    }
    let interface = cluster.interface.as_deref()?;
    let is_there = Path::new("/sys/class/net").join(interface).exists();
    (!is_there).then(|| format!("there is no interface {interface}: add it, or correct cluster.interface"))
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.config.address, &self.config.interface) {
            (Some(address), _) => write!(f, "a member at {address}, ")?,
            (None, interface) => {
                write!(f, "a member at the address of {}, ", interface.as_deref().unwrap_or_default())?;
            }
        }
        match &self.member {
            Member::Etcd { binary, config } => write!(
                f,
                "by {}, clients on port {}, peers on {}, data in {}",
                binary.display(),
                config.client_port,
                config.peer_port,
                self.directory.display()
            ),
            Member::Memory { why } => write!(f, "in memory, which lasts until noded ends: {why}"),
        }
    }
}
