//! The calls of other nodes of the cluster.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tonic::{Request, Response, Status};

use super::enrol;
use super::gate::{CallingNode, CallingStranger};
use super::rate_limit::StrangerCalls;
use crate::blocking::run_blocking;
use crate::node_v1::node_server::{Node, NodeServer};
use crate::node_v1::{EnrolRequest, EnrolResponse, UnlockKeysRequest, UnlockKeysResponse};
use crate::parts::api::enrol::MAX_REQUEST_BYTES;
use crate::parts::api::peer_keys::PeerKeys;
use crate::running::RunningNode;

struct NodeService {
    running: Arc<RunningNode>,
    enrolments: Mutex<StrangerCalls>,
}

/// The service for other nodes, behind the gate.
pub(super) fn node_server(running: &Arc<RunningNode>) -> NodeServer<impl Node> {
    let enrolments = Mutex::new(StrangerCalls::new(Instant::now()));
    NodeServer::new(NodeService { running: Arc::clone(running), enrolments })
        .max_decoding_message_size(MAX_REQUEST_BYTES)
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn unlock_keys(
        &self,
        request: Request<UnlockKeysRequest>,
    ) -> Result<Response<UnlockKeysResponse>, Status> {
        // The gate adds it to the call of a node. The request names no node: nobody asks for another.
        let caller = request.extensions().get::<CallingNode>().copied();
        let CallingNode { key } =
            caller.ok_or_else(|| Status::permission_denied("the caller is not a node"))?;
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

    async fn enrol(&self, request: Request<EnrolRequest>) -> Result<Response<EnrolResponse>, Status> {
        // The gate adds it to the call of a stranger.
        let caller = request.extensions().get::<CallingStranger>().copied();
        let caller = caller.ok_or_else(|| Status::permission_denied("the caller did not come to enrol"))?;
        let is_admitted = {
            let mut enrolments = self.enrolments.lock().unwrap_or_else(PoisonError::into_inner);
            enrolments.admits(caller.address.ip(), Instant::now())
        };
        if !is_admitted {
            return Err(Status::resource_exhausted("too many nodes enrol at once: try again"));
        }
        enrol::enrol(Arc::clone(&self.running), caller, request.get_ref()).await.map(Response::new)
    }
}
