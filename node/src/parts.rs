//! The parts of a node: the shipped ones, and yours.

pub(crate) mod cluster;
pub(crate) mod containerd;
pub(crate) mod control;
pub(crate) mod etcd;
mod kernel;
mod metrics;
mod network;
pub(crate) mod provisioner;
pub(crate) mod service;
pub(crate) mod storage;

use std::fmt;
use std::sync::Arc;

use nodekeel_cluster::enrolment::ConsensusFactory;
use nodekeel_cluster::network::Network;
use nodekeel_localstorage::volume::DataVolume;

use crate::config::{ConfigSection, ConfigViolation, NodedConfig, VolumeKind};
use crate::dependency::DependencyEntry;
use crate::dn::is_valid_runnable_name;
use crate::part::Part;

pub use crate::dn::KERNEL as KERNEL_DN;
pub use storage::unlock::{ClusterKeySource, ClusterKeysFuture};

/// What the shipped parts use instead of their defaults.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct PartDeps {
    /// The data volume of the node: everything that must survive its machine lies on it. `root.storage` opens it, and
    /// creates it if it is blank. Default: the directory `data` below the data directory.
    pub volume: Option<Arc<dyn DataVolume>>,
    /// The network of the cluster. Default: `cluster.address`, or the address of `cluster.interface`.
    pub network: Option<Arc<dyn Network>>,
    /// The consensus of the cluster. Default: etcd.
    pub consensus: Option<ConsensusFactory>,
    /// Where a node that starts cold gets its cluster unlock key: for `storage.cold_start = "peers"`. Default: none.
    pub cluster_keys: Option<Arc<dyn ClusterKeySource>>,
}

/// The parts of a node, in the order of their start.
#[derive(Clone)]
pub struct Parts {
    parts: Vec<Arc<dyn Part>>,
    /// Whether the program provides the data volume.
    provides_volume: bool,
    /// Names that were to be replaced or removed, and do not exist.
    unknown: Vec<String>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Part::name)).finish()
    }
}

impl Parts {
    /// The shipped parts: `control`, `metrics`, `kernel`, `storage`, `etcd`, `network`, `cluster`, `containerd`, `provisioner` and `service`.
    pub fn shipped() -> Self {
        Self::with_deps(PartDeps::default())
    }

    /// The shipped parts with these dependencies.
    pub fn with_deps(deps: PartDeps) -> Self {
        let provides_volume = deps.volume.is_some();
        let parts: Vec<Arc<dyn Part>> = vec![
            Arc::new(control::ControlPart),
            Arc::new(metrics::MetricsPart),
            Arc::new(kernel::KernelPart),
            Arc::new(storage::StoragePart::new(&deps)),
            Arc::new(etcd::EtcdPart),
            Arc::new(network::NetworkPart::new(&deps)),
            Arc::new(cluster::ClusterPart::new(deps)),
            Arc::new(containerd::ContainerdPart),
            Arc::new(provisioner::ProvisionerPart),
            Arc::new(service::ServicePart),
        ];
        Self { parts, provides_volume, unknown: Vec::new() }
    }

    /// Adds a part. It starts after the shipped ones, and before the services of the configuration.
    #[must_use]
    pub fn with(self, part: impl Part) -> Self {
        self.add_part(Arc::new(part))
    }

    pub(crate) fn add_part(mut self, part: Arc<dyn Part>) -> Self {
        let at =
            self.parts.iter().position(|known| known.name() == service::NAME).unwrap_or(self.parts.len());
        self.parts.insert(at, part);
        self
    }

    /// Replaces the part of the same name. A name that does not exist is an error of the configuration.
    #[must_use]
    pub fn replace(self, part: impl Part) -> Self {
        self.replace_part(Arc::new(part))
    }

    pub(crate) fn replace_part(mut self, part: Arc<dyn Part>) -> Self {
        match self.parts.iter_mut().find(|known| known.name() == part.name()) {
            Some(known) => *known = part,
            None => self.unknown.push(part.name().to_owned()),
        }
        self
    }

    /// Removes a part. Its section in the configuration is then unknown, as is a name that does not exist.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        let count = self.parts.len();
        self.parts.retain(|known| known.name() != name);
        if self.parts.len() == count {
            self.unknown.push(name.to_owned());
        }
        self
    }

    /// Whether the data volume can be looked at before root.storage has opened it: it is a directory.
    pub(crate) fn is_volume_known(&self, config: &NodedConfig) -> bool {
        !self.provides_volume && config.storage.kind == VolumeKind::Directory
    }

    /// Whether the program provides the data volume.
    pub(crate) fn provide_volume(&self) -> bool {
        self.provides_volume
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn Part> {
        self.parts.iter().map(AsRef::as_ref)
    }

    /// The names by which parts and services depend on them.
    pub(crate) fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        self.iter().flat_map(|part| part.dependencies(config)).collect()
    }

    /// Checks the names of the parts and of their sections.
    pub(crate) fn check_names(&self) -> Result<(), ConfigViolation> {
        let names: Vec<_> = self.iter().map(Part::name).collect();
        let refuse = |message: String| Err(ConfigViolation::new("", message));
        if let Some(name) = self.unknown.first() {
            return refuse(format!("unknown part {name:?}; known: {}", names.join(", ")));
        }
        for (index, name) in names.iter().enumerate() {
            if !is_valid_runnable_name(name) {
                return refuse(format!("invalid part name {name:?}; use 1 to 64 of a-z, 0-9, '_' and '-'"));
            }
            if names[..index].contains(name) {
                return refuse(format!(
                    "duplicate part name {name:?}; use another name, or replace the part"
                ));
            }
        }
        let sections: Vec<_> = self.iter().flat_map(Part::sections).collect();
        for (index, section) in sections.iter().enumerate() {
            let path = section.path();
            if !section.is_valid() {
                return refuse(format!("invalid section name {path:?} of a part; use the part's name"));
            }
            // Shipped parts may read the same table.
            let conflicts =
                |other: &ConfigSection| other.path() == path && (other.is_own() || section.is_own());
            if sections[..index].iter().any(conflicts) {
                return refuse(format!("duplicate section name {path:?} of two parts; use another for one"));
            }
        }
        Ok(())
    }
}
