//! The control API's calls about join tickets.

use std::time::{Duration, SystemTime};

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{
    InvalidTicketId, JoinTicketError, JoinTicketLimits, JoinTickets, MAX_TICKET_USES, Redemption,
    StoredJoinTicket,
};
use tonic::Status;

use crate::error_chain::error_chain;
use crate::parts::api::{running_api, ticket_voters};
use crate::running::RunningNode;
use crate::v1;
use crate::wire::timestamp;

/// The longest time in which a ticket can be redeemed.
const MAX_VALID: Duration = Duration::from_secs(365 * 24 * 3600);

pub(crate) async fn create_ticket(
    running: &RunningNode,
    cluster: &ClusterNode,
    request: &v1::CreateJoinTicketRequest,
) -> Result<v1::CreateJoinTicketResponse, Status> {
    let limits = parse_limits(request).map_err(Status::invalid_argument)?;
    let api = running_api(running).ok_or_else(|| {
        Status::failed_precondition(
            "join tickets are redeemed through the API of this node: set api.address in its configuration",
        )
    })?;
    let (tickets, now) = (join_tickets(cluster)?, SystemTime::now());
    let voters = ticket_voters(&api, cluster).await?;
    let ticket = tickets.create_ticket(&limits, &voters, now).await.map_err(|error| ticket_status(&error))?;
    Ok(v1::CreateJoinTicketResponse {
        ticket: ticket.to_text().to_string(),
        id: ticket.id().to_string(),
        expires: now.checked_add(limits.valid_for).and_then(timestamp),
        voters: ticket.voters().iter().map(|voter| voter.address.to_string()).collect(),
    })
}

fn parse_limits(request: &v1::CreateJoinTicketRequest) -> Result<JoinTicketLimits, String> {
    let mut limits = JoinTicketLimits::default();
    if request.valid_for_seconds > 0 {
        limits.valid_for = Duration::from_secs(request.valid_for_seconds);
    }
    if limits.valid_for > MAX_VALID {
        return Err("a join ticket is valid for a year at most".to_owned());
    }
    if request.uses > 0 {
        let uses = u16::try_from(request.uses).ok().filter(|uses| *uses <= MAX_TICKET_USES);
        let uses = uses.and_then(|uses| uses.try_into().ok());
        limits.uses = uses.ok_or_else(|| {
            format!("a join ticket has {MAX_TICKET_USES} uses at most: create one for each group of nodes")
        })?;
    }
    if !request.role.is_empty() {
        limits.role = request.role.parse().map_err(|error| error_chain(&error))?;
    }
    if !request.address.is_empty() {
        let address = request.address.parse();
        limits.address =
            Some(address.map_err(|_| format!("invalid address of a node: {:?}", request.address))?);
    }
    Ok(limits)
}

pub(crate) async fn list_tickets(cluster: &ClusterNode) -> Result<v1::JoinTicketsResponse, Status> {
    let listed = join_tickets(cluster)?.list_tickets().await.map_err(|error| ticket_status(&error))?;
    let now = SystemTime::now();
    Ok(v1::JoinTicketsResponse {
        tickets: listed.into_iter().map(|ticket| wire_ticket(ticket, now)).collect(),
    })
}

fn wire_ticket(ticket: StoredJoinTicket, now: SystemTime) -> v1::JoinTicket {
    let state = if ticket.is_revoked {
        "revoked"
    } else if ticket.redemptions.len() as u64 >= u64::from(ticket.uses) {
        "used"
    } else if now >= ticket.expires {
        "expired"
    } else {
        "open"
    };
    let used_by =
        |Redemption { key, node, url, at, .. }| v1::JoinTicketUse { key, node, url, at: timestamp(at) };
    v1::JoinTicket {
        id: ticket.id.to_string(),
        state: state.to_owned(),
        created: timestamp(ticket.created),
        expires: timestamp(ticket.expires),
        uses: ticket.uses,
        role: ticket.role,
        address: ticket.address.map(|address| address.to_string()).unwrap_or_default(),
        used_by: ticket.redemptions.into_iter().map(used_by).collect(),
    }
}

pub(crate) async fn revoke_ticket(
    cluster: &ClusterNode,
    id: &str,
) -> Result<v1::RevokeJoinTicketResponse, Status> {
    let id = id.parse().map_err(|error: InvalidTicketId| Status::invalid_argument(error.to_string()))?;
    let revoked = join_tickets(cluster)?.revoke_ticket(id).await.map_err(|error| ticket_status(&error))?;
    Ok(v1::RevokeJoinTicketResponse { urls: revoked.iter().map(ToString::to_string).collect() })
}

#[allow(clippy::result_large_err, reason = "tonic's services return its status")]
fn join_tickets(cluster: &ClusterNode) -> Result<JoinTickets, Status> {
    cluster.join_tickets().map_err(|error| Status::failed_precondition(error_chain(&error)))
}

fn ticket_status(error: &JoinTicketError) -> Status {
    let text = error_chain(error);
    match error {
        JoinTicketError::Unknown { .. } => Status::failed_precondition(text),
        JoinTicketError::Kv(error) if error.is_retryable() => Status::aborted(text),
        JoinTicketError::Revoke(error) if error.is_retryable() => Status::aborted(text),
        _ => Status::internal(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_has_1000_uses_at_most() {
        let limits = |uses| parse_limits(&v1::CreateJoinTicketRequest { uses, ..Default::default() });
        assert_eq!(limits(1000).expect("allowed").uses.get(), 1000);
        for many in [1001, 65535, 65536, u32::MAX] {
            assert!(limits(many).expect_err("too many").contains("1000 uses at most"), "{many}");
        }
    }
}
