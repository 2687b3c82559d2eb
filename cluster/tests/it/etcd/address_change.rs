//! Members that restart at another address.
//!
//! A connection from this host to one of its own addresses comes from 127.0.0.1, so a member at another
//! address connects from an address that its certificate doesn't name: to itself, and to the others.

use std::net::IpAddr;

use nodekeel_cluster::consensus::{ClusterAccess, Member};
use nodekeel_cluster::pki::{CertificateSpec, SubjectNames};
use rstest::rstest;

use super::EtcdVersion::{self, Debian, Newest};
use super::cluster::{add_member, three_members};
use super::etcd_fixture::{EtcdFixture, retried, started_member};
use crate::member_run::MemberRun;

fn loopback_address(number: u8) -> IpAddr {
    [127, 0, 0, number].into()
}

/// What does not depend on a member's address: its id and name, its key, the cluster's CA.
pub(super) async fn member_identity(
    fixture: &EtcdFixture,
    running: &ClusterAccess,
) -> (u64, Option<String>, String, Vec<u8>) {
    let this = running.this_member();
    let key = fixture.data.etcd.peer_pki.load_credentials().unwrap().unwrap().key.public_key().short_id();
    let cluster_ca = running.load_ca().await.unwrap();
    (this.id.0, this.name.clone(), key, cluster_ca.ca_certificate().der_bytes().to_vec())
}

/// Checks that the member is served, listed and certified at its present address, and at no other.
pub(super) async fn assert_listed_and_certified(fixture: &EtcdFixture, running: &ClusterAccess) {
    let urls = |member: &Member| member.peer_urls.clone();
    assert_eq!(urls(running.this_member()), [fixture.peer_url().to_string()]);
    let listed = running.cluster_members().list_members().await.unwrap();
    let this = listed.iter().find(|member| member.id == running.this_member().id).unwrap();
    assert_eq!(this, running.this_member());
    let existing = fixture.data.etcd.peer_pki.load_credentials().unwrap().unwrap();
    assert_eq!(SubjectNames::from_certificate(&existing.certificate).ip_addresses, [fixture.address()]);
    let cluster_ca = running.load_ca().await.unwrap();
    assert!(
        cluster_ca.list_issued().await.unwrap().contains(&existing.certificate),
        "a certificate that can't be revoked"
    );
    // One that doesn't know the member's name checks the address.
    let spec = CertificateSpec::for_member("other".parse().unwrap(), fixture.address());
    fixture.ask(&cluster_ca.issue_credentials(&spec).await.unwrap()).await.unwrap();
}

async fn restart_at(fixture: &mut EtcdFixture, address: IpAddr) -> (MemberRun, ClusterAccess) {
    fixture.move_to(address);
    let mut node = fixture.run(fixture.restart_options());
    let running = node.wait_running().await;
    (node, running)
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn each_of_two_members_restarts_at_another_address(#[values(Debian, Newest)] version: EtcdVersion) {
    let (mut first, node, one) = started_member(version).await;
    let mut second = EtcdFixture::new(version, "two");
    let mut joined = second.run(add_member(&second, &first, &one).await);
    let two = joined.wait_running().await;
    let (was_one, was_two) = (member_identity(&first, &one).await, member_identity(&second, &two).await);

    // Without the member that moves, the other has no quorum.
    node.stop().await;
    let (node, one) = restart_at(&mut first, loopback_address(2)).await;
    assert_eq!(member_identity(&first, &one).await, was_one);
    assert_listed_and_certified(&first, &one).await;
    one.root_kv().put(b"/k", b"from the first").await.unwrap();
    assert_eq!(two.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    assert_eq!(
        two.cluster_members().list_members().await.unwrap(),
        one.cluster_members().list_members().await.unwrap()
    );

    joined.stop().await;
    let (joined, two) = restart_at(&mut second, loopback_address(3)).await;
    assert_eq!(member_identity(&second, &two).await, was_two);
    assert_listed_and_certified(&second, &two).await;
    two.root_kv().put(b"/k", b"from the second").await.unwrap();
    assert_eq!(one.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the second");

    // They find each other at their present addresses.
    joined.stop().await;
    node.stop().await;
    let (mut node, mut joined) = (first.run(first.restart_options()), second.run(second.restart_options()));
    let (one, two) = (node.wait_running().await, joined.wait_running().await);
    assert_eq!(
        one.cluster_members().list_members().await.unwrap(),
        two.cluster_members().list_members().await.unwrap()
    );
    assert_eq!(one.root_kv().get(b"/k").await.unwrap().unwrap().value, b"from the second");
    joined.stop().await;
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn one_of_three_members_restarts_at_another_address(#[values(Debian, Newest)] version: EtcdVersion) {
    let mut fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let [(first, one), (second, _), (third, _)] = three_members(&fixtures).await;
    third.stop().await;
    // The others continue meanwhile.
    let root = one.root_kv();
    retried(async || root.put(b"/k", b"without it").await).await;
    let (moved, three) = restart_at(&mut fixtures[2], loopback_address(4)).await;
    assert_listed_and_certified(&fixtures[2], &three).await;
    assert_eq!(three.root_kv().get(b"/k").await.unwrap().unwrap().value, b"without it");
    // Its vote counts: with it, one of the others can stop, which may have been the leader.
    second.stop().await;
    retried(async || root.put(b"/k", b"with it").await).await;
    assert_eq!(three.root_kv().get(b"/k").await.unwrap().unwrap().value, b"with it");
    moved.stop().await;
    first.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_member_that_knows_only_former_addresses_starts_while_the_others_run() {
    let mut fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(Newest, name));
    let [(first, _), (second, _), (third, _)] = three_members(&fixtures).await;
    third.stop().await;
    let mut moved = Vec::new();
    for (run, fixture) in [first, second].into_iter().zip(&mut fixtures) {
        run.stop().await;
        let number = 2 + u8::try_from(moved.len()).unwrap();
        moved.push(restart_at(fixture, loopback_address(number)).await);
    }
    let (_, one) = &moved[0];
    let root = one.root_kv();
    retried(async || root.put(b"/k", b"without it").await).await;
    let mut third = fixtures[2].run(fixtures[2].restart_options());
    let three = third.wait_running().await;
    assert_eq!(three.root_kv().get(b"/k").await.unwrap().unwrap().value, b"without it");
    third.stop().await;
    for (run, _) in moved {
        run.stop().await;
    }
}
