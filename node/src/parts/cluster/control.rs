//! Calls of the control API about the node's cluster.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt as _, stream};
use nodekeel_cluster::backup::{Recipient, SnapshotError, encrypt_snapshot, stage_snapshot};
use nodekeel_cluster::consensus::{
    ClusterAccess, LostMember, Member, MemberFacts, MemberId, MembershipError, PeerUrl, StoreMaintenance,
    check_defragment, check_disarm,
};
use nodekeel_cluster::enrolment::{
    BootstrapRefusal, ClusterNode, EnrolmentPhase, EnrolmentRun, EnrolmentState, TicketAccessError, WaitCause,
};
use nodekeel_cluster::node::{
    GoldenTicketIssuer, KnownNode, NodeId, NodeRemovalError, NodeRemover, NodeReplacer, TicketIssueError,
};
use nodekeel_localstorage::Dir;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use super::warnings::{present_warnings, warning_text};
use crate::config::NodedConfig;
use crate::error_chain::error_chain;
use crate::v1;
use crate::wire::timestamp;

/// The state of a node in its cluster whose member can't take part at present.
const UNHEALTHY: &str = "Unhealthy";

/// The node's cluster, or the status of a node without one.
pub(crate) fn require_cluster(cluster: Option<ClusterNode>) -> Result<ClusterNode, Status> {
    let none = || {
        Status::failed_precondition("clustering is not configured: [cluster] is missing in the configuration")
    };
    cluster.ok_or_else(none)
}

/// Describes how far the node is on its way into the cluster, or what keeps it from taking part.
pub(crate) fn cluster_status(cluster: &ClusterNode, config: &NodedConfig) -> v1::ClusterResponse {
    let state = cluster.current_state();
    let condition = cluster.condition().map(|condition| condition.to_string());
    let (detail, node, id) = match &state {
        EnrolmentState::New => (condition.clone().unwrap_or_default(), None, None),
        // With a ticket it may wait for its address.
        EnrolmentState::Waiting(cause) => match &condition {
            Some(condition) if *condition != cause.to_string() => (condition.clone(), None, None),
            _ => (waiting_detail(cause, &config.node.data), None, None),
        },
        EnrolmentState::CreatingCluster(run)
        | EnrolmentState::Joining { run, .. }
        | EnrolmentState::Restarting(run) => {
            (condition.clone().unwrap_or_else(|| run.activity().to_string()), node_name(run), None)
        }
        EnrolmentState::Running(membership) => (
            condition.clone().unwrap_or_default(),
            Some(membership.node_id.to_string()),
            Some(membership.cluster_id.to_string()),
        ),
        EnrolmentState::Failed(reason) => (error_chain(reason), None, None),
        // A state of a later release of the crate.
        _ => (condition.clone().unwrap_or_default(), None, None),
    };
    v1::ClusterResponse {
        // A member that can't take part is still `Running` for the library. Operators see it as unhealthy.
        state: match (&state, condition) {
            (EnrolmentState::Running(_), Some(_)) => UNHEALTHY.to_owned(),
            _ => state.phase().to_string(),
        },
        detail,
        history: cluster.phase_history().iter().map(ToString::to_string).collect(),
        node: node.unwrap_or_default(),
        cluster: id.unwrap_or_default(),
        warnings: present_warnings(cluster).iter().map(warning_text).collect(),
    }
}

/// Describes why the node waits, and what to do on this node.
fn waiting_detail(cause: &WaitCause, data: &Path) -> String {
    let hint = match cause {
        // It goes on by itself; the condition says what it waits for.
        WaitCause::Redemption => return cause.to_string(),
        WaitCause::NoInstruction => ", or type `nodectl cluster bootstrap` for a new cluster",
        _ => ", or permit a new cluster: `nodectl reset --bootstrap`",
    };
    let ticket = data.join("esp/enrolment.pb");
    format!("{cause}; copy a ticket of a member to {}{hint}", ticket.display())
}

/// Tells the node to bootstrap a cluster. A node that has just started has not looked for a ticket yet: this waits until it
/// has, or until the client gives up, and then it requests nothing.
pub(crate) async fn bootstrap(cluster: &ClusterNode) -> Result<v1::BootstrapResponse, Status> {
    loop {
        match cluster.request_bootstrap() {
            Ok(()) => return Ok(v1::BootstrapResponse {}),
            Err(BootstrapRefusal::NotWaiting { state: EnrolmentPhase::New }) => {
                cluster.wait_phase_left(EnrolmentPhase::New).await;
            }
            Err(refusal) => return Err(Status::failed_precondition(error_chain(&refusal))),
        }
    }
}

fn node_name(run: &EnrolmentRun) -> Option<String> {
    run.node_id().map(ToString::to_string)
}

pub(crate) async fn list_members(cluster: &ClusterNode) -> Result<v1::MembersResponse, Status> {
    let member =
        cluster.cluster_access().map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let listed = member.cluster_members().list_members().await;
    // The condition of the node often explains the error, for example a lost quorum.
    let listed = listed.map_err(|error| {
        let text = add_condition(error_chain(&error), cluster.condition().as_deref());
        Status::new(membership_error_code(&error), text)
    })?;
    let this = member.this_member().id;
    let report = member.cluster_report();
    let wire = |member: Member| {
        let is_this = member.id == this;
        let uncompared_since = report.uncompared_since.filter(|_| is_this);
        let report = report.members.iter().find(|report| report.member.id == member.id);
        v1::Member {
            is_this,
            id: member.id.to_string(),
            name: member.name.unwrap_or_default(),
            peer_urls: member.peer_urls,
            is_learner: member.is_learner,
            silent_since: report.and_then(|report| report.silent_since).and_then(timestamp),
            facts: report.and_then(|report| report.facts.clone()).map(wire_facts),
            uncompared_since: uncompared_since.and_then(timestamp),
        }
    };
    let nodes = cluster.node_store().map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let known = nodes.watch_nodes().next_nodes().await;
    let known = known.map_err(|error| Status::aborted(error_chain(&error)))?;
    let workers = known.into_iter().filter(|node| node.is_worker);
    let worker =
        |node: KnownNode| v1::Worker { name: node.id.to_string(), address: node.api.address.to_string() };
    Ok(v1::MembersResponse {
        members: listed.into_iter().map(wire).collect(),
        workers: workers.map(worker).collect(),
    })
}

pub(crate) async fn defragment(
    cluster: &ClusterNode,
    request: &v1::DefragmentRequest,
) -> Result<v1::DefragmentResponse, Status> {
    let (access, maintenance) = store_maintenance(cluster)?;
    let id = u64::from_str_radix(&request.member, 16).map(MemberId);
    let id =
        id.map_err(|_| Status::invalid_argument(format!("invalid id of a member: {:?}", request.member)))?;
    check_defragment(&access.cluster_report(), id)
        .map_err(|reason| Status::failed_precondition(format!("can't defragment a member: {reason}")))?;
    if request.compact {
        maintenance.compact().await.map_err(|error| membership_status(&error))?;
    }
    maintenance.defragment().await.map_err(|error| membership_status(&error))?;
    Ok(v1::DefragmentResponse {})
}

pub(crate) async fn disarm(cluster: &ClusterNode) -> Result<v1::DisarmResponse, Status> {
    let (access, maintenance) = store_maintenance(cluster)?;
    let mut alarms = Vec::new();
    for (member, alarm) in maintenance.list_alarms().await.map_err(|error| membership_status(&error))? {
        check_disarm(&access.cluster_report(), member, &alarm)
            .map_err(|reason| Status::failed_precondition(format!("can't end an alarm: {reason}")))?;
        maintenance.disarm(member, &alarm).await.map_err(|error| membership_status(&error))?;
        alarms.push(format!("{} of {}", alarm.kind, alarm.member));
    }
    Ok(v1::DisarmResponse { alarms })
}

/// The encrypted file of a snapshot by this node's member.
pub(crate) async fn snapshot(
    cluster: &ClusterNode,
    config: &NodedConfig,
    request: &v1::SnapshotClusterRequest,
) -> Result<impl Stream<Item = Result<v1::SnapshotClusterResponse, Status>> + Send + use<>, Status> {
    let recipient = choose_recipient(config, &request.recipient)?;
    let (_, maintenance) = store_maintenance(cluster)?;
    let snapshot = maintenance.snapshot().await.map_err(|error| {
        let text = add_condition(error_chain(&error), cluster.condition().as_deref());
        Status::new(membership_error_code(&error), text)
    })?;
    let file = Box::pin(encrypt_snapshot(snapshot, &recipient));
    let first = v1::SnapshotClusterResponse { recipient: recipient.to_string(), ..Default::default() };
    Ok(stream::try_unfold((Some(first), Some(file)), |(first, file)| async {
        if let Some(first) = first {
            return Ok(Some((first, (None, file))));
        }
        let Some(mut file) = file else { return Ok(None) };
        Ok(Some(match file.try_next().await.map_err(|error| snapshot_status(&error))? {
            Some(piece) => (v1::SnapshotClusterResponse { piece, ..Default::default() }, (None, Some(file))),
            None => (v1::SnapshotClusterResponse { is_complete: true, ..Default::default() }, (None, None)),
        }))
    }))
}

/// The recipient of the request, or the configured one.
fn choose_recipient(config: &NodedConfig, given: &str) -> Result<Recipient, Status> {
    let configured = config.cluster.as_ref().and_then(|cluster| cluster.backup.as_ref());
    match (given, configured) {
        ("", Some(backup)) => Ok(backup.recipient.clone()),
        ("", None) => Err(Status::failed_precondition(
            "a snapshot is encrypted, and there is no recipient: `age-keygen -o KEY` on another machine makes a key and prints \
             its recipient; then --recipient age1…, or cluster.backup.recipient in the configuration",
        )),
        (given, _) => given.parse().map_err(|error| Status::invalid_argument(error_chain(&error))),
    }
}

/// The file of a snapshot that is to be restored.
#[derive(Clone, Debug)]
pub(crate) struct StagedSnapshot(pub(crate) PathBuf);

/// How long a restore waits for a node that has just started.
const BEGUN_WITHIN: Duration = Duration::from_secs(60);

/// Receives a decrypted snapshot, verifies it, and tells the node to restore the cluster from it. An upload that fails
/// decides nothing.
pub(crate) async fn restore(
    cluster: &ClusterNode,
    staged: Option<StagedSnapshot>,
    mut pieces: Streaming<v1::RestoreClusterRequest>,
) -> Result<v1::RestoreClusterResponse, Status> {
    let Some(StagedSnapshot(path)) = staged else {
        return Err(Status::failed_precondition("the cluster's store is in memory: it has no snapshots"));
    };
    let refused = |refusal: BootstrapRefusal| Status::failed_precondition(error_chain(&refusal));
    // Before the upload, which may be long. The request checks it again.
    let begun = timeout(BEGUN_WITHIN, cluster.wait_phase_left(EnrolmentPhase::New)).await;
    let not_begun = |_| {
        Status::failed_precondition(
            "the node has not looked for a ticket yet, perhaps because its data volume is not open: see `nodectl status root.storage`, \
             and repeat the command once `nodectl cluster status` prints Waiting",
        )
    };
    match begun.map_err(not_begun)? {
        EnrolmentState::Waiting(_) => {}
        other => return Err(refused(BootstrapRefusal::NotWaiting { state: other.phase() })),
    }
    let (sender, mut receiver) = mpsc::channel(8);
    let staging = spawn_blocking(move || {
        let (dir, name) = (path.parent().unwrap_or(&path), path.file_name().unwrap_or_default());
        let dir = Dir::open(dir).map_err(SnapshotError::Store)?;
        // Of an upload that was killed.
        dir.remove_stale_files().map_err(SnapshotError::Store)?;
        stage_snapshot(&dir, Path::new(name), std::iter::from_fn(|| receiver.blocking_recv()))
    });
    // A client that has gone leaves an incomplete snapshot, which is not stored.
    while let Ok(Some(next)) = pieces.message().await {
        // A failed writer tells why below.
        if sender.send(next.piece).await.is_err() {
            break;
        }
    }
    drop(sender);
    let staged = staging.await.map_err(|error| Status::internal(error.to_string()))?;
    staged.map_err(|error| snapshot_status(&error))?;
    cluster.request_restore().map_err(refused)?;
    Ok(v1::RestoreClusterResponse {})
}

fn snapshot_status(error: &SnapshotError) -> Status {
    let code = match error {
        SnapshotError::Read(source) => membership_error_code(source),
        SnapshotError::Damaged { .. } => Code::Aborted,
        _ => Code::FailedPrecondition,
    };
    Status::new(code, error_chain(error))
}

fn store_maintenance(cluster: &ClusterNode) -> Result<(ClusterAccess, Arc<dyn StoreMaintenance>), Status> {
    let access =
        cluster.cluster_access().map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let maintenance = access.store_maintenance();
    let none = || {
        Status::failed_precondition(
            "the cluster's store is in memory: it has no maintenance and no snapshots",
        )
    };
    Ok((access, maintenance.ok_or_else(none)?))
}

fn membership_status(error: &MembershipError) -> Status {
    Status::new(membership_error_code(error), error_chain(error))
}

fn wire_facts(facts: MemberFacts) -> v1::MemberFacts {
    let store = facts.store.unwrap_or_default();
    v1::MemberFacts {
        version: facts.version,
        applied_index: store.applied_index,
        store_bytes: store.store_bytes,
        used_bytes: store.used_bytes,
        quota_bytes: store.quota_bytes.unwrap_or_default(),
    }
}

/// Removes another node. It goes on if the client disconnects: half a removal helps nobody.
pub(crate) async fn remove_node(cluster: &ClusterNode, node: &str) -> Result<v1::RemoveNodeResponse, Status> {
    let (node, remover) = (parse_node(node)?, node_remover(cluster)?);
    let command = format!("nodectl cluster remove {node}");
    let removed = tokio::spawn(async move { remover.remove_node(&node).await }).await;
    let removed = removed.map_err(|error| Status::internal(error.to_string()))?;
    removed
        .map(|()| v1::RemoveNodeResponse {})
        .map_err(|error| removal_status(&error, &command, cluster.condition().as_deref()))
}

/// Replaces another node. It goes on if the client disconnects, and the repeated command gets the ticket.
pub(crate) async fn replace_node(
    cluster: &ClusterNode,
    config: &NodedConfig,
    request: v1::ReplaceNodeRequest,
) -> Result<v1::ReplaceNodeResponse, Status> {
    let node = parse_node(&request.node)?;
    let replacer = NodeReplacer::new(node_remover(cluster)?, ticket_issuer(cluster)?);
    let successor = match request.address.as_str() {
        "" => None,
        address => Some(peer_url(config, address, request.port)?),
    };
    let command = format!("nodectl cluster replace {node} --file FILE");
    let replaced = tokio::spawn(async move { replacer.replace_node(&node, successor.as_ref()).await }).await;
    let replaced = replaced.map_err(|error| Status::internal(error.to_string()))?;
    let ticket =
        replaced.map_err(|error| removal_status(&error, &command, cluster.condition().as_deref()))?;
    Ok(v1::ReplaceNodeResponse {
        enrolment: ticket.to_config().to_vec(),
        node: ticket.node_id().to_string(),
        url: ticket.new_member().url.to_string(),
    })
}

/// Takes this node out of its cluster. It goes on if the client disconnects.
pub(crate) async fn leave(cluster: &ClusterNode) -> Result<v1::LeaveResponse, Status> {
    let remover = node_remover(cluster)?;
    let left = tokio::spawn(async move { remover.leave().await }).await;
    let left = left.map_err(|error| Status::internal(error.to_string()))?;
    let node = left
        .map_err(|error| removal_status(&error, "nodectl cluster leave", cluster.condition().as_deref()))?;
    Ok(v1::LeaveResponse { node: node.to_string() })
}

/// Recovers the cluster from this node, or returns what that takes out.
pub(crate) async fn recover_cluster(
    cluster: &ClusterNode,
    request: &v1::RecoverClusterRequest,
) -> Result<v1::RecoverClusterResponse, Status> {
    let node = parse_node(&request.node)?;
    let planned = match request.is_agreed {
        true => cluster.recover_cluster(&node).await,
        false => cluster.plan_recovery(&node).await,
    };
    let planned = planned.map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let wire = |lost: LostMember| v1::LostMember {
        name: lost.name.unwrap_or_default(),
        url: lost.peer_url.unwrap_or_default(),
        is_answering: lost.is_answering,
    };
    let lost = planned.lost.into_iter().map(wire).collect();
    Ok(v1::RecoverClusterResponse { lost, is_done: request.is_agreed })
}

fn parse_node(node: &str) -> Result<NodeId, Status> {
    node.parse().map_err(|error| {
        let error = error_chain(&error);
        Status::invalid_argument(format!(
            "{error}; `nodectl cluster status` prints the name of a node, `nodectl cluster members` those of all"
        ))
    })
}

fn node_remover(cluster: &ClusterNode) -> Result<NodeRemover, Status> {
    cluster.node_remover().map_err(|error| Status::failed_precondition(error_chain(&error)))
}

/// `command` completes what was begun.
fn removal_status(error: &NodeRemovalError, command: &str, condition: Option<&str>) -> Status {
    let mut text = error_chain(error);
    if error.is_retryable() {
        text.push_str(&format!("; repeat `{command}`, which completes what was begun"));
    }
    Status::new(removal_error_code(error), add_condition(text, condition))
}

fn removal_error_code(error: &NodeRemovalError) -> Code {
    let retry = |is_retryable| if is_retryable { Code::Aborted } else { Code::Internal };
    match error {
        NodeRemovalError::Member { source, .. } | NodeRemovalError::PrepareLeave(source) => {
            membership_error_code(source)
        }
        NodeRemovalError::Certificates { source, .. } => retry(source.is_retryable()),
        NodeRemovalError::Ticket { source, .. } | NodeRemovalError::Successor { source, .. } => {
            ticket_error_code(source)
        }
        NodeRemovalError::Record { source, .. } => retry(source.is_retryable()),
        NodeRemovalError::Departure { source, .. } => retry(source.is_retryable()),
        _ => Code::FailedPrecondition,
    }
}

pub(crate) async fn create_ticket(
    cluster: &ClusterNode,
    config: &NodedConfig,
    request: v1::CreateGoldenTicketRequest,
) -> Result<v1::CreateGoldenTicketResponse, Status> {
    let tickets = ticket_issuer(cluster)?;
    let url = peer_url(config, &request.address, request.port)?;
    let ticket = tickets.issue_ticket(&url).await;
    let ticket = ticket.map_err(|error| ticket_error_status(&error, cluster.condition().as_deref()))?;
    Ok(v1::CreateGoldenTicketResponse {
        enrolment: ticket.to_config().to_vec(),
        node: ticket.node_id().to_string(),
    })
}

pub(crate) async fn revoke_ticket(
    cluster: &ClusterNode,
    config: &NodedConfig,
    request: v1::WithdrawGoldenTicketRequest,
) -> Result<v1::WithdrawGoldenTicketResponse, Status> {
    // Also of a node that makes none: a node that has redeemed a join ticket has the same place.
    let tickets = cluster.join_tickets().map_err(|error| Status::failed_precondition(error_chain(&error)))?;
    let url = peer_url(config, &request.address, request.port)?;
    match tickets.revoke_place(&url).await {
        Ok(true) => Ok(v1::WithdrawGoldenTicketResponse { url: url.to_string() }),
        Ok(false) => Err(Status::failed_precondition(format!("no ticket exists for {url}"))),
        Err(error) => Err(ticket_error_status(&error, cluster.condition().as_deref())),
    }
}

fn ticket_issuer(cluster: &ClusterNode) -> Result<GoldenTicketIssuer, Status> {
    cluster.ticket_issuer().map_err(|error| {
        let hint = match error {
            TicketAccessError::Disabled => {
                "; set cluster.golden_tickets = true on the node that creates them"
            }
            _ => "",
        };
        Status::failed_precondition(error_chain(&error) + hint)
    })
}

/// URL at which the other members reach the node of a ticket; port 0 is this node's peer port.
fn peer_url(config: &NodedConfig, address: &str, port: u32) -> Result<PeerUrl, Status> {
    let invalid =
        |what: &str| Status::invalid_argument(format!("invalid address or port of a node: {what:?}"));
    let address: IpAddr = address.parse().map_err(|_| invalid(address))?;
    let port = match u16::try_from(port).map_err(|_| invalid(&port.to_string()))? {
        0 => config.services.etcd.peer_port.get(),
        port => port,
    };
    Ok(PeerUrl::new(address, port))
}

fn ticket_error_status(error: &TicketIssueError, condition: Option<&str>) -> Status {
    Status::new(ticket_error_code(error), add_condition(error_chain(error), condition))
}

/// An error of the cluster, with what keeps the node from taking part in it, if that is known.
fn add_condition(error: String, condition: Option<&str>) -> String {
    match condition {
        Some(condition) if !error.contains(condition) => {
            format!("{error}; the node is {UNHEALTHY}: {condition}")
        }
        _ => error,
    }
}

/// The code of an error of a ticket. The node was reached and has answered: it is never `Unavailable`.
fn ticket_error_code(error: &TicketIssueError) -> Code {
    let retry = |is_retryable| if is_retryable { Code::Aborted } else { Code::Internal };
    match error {
        TicketIssueError::NoAddress { .. } => Code::InvalidArgument,
        TicketIssueError::MemberExists { .. } | TicketIssueError::StoredTicket { .. } => {
            Code::FailedPrecondition
        }
        TicketIssueError::Membership(error) => membership_error_code(error),
        TicketIssueError::Kv(error) => retry(error.is_retryable()),
        TicketIssueError::Ca(error) | TicketIssueError::Revoke(error) => retry(error.is_retryable()),
        TicketIssueError::Record(error) => retry(error.is_retryable()),
        _ => Code::Internal,
    }
}

fn membership_error_code(error: &MembershipError) -> Code {
    match error {
        MembershipError::Unavailable { .. } => Code::Aborted,
        MembershipError::Rejected { .. } => Code::Internal,
        // Another learner, a lost quorum, a member that has been stopped.
        _ => Code::FailedPrecondition,
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_cluster::consensus::kv::KvError;
    use nodekeel_cluster::node::{NodeStoreError, TicketError};
    use nodekeel_cluster::pki::CaError;

    use super::*;

    #[test]
    fn an_error_of_a_cluster_without_a_majority_says_who_is_missing() {
        let condition = "waits for a majority: 1 of 3 members reachable (10.0.0.8 does not answer)";
        let text = add_condition(
            "can't list the members: the cluster's etcd does not answer".into(),
            Some(condition),
        );
        assert_eq!(
            text,
            format!(
                "can't list the members: the cluster's etcd does not answer; the node is Unhealthy: {condition}"
            )
        );
        assert_eq!(add_condition(condition.into(), Some(condition)), condition);
        assert_eq!(add_condition("no".into(), None), "no");
    }

    #[test]
    fn a_removal_that_was_interrupted_names_the_command_to_repeat() {
        let name = "nodekeel-00112233445566778899aabbccddeeff";
        let node: NodeId = name.parse().unwrap();
        let source = KvError::Unavailable { operation: "read", source: "leader changed".into() };
        let source = CaError::Store { operation: "read the CA", source };
        let command = format!("nodectl cluster remove {name}");
        let failed = removal_status(
            &NodeRemovalError::Certificates { node: node.clone(), source },
            &command,
            Some("waits for a leader"),
        );
        assert_eq!(failed.code(), Code::Aborted);
        assert!(
            failed.message().ends_with(&format!(
                "; repeat `nodectl cluster remove {name}`, which completes what was begun; the node is Unhealthy: waits for a leader"
            )),
            "{failed}"
        );
        let refused = NodeRemovalError::Member { node, source: MembershipError::QuorumLoss };
        let refused = removal_status(&refused, &command, None);
        assert!(!refused.message().contains("repeat"), "{refused}");
    }

    #[test]
    fn errors_of_the_cluster_never_map_to_unavailable() {
        let url = PeerUrl::new([192, 0, 2, 1].into(), 7834);
        let no_answer =
            || MembershipError::Unavailable { operation: "list the members", source: "late".into() };
        let refused = || MembershipError::Rejected { operation: "list the members", source: "no".into() };
        let cases = [
            (TicketIssueError::NoAddress { url: url.clone() }, Code::InvalidArgument),
            (TicketIssueError::MemberExists { url: url.clone() }, Code::FailedPrecondition),
            (
                TicketIssueError::StoredTicket { url, source: TicketError::Malformed },
                Code::FailedPrecondition,
            ),
            (TicketIssueError::Membership(MembershipError::Stopped), Code::FailedPrecondition),
            (TicketIssueError::Membership(no_answer()), Code::Aborted),
            (TicketIssueError::Membership(refused()), Code::Internal),
            (
                TicketIssueError::Kv(KvError::Unavailable { operation: "get", source: "late".into() }),
                Code::Aborted,
            ),
            (TicketIssueError::Kv(KvError::DuplicateKey), Code::Internal),
            (TicketIssueError::Ca(CaError::Contended), Code::Aborted),
            (TicketIssueError::Ca(CaError::NotFound), Code::Internal),
            (TicketIssueError::Revoke(CaError::Contended), Code::Aborted),
            (TicketIssueError::Record(NodeStoreError::ClusterIdMissing), Code::Internal),
        ];
        for (error, code) in cases {
            let status = ticket_error_status(&error, None);
            assert_eq!((status.code(), status.message()), (code, &*error_chain(&error)));
        }
    }
}
