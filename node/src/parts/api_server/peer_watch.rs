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

use std::net::SocketAddr;
use std::sync::Arc;

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_cluster::node::{KnownNode, NodeApi, NodeId};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};

use crate::access::InvalidKey;
use crate::blocking::run_blocking;
use crate::parts::api::Api;
use crate::parts::api::config::{DN, NOT_IN_CLUSTER};
use crate::parts::api::identities::Source;
use crate::parts::api::peer_keys::PeerKeys;
use crate::parts::api::peers::Peer;
use crate::volume::NodeVolume;

/// Records this node, and keeps what it knows of the others current, once the node is in its cluster.
pub(super) struct PeerWatch {
    pub(super) api: Arc<Api>,
    pub(super) cluster: ClusterNode,
    pub(super) volume: NodeVolume,
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
