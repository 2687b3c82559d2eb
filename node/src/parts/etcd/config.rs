//! `[services.etcd]`: an etcd of one member, or the ports of the cluster's.

use std::num::NonZeroU16;
use std::path::PathBuf;

use serde::Deserialize;

use crate::config::check::{ConfigViolation, check_program, reject_field};

/// `[services.etcd]`: an etcd of one member on the loopback interface.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdConfig {
    /// True if the node runs it.
    pub enable: bool,
    /// The program; `None` searches for `etcd`.
    pub binary: Option<PathBuf>,
    /// Port for clients of an etcd without a cluster: that of a cluster serves this node alone, at a socket.
    pub client_port: NonZeroU16,
    /// Port for other members.
    pub peer_port: NonZeroU16,
    /// Arguments after noded's.
    pub extra_args: Vec<String>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        let port = |n| NonZeroU16::new(n).expect("not zero");
        Self {
            enable: true,
            binary: None,
            client_port: port(2379),
            peer_port: port(2380),
            extra_args: Vec::new(),
        }
    }
}

/// Checks the rules between fields of etcd.
pub(crate) fn check_etcd(etcd: &EtcdConfig) -> Result<(), ConfigViolation> {
    if etcd.client_port == etcd.peer_port {
        return reject_field(
            "services.etcd.peer_port",
            format!("{} is already client_port; use another port", etcd.peer_port),
        );
    }
    check_program("services.etcd", etcd.binary.as_deref(), &etcd.extra_args)
}
