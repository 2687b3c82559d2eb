//! `[provisioner]`: volumes for the claims of a Kubernetes cluster.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nodekeel_fsquota::Bytes;
use nodekeel_provisioner::{CapacityPolicy, DriverName, InvalidRatio, NodeName};
use serde::de::{Deserializer, Error};
use serde::{Deserialize, de};

use crate::config::NodedConfig;
use crate::config::check::{ConfigViolation, check_absolute_path, reject_field};
use crate::config::value::deserialize_duration;

/// An audit reads each directory of the volumes.
const MIN_AUDIT_INTERVAL: Duration = Duration::from_secs(1);

/// `[provisioner]`: if given, the provisioner runs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProvisionerConfig {
    /// Address and credentials of the API server.
    pub kubeconfig: PathBuf,
    /// Name of this node in the API; `None` is `node.name`.
    #[serde(default, deserialize_with = "deserialize_optional_name")]
    pub node: Option<NodeName>,
    /// Name of the CSI driver in storage classes and at the kubelet.
    #[serde(default = "default_driver", deserialize_with = "deserialize_name")]
    pub driver: DriverName,
    /// Directory of volumes; `None` is `volumes` below the data directory.
    #[serde(default)]
    pub directory: Option<PathBuf>,
    /// Whether project quotas must enforce the size of volumes.
    #[serde(default)]
    pub quota: QuotaMode,
    /// Whether to mount volumes into pods through the kubelet.
    #[serde(default = "default_csi")]
    pub csi: bool,
    /// The kubelet's directory.
    #[serde(default = "default_kubelet")]
    pub kubelet: PathBuf,
    /// How much of the disk may be promised to volumes.
    #[serde(default)]
    pub capacity: CapacitySettings,
    /// How the limits of volumes are audited.
    #[serde(default)]
    pub audit: AuditSettings,
}

/// `[provisioner.capacity]`: how much of the disk may be promised to volumes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CapacitySettings {
    /// How often each byte is promised.
    pub ratio: f64,
    /// Bytes that are kept for other data; at least what they occupy.
    pub reserve: u64,
}

impl Default for CapacitySettings {
    fn default() -> Self {
        Self { ratio: 1.0, reserve: 0 }
    }
}

/// `[provisioner.audit]`: how the limits of volumes are audited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditSettings {
    /// The time between two audits, at least a second: files that left their limits are reported by then.
    #[serde(deserialize_with = "deserialize_duration")]
    pub interval: Duration,
    /// How many files and directories an audit inspects in a second at most.
    pub rate: NonZeroU32,
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self { interval: Duration::from_secs(6 * 60 * 60), rate: NonZeroU32::MIN.saturating_add(999) }
    }
}

/// Whether project quotas must enforce the size of volumes.
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

    /// How much of the disk may be promised to volumes.
    pub(crate) fn capacity_policy(&self) -> Result<CapacityPolicy, InvalidRatio> {
        CapacityPolicy::try_new(self.capacity.ratio, Bytes(self.capacity.reserve))
    }
}

fn default_driver() -> DriverName {
    DriverName::try_new("volumes.nodekeel").expect("a valid domain")
}

fn default_csi() -> bool {
    true
}

fn default_kubelet() -> PathBuf {
    "/var/lib/kubelet".into()
}

fn deserialize_name<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
) -> Result<T, D::Error> {
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

fn deserialize_optional_name<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<NodeName>, D::Error> {
    deserialize_name(deserializer).map(Some)
}

/// Checks the rules between fields.
pub(crate) fn check_provisioner(config: &NodedConfig) -> Result<(), ConfigViolation> {
    let Some(provisioner) = &config.provisioner else { return Ok(()) };
    let paths = [
        ("provisioner.kubeconfig", Some(&provisioner.kubeconfig)),
        ("provisioner.directory", provisioner.directory.as_ref()),
        ("provisioner.kubelet", Some(&provisioner.kubelet)),
    ];
    for (field, path) in paths.into_iter().filter_map(|(field, path)| Some((field, path?))) {
        check_absolute_path(field, path)?;
    }
    if provisioner.node_name_or(&config.node.name).is_none() {
        let message = format!(
            "node.name {:?} is not a valid Kubernetes node name; set provisioner.node",
            config.node.name
        );
        return reject_field("provisioner.node", message);
    }
    if let Err(invalid) = provisioner.capacity_policy() {
        return reject_field("provisioner.capacity.ratio", invalid.to_string());
    }
    let interval = provisioner.audit.interval;
    if interval < MIN_AUDIT_INTERVAL {
        let message =
            format!("invalid interval {interval:?}: use a duration of at least a second, such as \"30m\"");
        return reject_field("provisioner.audit.interval", message);
    }
    Ok(())
}
