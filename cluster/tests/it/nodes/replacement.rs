//! Nodes that are replaced by others.

use nodekeel_cluster::node::{NodeId, NodeRemovalError, NodeReplacer, RemovalStep, TicketIssueError};

use super::removal::assert_nodes;
use crate::enrolment::{MemoryCluster, peer_url};

fn replacer(cluster: &MemoryCluster) -> NodeReplacer {
    NodeReplacer::new(cluster.first.node.node_remover().expect("a running node"), cluster.issuer())
}

fn first_node(cluster: &MemoryCluster) -> NodeId {
    cluster.first.node.cluster_identity().expect("a running node").node_id
}

#[tokio::test]
async fn a_replacement_killed_after_any_step_ends_with_one_successor() {
    let cluster = MemoryCluster::start().await;
    let (first, replacer) = (first_node(&cluster), replacer(&cluster));
    let remover = cluster.first.node.node_remover().expect("a running node");
    for successor_at in ["192.0.2.2", "192.0.2.3"] {
        // The last one was interrupted before its ticket was handed out.
        for killed_after in 0..=RemovalStep::ALL.len() + 2 {
            let (joiner, _) = cluster.invite("192.0.2.2").await;
            let (run, joined) = joiner.run_to_running().await;
            run.stop().await;
            let (node, url) = (joined.node_id, peer_url(successor_at));
            let mut interrupted = None;
            if killed_after > 0 {
                replacer.record_successor(&node, &url).await.expect("recorded");
                for step in RemovalStep::ALL.iter().take(killed_after - 1) {
                    remover.run_step(&node, *step).await.expect("a step");
                }
                if killed_after > RemovalStep::ALL.len() + 1 {
                    interrupted = Some(cluster.issue(successor_at).await);
                }
            }
            let given = (successor_at != "192.0.2.2").then_some(&url);
            let ticket = replacer.replace_node(&node, given).await.expect("replaced");
            if let Some(interrupted) = interrupted {
                assert_eq!(interrupted.node_id(), ticket.node_id());
            }
            let again = replacer.replace_node(&node, None).await.expect("the same ticket");
            assert_eq!(again.to_config(), ticket.to_config());
            assert_eq!(ticket.new_member().url, url);

            let successor = cluster.node(successor_at);
            successor.give_ticket(&ticket);
            let (run, joined) = successor.run_to_running().await;
            assert_nodes(&cluster, &[&first, &joined.node_id]).await;
            // It has joined: nothing is left of the other.
            let completed = replacer.replace_node(&node, None).await;
            assert!(matches!(completed, Err(NodeRemovalError::Unknown { .. })), "{completed:?}");
            run.stop().await;
            remover.remove_node(&joined.node_id).await.expect("removed");
        }
    }
    cluster.stop().await;
}

#[tokio::test]
async fn a_replacement_that_is_refused_changes_nothing() {
    let cluster = MemoryCluster::start().await;
    let (first, replacer) = (first_node(&cluster), replacer(&cluster));
    let refused = replacer.replace_node(&first, None).await.expect_err("it replaced itself");
    assert!(matches!(refused, NodeRemovalError::ThisNode { .. }), "{refused:?}");
    let (joiner, _) = cluster.invite("192.0.2.2").await;
    let (run, joined) = joiner.run_to_running().await;
    let node = joined.node_id;
    let taken = replacer.replace_node(&node, Some(&peer_url("192.0.2.1"))).await;
    assert!(
        matches!(
            taken,
            Err(NodeRemovalError::Successor { source: TicketIssueError::MemberExists { .. }, .. })
        ),
        "{taken:?}"
    );
    assert_nodes(&cluster, &[&first, &node]).await;

    // Begun with another address than the one that is given now.
    replacer.record_successor(&node, &peer_url("192.0.2.3")).await.expect("recorded");
    let other = replacer.replace_node(&node, Some(&peer_url("192.0.2.4"))).await.expect_err("two successors");
    assert!(other.to_string().contains("being replaced by one at https://192.0.2.3:7834"), "{other}");
    // It is removed without a successor after all.
    let remover = cluster.first.node.node_remover().expect("a running node");
    remover.remove_node(&node).await.expect("removed");
    let unknown = replacer.replace_node(&node, None).await;
    assert!(matches!(unknown, Err(NodeRemovalError::Unknown { .. })), "{unknown:?}");
    run.stop().await;
    cluster.stop().await;
}
