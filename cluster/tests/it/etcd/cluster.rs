//! Several members.

use std::time::Instant;

use nodekeel_cluster::consensus::{ClusterAccess, NewMember, StartOptions};
use rstest::rstest;

use super::EtcdVersion::{self, Debian, Newest};
use super::etcd_fixture::{EtcdFixture, retried, started_member};
use crate::member_run::MemberRun;

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_learner_joins_and_is_promoted(#[values(Debian, Newest)] version: EtcdVersion) {
    let (first, node, one) = started_member(version).await;
    let second = EtcdFixture::new(version, "two");
    one.root_kv().put(b"/k", b"from the first").await.unwrap();
    let added = one
        .cluster_members()
        .add_learner(&NewMember::new(second.name.clone(), second.peer_url()))
        .await
        .unwrap();
    assert!(added.is_learner);
    let start = second.join_options(&[&first], &one).await;
    let started_at = Instant::now();
    let mut joined = second.run(start);
    let two = joined.wait_running().await;
    println!("{version:?}: from the joiner's start to its vote {:?}", started_at.elapsed());
    assert_eq!(two.this_member().id, added.id);
    assert_eq!(two.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    let members = two.cluster_members().list_members().await.unwrap();
    assert!(members.len() == 2 && members.iter().all(|member| !member.is_learner), "{members:?}");
    assert_eq!(members, one.cluster_members().list_members().await.unwrap());
    let (ca, other) = (one.load_ca().await.unwrap(), two.load_ca().await.unwrap());
    assert_eq!(ca.ca_certificate(), other.ca_certificate());
    two.root_kv().put(b"/k", b"from the second").await.unwrap();
    assert_eq!(one.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the second");
    joined.stop().await;
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn restarted_members_find_each_other(#[values(Debian, Newest)] version: EtcdVersion) {
    let (first, node, one) = started_member(version).await;
    let second = EtcdFixture::new(version, "two");
    let join = add_member(&second, &first, &one).await;
    let mut joined = second.run(join.clone());
    joined.wait_running().await.root_kv().put(b"/k", b"v").await.unwrap();
    joined.stop().await;
    node.stop().await;
    // Killed before its join was recorded, it joins again: there is nobody to ask, since no majority runs without it.
    for start in [second.restart_options(), join] {
        let (mut joined, mut node) = (second.run(start), first.run(first.restart_options()));
        let (one, two) = (node.wait_running().await, joined.wait_running().await);
        assert_eq!(one.root_kv().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(
            one.cluster_members().list_members().await.unwrap(),
            two.cluster_members().list_members().await.unwrap()
        );
        joined.stop().await;
        node.stop().await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_third_member_joins_and_a_removed_member_exits(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [(first, one), (mut removed, gone), (last, three)] = three_members(&fixtures).await;
    assert_eq!(one.cluster_members().list_members().await.unwrap().len(), 3);
    retried(async || one.cluster_members().remove_member(gone.this_member().id).await).await;
    println!("{version:?}: {}", removed.wait_failure().await);
    assert!(gone.root_kv().get(b"/k").await.is_err(), "a handle of a removed member still works");
    three.root_kv().put(b"/k", b"v").await.unwrap();
    assert_eq!(one.cluster_members().list_members().await.unwrap().len(), 2);
    removed.stop().await;
    last.stop().await;
    first.stop().await;
}

/// The start of a member in the cluster of another, which has added it.
pub(super) async fn add_member(
    second: &EtcdFixture,
    first: &EtcdFixture,
    one: &ClusterAccess,
) -> StartOptions {
    let new = NewMember::new(second.name.clone(), second.peer_url());
    retried(async || one.cluster_members().add_learner(&new).await).await;
    second.join_options(&[first], one).await
}

/// A cluster of these: the first has bootstrapped it, the others have joined and have their votes.
pub(super) async fn three_members(fixtures: &[EtcdFixture; 3]) -> [(MemberRun, ClusterAccess); 3] {
    let mut first = fixtures[0].run(fixtures[0].bootstrap_options());
    let one = first.wait_running().await;
    let mut joined = Vec::new();
    for number in 1..3 {
        let (existing, fixture) = (fixtures[..number].iter().collect::<Vec<_>>(), &fixtures[number]);
        let new = NewMember::new(fixture.name.clone(), fixture.peer_url());
        retried(async || one.cluster_members().add_learner(&new).await).await;
        let mut node = fixture.run(fixture.join_options(&existing, &one).await);
        let running = node.wait_running().await;
        joined.push((node, running));
    }
    let (third, second) = (joined.pop().unwrap(), joined.pop().unwrap());
    [(first, one), second, third]
}
