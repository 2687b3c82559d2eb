//! etcd's configuration.

use std::path::PathBuf;
use std::time::Duration;

use crate::backup::Recipient;
use crate::consensus::DEFAULT_PEER_PORT;

/// etcd's configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EtcdConfig {
    /// The etcd binary.
    pub binary: PathBuf,
    /// The port for other members, at the node's address. Default: [`DEFAULT_PEER_PORT`].
    pub peer_port: u16,
    /// Additional arguments, appended to the generated ones.
    pub extra_args: Vec<String>,
    /// Timeout from its start until it has connected to the other members, or since it has last received data of the
    /// cluster. Default: one minute; then it is restarted.
    pub ready_within: Duration,
    /// A file outside of the data volume that counts the member's starts, too: with it, data that was put back alone is
    /// recognised without another member. Default: none.
    pub start_record: Option<PathBuf>,
    /// A key that opens the private key of the cluster's CA, besides the voters': kept offline, for when the voters are lost. That of
    /// the voter that was started last counts, and stays if another one has none. Default: none.
    pub recovery_recipient: Option<Recipient>,
    /// Grace period of a stop. Default: ten seconds.
    pub grace: Duration,
    /// The time without a commit after which the member proposes one itself, to see that it can. The loss of progress is
    /// known within this time and two seconds. Default: 2.5 s.
    ///
    /// The proposal deletes a key that does not exist: it is an entry of some hundred bytes in the log of each member,
    /// with its fsync, and changes neither a key nor the revision.
    pub progress_period: Duration,
}

impl EtcdConfig {
    /// This binary, with the defaults.
    pub fn new(binary: impl Into<PathBuf>) -> EtcdConfig {
        EtcdConfig {
            binary: binary.into(),
            peer_port: DEFAULT_PEER_PORT,
            extra_args: Vec::new(),
            ready_within: Duration::from_secs(60),
            start_record: None,
            recovery_recipient: None,
            grace: Duration::from_secs(10),
            progress_period: Duration::from_millis(2500),
        }
    }
}
