//! etcd's configuration.

use std::path::PathBuf;
use std::time::Duration;

use crate::consensus::{DEFAULT_CLIENT_PORT, DEFAULT_PEER_PORT};

/// etcd's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EtcdConfig {
    /// The etcd binary.
    pub binary: PathBuf,
    /// The port for other members, at the node's address. Default: [`DEFAULT_PEER_PORT`].
    pub peer_port: u16,
    /// The port for clients, at the node's address. Default: [`DEFAULT_CLIENT_PORT`].
    pub client_port: u16,
    /// Additional arguments, appended to the generated ones.
    pub extra_args: Vec<String>,
    /// Timeout from its start until it has connected to the other members. Default: one minute; then it is
    /// restarted.
    pub ready_within: Duration,
    /// Grace period of a stop. Default: ten seconds.
    pub grace: Duration,
}

impl EtcdConfig {
    /// This binary, with the defaults.
    pub fn new(binary: impl Into<PathBuf>) -> EtcdConfig {
        EtcdConfig {
            binary: binary.into(),
            peer_port: DEFAULT_PEER_PORT,
            client_port: DEFAULT_CLIENT_PORT,
            extra_args: Vec::new(),
            ready_within: Duration::from_secs(60),
            grace: Duration::from_secs(10),
        }
    }
}
