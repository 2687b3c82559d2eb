//! The dependencies of a node's enrolment.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::DataVolume;
#[cfg(feature = "etcd")]
use nodekeel_localstorage::{OsFileStore, tree::LayoutTarget};
use thiserror::Error;

use crate::BoxError;
use crate::consensus::Consensus;
#[cfg(feature = "etcd")]
use crate::consensus::etcd::{EtcdConsensus, EtcdLayout};
use crate::network::Network;
use crate::node::{EnrolRequest, EnrolmentSources, LocalNames, TicketVoter};

/// The dependencies of a node's enrolment.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "the builder of a node has all of it")]
pub struct Deps {
    /// Directory of the enrolment journal. It exists before the data volume does, like the EFI system
    /// partition.
    pub journal_dir: Dir,
    /// The places of the enrolment configuration.
    pub enrolment: EnrolmentSources,
    /// Reports the node's address.
    pub network: Arc<dyn Network>,
    /// Holds the node's data. The enrolment opens it and leaves it open when a run ends, until
    /// [`ClusterNode::release_volume`](super::ClusterNode::release_volume).
    pub volume: Arc<dyn DataVolume>,
    /// Runs the node's member.
    pub consensus: ConsensusFactory,
    /// The files of the local host name, machine id and hosts.
    pub local_names: LocalNames,
    /// Calls voters, to redeem a join ticket. Without it, the node joins by golden tickets alone.
    pub enroller: Option<Arc<dyn Enroller>>,
}

/// Calls a voter for a node that joins.
///
/// # Contract
/// The call is made by a key that the node keeps: after a kill it is repeated, and the voter knows the node by it. Nothing of
/// the request goes to a voter with another key than the ticket names. A voter that does not answer is an error after some
/// seconds.
#[async_trait]
pub trait Enroller: fmt::Debug + Send + Sync {
    /// The key by which it calls, as the voters name it; `None` if nothing can call one.
    fn caller(&self) -> Option<String>;

    /// Redeems a join ticket at this voter, and returns its answer, as
    /// [`JoinTickets::redeem_ticket`](crate::node::JoinTickets::redeem_ticket) made it.
    ///
    /// # Errors
    /// [`EnrolCallError`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    async fn enrol(&self, voter: &TicketVoter, request: &EnrolRequest) -> Result<Vec<u8>, EnrolCallError>;
}

/// The reason why a voter has not admitted the node.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnrolCallError {
    /// The cluster refuses the ticket or the node, for this reason.
    #[error("{0}")]
    Refused(String),
    /// The voter does not answer, or can't admit a node at present. A retry may help.
    #[error("the voter at {voter} does not admit the node")]
    Unavailable {
        /// Its address.
        voter: std::net::SocketAddr,
        /// The cause.
        source: BoxError,
    },
}

/// Creates the consensus implementation that runs a node's member, once the data volume is open.
#[derive(Clone)]
pub struct ConsensusFactory {
    open: Arc<OpenFn>,
    /// The port at which other members reach this one, if known.
    pub(super) peer_port: Option<u16>,
}

type OpenFn = dyn Fn(&Dir) -> Result<Arc<dyn Consensus>, BoxError> + Send + Sync;

impl ConsensusFactory {
    /// An implementation with its files on the data volume, whose root directory is passed to `open`. `open`
    /// may block.
    pub fn on_volume<E: Into<BoxError>>(
        open: impl Fn(&Dir) -> Result<Arc<dyn Consensus>, E> + Send + Sync + 'static,
    ) -> Self {
        Self { open: Arc::new(move |top| open(top).map_err(Into::into)), peer_port: None }
    }

    /// etcd, with its data and credentials on the data volume, as in [`EtcdLayout`].
    #[cfg(feature = "etcd")]
    pub fn etcd_on_volume(config: crate::consensus::etcd::EtcdConfig) -> Self {
        let port = config.peer_port;
        let source = Self::on_volume(move |top| {
            let (path, top) = (top.path().to_owned(), top.try_clone()?);
            let placed: EtcdLayout =
                LayoutTarget::new(Arc::new(OsFileStore::new(top)), path).create_layout()?;
            let etcd = EtcdConsensus::new(config.clone(), placed.etcd.clone());
            Ok::<Arc<dyn Consensus>, BoxError>(Arc::new(etcd))
        });
        source.with_peer_port(port)
    }

    /// An implementation that needs no data volume.
    pub fn without_volume(consensus: Arc<dyn Consensus>) -> Self {
        Self { open: Arc::new(move |_| Ok(Arc::clone(&consensus))), peer_port: None }
    }

    /// Sets the port at which other members reach this one. A ticket for another port is rejected before
    /// anything starts.
    #[must_use]
    pub fn with_peer_port(self, peer_port: u16) -> Self {
        Self { peer_port: Some(peer_port), ..self }
    }

    pub(super) fn open(&self, top: &Dir) -> Result<Arc<dyn Consensus>, BoxError> {
        (self.open)(top)
    }
}

impl fmt::Debug for ConsensusFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsensusFactory").finish_non_exhaustive()
    }
}
