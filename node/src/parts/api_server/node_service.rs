//! The calls of other nodes of the cluster, and of machines that want to be one.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures_util::{Stream, stream};
use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{NodeApi, NodeId, NodeStore, NodeStoreError, SecretBytes, StoredUnlockKeys};
use nodekeel_supervisor::Context;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::enrol;
use super::gate::{CallingNode, CallingStranger};
use super::rate_limit::StrangerCalls;
use crate::access::PublicKey;
use crate::blocking::run_blocking;
use crate::control::stopping_status;
use crate::error_chain::error_chain;
use crate::node_v1::node_server::{Node, NodeServer};
use crate::node_v1::{
    ClusterRecords, EnrolRequest, EnrolResponse, ReplaceUnlockKeysRequest, ReplaceUnlockKeysResponse,
    UnlockKeysRequest, UnlockKeysResponse, WatchRecordsRequest, WhoAmIRequest, WhoAmIResponse,
};
use crate::parts::api::Api;
use crate::parts::api::cluster_records::Records;
use crate::parts::api::enrol::MAX_REQUEST_BYTES;
use crate::parts::api::peer_keys::PeerKeys;
use crate::running::RunningNode;

struct NodeService {
    running: Arc<RunningNode>,
    api: Arc<Api>,
    /// Ends the streams; otherwise a graceful stop would wait for their clients.
    stop: CancellationToken,
    strangers: Mutex<StrangerCalls>,
    redeeming_workers: Arc<tokio::sync::Mutex<()>>,
}

/// The service for other nodes, behind the gate, for a server that runs in this context.
pub(super) fn node_server(
    running: &Arc<RunningNode>,
    api: &Arc<Api>,
    ctx: &Context,
) -> NodeServer<impl Node> {
    let service = NodeService {
        running: Arc::clone(running),
        api: Arc::clone(api),
        stop: ctx.cancellation_token(),
        strangers: Mutex::new(StrangerCalls::new(Instant::now())),
        redeeming_workers: Arc::default(),
    };
    NodeServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES)
}

impl NodeService {
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn cluster(&self) -> Result<ClusterNode, Status> {
        self.running.extension().ok_or_else(|| Status::aborted("the voter is in no cluster"))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn nodes(&self) -> Result<NodeStore, Status> {
        self.cluster()?.node_store().map_err(|error| Status::aborted(error_chain(&error)))
    }

    /// The name of the node that calls by this key. Its record may have been removed in this moment.
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn name_of(&self, key: PublicKey) -> Result<NodeId, Status> {
        let name = self.api.identities.find(&key).and_then(|identity| identity.name.parse().ok());
        name.ok_or_else(|| Status::permission_denied("the caller is not a node of the cluster"))
    }

    /// Refuses a worker whose key is that of a voter.
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn check_worker_key(&self, key: PublicKey) -> Result<(), Status> {
        let records = self.api.records.borrow();
        let voter = records.nodes.iter().flatten().find(|peer| peer.key == key && !peer.is_worker);
        match voter {
            Some(voter) => Err(Status::failed_precondition(format!(
                "this worker has the key of voter {0}: if its machine was that voter, type `nodectl cluster remove {0}` on \
                 another voter, and join it by another ticket",
                voter.id
            ))),
            None => Ok(()),
        }
    }

    /// Records the address of a worker's API, if it is another one.
    async fn record_worker(&self, node: &NodeId, key: PublicKey, address: &str) -> Result<(), Status> {
        let invalid = |_| Status::invalid_argument(format!("invalid address of a worker: {address:?}"));
        let address = address.parse().map_err(invalid)?;
        let recorded = self.nodes()?.record_api(node, NodeApi { key: key.to_bytes(), address }).await;
        recorded.map_err(|error| record_status(&error))
    }

    /// Admits a call of a stranger, if there are not too many.
    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn admit_stranger<T>(&self, request: &Request<T>) -> Result<CallingStranger, Status> {
        // The gate adds it to the call of a stranger.
        let caller = request.extensions().get::<CallingStranger>().copied();
        let caller = caller.ok_or_else(|| Status::permission_denied("the caller did not come to enrol"))?;
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        match strangers.admits(caller.address.ip(), Instant::now()) {
            true => Ok(caller),
            false => Err(Status::resource_exhausted("too many nodes enrol at once: try again")),
        }
    }
}

/// The most keys of a volume: two during a rotation.
const MAX_KEYS: usize = 4;
const MAX_KEY_BYTES: usize = 64;
const MAX_VOLUME_BYTES: usize = 64;
/// The keys of former volumes of the node.
const MAX_OTHER_KEYS: usize = 64;

fn exposed(stored: &StoredUnlockKeys) -> Vec<Vec<u8>> {
    stored.keys().iter().map(|key| key.expose_bytes().to_vec()).collect()
}

fn record_status(error: &NodeStoreError) -> Status {
    Status::aborted(error_chain(error))
}

/// The gate adds it to the call of a node. The request names no node: nobody asks for another.
#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
fn calling_node<T>(request: &Request<T>) -> Result<CallingNode, Status> {
    let caller = request.extensions().get::<CallingNode>().copied();
    caller.ok_or_else(|| Status::permission_denied("the caller is not a node"))
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn unlock_keys(
        &self,
        request: Request<UnlockKeysRequest>,
    ) -> Result<Response<UnlockKeysResponse>, Status> {
        let CallingNode { key } = calling_node(&request)?;
        if request.get_ref().of_cluster {
            let (nodes, node) = (self.nodes()?, self.name_of(key)?);
            let read = nodes.load_unlock_keys(&node, &request.get_ref().volume).await;
            let keys = exposed(&read.map_err(|error| record_status(&error))?);
            return Ok(Response::new(UnlockKeysResponse { keys }));
        }
        let closed = || Status::unavailable("its own data volume is not open");
        let volume = self.running.volume.handle_of_call().ok_or_else(closed)?;
        let read = run_blocking(move || PeerKeys::read(volume.dir())).await;
        let known =
            read.map_err(|error| Status::internal(format!("it can't read the keys of its peers: {error}")))?;
        let keys = known.into_keys(key, &request.get_ref().volume);
        if keys.is_empty() {
            return Err(Status::not_found("it has no key of this volume"));
        }
        Ok(Response::new(UnlockKeysResponse { keys }))
    }

    async fn replace_unlock_keys(
        &self,
        request: Request<ReplaceUnlockKeysRequest>,
    ) -> Result<Response<ReplaceUnlockKeysResponse>, Status> {
        let CallingNode { key } = calling_node(&request)?;
        let ReplaceUnlockKeysRequest { volume, read, keys } = request.into_inner();
        let (nodes, node) = (self.nodes()?, self.name_of(key)?);
        let stored = nodes.load_unlock_keys(&node, &volume).await.map_err(|error| record_status(&error))?;
        if exposed(&stored) != read {
            return Err(Status::aborted(
                "the cluster has other keys of this volume than those that were read",
            ));
        }
        // A node can't fill the store of the cluster.
        let is_short = |key: &Vec<u8>| key.len() <= MAX_KEY_BYTES;
        if volume.len() > MAX_VOLUME_BYTES
            || keys.len() > MAX_KEYS
            || !keys.iter().all(is_short)
            || stored.other_count() > MAX_OTHER_KEYS
        {
            return Err(Status::invalid_argument("too many keys, or keys of too many volumes"));
        }
        let keys: Vec<_> = keys.into_iter().map(SecretBytes::new).collect();
        let replaced = nodes.replace_unlock_keys(&stored, &keys).await;
        replaced.map_err(|error| record_status(&error))?;
        Ok(Response::new(ReplaceUnlockKeysResponse {}))
    }

    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolResponse>, Status> {
        let (caller, cluster) = (self.admit_stranger(&request)?, self.cluster()?);
        let enrolment = enrol::Enrolment {
            running: Arc::clone(&self.running),
            api: Arc::clone(&self.api),
            cluster,
            redeeming_workers: Arc::clone(&self.redeeming_workers),
        };
        enrolment.admit(caller, request.get_ref()).await.map(Response::new)
    }

    type WatchRecordsStream = Pin<Box<dyn Stream<Item = Result<ClusterRecords, Status>> + Send>>;

    async fn watch_records(
        &self,
        request: Request<WatchRecordsRequest>,
    ) -> Result<Response<Self::WatchRecordsStream>, Status> {
        let CallingNode { key } = calling_node(&request)?;
        let cluster = self.cluster()?;
        let node = self.name_of(key)?;
        self.check_worker_key(key)?;
        if !request.get_ref().address.is_empty() {
            self.record_worker(&node, key, &request.get_ref().address).await?;
        }
        let told = Told {
            node: node.to_string(),
            cluster,
            changes: self.api.records.subscribe(),
            stop: self.stop.clone(),
            last: None,
        };
        Ok(Response::new(Box::pin(told.into_stream())))
    }

    async fn who_am_i(&self, request: Request<WhoAmIRequest>) -> Result<Response<WhoAmIResponse>, Status> {
        let CallingStranger { key, .. } = self.admit_stranger(&request)?;
        let cluster = self.cluster()?.cluster_identity();
        let cluster = cluster.map_err(|error| Status::aborted(error_chain(&error)))?.cluster_id;
        // What it does not know says nothing of another cluster.
        if cluster.to_string() != request.get_ref().cluster {
            return Err(Status::aborted("the voter is in another cluster"));
        }
        // From a majority: what this voter knows may be old.
        let known = self.nodes()?.watch_nodes().next_nodes().await;
        let known = known.map_err(|error| Status::aborted(error_chain(&error)))?;
        let node = known.into_iter().find(|node| node.api.key == key.to_bytes());
        let node = node.ok_or_else(|| Status::not_found("the cluster has no node of this key"))?.id;
        Ok(Response::new(WhoAmIResponse { node: node.to_string() }))
    }
}

/// What a node is told of its cluster, as long as it listens.
struct Told {
    node: String,
    cluster: ClusterNode,
    changes: watch::Receiver<Records>,
    stop: CancellationToken,
    last: Option<ClusterRecords>,
}

impl Told {
    /// Now, and after each change. An error is the last.
    fn into_stream(mut self) -> impl Stream<Item = Result<ClusterRecords, Status>> + Send {
        // What is known now is the first change.
        self.changes.mark_changed();
        stream::unfold(Some(self), |told| async {
            let mut told = told?;
            match told.next().await {
                Ok(records) => Some((Ok(records), Some(told))),
                Err(status) => Some((Err(status), None)),
            }
        })
    }

    async fn next(&mut self) -> Result<ClusterRecords, Status> {
        loop {
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(stopping_status()),
                // Changes would not reach it any more, and another voter may have them.
                why = self.cluster.wait_condition() => {
                    return Err(Status::unavailable(format!("it does not take part in its cluster: {why}")));
                }
                changed = self.changes.changed() => changed.map_err(|_| stopping_status())?,
            }
            let cluster = self.cluster.cluster_identity();
            let cluster = cluster.map_err(|error| Status::unavailable(error_chain(&error)))?.cluster_id;
            let records = self.changes.borrow_and_update().message_to(&self.node, cluster);
            if let Some(records) = records.filter(|records| Some(records) != self.last.as_ref()) {
                self.last = Some(records.clone());
                return Ok(records);
            }
        }
    }
}
