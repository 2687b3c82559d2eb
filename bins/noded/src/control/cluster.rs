//! What the control API tells of the node's cluster.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::error::Error;
use std::net::IpAddr;

use nodekeel_cluster::consensus::{Member, PeerUrl};
use nodekeel_cluster::machine::{Cluster, State, Work};
use tonic::Status;

use crate::node::Shared;
use crate::{plan, v1};

/// The node's cluster.
fn cluster(shared: &Shared) -> Result<&Cluster, Status> {
    let none = || {
        Status::failed_precondition("this node is to be in no cluster: its configuration has no [cluster]")
    };
    shared.cluster.as_ref().ok_or_else(none)
}

pub(super) fn status(shared: &Shared) -> Result<v1::ClusterResponse, Status> {
    let cluster = cluster(shared)?;
    let state = cluster.state();
    let (detail, node, id) = match &state {
        State::New => (String::new(), None, None),
        State::CreatingCluster(work) | State::Joining { work, .. } | State::Restarting(work) => {
            (work.activity().to_string(), name(work), None)
        }
        State::Running(place) => {
            (String::new(), Some(place.node.to_string()), Some(place.cluster.to_string()))
        }
        State::Failed(reason) => (plan::chain(reason), None, None),
    };
    Ok(v1::ClusterResponse {
        state: state.kind().to_string(),
        detail,
        history: cluster.history().iter().map(ToString::to_string).collect(),
        node: node.unwrap_or_default(),
        cluster: id.unwrap_or_default(),
    })
}

fn name(work: &Work) -> Option<String> {
    work.node().map(ToString::to_string)
}

pub(super) async fn members(shared: &Shared) -> Result<v1::MembersResponse, Status> {
    let member = cluster(shared)?.member().map_err(|error| unavailable(&error))?;
    let listed = member.members().list().await.map_err(|error| unavailable(&error))?;
    let this = member.this().id;
    let wire = |member: Member| v1::Member {
        is_this: member.id == this,
        id: member.id.to_string(),
        name: member.name.unwrap_or_default(),
        peer_urls: member.peer_urls,
        is_learner: member.is_learner,
    };
    Ok(v1::MembersResponse { members: listed.into_iter().map(wire).collect() })
}

pub(super) async fn golden_ticket(
    shared: &Shared,
    request: v1::CreateGoldenTicketRequest,
) -> Result<v1::CreateGoldenTicketResponse, Status> {
    let tickets = cluster(shared)?.golden_tickets().map_err(|error| {
        let remedy = "set cluster.golden_tickets = true where they are to be made";
        Status::failed_precondition(format!("{}; {remedy}", plan::chain(&error)))
    })?;
    let wrong = |what: &str| Status::invalid_argument(format!("{what:?} is not an address of a node"));
    let address: IpAddr = request.address.parse().map_err(|_| wrong(&request.address))?;
    let port = match u16::try_from(request.port).map_err(|_| wrong(&request.port.to_string()))? {
        0 => shared.plan.config.services.etcd.peer_port.get(),
        port => port,
    };
    let ticket = tickets.issue(&PeerUrl::new(address, port)).await.map_err(|error| unavailable(&error))?;
    Ok(v1::CreateGoldenTicketResponse {
        enrolment: ticket.to_config().to_vec(),
        node: ticket.node().to_string(),
    })
}

fn unavailable(error: &dyn Error) -> Status {
    Status::unavailable(plan::chain(error))
}
