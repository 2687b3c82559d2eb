//! `[cluster]`: the node is a member of a cluster.

use std::net::IpAddr;
use std::time::Duration;

use nodekeel_cluster::network::Address;
use serde::Deserialize;

use super::graph::{Wrong, check_nul, check_span, wrong};
use super::{Config, value};

/// `[cluster]`: it runs where it is given, and etcd with it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// The address at which the other nodes reach this one.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// The interface whose address that is.
    #[serde(default)]
    pub interface: Option<String>,
    /// How long it may take until the node is in its cluster.
    #[serde(default = "default_deadline", deserialize_with = "value::duration")]
    pub deadline: Duration,
    /// Whether golden tickets can be made here.
    #[serde(default)]
    pub golden_tickets: bool,
    /// Whether the kernel is told the node's name as its hostname.
    #[serde(default)]
    pub hostname: bool,
}

/// As the library's: an etcd starts in less than two seconds, and a lease of an address may take a minute.
fn default_deadline() -> Duration {
    Duration::from_secs(120)
}

/// Checks what no field can know alone.
pub(super) fn check(config: &Config) -> Result<(), Wrong> {
    let Some(cluster) = &config.cluster else { return Ok(()) };
    check_span("cluster.deadline", Some(cluster.deadline))?;
    if cluster.deadline.is_zero() {
        return wrong("cluster.deadline", "no time would be enough; give \"2m\"");
    }
    if !config.services.etcd.enable {
        return wrong("services.etcd.enable", "the cluster is kept in etcd; remove this, or [cluster]");
    }
    match (cluster.address, &cluster.interface) {
        (Some(address), None) => match Address::try_new(address) {
            Ok(_) => Ok(()),
            Err(error) => wrong("cluster.address", error.to_string()),
        },
        (None, Some(interface)) if interface.is_empty() || interface.contains('/') => wrong(
            "cluster.interface",
            format!("{interface:?} is no interface's name; give one like \"eth0\""),
        ),
        (None, Some(interface)) => check_nul("cluster.interface", Some(interface.as_str())),
        (Some(_), Some(_)) => wrong("cluster.interface", "there is an address already; give one of the two"),
        (None, None) => wrong("cluster", "give the node's address, or the interface whose address it is"),
    }
}
