//! The calls of this node to the others of its cluster.

use std::io;
use std::time::Duration;

use futures_util::future::join_all;
use nodekeel_localstorage::volume::UnlockKey;
use thiserror::Error;
use tokio::time::timeout;
use tonic::Status;

use super::identities::Api;
use super::peers::Peer;
use crate::access::PublicKey;
use crate::blocking::run_blocking;
use crate::client::{ConnectError, connect_channel};
use crate::error_chain::error_chain;
use crate::node_v1::UnlockKeysRequest;
use crate::node_v1::node_client::NodeClient;

/// The time for a connection and a call. A node answers within milliseconds; one whose machine is off does not answer at all.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

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

fn describe_all(errors: &[PeerError]) -> String {
    let texts: Vec<_> = errors.iter().map(|error| error_chain(error)).collect();
    texts.join("; ")
}

/// A node does not give the key.
#[derive(Debug, Error)]
#[error("node {} at {}", peer.id, peer.address)]
pub(crate) struct PeerError {
    peer: Peer,
    #[source]
    problem: PeerProblem,
}

#[derive(Debug, Error)]
enum PeerProblem {
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
}

impl Api {
    /// Asks the other nodes for the cluster's half of the key of this node's volume, all at once, and returns what any of them has:
    /// the copy of one that was cut off may be older.
    pub(crate) async fn ask_unlock_keys(&self, volume: &str) -> Result<Vec<UnlockKey>, PeerKeysError> {
        let file = self.peers.clone();
        let peers = run_blocking(move || file.read()).await.map_err(PeerKeysError::Peers)?;
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

    async fn ask_peer(&self, peer: Peer, volume: &str) -> (Peer, Result<Vec<UnlockKey>, PeerProblem>) {
        let asked = timeout(CALL_TIMEOUT, self.call_peer(&peer, volume)).await;
        (peer, asked.unwrap_or(Err(PeerProblem::Timeout)))
    }

    async fn call_peer(&self, peer: &Peer, volume: &str) -> Result<Vec<UnlockKey>, PeerProblem> {
        let channel = connect_channel(peer.address.to_string(), peer.key, &self.key).await;
        let channel = channel.map_err(|error| match error {
            ConnectError::UnknownOperator { .. } => PeerProblem::Removed,
            ConnectError::WrongNode { found, .. } => PeerProblem::OtherKey { found },
            ConnectError::Remote { source, .. } => PeerProblem::Connect(source),
            other => PeerProblem::Connect(io::Error::other(other)),
        })?;
        let request = UnlockKeysRequest { volume: volume.to_owned() };
        let answer = NodeClient::new(channel).unlock_keys(request).await.map_err(PeerProblem::Refused)?;
        // Bytes of another length open no volume.
        let keys = answer.into_inner().keys.into_iter().filter_map(|key| UnlockKey::from_bytes(&key).ok());
        Ok(keys.take(MAX_KEYS).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use nodekeel_localstorage::Dir;
    use nodekeel_logtree::LogStore;
    use testbed::{ReservedPort, reserve_port};
    use tonic::transport::Server;
    use tonic::{Request, Response};

    use super::super::audit::Audit;
    use super::super::connections::listen;
    use super::super::identities::{Identities, Source};
    use super::super::peers::PeersFile;
    use super::*;
    use crate::access::PrivateKey;
    use crate::layout::{ApiLayout, place_layout};
    use crate::node_v1::node_server::{Node, NodeServer};
    use crate::node_v1::{EnrolRequest, EnrolResponse, UnlockKeysResponse};

    const VOLUME: &str = "22222222-2222-2222-2222-222222222222";

    /// A node with these keys of the volume.
    struct Fixed(Vec<Vec<u8>>);

    #[tonic::async_trait]
    impl Node for Fixed {
        async fn unlock_keys(
            &self,
            request: Request<UnlockKeysRequest>,
        ) -> Result<Response<UnlockKeysResponse>, Status> {
            assert_eq!(request.get_ref().volume, VOLUME);
            if self.0.is_empty() {
                return Err(Status::unavailable("its own data volume is not open"));
            }
            Ok(Response::new(UnlockKeysResponse { keys: self.0.clone() }))
        }

        async fn enrol(&self, _: Request<EnrolRequest>) -> Result<Response<EnrolResponse>, Status> {
            Err(Status::unimplemented("it lets nobody join"))
        }
    }

    /// The API of a node at this address, which knows these peers.
    fn api(address: SocketAddr, scratch: &tempfile::TempDir, peers: &[Peer]) -> Api {
        let root = place_layout(Dir::open(scratch.path()).expect("open")).expect("placed");
        let file = PeersFile::new(root.add_layout::<ApiLayout>().expect("placed").api.peers);
        file.write(peers).expect("written");
        let identities = Arc::new(Identities::default());
        identities.replace(Source::Nodes, peers.iter().map(Peer::identity).collect());
        let key = Arc::new(PrivateKey::generate().expect("random numbers"));
        Api { address, key, identities, cluster_operators: false, peers: file }
    }

    fn peer(digit: usize, key: PublicKey, address: SocketAddr) -> Peer {
        let id = format!("nodekeel-{}", digit.to_string().repeat(32));
        Peer { id: id.parse().expect("an id"), key, address }
    }

    /// Serves these keys to the peer, if it is admitted.
    fn serve(port: &ReservedPort, admitted: &[Peer], keys: &[u8]) -> PublicKey {
        let scratch = tempfile::tempdir().expect("a directory");
        let api = api(port.socket_address().into(), &scratch, admitted);
        let connections =
            listen(&api, &Arc::new(Audit::new(LogStore::default())), false).expect("a free port");
        let service = NodeServer::new(Fixed(keys.iter().map(|key| vec![*key; 32]).collect()));
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(connections));
        api.key.public_key()
    }

    #[tokio::test]
    async fn all_nodes_are_asked_and_each_that_does_not_help_is_named() {
        let ports = [(); 5].map(|()| reserve_port().expect("a free port"));
        let scratch = tempfile::tempdir().expect("a directory");
        let this = api(ports[0].socket_address().into(), &scratch, &[]);
        let key = |keys: Vec<UnlockKey>| keys.iter().map(|key| key.expose_bytes()[0]).collect::<Vec<_>>();
        let alone = this.ask_unlock_keys(VOLUME).await.expect_err("alone");
        assert!(matches!(alone, PeerKeysError::Alone));

        let admitted = [peer(0, this.key.public_key(), this.address)];
        let closed = serve(&ports[1], &admitted, &[]);
        let stranger = serve(&ports[2], &[], &[9]);
        let addresses = ports.each_ref().map(|port| SocketAddr::from(port.socket_address()));
        let unhelpful = [
            peer(1, closed, addresses[1]),
            peer(2, stranger, addresses[2]),
            // Nobody listens there, and another node does.
            peer(3, closed, addresses[3]),
            peer(4, stranger, addresses[1]),
        ];
        this.peers.write(&unhelpful).expect("written");
        let text = this.ask_unlock_keys(VOLUME).await.expect_err("nobody helps").to_string();
        for (peer, why) in unhelpful.iter().zip([
            "its own data volume is not open",
            "does not admit this node: it was removed from the cluster",
            "can't be reached: ",
            &format!("has another key, {closed}: "),
        ]) {
            let named = format!("node {} at {}: {why}", peer.id, peer.address);
            assert!(text.contains(&named), "{named} in {text}");
        }

        // One that was cut off has an older key alone; what it sends beyond that is not tried.
        let old = serve(&ports[3], &admitted, &[1]);
        let new = serve(&ports[4], &admitted, &[1, 2, 3, 4, 5, 6]);
        let helpful = [peer(3, old, addresses[3]), peer(4, new, addresses[4])];
        this.peers.write(&[&unhelpful[..2], &helpful].concat()).expect("written");
        assert_eq!(key(this.ask_unlock_keys(VOLUME).await.expect("keys")), [1, 2, 3, 4]);
    }
}
