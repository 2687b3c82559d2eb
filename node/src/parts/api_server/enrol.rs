//! Enrolment by a join ticket: how a voter answers a new node.

use std::sync::Arc;
use std::time::SystemTime;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::EnrolError;
use tonic::Status;

use super::gate::CallingStranger;
use crate::caller::Caller;
use crate::dn::CLUSTER as CLUSTER_DN;
use crate::error_chain::error_chain;
use crate::node_v1;
use crate::parts::api::enrol::parse_message;
use crate::running::RunningNode;

/// Admits a node, if its ticket says so. A node that is admitted is an event; the gate records the others.
pub(super) async fn enrol(
    running: Arc<RunningNode>,
    CallingStranger { key, address }: CallingStranger,
    message: &node_v1::EnrolRequest,
) -> Result<node_v1::EnrolResponse, Status> {
    let request = parse_message(message).map_err(|error| Status::invalid_argument(error_chain(&error)))?;
    let cluster = running.extension::<ClusterNode>();
    let cluster = cluster.ok_or_else(|| Status::aborted("the voter is in no cluster"))?;
    let tickets = cluster.join_tickets().map_err(|error| Status::aborted(error_chain(&error)))?;
    // It ends also if the caller does not wait for it: who was admitted is always an event.
    let redeeming = tokio::spawn(async move {
        let redeemed = tickets.redeem_ticket(&key.to_string(), &request, SystemTime::now()).await;
        let enrolment = redeemed.map_err(|error| refusal(&error))?;
        let action = format!("enrolment of the node at {} by join ticket {}", request.url, request.ticket);
        let caller = Caller::Operator { name: key.to_string(), address };
        running.history.add_request(CLUSTER_DN, 0, &action, Some(caller));
        Ok(node_v1::EnrolResponse { enrolment })
    });
    redeeming.await.unwrap_or_else(|error| Err(Status::internal(error_chain(&error))))
}

fn refusal(error: &EnrolError) -> Status {
    let text = error_chain(error);
    match error {
        EnrolError::Request(_) => Status::invalid_argument(text),
        error if error.is_refusal() => Status::permission_denied(text),
        _ => Status::aborted(text),
    }
}
