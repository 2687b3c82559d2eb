//! The shipped parts, each in a folder of its own: its tables of the configuration and their rules, its
//! plan, its runnable, its health, its metrics and its calls of the control API.

pub(crate) mod api;
mod api_server;
pub(crate) mod cluster;
pub(crate) mod containerd;
pub(crate) mod control;
mod deps;
pub(crate) mod etcd;
mod kernel;
mod metrics;
mod network;
pub(crate) mod provisioner;
pub(crate) mod service;
pub(crate) mod storage;
pub(crate) mod worker;

use std::path::Path;
use std::sync::Arc;

use crate::config::{ConfigError, NodedConfig, read_text};
use crate::part::{Part, Parts};
use crate::plan::{NodePlan, PlanError, PlanSource};
use crate::search_path::SearchPath;

pub use crate::dn::KERNEL as KERNEL_DN;
pub(crate) use deps::PartDeps;
pub use storage::unlock::{ClusterKeySource, ClusterKeysFuture};

/// The shipped parts, in the order of their start, with what the program provides instead of their defaults.
pub(crate) fn shipped_parts(deps: PartDeps) -> Parts {
    let provides_volume = deps.volume.is_some();
    let parts: Vec<Arc<dyn Part>> = vec![
        Arc::new(control::ControlPart),
        Arc::new(api_server::ApiPart),
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
    Parts::new(parts, provides_volume)
}

impl NodedConfig {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// The file can't be read, or see [`parse_toml`](Self::parse_toml).
    pub fn read_file(file: &Path) -> Result<Self, ConfigError> {
        Self::parse_toml(file, &read_text(file)?)
    }

    /// Parses and checks the text of a file for a node of the shipped parts; `file` is only used in errors.
    ///
    /// # Errors
    /// The text is not TOML, a key is unknown, a value is invalid, or the dependencies of services are.
    pub fn parse_toml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        shipped_parts(PartDeps::default()).parse_config(file, text)
    }
}

impl NodePlan {
    /// Plans a node of the shipped parts. With `dev`, skips services with missing requirements, and the services
    /// that depend on them.
    ///
    /// # Errors
    /// Missing requirements without `dev`, and conflicts: see [`PlanError`].
    pub fn from_config(config: NodedConfig, search: SearchPath, dev: bool) -> Result<Self, PlanError> {
        let parts = shipped_parts(PartDeps::default());
        PlanSource { parts, search, dev, file: None, data: None, default_data: None, beside_node: false }
            .plan(config, None)
    }
}
