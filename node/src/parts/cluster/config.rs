//! `[cluster]`: the node is a member of a cluster.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use nodekeel_cluster::backup::Recipient;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::config::value;

/// `[cluster]`: if given, the cluster service runs, and its etcd.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// Address at which the other members reach this node.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// Interface whose address is used.
    #[serde(default)]
    pub interface: Option<String>,
    /// True if the node bootstraps a cluster if it has no ticket and has not been in a cluster yet.
    #[serde(default)]
    pub bootstrap: bool,
    /// The file that records that the node has been in a cluster; `None` is next to the data directory, with
    /// `.bootstrapped` after its name.
    #[serde(default)]
    pub bootstrap_record: Option<PathBuf>,
    /// Timeout until the node is in its cluster.
    #[serde(default = "default_deadline", deserialize_with = "value::deserialize_duration")]
    pub deadline: Duration,
    /// The time without a commit in the cluster after which the node's member proposes one itself, to see that it can.
    #[serde(default = "default_progress_period", deserialize_with = "value::deserialize_duration")]
    pub progress_period: Duration,
    /// True if this node creates golden tickets.
    #[serde(default)]
    pub golden_tickets: bool,
    /// True if the node sets the kernel's hostname to its name.
    #[serde(default)]
    pub hostname: bool,
    /// The backups of the cluster.
    #[serde(default)]
    pub backup: Option<BackupConfig>,
}

/// `[cluster.backup]`: snapshots of the cluster's store.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackupConfig {
    /// The public key for which they are encrypted.
    #[serde(deserialize_with = "deserialize_recipient")]
    pub recipient: Recipient,
    /// The directory in which the node saves its own ones by a schedule; `None` is no schedule.
    #[serde(default)]
    pub directory: Option<PathBuf>,
    /// The time from one to the next.
    #[serde(default = "default_backup_period", deserialize_with = "value::deserialize_duration")]
    pub every: Duration,
    /// The number of this node's files that stay.
    #[serde(default = "default_backup_count")]
    pub keep: NonZeroU16,
}

fn default_backup_period() -> Duration {
    Duration::from_secs(24 * 3600)
}

fn default_backup_count() -> NonZeroU16 {
    const { NonZeroU16::new(7).unwrap() }
}

fn deserialize_recipient<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Recipient, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The library's default: etcd starts in less than two seconds, and a DHCP lease may take a minute.
fn default_deadline() -> Duration {
    Duration::from_secs(120)
}

/// The library's default: with the two seconds of a commit it stays below five.
fn default_progress_period() -> Duration {
    Duration::from_millis(2500)
}
