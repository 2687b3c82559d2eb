//! Consensus in memory.

use std::net::IpAddr;
use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KvError, KvStore};
use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryKv, MemoryNet};
use nodekeel_cluster::consensus::{
    MemberName, MembershipError, NewMember, PEER_PORT, Peer, PeerUrl, Running, Start, Status,
};
use nodekeel_cluster::pki::{Authority, Leaf};
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};

use crate::node::Node;

fn name(number: u8) -> MemberName {
    format!("node-{number}").parse().unwrap()
}

fn address(number: u8) -> IpAddr {
    [192, 0, 2, number].into()
}

fn url(number: u8) -> PeerUrl {
    PeerUrl::new(address(number), PEER_PORT)
}

fn create(number: u8) -> Start {
    Start::new_cluster(name(number), address(number))
}

/// What a member of the cluster gives to one that is to join.
async fn ticket(running: &Running, number: u8) -> Start {
    running.members().add_learner(&NewMember::new(name(number), url(number))).await.unwrap();
    let authority = Authority::load(running.root()).await.unwrap();
    let credentials = authority.issue(&Leaf::member(name(number), address(number))).await.unwrap();
    let revoked = authority.revoked().await.unwrap();
    Start::join(
        name(number),
        address(number),
        vec![Peer::new(name(1), url(1))],
        Arc::new(credentials),
        revoked,
    )
}

#[tokio::test(start_paused = true)]
async fn the_store_keeps_the_contract() {
    kv_conformance(Arc::new(MemoryKv::new())).await;
}

#[tokio::test(start_paused = true)]
async fn a_space_of_a_store_keeps_the_contract_too() {
    let root = Arc::new(MemoryKv::new());
    root.put(b"/conformance/of-another", b"").await.unwrap();
    let space = nodekeel_cluster::consensus::kv::Namespaced::new(Arc::clone(&root) as _, "m", "s").unwrap();
    kv_conformance(Arc::new(space)).await;
    assert!(root.get(b"/conformance/of-another").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_member_keeps_the_contract() {
    let mut node = Node::start(&MemoryConsensus::new(), create(1));
    consensus_conformance(&node.running().await).await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_that_starts_again_finds_what_it_knew_and_old_handles_are_of_no_use() {
    let member = MemoryConsensus::new();
    let mut first = Node::start(&member, create(1));
    let old = first.running().await;
    old.root().put(b"/k", b"v").await.unwrap();
    let ca = Authority::load(old.root()).await.unwrap().certificate().clone();
    let status = first.stop().await;
    assert!(matches!(status.now(), Status::Ended { failure: None }));
    for start in [Start::restart(name(1), address(1)), create(1)] {
        let mut again = Node::start(&member, start);
        let running = again.running().await;
        assert_eq!(running.this(), old.this());
        assert_eq!(running.root().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(Authority::load(running.root()).await.unwrap().certificate(), &ca);
        assert!(matches!(old.root().get(b"/k").await, Err(KvError::Stopped)));
        assert!(matches!(old.members().list().await, Err(MembershipError::Stopped)));
        again.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_that_comes_back_at_another_address_is_listed_there() {
    let net = MemoryNet::new();
    let member = MemoryConsensus::on(&net);
    let mut first = Node::start(&member, create(1));
    let old = first.running().await.this().clone();
    first.stop().await;
    let mut again = Node::start(&member, Start::restart(name(1), address(9)));
    let running = again.running().await;
    assert_eq!((running.this().id, &running.this().name), (old.id, &old.name));
    assert_eq!(running.this().peer_urls, [url(9).to_string()]);
    assert_eq!(running.members().list().await.unwrap(), [running.this().clone()]);
    let elsewhere = NewMember::new(name(2), url(1));
    assert!(running.members().add_learner(&elsewhere).await.unwrap().is_learner, "its old place is free");
    again.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_without_a_past_can_not_go_on() {
    let mut node = Node::start(&MemoryConsensus::new(), Start::restart(name(1), address(1)));
    assert!(node.failure().await.contains("no member to go on with"));
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_learner_joins_and_sees_what_the_first_wrote() {
    let net = MemoryNet::new();
    let mut first = Node::start(&MemoryConsensus::on(&net), create(1));
    let one = first.running().await;
    one.root().put(b"/k", b"from the first").await.unwrap();
    let start = ticket(&one, 2).await;
    let joiner = MemoryConsensus::on(&net);
    let mut second = Node::start(&joiner, start);
    let two = second.running().await;
    assert_eq!(two.root().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    let members = two.members().list().await.unwrap();
    assert!(members.len() == 2 && members.iter().all(|member| !member.is_learner), "{members:?}");
    assert_eq!(net.clusters(), 1);
    one.members().remove(two.this().id).await.unwrap();
    assert!(second.failure().await.contains("no member node-2"), "who is removed ends");
    second.stop().await;
    first.stop().await;
}

#[tokio::test(start_paused = true)]
async fn who_was_not_added_or_was_revoked_does_not_join() {
    let net = MemoryNet::new();
    let mut first = Node::start(&MemoryConsensus::on(&net), create(1));
    let one = first.running().await;
    let added = ticket(&one, 2).await;
    let mut elsewhere = added.clone();
    elsewhere.address = address(3);
    let mut wrong = Node::start(&MemoryConsensus::on(&net), elsewhere);
    assert!(wrong.failure().await.contains("no member node-2 at 192.0.2.3"));
    wrong.stop().await;
    Authority::load(one.root()).await.unwrap().revoke("node-2").await.unwrap();
    let mut expelled = Node::start(&MemoryConsensus::on(&net), added);
    assert!(expelled.failure().await.contains("revoked"));
    expelled.stop().await;
    first.stop().await;
}
