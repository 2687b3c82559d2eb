//! How etcd is run.

use std::path::PathBuf;
use std::time::Duration;

use crate::consensus::{CLIENT_PORT, PEER_PORT};

/// How etcd is run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EtcdConfig {
    /// The program.
    pub binary: PathBuf,
    /// Where it is reached by the other members, on the node's address. Default: [`PEER_PORT`].
    pub peer_port: u16,
    /// Where it serves clients, on the node's address. Default: [`CLIENT_PORT`].
    pub client_port: u16,
    /// Further arguments, after its own.
    pub extra_args: Vec<String>,
    /// How long it may take from its start until it has found the other members. Default: a minute; then it is started
    /// again.
    pub ready_within: Duration,
    /// How long it may take to stop. Default: ten seconds.
    pub grace: Duration,
}

impl EtcdConfig {
    /// This program, with the defaults.
    pub fn new(binary: impl Into<PathBuf>) -> EtcdConfig {
        EtcdConfig {
            binary: binary.into(),
            peer_port: PEER_PORT,
            client_port: CLIENT_PORT,
            extra_args: Vec::new(),
            ready_within: Duration::from_secs(60),
            grace: Duration::from_secs(10),
        }
    }
}
