//! Metrics and health for programs, over HTTP.

mod server;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, de};

use self::server::MetricsServer;
use crate::config::{ConfigSection, NodedConfig};
use crate::control::socket::{self, SocketPath};
use crate::listen_address::{ListenAddress, check_socket_path};
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};

const NAME: &str = "metrics";
const DN: &str = "root.metrics";
const ADDRESS_KEY: &str = "metrics.address";

/// The part of `[metrics]`.
pub(super) struct MetricsPart;

/// `[metrics]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricsConfig {
    address: MetricsAddress,
}

impl MetricsConfig {
    fn has_port(&self, port: u16) -> bool {
        matches!(self.address, MetricsAddress::Tcp(address) if address.port() == port)
    }
}

/// The address where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MetricsAddress {
    /// To every user of the network.
    Tcp(SocketAddr),
    /// To the node's user and root.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<SocketAddr>() {
            // A path is recognized by its slash, with which no address starts.
            _ if text.starts_with('/') && !text.contains('\0') => Ok(Self::Unix(text.into())),
            // With port 0 the kernel would choose a port that no scraper knows.
            Ok(address) if address.port() != 0 => Ok(Self::Tcp(address)),
            _ => Err(
                "must be an address with a port, like \"127.0.0.1:9464\", or the absolute path of a socket"
                    .into(),
            ),
        }
    }
}

impl<'de> Deserialize<'de> for MetricsAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Part for MetricsPart {
    fn name(&self) -> &str {
        NAME
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<MetricsConfig>(NAME)]
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let is_off = config.section::<MetricsConfig>(NAME).is_none();
        let unavailable = is_off.then_some("which is disabled; set metrics.address");
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<MetricsConfig>(NAME).cloned() else { return };
        let running = planner.running_config().and_then(|running| running.section::<MetricsConfig>(NAME));
        match &config.address {
            // The server that runs releases its port before the new one listens.
            MetricsAddress::Tcp(address)
                if running.is_some_and(|running| running.has_port(address.port())) =>
            {
                planner.claim_address(ListenAddress::Tcp(address.ip(), address.port()), ADDRESS_KEY);
            }
            MetricsAddress::Tcp(address) => planner.check_port(address.ip(), address.port(), ADDRESS_KEY),
            MetricsAddress::Unix(path) => {
                let hint = "set metrics.address to a shorter path";
                check_socket_path(path, hint).into_iter().for_each(|problem| planner.report(problem));
                planner.claim_address(ListenAddress::Unix(path.clone()), ADDRESS_KEY);
                // A server with the same address holds the socket itself.
                if running != Some(&config)
                    && let Err(error) =
                        socket::check_socket(&SocketPath::metrics(path), &planner.config().node.data)
                {
                    planner.report(error.to_string());
                }
            }
        }
        planner.add(PlannedService::new(DN, MetricsPlan(config.address)));
    }
}

#[derive(Debug, PartialEq)]
struct MetricsPlan(MetricsAddress);

impl fmt::Display for MetricsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "metrics and health for programs on {}", self.0)
    }
}

impl PlannedRunnable for MetricsPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let running = Arc::clone(node.running());
        Ok(PreparedRunnable::new(MetricsServer { address: self.0.clone(), running }))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_port_or_an_absolute_path() {
        let parse = |text: &str| text.parse::<MetricsAddress>();
        assert_eq!(parse("127.0.0.1:9464"), Ok(MetricsAddress::Tcp(([127, 0, 0, 1], 9464).into())));
        assert_eq!(parse("/run/metrics.sock"), Ok(MetricsAddress::Unix("/run/metrics.sock".into())));
        assert!(parse("[::1]:9464").is_ok());
        for text in ["", "9464", "localhost:9464", "run/metrics.sock", "127.0.0.1", "127.0.0.1:0", "/run/\0"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
