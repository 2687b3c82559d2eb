//! The calls of a node to its peers, with real servers of them.

use std::net::SocketAddr;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::UnlockKey;
use nodekeel_logtree::LogStore;
use testbed::{ReservedPort, reserve_port};
use tokio::sync::watch;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::audit::Audit;
use super::connections::listen;
use crate::access::{PrivateKey, PublicKey};
use crate::layout::{ApiLayout, place_layout};
use crate::node_v1::node_server::{Node, NodeServer};
use crate::node_v1::{
    ClusterRecords, EnrolRequest, EnrolResponse, ReplaceUnlockKeysRequest, ReplaceUnlockKeysResponse,
    UnlockKeysRequest, UnlockKeysResponse, WatchRecordsRequest, WhoAmIRequest, WhoAmIResponse,
};
use crate::parts::api::Api;
use crate::parts::api::identities::{Identities, Source};
use crate::parts::api::peer_client::PeerKeysError;
use crate::parts::api::peers::{Peer, PeersFile};

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

    type WatchRecordsStream = futures_util::stream::Empty<Result<ClusterRecords, Status>>;

    async fn watch_records(
        &self,
        _: Request<WatchRecordsRequest>,
    ) -> Result<Response<Self::WatchRecordsStream>, Status> {
        Err(Status::unimplemented("it has no records"))
    }

    async fn replace_unlock_keys(
        &self,
        _: Request<ReplaceUnlockKeysRequest>,
    ) -> Result<Response<ReplaceUnlockKeysResponse>, Status> {
        Err(Status::unimplemented("it keeps no keys"))
    }

    async fn who_am_i(&self, _: Request<WhoAmIRequest>) -> Result<Response<WhoAmIResponse>, Status> {
        Err(Status::unimplemented("it knows nobody"))
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
    let records = watch::Sender::default();
    Api { address, key, identities, cluster_operators: false, peers: file, records, worker_joined: None }
}

fn peer(digit: usize, key: PublicKey, address: SocketAddr) -> Peer {
    let id = format!("nodekeel-{}", digit.to_string().repeat(32));
    Peer { id: id.parse().expect("an id"), key, address, is_worker: false }
}

/// Serves these keys to the peer, if it is admitted.
fn serve(port: &ReservedPort, admitted: &[Peer], keys: &[u8]) -> PublicKey {
    let scratch = tempfile::tempdir().expect("a directory");
    let api = api(port.socket_address().into(), &scratch, admitted);
    let connections = listen(&api, &Arc::new(Audit::new(LogStore::default())), false).expect("a free port");
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
