//! The calls of this node to the others of its cluster.

use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use nodekeel_localstorage::volume::UnlockKey;
use thiserror::Error;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::cluster_records::InvalidRecords;
use super::peers::Peer;
use super::shared::Api;
use crate::access::PublicKey;
use crate::blocking::run_blocking;
use crate::client::{ConnectError, connect_channel};
use crate::error_chain::error_chain;
use crate::node_v1::node_client::NodeClient;
use crate::node_v1::{ReplaceUnlockKeysRequest, UnlockKeysRequest};

/// The time for a connection and a call. A node answers within milliseconds; one whose machine is off does not answer at all.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// The keys of an answer that are tried, each of which takes a second: a node has two during a rotation.
const MAX_KEYS: usize = 4;

/// No other node has given a key of the volume.
#[derive(Debug, Error)]
pub(crate) enum PeerKeysError {
    #[error("can't read which nodes to ask for the other half of its key")]
    Peers(#[source] io::Error),
    #[error("this node knows no other node that has the other half of its key")]
    Alone,
    #[error("{}", describe_all(.0))]
    Peer(Vec<PeerError>),
}

/// Names each node that was asked, with its answer.
pub(crate) fn describe_all(errors: &[PeerError]) -> String {
    let texts: Vec<_> = errors.iter().map(|error| error_chain(error)).collect();
    texts.join("; ")
}

/// A node does not answer as it should.
#[derive(Debug, Error)]
#[error("node {} at {}", peer.id, peer.address)]
pub(crate) struct PeerError {
    pub(crate) peer: Peer,
    #[source]
    pub(crate) problem: PeerProblem,
}

#[derive(Debug, Error)]
pub(crate) enum PeerProblem {
    #[error("does not answer within {} s", CALL_TIMEOUT.as_secs())]
    Timeout,
    #[error("does not admit this node: it was removed from the cluster, or its key is a new one")]
    Removed,
    #[error("has another key, {found}: it was installed anew, or another machine answers there")]
    OtherKey { found: PublicKey },
    #[error("can't be reached")]
    Connect(#[source] io::Error),
    #[error("{}", .0.message())]
    Refused(Status),
    #[error(transparent)]
    Records(InvalidRecords),
}

impl Api {
    /// Asks the other nodes for the cluster's half of the key of this node's volume, all at once, and returns what any of them has:
    /// the copy of one that was cut off may be older.
    pub(crate) async fn ask_unlock_keys(&self, volume: &str) -> Result<Vec<UnlockKey>, PeerKeysError> {
        let file = self.peers.clone();
        let peers = run_blocking(move || file.read()).await.map_err(PeerKeysError::Peers)?;
        // A worker has the keys of nobody.
        let peers: Vec<_> = peers.into_iter().filter(|peer| !peer.is_worker).collect();
        if peers.is_empty() {
            return Err(PeerKeysError::Alone);
        }
        let (mut keys, mut errors) = (Vec::<UnlockKey>::new(), Vec::new());
        for (peer, answer) in join_all(peers.into_iter().map(|peer| self.ask_peer(peer, volume))).await {
            match answer {
                Ok(given) => given.into_iter().for_each(|key| {
                    if keys.iter().all(|known| known.expose_bytes() != key.expose_bytes()) {
                        keys.push(key);
                    }
                }),
                Err(problem) => errors.push(PeerError { peer, problem }),
            }
        }
        if keys.is_empty() { Err(PeerKeysError::Peer(errors)) } else { Ok(keys) }
    }

    /// The cluster's halves of the keys of this node's volume, as a majority of the voters has them: of a worker, which has no
    /// member to ask.
    pub(crate) async fn load_unlock_keys(&self, volume: &str) -> Result<Vec<Vec<u8>>, PeerKeysError> {
        let request = UnlockKeysRequest { volume: volume.to_owned(), of_cluster: true };
        let ask = |mut voter: NodeClient<Channel>| {
            let request = request.clone();
            async move { voter.unlock_keys(request).await }
        };
        self.ask_voters(ask).await.map(|answer| answer.keys)
    }

    /// Has the cluster keep these in the place of those that were read.
    pub(crate) async fn replace_unlock_keys(
        &self,
        request: ReplaceUnlockKeysRequest,
    ) -> Result<(), PeerKeysError> {
        let ask = |mut voter: NodeClient<Channel>| {
            let request = request.clone();
            async move { voter.replace_unlock_keys(request).await }
        };
        self.ask_voters(ask).await.map(drop)
    }

    /// The answer of the first voter that has one.
    async fn ask_voters<T, Call: Future<Output = Result<Response<T>, Status>>>(
        &self,
        ask: impl Fn(NodeClient<Channel>) -> Call,
    ) -> Result<T, PeerKeysError> {
        let file = self.peers.clone();
        let voters = run_blocking(move || file.read()).await.map_err(PeerKeysError::Peers)?;
        let mut errors = Vec::new();
        for peer in voters {
            let call = async {
                let voter = self.connect_peer(&peer).await?;
                ask(voter).await.map(Response::into_inner).map_err(PeerProblem::Refused)
            };
            match timeout(CALL_TIMEOUT, call).await.unwrap_or(Err(PeerProblem::Timeout)) {
                Ok(answer) => return Ok(answer),
                Err(problem) => errors.push(PeerError { peer, problem }),
            }
        }
        Err(if errors.is_empty() { PeerKeysError::Alone } else { PeerKeysError::Peer(errors) })
    }

    /// Connects to another node, as this one.
    pub(crate) async fn connect_peer(&self, peer: &Peer) -> Result<NodeClient<Channel>, PeerProblem> {
        let channel = connect_channel(peer.address.to_string(), peer.key, &self.key).await;
        let channel = channel.map_err(|error| match error {
            ConnectError::UnknownOperator { .. } => PeerProblem::Removed,
            ConnectError::WrongNode { found, .. } => PeerProblem::OtherKey { found },
            ConnectError::Remote { source, .. } => PeerProblem::Connect(source),
            other => PeerProblem::Connect(io::Error::other(other)),
        })?;
        Ok(NodeClient::new(channel))
    }

    async fn ask_peer(&self, peer: Peer, volume: &str) -> (Peer, Result<Vec<UnlockKey>, PeerProblem>) {
        let asked = timeout(CALL_TIMEOUT, self.call_peer(&peer, volume)).await;
        (peer, asked.unwrap_or(Err(PeerProblem::Timeout)))
    }

    async fn call_peer(&self, peer: &Peer, volume: &str) -> Result<Vec<UnlockKey>, PeerProblem> {
        let request = UnlockKeysRequest { volume: volume.to_owned(), of_cluster: false };
        let answer =
            self.connect_peer(peer).await?.unlock_keys(request).await.map_err(PeerProblem::Refused)?;
        // Bytes of another length open no volume.
        let keys = answer.into_inner().keys.into_iter().filter_map(|key| UnlockKey::from_bytes(&key).ok());
        Ok(keys.take(MAX_KEYS).collect())
    }
}
