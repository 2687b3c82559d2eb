//! Nodes that are taken out of their cluster.

use std::collections::BTreeSet;
use std::time::Duration;

use nodekeel_cluster::consensus::MembershipError;
use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::node::{NodeId, NodeRemovalError, RemovalStep};
use nodekeel_cluster::pki::ClusterCa;
use tokio::time::timeout;

use crate::enrolment::{MemoryCluster, peer_url};

/// The common names of all certificates that are not revoked.
async fn certified(cluster: &MemoryCluster) -> BTreeSet<String> {
    let root = cluster.first.node.root_kv().expect("a running node");
    let cluster_ca = ClusterCa::load_ca(root).await.expect("a CA");
    let revoked = cluster_ca.revocation_list().await.expect("read");
    let issued = cluster_ca.list_issued().await.expect("listed");
    let valid = issued.iter().filter(|certificate| !revoked.is_revoked(certificate));
    valid.filter_map(|certificate| certificate.common_name().map(str::to_owned)).collect()
}

/// Records, members and valid certificates are of these nodes, and of no other.
pub(super) async fn assert_nodes(cluster: &MemoryCluster, nodes: &[&NodeId]) {
    let nodes: BTreeSet<_> = nodes.iter().map(ToString::to_string).collect();
    // One that has never started has no name.
    let members =
        cluster.first.list_members().await.into_iter().map(|member| member.name.unwrap_or_default());
    assert_eq!(members.collect::<BTreeSet<_>>(), nodes, "members");
    // The others remove those of a node that has left.
    let removed = async {
        while recorded(cluster).await != nodes || certified(cluster).await != nodes {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    if timeout(Duration::from_secs(20), removed).await.is_err() {
        panic!("records of {:?}, certificates of {:?}", recorded(cluster).await, certified(cluster).await);
    }
}

async fn recorded(cluster: &MemoryCluster) -> BTreeSet<String> {
    cluster.first.list_records().await.into_iter().map(|stored| stored.id.to_string()).collect()
}

/// The keys of nodes that leave.
async fn departures(cluster: &MemoryCluster) -> usize {
    let root = cluster.first.node.root_kv().expect("a running node");
    root.range(KeyRange::prefix("/etcd-departures/")).await.expect("read").kvs.len()
}

#[tokio::test]
async fn a_removal_killed_after_any_step_is_completed_by_the_next() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    for killed_after in 0..=RemovalStep::ALL.len() {
        for is_dead in [true, false] {
            let (joiner, ticket) = cluster.invite("192.0.2.2").await;
            let (run, joined) = joiner.run_to_running().await;
            assert_nodes(&cluster, &[&first, &joined.node_id]).await;
            // As if the node had been killed before it could delete its ticket.
            let tickets = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
            tickets.put(b"/golden/192.0.2.2:7834", &ticket.to_config()).await.expect("put");
            let run = if is_dead {
                run.stop().await;
                None
            } else {
                Some(run)
            };
            let remover = cluster.first.node.node_remover().expect("a running node");
            for step in &RemovalStep::ALL[..killed_after] {
                remover.run_step(&joined.node_id, *step).await.expect("a step");
            }
            let completed = remover.remove_node(&joined.node_id).await;
            if killed_after < RemovalStep::ALL.len() {
                completed.expect("removed");
            } else {
                // Nothing is left of it.
                assert!(matches!(completed, Err(NodeRemovalError::Unknown { .. })), "{completed:?}");
            }
            assert_nodes(&cluster, &[&first]).await;
            // The ticket with the revoked certificate is not handed out again.
            assert!(tickets.get(b"/golden/192.0.2.2:7834").await.expect("read").is_none());
            if let Some(run) = run {
                run.stop().await;
            }
        }
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_that_never_started_leaves_no_learner_whatever_is_left_of_it() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let remover = cluster.first.node.node_remover().expect("a running node");
    for killed_after in 0..=RemovalStep::ALL.len() {
        // It has not joined: only its ticket has its name.
        let ticket = cluster.issue("192.0.2.2").await;
        for step in &RemovalStep::ALL[..killed_after] {
            remover.run_step(ticket.node_id(), *step).await.expect("a step");
        }
        // Its ticket is the last that is left of a node without a record.
        match remover.remove_node(ticket.node_id()).await {
            Err(NodeRemovalError::Unknown { .. }) => assert!(killed_after > 2),
            removed => removed.expect("removed"),
        }
        assert_nodes(&cluster, &[&first]).await;
        // The place is free, and its address gets another ticket.
        let url = peer_url("192.0.2.2");
        assert_ne!(cluster.issue("192.0.2.2").await.node_id(), ticket.node_id());
        assert!(cluster.issuer().revoke_ticket(&url).await.expect("revoked"));
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_that_is_this_one_unknown_or_the_last_voter_is_not_removed() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let remover = cluster.first.node.node_remover().expect("a running node");
    let refused = remover.remove_node(&first).await.expect_err("it removed itself");
    assert!(
        refused.to_string().contains("`nodectl cluster leave`, or remove it on another member"),
        "{refused}"
    );
    let unknown: NodeId = "nodekeel-00112233445566778899aabbccddeeff".parse().expect("a name");
    let refused = remover.remove_node(&unknown).await.expect_err("nobody was removed");
    assert!(matches!(refused, NodeRemovalError::Unknown { .. }), "{refused:?}");
    let refused =
        remover.run_step(&first, RemovalStep::Member).await.expect_err("the last voter was removed");
    assert!(
        matches!(refused, NodeRemovalError::Member { source: MembershipError::QuorumLoss, .. }),
        "{refused:?}"
    );
    assert_nodes(&cluster, &[&first]).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_that_leaves_is_out_of_its_cluster_and_the_others_complete_it() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let (joiner, ticket) = cluster.invite("192.0.2.2").await;
    let (run, joined) = joiner.run_to_running().await;
    // As if the node had been killed before it could delete its ticket.
    let tickets = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
    tickets.put(b"/golden/192.0.2.2:7834", &ticket.to_config()).await.expect("put");
    let left = run.node.node_remover().expect("a running node").leave().await.expect("left");
    assert_eq!(left, joined.node_id);
    assert_nodes(&cluster, &[&first]).await;
    assert!(tickets.get(b"/golden/192.0.2.2:7834").await.expect("read").is_none());
    run.stop().await;
    let refused = cluster.first.node.node_remover().expect("a running node").leave().await;
    assert!(matches!(refused, Err(NodeRemovalError::LastNode { .. })), "{refused:?}");
    assert_nodes(&cluster, &[&first]).await;
    assert_eq!(departures(&cluster).await, 0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_that_is_stopped_while_it_leaves_starts_again_as_a_member_and_leaves_then() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let (joiner, _) = cluster.invite("192.0.2.2").await;
    let (run, joined) = joiner.run_to_running().await;
    let stopped = run.node.node_remover().expect("a running node");
    stopped.announce_leave(&joined.node_id).await.expect("announced");
    assert_eq!(departures(&cluster).await, 1);
    run.stop().await;
    // No other has removed anything of it, and it has not left.
    let refused = stopped.run_step(&joined.node_id, RemovalStep::Member).await.expect_err("it was stopped");
    assert!(!refused.is_retryable(), "{refused:?}");
    assert_nodes(&cluster, &[&first, &joined.node_id]).await;
    let (run, again) = joiner.run_to_running().await;
    assert_eq!(again.node_id, joined.node_id);
    assert_eq!(departures(&cluster).await, 0, "withdrawn");
    run.node.node_remover().expect("a running node").leave().await.expect("left");
    assert_nodes(&cluster, &[&first]).await;
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_that_is_killed_after_its_member_was_removed_has_left() {
    let cluster = MemoryCluster::start().await;
    let first = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let (joiner, _) = cluster.invite("192.0.2.2").await;
    let (run, joined) = joiner.run_to_running().await;
    let remover = cluster.first.node.node_remover().expect("a running node");
    remover.announce_leave(&joined.node_id).await.expect("announced");
    run.stop().await;
    remover.run_step(&joined.node_id, RemovalStep::Member).await.expect("removed");
    assert_nodes(&cluster, &[&first]).await;
    cluster.stop().await;
}
