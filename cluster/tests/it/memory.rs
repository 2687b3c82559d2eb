//! Consensus in memory.

use std::net::IpAddr;
use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KvError, KvStore};
use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryKv, MemoryNetwork};
use nodekeel_cluster::consensus::{
    ClusterAccess, DEFAULT_PEER_PORT, JoinRefusal, MemberName, MemberStatus, MembershipError, NewMember,
    Peer, PeerUrl, StartOptions,
};
use nodekeel_cluster::pki::{CertificateSpec, ClusterCa};
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};

use crate::member_run::MemberRun;

fn member_name(number: u8) -> MemberName {
    format!("node-{number}").parse().unwrap()
}

fn address(number: u8) -> IpAddr {
    [192, 0, 2, number].into()
}

fn peer_url(number: u8) -> PeerUrl {
    PeerUrl::new(address(number), DEFAULT_PEER_PORT)
}

fn bootstrap_options(number: u8) -> StartOptions {
    StartOptions::new_cluster(member_name(number), address(number))
}

/// What a member of the cluster gives to a joining one.
async fn join_options(running: &ClusterAccess, number: u8) -> StartOptions {
    running
        .cluster_members()
        .add_learner(&NewMember::new(member_name(number), peer_url(number)))
        .await
        .unwrap();
    let cluster_ca = ClusterCa::load_ca(running.root_kv()).await.unwrap();
    let credentials = cluster_ca
        .issue_credentials(&CertificateSpec::for_member(member_name(number), address(number)))
        .await
        .unwrap();
    let revoked = cluster_ca.revocation_list().await.unwrap();
    StartOptions::join_cluster(
        member_name(number),
        address(number),
        vec![Peer::new(member_name(1), peer_url(1))],
        Arc::new(credentials),
        revoked,
    )
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_meets_the_contract() {
    kv_conformance(Arc::new(MemoryKv::new())).await;
}

#[tokio::test(start_paused = true)]
async fn a_namespace_of_a_store_meets_the_contract() {
    let root = Arc::new(MemoryKv::new());
    root.put(b"/conformance/of-another", b"").await.unwrap();
    let space = nodekeel_cluster::consensus::kv::NamespacedKv::new(Arc::clone(&root) as _, "m", "s").unwrap();
    kv_conformance(Arc::new(space)).await;
    assert!(root.get(b"/conformance/of-another").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_memory_member_meets_the_contract() {
    let mut node = MemberRun::start(&MemoryConsensus::new(), bootstrap_options(1));
    consensus_conformance(&node.wait_running().await).await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_member_keeps_its_data_and_old_handles_are_stopped() {
    let member = MemoryConsensus::new();
    let mut first = MemberRun::start(&member, bootstrap_options(1));
    let old = first.wait_running().await;
    old.root_kv().put(b"/k", b"v").await.unwrap();
    let ca = ClusterCa::load_ca(old.root_kv()).await.unwrap().ca_certificate().clone();
    let status = first.stop().await;
    assert!(matches!(status.current_status(), MemberStatus::Exited { failure: None }));
    for start in [StartOptions::restart_member(member_name(1), address(1)), bootstrap_options(1)] {
        let mut again = MemberRun::start(&member, start);
        let running = again.wait_running().await;
        assert_eq!(running.this_member(), old.this_member());
        assert_eq!(running.root_kv().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(ClusterCa::load_ca(running.root_kv()).await.unwrap().ca_certificate(), &ca);
        assert!(matches!(old.root_kv().get(b"/k").await, Err(KvError::Stopped)));
        assert!(matches!(old.cluster_members().list_members().await, Err(MembershipError::Stopped)));
        again.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_restarted_at_another_address_is_listed_there() {
    let network = MemoryNetwork::new();
    let member = MemoryConsensus::on_network(&network);
    let mut first = MemberRun::start(&member, bootstrap_options(1));
    let old = first.wait_running().await.this_member().clone();
    first.stop().await;
    let mut again = MemberRun::start(&member, StartOptions::restart_member(member_name(1), address(9)));
    let running = again.wait_running().await;
    assert_eq!((running.this_member().id, &running.this_member().name), (old.id, &old.name));
    assert_eq!(running.this_member().peer_urls, [peer_url(9).to_string()]);
    assert_eq!(running.cluster_members().list_members().await.unwrap(), [running.this_member().clone()]);
    let elsewhere = NewMember::new(member_name(2), peer_url(1));
    assert!(
        running.cluster_members().add_learner(&elsewhere).await.unwrap().is_learner,
        "its old URL is still listed"
    );
    again.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_without_data_cannot_restart() {
    let mut node =
        MemberRun::start(&MemoryConsensus::new(), StartOptions::restart_member(member_name(1), address(1)));
    assert!(node.wait_failure().await.contains("holds no member's data"));
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_learner_joins_and_reads_the_existing_keys() {
    let network = MemoryNetwork::new();
    let mut first = MemberRun::start(&MemoryConsensus::on_network(&network), bootstrap_options(1));
    let one = first.wait_running().await;
    one.root_kv().put(b"/k", b"from the first").await.unwrap();
    let start = join_options(&one, 2).await;
    let joiner = MemoryConsensus::on_network(&network);
    let mut second = MemberRun::start(&joiner, start);
    let two = second.wait_running().await;
    assert_eq!(two.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    let members = two.cluster_members().list_members().await.unwrap();
    assert!(members.len() == 2 && members.iter().all(|member| !member.is_learner), "{members:?}");
    assert_eq!(network.created_count(), 1);
    one.cluster_members().remove_member(two.this_member().id).await.unwrap();
    assert!(
        second.wait_failure().await.contains("was removed from its cluster"),
        "a removed member still runs"
    );
    second.stop().await;
    first.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_that_was_not_added_or_was_revoked_does_not_join() {
    let network = MemoryNetwork::new();
    let mut first = MemberRun::start(&MemoryConsensus::on_network(&network), bootstrap_options(1));
    let one = first.wait_running().await;
    let added = join_options(&one, 2).await;
    let mut elsewhere = added.clone();
    elsewhere.address = address(3);
    let mut wrong = MemberRun::start(&MemoryConsensus::on_network(&network), elsewhere);
    assert!(wrong.wait_failure().await.contains("no member at https://192.0.2.3:7834"));
    wrong.stop().await;
    ClusterCa::load_ca(one.root_kv()).await.unwrap().revoke_name("node-2").await.unwrap();
    let mut expelled = MemberRun::start(&MemoryConsensus::on_network(&network), added);
    assert!(expelled.wait_failure().await.contains("revoked"));
    expelled.stop().await;
    first.stop().await;
}

#[tokio::test]
async fn a_member_that_has_started_does_not_join_again_without_its_data() {
    let network = MemoryNetwork::new();
    let mut first = MemberRun::start(&MemoryConsensus::on_network(&network), bootstrap_options(1));
    let running = first.wait_running().await;
    let options = join_options(&running, 2).await;
    let mut second = MemberRun::start(&MemoryConsensus::on_network(&network), options.clone());
    let joined = second.wait_running().await.this_member().id;
    second.stop().await;
    // Another disk, with the same ticket.
    let mut again = MemberRun::start(&MemoryConsensus::on_network(&network), options);
    let refusal = loop {
        if let MemberStatus::Refused(refusal) = again.status.next_status().await.unwrap() {
            break refusal;
        }
    };
    assert_eq!(refusal, JoinRefusal::AlreadyStarted { id: joined, name: "node-2".into() });
    again.stop().await;
    first.stop().await;
}
