//! Enrolment by a join ticket: how a voter answers a new node.

use std::sync::Arc;
use std::time::SystemTime;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{EnrolError, EnrolRequest, JoinTickets, WorkerRequest};
use tokio::sync::Mutex;
use tonic::Status;

use super::gate::CallingStranger;
use crate::access::PublicKey;
use crate::caller::Caller;
use crate::dn::CLUSTER as CLUSTER_DN;
use crate::error_chain::error_chain;
use crate::node_v1;
use crate::parts::api::Api;
use crate::parts::api::enrol::{ParsedRequest, parse_message};
use crate::running::RunningNode;

/// A voter to which a new node has come.
pub(super) struct Enrolment {
    pub(super) running: Arc<RunningNode>,
    pub(super) api: Arc<Api>,
    pub(super) cluster: ClusterNode,
    /// Held for one after the other: those that have the same ticket would contend for it.
    pub(super) redeeming_workers: Arc<Mutex<()>>,
}

impl Enrolment {
    /// Admits a node, if its ticket says so. A node that is admitted is an event; the gate records the others.
    pub(super) async fn admit(
        self,
        CallingStranger { key, address }: CallingStranger,
        message: &node_v1::EnrolRequest,
    ) -> Result<node_v1::EnrolResponse, Status> {
        let request = parse_message(message, key);
        let request = request.map_err(|error| Status::invalid_argument(error_chain(&error)))?;
        // It ends also if the caller does not wait for it: who was admitted is always an event.
        let redeeming = tokio::spawn(async move {
            let name = key.to_string();
            let (answer, action) = match request {
                ParsedRequest::Voter(request) => self.admit_voter(key, &name, &request).await?,
                ParsedRequest::Worker(request) => self.admit_worker(&name, &request).await?,
            };
            let caller = Caller::Operator { name, address };
            self.running.history.add_request(CLUSTER_DN, 0, &action, Some(caller));
            Ok(answer)
        });
        redeeming.await.unwrap_or_else(|error| Err(Status::internal(error_chain(&error))))
    }

    async fn admit_voter(
        &self,
        key: PublicKey,
        name: &str,
        request: &EnrolRequest,
    ) -> Result<(node_v1::EnrolResponse, String), Status> {
        let tickets = self.tickets()?;
        let checked = tickets.check_api_key(&key.to_bytes(), request).await;
        checked.map_err(|error| refusal(&error))?;
        let redeemed = tickets.redeem_ticket(name, request, SystemTime::now()).await;
        let enrolment = redeemed.map_err(|error| refusal(&error))?;
        let action = format!("enrolment of the node at {} by join ticket {}", request.url, request.ticket);
        Ok((node_v1::EnrolResponse { enrolment, records: None }, action))
    }

    async fn admit_worker(
        &self,
        key: &str,
        request: &WorkerRequest,
    ) -> Result<(node_v1::EnrolResponse, String), Status> {
        let tickets = self.tickets()?;
        let cluster = self.cluster.cluster_identity();
        let cluster = cluster.map_err(|error| Status::aborted(error_chain(&error)))?.cluster_id;
        // Before anything is used: without them, the worker could do nothing.
        let records = self.api.records.borrow().message_to("", cluster);
        let unknown = || Status::aborted("it does not know the nodes of its cluster yet: try again");
        let records = records.ok_or_else(unknown)?;
        let turn = self.redeeming_workers.lock().await;
        let redeemed = tickets.redeem_worker_ticket(key, request, SystemTime::now()).await;
        drop(turn);
        let node = redeemed.map_err(|error| refusal(&error))?.to_string();
        let (address, ticket) = (request.api.address, request.ticket);
        let action = format!("enrolment of worker {node} at {address} by join ticket {ticket}");
        let records = Some(node_v1::ClusterRecords { node, ..records });
        Ok((node_v1::EnrolResponse { enrolment: Vec::new(), records }, action))
    }

    #[allow(clippy::result_large_err, reason = "tonic's services return its status")]
    fn tickets(&self) -> Result<JoinTickets, Status> {
        self.cluster.join_tickets().map_err(|error| Status::aborted(error_chain(&error)))
    }
}

fn refusal(error: &EnrolError) -> Status {
    let text = error_chain(error);
    match error {
        EnrolError::Request(_) => Status::invalid_argument(text),
        error if error.is_refusal() => Status::permission_denied(text),
        _ => Status::aborted(text),
    }
}
