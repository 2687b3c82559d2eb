//! Bootstrap, join and restart as a whole.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::consensus::memory::MemoryNetwork;
use nodekeel_cluster::consensus::{DEFAULT_PEER_PORT, PeerUrl};
use nodekeel_cluster::enrolment::{
    ClusterNode, EnrolmentPhase, EnrolmentState, FailureReason, NodeUnavailable, StepError, TicketAccessError,
};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::node::{EnrolmentSource, EnrolmentSources, NodeId};

use tokio::sync::watch;

use super::node_fixture::{
    MemoryCluster, NodeFixture, NodeRun, TIMEOUT, error_chain, node_address, parse_ip, peer_url,
    wait_without_address,
};

#[tokio::test]
async fn an_empty_node_bootstraps_a_cluster_and_is_listed_in_it() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.1");
    let (run, membership) = fixture.run_to_running().await;
    assert_eq!(run.phases(), "New CreatingCluster Running");
    let nodes = run.list_records().await;
    let [this] = &nodes[..] else { panic!("one node: {nodes:?}") };
    assert_eq!(this.id, membership.node_id);
    assert_eq!(this.record.address, Some(parse_ip("192.0.2.1")));
    assert_eq!(
        this.record.roles.consensus_member().map(|name| name.as_str()),
        Some(membership.node_id.as_str())
    );
    assert_eq!(this.record.roles.kubernetes_worker(), Some(membership.node_id.as_str()));
    assert!(membership.node_id.matches_key(&this.record.certificate.public_key()));
    let members = run.list_members().await;
    assert_eq!(members.len(), 1);
    assert_eq!(
        run.node.node_store().expect("a running node").cluster_id().await.ok(),
        Some(membership.cluster_id)
    );
    assert_eq!(network.created_count(), 1);
    run.stop().await;
}

#[tokio::test]
async fn a_restarted_node_keeps_its_identity_its_cluster_and_its_keys() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.1");
    let (run, first) = fixture.run_to_running().await;
    run.node.namespaced_kv("mine", "all").expect("a running node").put(b"/kept", b"yes").await.expect("put");
    run.stop().await;
    for _ in 0..3 {
        let (run, again) = fixture.run_to_running().await;
        assert_eq!(again, first);
        assert_eq!(run.phases(), "New Restarting Running");
        let kept =
            run.node.namespaced_kv("mine", "all").expect("a running node").get(b"/kept").await.expect("read");
        assert_eq!(kept.map(|kv| kv.value), Some(b"yes".to_vec()));
        run.stop().await;
    }
    assert_eq!(network.created_count(), 1);
}

#[tokio::test]
async fn a_node_with_a_ticket_joins_and_then_ignores_the_ticket() {
    let cluster = MemoryCluster::start().await;
    let (second, ticket) = cluster.invite("192.0.2.2").await;
    let (run, joined) = second.run_to_running().await;
    assert_eq!(run.phases(), "New Joining Running");
    let first = cluster.first.node.cluster_identity().expect("a running node");
    assert_eq!((joined.cluster_id, &joined.node_id), (first.cluster_id, ticket.node_id()));
    let members = run.list_members().await;
    assert_eq!(members.iter().filter(|member| !member.is_learner).count(), 2, "{members:?}");
    let nodes = run.list_records().await;
    let ids: BTreeSet<_> = nodes.into_iter().map(|node| node.id).collect();
    assert_eq!(ids, [first.node_id, joined.node_id.clone()].into());
    let kept = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
    assert_eq!(
        kept.range(KeyRange::prefix("/")).await.expect("read").kvs,
        [],
        "the used ticket is still stored"
    );
    run.stop().await;

    second.ticket_file().write(b"no ticket at all").expect("written");
    let (run, again) = second.run_to_running().await;
    assert_eq!(again, joined, "a node in a cluster has read its configuration");
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_without_an_esp_file_joins_by_the_firmware_ticket() {
    let cluster = MemoryCluster::start().await;
    let (second, ticket) = (cluster.node("192.0.2.2"), cluster.issue("192.0.2.2").await);
    let firmware_file = second.disks.path().join("fw_cfg");
    std::fs::write(&firmware_file, &*ticket.to_config()).expect("written");
    let mut deps = second.deps();
    let esp_source = EnrolmentSource::EspFile(second.ticket_file());
    deps.enrolment = EnrolmentSources::new([esp_source, EnrolmentSource::FwCfg(firmware_file)]);
    let run = NodeRun::start_once(ClusterNode::new(deps, second.settings.clone()));
    assert_eq!(&run.wait_finished().await.expect("the node is in its cluster").node_id, ticket.node_id());
    assert_eq!(run.phases(), "New Joining Running");
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_ticket_for_another_address_or_port_is_rejected_and_another_one_joins_without_a_reset() {
    let cluster = MemoryCluster::start().await;
    let (issuer, second) = (cluster.issuer(), cluster.node("192.0.2.3"));
    let start = || {
        let mut deps = second.deps();
        deps.consensus = deps.consensus.with_peer_port(DEFAULT_PEER_PORT);
        NodeRun::start_once(ClusterNode::new(deps, second.settings.clone()))
    };
    let wrong = PeerUrl::new(parse_ip("192.0.2.2"), 7);
    second.give_ticket(&issuer.issue_ticket(&wrong).await.expect("created"));
    for (address, expected) in [
        ("192.0.2.3", "the ticket was issued for 192.0.2.2, but this host is at 192.0.2.3"),
        ("192.0.2.2", "for a member at port 7, but this host's member is at port 7834"),
    ] {
        second.network.set_address(Some(node_address(address)));
        let run = start();
        let reason = error_chain(run.wait_finished().await.expect_err("another host's ticket was accepted"));
        assert!(reason.contains(expected), "{reason}");
        run.stop().await;
    }
    // Nothing binds the node to the rejected ticket.
    issuer.revoke_ticket(&wrong).await.expect("revoked");
    second.give_ticket(&cluster.issue("192.0.2.2").await);
    let run = start();
    run.wait_finished().await.expect("the node is in its cluster");
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_with_a_ticket_says_that_it_waits_for_its_address() {
    let cluster = MemoryCluster::start().await;
    let (second, _) = cluster.invite("192.0.2.2").await;
    second.network.set_address(None);
    let run = second.start();
    wait_without_address(&run).await;
    second.network.set_address(Some(node_address("192.0.2.2")));
    run.wait_finished().await.expect("the node is in its cluster");
    assert_eq!(run.node.condition(), None);
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_joins_by_the_ticket_that_it_has_when_it_gets_its_address() {
    let cluster = MemoryCluster::start().await;
    let second = cluster.node("192.0.2.2");
    second.give_ticket(&cluster.issue("192.0.2.3").await);
    second.network.set_address(None);
    let run = second.start();
    wait_without_address(&run).await;
    cluster.issuer().revoke_ticket(&peer_url("192.0.2.3")).await.expect("revoked");
    let ticket = cluster.issue("192.0.2.2").await;
    second.give_ticket(&ticket);
    second.network.set_address(Some(node_address("192.0.2.2")));
    let joined = run.wait_finished().await.expect("the node is in its cluster");
    assert_eq!(&joined.node_id, ticket.node_id());
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn waiters_are_notified_before_during_and_after_a_run() {
    let fixture = NodeFixture::single_node();
    fixture.network.set_address(None);
    let run = fixture.start();
    let early: Vec<_> = (0..3)
        .map(|_| {
            let cluster = run.node.clone();
            tokio::spawn(async move { cluster.wait_finished().await })
        })
        .collect();
    let working = run.node.wait_phase_left(EnrolmentPhase::New).await;
    assert_eq!(working.phase(), EnrolmentPhase::CreatingCluster);
    let abandoned = tokio::spawn({
        let cluster = run.node.clone();
        async move { cluster.wait_finished().await }
    });
    abandoned.abort();
    fixture.network.set_address(Some(node_address("192.0.2.1")));
    let membership = run.wait_finished().await.expect("a running node");
    for waiter in early {
        let result = waiter.await.expect("ended").expect("a running node");
        assert_eq!(result, membership);
    }
    assert_eq!(run.wait_finished().await.ok(), Some(membership));
    run.stop().await;
}

#[tokio::test]
async fn waiters_are_notified_when_a_run_is_stopped() {
    let fixture = NodeFixture::single_node();
    fixture.network.set_address(None);
    let run = fixture.start();
    run.node.wait_phase_left(EnrolmentPhase::New).await;
    let cluster = run.node.clone();
    run.stop().await;
    let result = tokio::time::timeout(TIMEOUT, cluster.wait_finished()).await.expect("at once");
    assert!(matches!(result, Err(FailureReason::Stopped { .. })), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn a_node_without_an_address_fails_at_its_deadline_and_reports_why() {
    let mut fixture = NodeFixture::single_node();
    fixture.network = Arc::new(StaticNetwork::without_address());
    fixture.settings.deadline = Duration::from_secs(30);
    let started_at = tokio::time::Instant::now();
    let run = fixture.start();
    let reason = run.node.wait_finished().await.expect_err("no address");
    assert_eq!(started_at.elapsed().as_secs(), 30);
    assert_eq!(error_chain(reason), "enrolment timed out while running step network: the address is not set");
    run.stop().await;
    fixture.network.set_address(Some(node_address("192.0.2.1")));
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
}

#[tokio::test]
async fn only_a_running_node_has_a_membership_keys_and_members() {
    let fixture = NodeFixture::single_node();
    fixture.network.set_address(None);
    let run = fixture.start();
    let EnrolmentState::CreatingCluster(work) = run.node.wait_phase_left(EnrolmentPhase::New).await else {
        panic!("it bootstraps")
    };
    assert!(work.node_id().is_none());
    let refused = NodeUnavailable::NotRunning { state: EnrolmentPhase::CreatingCluster };
    assert_eq!(run.node.cluster_identity().err(), Some(refused));
    assert_eq!(run.node.root_kv().err(), Some(refused));
    assert_eq!(run.node.cluster_members().err(), Some(refused));
    assert!(run.node.namespaced_kv("a", "b").is_err() && run.node.node_store().is_err());
    fixture.network.set_address(Some(node_address("192.0.2.1")));
    run.wait_finished().await.expect("a running node");
    run.node.root_kv().expect("a running node").put(b"/x", b"").await.expect("put");
    assert!(run.node.namespaced_kv("no module", "b").is_err());
    assert!(matches!(run.node.ticket_issuer(), Err(TicketAccessError::Disabled)));
    let cluster = run.node.clone();
    run.stop().await;
    // A run that has ended has no membership, and waiters do not wait for it.
    assert_eq!(
        cluster.cluster_identity().err(),
        Some(NodeUnavailable::NotRunning { state: EnrolmentPhase::Failed })
    );
    assert_eq!(cluster.root_kv().err(), Some(NodeUnavailable::NotRunning { state: EnrolmentPhase::Failed }));
    assert!(matches!(cluster.wait_finished().await, Err(FailureReason::RunEnded)));
    assert_eq!(cluster.phase_history().last(), Some(&EnrolmentPhase::Failed));
}

#[tokio::test]
async fn a_deadline_beyond_the_range_of_the_clock_is_accepted() {
    let mut fixture = NodeFixture::single_node();
    fixture.settings.deadline = std::time::Duration::MAX;
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
}

/// The address in the node's record, and the addresses in the member list.
async fn listed_addresses(cluster: &ClusterNode, node: &NodeId) -> (Option<IpAddr>, Vec<String>) {
    let nodes = cluster.node_store().expect("a running node");
    let existing = nodes.load_record(node).await.expect("read").expect("it exists");
    let members = cluster.cluster_members().expect("a running node").list_members().await.expect("listed");
    (existing.record.address, members.into_iter().flat_map(|member| member.peer_urls).collect())
}

fn expected_addresses(address: &str) -> (Option<IpAddr>, Vec<String>) {
    (Some(parse_ip(address)), vec![peer_url(address).to_string()])
}

#[tokio::test]
async fn a_running_node_restarts_its_member_at_a_new_address() {
    let fixture = NodeFixture::single_node();
    let ends = Arc::new(watch::Sender::new(0));
    let seen = Arc::clone(&ends);
    let hook = move |point: &str| {
        if point == "end local" {
            seen.send_modify(|ends| *ends += 1);
        }
    };
    let run = NodeRun::start_with_restarts(ClusterNode::with_test_hook(
        fixture.deps(),
        fixture.settings.clone(),
        hook,
    ));
    let membership = run.wait_finished().await.expect("a running node");
    assert_eq!(listed_addresses(&run.node, &membership.node_id).await, expected_addresses("192.0.2.1"));
    // A loss, and the same address again, do not end the run.
    fixture.network.set_address(None);
    fixture.network.set_address(Some(node_address("192.0.2.1")));
    fixture.network.set_address(None);
    fixture.network.set_address(Some(node_address("192.0.2.9")));
    let mut ends = ends.subscribe();
    let second = tokio::time::timeout(TIMEOUT, ends.wait_for(|ends| *ends == 2)).await;
    second.expect("soon").expect("the sender exists");
    assert_eq!(run.wait_finished().await.ok().as_ref(), Some(&membership), "another node or cluster");
    assert_eq!(run.phases(), "New Restarting Running");
    assert_eq!(listed_addresses(&run.node, &membership.node_id).await, expected_addresses("192.0.2.9"));
    run.stop().await;
}

#[tokio::test]
async fn a_node_restarted_at_another_address_is_listed_there() {
    let fixture = NodeFixture::single_node();
    let (run, membership) = fixture.run_to_running().await;
    run.stop().await;
    fixture.network.set_address(Some(node_address("192.0.2.10")));
    let (run, again) = fixture.run_to_running().await;
    assert_eq!(again, membership);
    assert_eq!(listed_addresses(&run.node, &membership.node_id).await, expected_addresses("192.0.2.10"));
    run.stop().await;
}

#[tokio::test]
async fn a_run_after_a_failed_run_resumes() {
    let fixture = NodeFixture::single_node();
    fixture.ticket_file().write(b"\xff").expect("written");
    let reason = fixture.run_to_failure().await;
    let FailureReason::ActionFailed { source, .. } = &reason else { panic!("{reason:?}") };
    assert!(matches!(**source, StepError::EnrolmentConfig(_)), "{source:?}");
    fixture.ticket_file().remove().expect("removed");
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
}
