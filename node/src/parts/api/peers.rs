//! The other nodes of the cluster: each node records the key and the address of its API, and admits those of the others.
//!
//! ```text
//!  api/key ──▶ cluster:enrolment/api/NODE ──▶ each other voter ─┬─▶ identities       who may call
//!                                                               ├─▶ api/peers        whom to ask when it starts cold
//!                                                               ├─▶ VOLUME/cluster/peer-keys   what it answers them
//!                                                               └─▶ records          what it tells workers
//! ```
//!
//! The files are what a node knows when its cluster has no majority.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_cluster::node::{InvalidNodeId, KnownNode, NodeApi, NodeId};
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;

use super::config::DN;
use super::identities::{Api, Identity, Source};
use super::peer_keys::PeerKeys;
use crate::access::{InvalidKey, Principal, PublicKey};
use crate::blocking::run_blocking;
use crate::volume::NodeVolume;

/// Another node of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) id: NodeId,
    pub(crate) key: PublicKey,
    pub(crate) address: SocketAddr,
    /// True if it is a worker: it may call, and is not asked for anything.
    pub(crate) is_worker: bool,
}

/// The last field of the line of a worker.
const WORKER: &str = "worker";

impl Peer {
    pub(crate) fn identity(&self) -> Identity {
        let name = self.id.to_string();
        Identity { name, key: self.key, principal: Principal::Node }
    }

    fn of(node: &KnownNode) -> Result<Self, InvalidKey> {
        let KnownNode { id, is_worker, api, .. } = node;
        let (id, key) = (id.clone(), PublicKey::new(api.key)?);
        Ok(Self { id, key, address: api.address, is_worker: *is_worker })
    }

    fn parse(line: &str) -> Result<Self, InvalidPeer> {
        let (id, key, address, is_worker) = match line.split(' ').collect::<Vec<_>>()[..] {
            [id, key, address] => (id, key, address, false),
            [id, key, address, WORKER] => (id, key, address, true),
            _ => return Err(InvalidPeer::Fields),
        };
        Ok(Self {
            id: id.parse().map_err(InvalidPeer::Id)?,
            key: key.parse().map_err(InvalidPeer::Key)?,
            address: address.parse().map_err(|_| InvalidPeer::Address)?,
            is_worker,
        })
    }
}

/// A line of the file: id, key and address, and of a worker that word, with a space between them.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.id, self.key, self.address)?;
        if self.is_worker { write!(f, " {WORKER}") } else { Ok(()) }
    }
}

/// The reason why a line of the file is not one of a peer.
#[derive(Debug, Error)]
enum InvalidPeer {
    #[error("expected an id, a key and an address")]
    Fields,
    #[error(transparent)]
    Id(InvalidNodeId),
    #[error(transparent)]
    Key(InvalidKey),
    #[error("invalid address")]
    Address,
}

/// The other nodes of the cluster, outside of the volume. The node writes it anew when it is in its cluster.
#[derive(Debug, Clone)]
pub(crate) struct PeersFile(LayoutFile);

impl PeersFile {
    pub(crate) fn new(file: LayoutFile) -> Self {
        Self(file)
    }

    /// The peers that were written last; none if there were none. It blocks.
    pub(crate) fn read(&self) -> io::Result<Vec<Peer>> {
        let bytes = self.0.read_if_present().map_err(io::Error::other)?.unwrap_or_default();
        parse_peers(&bytes).map_err(|source| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {source}", self.0.path().display()))
        })
    }

    /// Writes them, if they are others. It blocks.
    pub(crate) fn write(&self, peers: &[Peer]) -> io::Result<()> {
        let text: String = peers.iter().map(|peer| format!("{peer}\n")).collect();
        if self.0.read_if_present().is_ok_and(|found| found.unwrap_or_default() == text.as_bytes()) {
            return Ok(());
        }
        self.0.write(text.as_bytes()).map_err(io::Error::other)
    }
}

fn parse_peers(bytes: &[u8]) -> Result<Vec<Peer>, InvalidPeer> {
    let text = std::str::from_utf8(bytes).map_err(|_| InvalidPeer::Fields)?;
    text.lines().map(Peer::parse).collect()
}

/// The reason of those that wait for the node's cluster.
pub(super) const NOT_IN_CLUSTER: &str = "the node is not in its cluster: see `nodectl cluster status`";

/// Records this node, and keeps what it knows of the others current, once the node is in its cluster.
pub(crate) struct PeerWatch {
    pub(crate) api: Arc<Api>,
    pub(crate) cluster: ClusterNode,
    pub(crate) volume: NodeVolume,
}

impl Runnable for PeerWatch {
    fn run(&self, ctx: Context) -> RunFuture {
        let watch =
            Self { api: Arc::clone(&self.api), cluster: self.cluster.clone(), volume: self.volume.clone() };
        Box::pin(async move {
            tokio::select! {
                canceled = ctx.canceled() => Err(canceled.into()),
                ended = watch.follow(&ctx) => ended,
            }
        })
    }
}

impl PeerWatch {
    async fn follow(&self, ctx: &Context) -> Result<(), Failure> {
        ctx.signal_not_ready(NOT_IN_CLUSTER)?;
        let mut phase = EnrolmentPhase::New;
        while phase != EnrolmentPhase::Running {
            phase = self.cluster.wait_phase_left(phase).await.phase();
            // A node that waits for a ticket has no peers: it is new, or was reset.
            if phase == EnrolmentPhase::Waiting {
                self.apply(None, Vec::new()).await?;
            }
        }
        let (nodes, this) = (self.cluster.node_store()?, self.cluster.cluster_identity()?.node_id);
        let api = NodeApi { key: self.api.key.public_key().to_bytes(), address: self.reached_address()? };
        nodes.record_api(&this, api).await?;
        let mut watcher = nodes.watch_nodes();
        self.apply(Some(&this), watcher.next_nodes().await?).await?;
        ctx.signal_ready()?;
        loop {
            self.apply(Some(&this), watcher.next_nodes().await?).await?;
        }
    }

    /// The address at which others reach the API: if it listens at every one, that of the member.
    fn reached_address(&self) -> Result<SocketAddr, Failure> {
        let configured = self.api.address;
        if !configured.ip().is_unspecified() {
            return Ok(configured);
        }
        let access = self.cluster.cluster_access()?;
        let urls = access.this_member().peer_urls.iter();
        let ip = urls.filter_map(|url| url.parse::<PeerUrl>().ok()).find_map(|url| url.host().parse().ok());
        let ip = ip.ok_or_else(|| Failure::new("the member of this node has no address"))?;
        Ok(SocketAddr::new(ip, configured.port()))
    }

    async fn apply(&self, this: Option<&NodeId>, nodes: Vec<KnownNode>) -> Result<(), Failure> {
        let is_valid = |peer: Result<Peer, InvalidKey>| match peer {
            Ok(peer) => Some(peer),
            Err(error) => {
                tracing::warn!(dn = DN, "a node of the cluster is not admitted: {error}");
                None
            }
        };
        let known: Vec<_> = nodes.iter().map(Peer::of).filter_map(is_valid).collect();
        let peers: Vec<_> = known.iter().filter(|peer| Some(&peer.id) != this).cloned().collect();
        // First: a node that was removed has no call from here on.
        self.api.identities.replace(Source::Nodes, peers.iter().map(Peer::identity).collect());
        self.api.records.send_modify(|records| records.nodes = this.map(|_| known));
        let others: Vec<_> = nodes.into_iter().filter(|node| Some(&node.id) != this).collect();
        let (file, volume) = (self.api.peers.clone(), self.volume.clone());
        let written = run_blocking(move || {
            file.write(&peers)?;
            // Without its volume the node answers none of them.
            match volume.handle_of_call() {
                Some(volume) => PeerKeys::of(&others).write(volume.dir()),
                None => Ok(()),
            }
        });
        Ok(written.await?)
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::Dir;
    use proptest::prelude::*;

    use super::*;
    use crate::access::PrivateKey;
    use crate::layout::{ApiLayout, place_layout};

    #[test]
    fn the_peers_that_are_read_are_those_that_were_written() {
        let scratch = tempfile::tempdir().expect("a directory");
        let root = place_layout(Dir::open(scratch.path()).expect("open")).expect("placed");
        let file = PeersFile::new(root.add_layout::<ApiLayout>().expect("placed").api.peers);
        assert_eq!(file.read().expect("none"), []);
        let peer = |digit: &str, address: &str| Peer {
            id: format!("nodekeel-{}", digit.repeat(32)).parse().expect("an id"),
            key: PrivateKey::generate().expect("random numbers").public_key(),
            address: address.parse().expect("an address"),
            is_worker: digit == "2",
        };
        let peers = [peer("1", "192.0.2.1:7001"), peer("2", "[2001:db8::2]:7001")];
        file.write(&peers).expect("written");
        assert_eq!(file.read().expect("read"), peers);
        std::fs::write(file.0.path(), "nodekeel-1 ed25519:A 192.0.2.1:7001\n").expect("written");
        let damaged = file.read().expect_err("damaged").to_string();
        assert!(damaged.contains("api/peers: invalid node name"), "{damaged}");
        file.write(&[]).expect("written");
        assert_eq!(file.read().expect("read"), []);
    }

    proptest! {
        #[test]
        fn a_line_with_another_byte_is_an_error_or_is_written_as_it_was(at in 0..109_usize, byte: u8) {
            let key = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";
            let mut bytes = format!("nodekeel-{} {key} 192.0.2.1:7001\n", "1".repeat(32)).into_bytes();
            bytes[at] = byte;
            if let Ok(peers) = parse_peers(&bytes) {
                let again: String = peers.iter().map(|peer| format!("{peer}\n")).collect();
                prop_assert_eq!(parse_peers(again.as_bytes()).expect("written by us"), peers);
            }
        }
    }
}
