//! `[provisioner]`: volumes for the claims of a Kubernetes cluster.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use nodekeel_provisioner::{DriverName, NodeName};
use serde::de::{Deserializer, Error};
use serde::{Deserialize, de};

use super::Config;
use super::graph::{Wrong, check_absolute, wrong};

/// `[provisioner]`: it runs where a Kubernetes API is given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionerConfig {
    /// How the API server is reached, and as whom.
    pub kubeconfig: PathBuf,
    /// What the API calls this node; `None` is the node's own name.
    #[serde(default, deserialize_with = "some_name")]
    pub node: Option<NodeName>,
    /// The name by which claims' classes and the kubelet know the driver.
    #[serde(default = "default_driver", deserialize_with = "name")]
    pub driver: DriverName,
    /// Where volumes are kept; `None` is `volumes` below the data directory.
    #[serde(default)]
    pub directory: Option<PathBuf>,
    /// Whether volumes must have limits that bind.
    #[serde(default)]
    pub quota: Quota,
    /// Whether pods are given volumes through the kubelet.
    #[serde(default = "default_csi")]
    pub csi: bool,
    /// The kubelet's directory.
    #[serde(default = "default_kubelet")]
    pub kubelet: PathBuf,
}

/// Whether volumes must have limits that bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Quota {
    /// `"require"`: without project quotas there are no volumes.
    #[default]
    Require,
    /// `"none"`: volumes have no limits; each one that is made says so in the log.
    None,
}

impl ProvisionerConfig {
    /// What the API calls this node, of which the configuration calls the node so; `None` where that is no such name.
    pub(crate) fn node_name(&self, node: &str) -> Option<NodeName> {
        self.node.clone().or_else(|| NodeName::try_new(node).ok())
    }
}

fn default_driver() -> DriverName {
    DriverName::try_new("volumes.nodekeel").expect("it is a domain")
}

fn default_csi() -> bool {
    true
}

fn default_kubelet() -> PathBuf {
    "/var/lib/kubelet".into()
}

fn name<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<T, D::Error> {
    struct Text<T>(std::marker::PhantomData<T>);
    impl<T: FromStr<Err: Display>> de::Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a string")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }
    deserializer.deserialize_str(Text(std::marker::PhantomData))
}

fn some_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NodeName>, D::Error> {
    name(deserializer).map(Some)
}

/// Checks what no field can know alone.
pub(super) fn check(config: &Config) -> Result<(), Wrong> {
    let Some(provisioner) = &config.provisioner else { return Ok(()) };
    let paths = [
        ("provisioner.kubeconfig", Some(&provisioner.kubeconfig)),
        ("provisioner.directory", provisioner.directory.as_ref()),
        ("provisioner.kubelet", Some(&provisioner.kubelet)),
    ];
    for (field, path) in paths.into_iter().filter_map(|(field, path)| Some((field, path?))) {
        check_absolute(field, path)?;
    }
    if provisioner.node_name(&config.node.name).is_none() {
        let message = format!(
            "a node of Kubernetes can't be called {:?}, which is node.name; give its name in the API",
            config.node.name
        );
        return wrong("provisioner.node", message);
    }
    Ok(())
}
