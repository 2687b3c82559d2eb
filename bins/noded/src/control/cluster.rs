//! What the control API tells of the node's cluster.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::net::{IpAddr, SocketAddr};

use nodekeel_cluster::consensus::{Member, MembershipError, PeerUrl};
use nodekeel_cluster::machine::{Cluster, State, TicketAccessError, Work};
use nodekeel_cluster::node::{GoldenTickets, IssueError};
use tonic::{Code, Status};

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
    let member =
        cluster(shared)?.member().map_err(|error| Status::failed_precondition(plan::chain(&error)))?;
    let listed = member.members().list().await;
    let listed = listed.map_err(|error| Status::new(of_members(&error), plan::chain(&error)))?;
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
    let tickets = tickets(shared)?;
    let url = url(shared, &request.address, request.port)?;
    let ticket = match tickets.issue(&url).await {
        Ok(ticket) => ticket,
        Err(error) => return Err(not_issued(&error, remedy(cluster(shared)?, &error, &url).await)),
    };
    Ok(v1::CreateGoldenTicketResponse {
        enrolment: ticket.to_config().to_vec(),
        node: ticket.node().to_string(),
    })
}

pub(super) async fn withdraw(
    shared: &Shared,
    request: v1::WithdrawGoldenTicketRequest,
) -> Result<v1::WithdrawGoldenTicketResponse, Status> {
    let tickets = tickets(shared)?;
    let url = url(shared, &request.address, request.port)?;
    match tickets.withdraw(&url).await {
        Ok(true) => Ok(v1::WithdrawGoldenTicketResponse { url: url.to_string() }),
        Ok(false) => Err(Status::failed_precondition(format!("there is no ticket for {url}"))),
        Err(error) => Err(not_issued(&error, None)),
    }
}

fn tickets(shared: &Shared) -> Result<GoldenTickets, Status> {
    cluster(shared)?.golden_tickets().map_err(|error| {
        let remedy = match error {
            TicketAccessError::Disabled => "; set cluster.golden_tickets = true where they are to be made",
            _ => "",
        };
        Status::failed_precondition(plan::chain(&error) + remedy)
    })
}

/// Where the others reach the node of a ticket; port 0 is the same as this node's.
fn url(shared: &Shared, address: &str, port: u32) -> Result<PeerUrl, Status> {
    let wrong = |what: &str| Status::invalid_argument(format!("{what:?} is not where a node can be"));
    let address: IpAddr = address.parse().map_err(|_| wrong(address))?;
    let port = match u16::try_from(port).map_err(|_| wrong(&port.to_string()))? {
        0 => shared.plan.config.services.etcd.peer_port.get(),
        port => port,
    };
    Ok(PeerUrl::new(address, port))
}

fn not_issued(error: &IssueError, remedy: Option<String>) -> Status {
    let remedy = remedy.map(|remedy| format!("; {remedy}")).unwrap_or_default();
    Status::new(of_ticket(error), plan::chain(error) + &remedy)
}

/// What the operator can do about it, where what is in the way is another ticket.
async fn remedy(cluster: &Cluster, error: &IssueError, url: &PeerUrl) -> Option<String> {
    match error {
        IssueError::Kept(_) => Some(format!("to have another made, {}", withdrawal(url.as_str())?)),
        IssueError::Membership(MembershipError::TooManyLearners) => {
            let members = cluster.members().ok()?.list().await.ok()?;
            let learner = members.into_iter().find(|member| member.is_learner)?;
            let url = learner.peer_urls.into_iter().next()?;
            let free = withdrawal(&url).map(|command| format!(", or {command}")).unwrap_or_default();
            Some(format!("it is at {url}: wait until its node has joined{free}"))
        }
        _ => None,
    }
}

/// The command that takes the ticket for this place back.
fn withdrawal(url: &str) -> Option<String> {
    let place: SocketAddr = url.strip_prefix("https://")?.parse().ok()?;
    let (address, port) = (place.ip(), place.port());
    Some(format!(
        "take its ticket back with `nodectl cluster ticket withdraw --address {address} --port {port}`"
    ))
}

/// What a failure to make a ticket is to the caller. The node was reached, and has answered: it is never `Unavailable`.
fn of_ticket(error: &IssueError) -> Code {
    let retry = |is_retryable| if is_retryable { Code::Aborted } else { Code::Internal };
    match error {
        IssueError::NoAddress { .. } => Code::InvalidArgument,
        IssueError::Taken { .. } | IssueError::Kept(_) => Code::FailedPrecondition,
        IssueError::Membership(error) => of_members(error),
        IssueError::Kv(error) => retry(error.is_retryable()),
        IssueError::Authority(error) => retry(error.is_retryable()),
        IssueError::Record(error) => retry(error.is_retryable()),
        _ => Code::Internal,
    }
}

fn of_members(error: &MembershipError) -> Code {
    match error {
        MembershipError::Unavailable { .. } => Code::Aborted,
        MembershipError::Refused { .. } => Code::Internal,
        // Another learner, a majority that is missing, a member that has been stopped.
        _ => Code::FailedPrecondition,
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_cluster::consensus::kv::KvError;
    use nodekeel_cluster::node::{RecordError, TicketError};
    use nodekeel_cluster::pki::AuthorityError;

    use super::*;

    #[test]
    fn the_command_for_a_place_has_its_address_and_port() {
        let command = withdrawal("https://[2001:db8::1]:7834").unwrap_or_default();
        assert!(command.contains("--address 2001:db8::1 --port 7834"), "{command}");
        assert_eq!(withdrawal("https://node-1:7834"), None);
    }

    #[test]
    fn what_the_cluster_answers_is_not_told_as_a_node_that_can_not_be_reached() {
        let url = PeerUrl::new([192, 0, 2, 1].into(), 7834);
        let no_answer =
            || MembershipError::Unavailable { operation: "list the members", source: "late".into() };
        let refused = || MembershipError::Refused { operation: "list the members", source: "no".into() };
        let cases = [
            (IssueError::NoAddress { url: url.clone() }, Code::InvalidArgument),
            (IssueError::Taken { url }, Code::FailedPrecondition),
            (IssueError::Kept(TicketError::Message), Code::FailedPrecondition),
            (IssueError::Membership(MembershipError::TooManyLearners), Code::FailedPrecondition),
            (IssueError::Membership(MembershipError::Stopped), Code::FailedPrecondition),
            (IssueError::Membership(no_answer()), Code::Aborted),
            (IssueError::Membership(refused()), Code::Internal),
            (IssueError::Kv(KvError::Unavailable { operation: "get", source: "late".into() }), Code::Aborted),
            (IssueError::Kv(KvError::DuplicateKey), Code::Internal),
            (IssueError::Authority(AuthorityError::Contended), Code::Aborted),
            (IssueError::Authority(AuthorityError::Absent), Code::Internal),
            (IssueError::Record(RecordError::NoCluster), Code::Internal),
        ];
        for (error, code) in cases {
            let status = not_issued(&error, None);
            assert_eq!((status.code(), status.message()), (code, &*plan::chain(&error)));
        }
    }
}
