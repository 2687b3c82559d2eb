//! `[provisioner]`: volumes for the claims of a Kubernetes cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;

use nodekeel_provisioner::settings::{DEFAULT_KUBELET, check_store_directories, default_driver};
use nodekeel_provisioner::{DriverName, NodeName, StoreName};
use serde::Deserialize;

use crate::config::check::{ConfigViolation, check_absolute_path, reject_field};

pub use nodekeel_provisioner::settings::{AuditSettings, CapacitySettings};

/// `[provisioner]`: if given, the provisioner runs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionerConfig {
    /// Address and credentials of the API server.
    pub kubeconfig: PathBuf,
    /// Name of this node in the API; `None` is `node.name`.
    #[serde(default)]
    pub node: Option<NodeName>,
    /// Name of the CSI driver in storage classes and at the kubelet.
    #[serde(default = "default_driver")]
    pub driver: DriverName,
    /// Directory of volumes; `None` is `volumes` below the data directory.
    #[serde(default)]
    pub directory: Option<PathBuf>,
    /// Directories of further stores, by the name that the parameter `store` of a StorageClass refers to; each on a file
    /// system of its own.
    #[serde(default)]
    pub stores: BTreeMap<StoreName, PathBuf>,
    /// True if project quotas must enforce the size of volumes.
    #[serde(default)]
    pub quota: QuotaMode,
    /// True if volumes are mounted into pods through the kubelet.
    #[serde(default = "default_csi")]
    pub csi: bool,
    /// The kubelet's directory.
    #[serde(default = "default_kubelet")]
    pub kubelet: PathBuf,
    /// The share of the disk that may be promised to volumes.
    #[serde(default)]
    pub capacity: CapacitySettings,
    /// The audit of the limits of volumes.
    #[serde(default)]
    pub audit: AuditSettings,
}

/// True if project quotas must enforce the size of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum QuotaMode {
    /// `"require"`: without project quotas, volumes are not provisioned.
    #[default]
    Require,
    /// `"none"`: volumes have no limits; each created volume is logged with a warning.
    None,
}

impl ProvisionerConfig {
    /// Name of this node in the API, where `node` is `node.name`; `None` if that is not a valid Kubernetes
    /// name.
    pub(crate) fn node_name_or(&self, node: &str) -> Option<NodeName> {
        self.node.clone().or_else(|| NodeName::try_new(node).ok())
    }

    /// Checks the rules between keys, for a node of this name.
    pub(super) fn check(&self, node: &str) -> Result<(), ConfigViolation> {
        let paths = [
            ("provisioner.kubeconfig", Some(&self.kubeconfig)),
            ("provisioner.directory", self.directory.as_ref()),
            ("provisioner.kubelet", Some(&self.kubelet)),
        ];
        for (field, path) in paths.into_iter().filter_map(|(field, path)| Some((field, path?))) {
            check_absolute_path(field, path)?;
        }
        for path in self.stores.values() {
            check_absolute_path("provisioner.stores", path)?;
        }
        if let Err(overlap) = check_store_directories(self.directory.as_deref(), &self.stores) {
            return reject_field("provisioner.stores", overlap.to_string());
        }
        if self.node_name_or(node).is_none() {
            let message =
                format!("node.name {node:?} is not a valid Kubernetes node name; set provisioner.node");
            return reject_field("provisioner.node", message);
        }
        match self.capacity.policy() {
            Ok(_) => Ok(()),
            Err(invalid) => reject_field("provisioner.capacity.ratio", invalid.to_string()),
        }
    }
}

fn default_csi() -> bool {
    true
}

fn default_kubelet() -> PathBuf {
    DEFAULT_KUBELET.into()
}
