//! Members that come back at another address.
//!
//! Whoever connects from this machine to one of its own addresses comes from 127.0.0.1, so a member at another one comes from
//! where its certificate doesn't name it: to itself, and to the others.

use std::net::IpAddr;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore, Range};
use nodekeel_cluster::consensus::{Member, NewMember, Running};
use nodekeel_cluster::pki::{Authority, Leaf, SubjectNames};

use super::bed::{Bed, Version};
use super::cluster::three;
use super::refused::get;
use crate::node::Node;

fn elsewhere(number: u8) -> IpAddr {
    [127, 0, 0, number].into()
}

/// What is the same wherever a member is: its number and name, its key, the cluster's authority.
pub(super) async fn identity(bed: &Bed, running: &Running) -> (u64, Option<String>, String, Vec<u8>) {
    let this = running.this();
    let key = bed.data.etcd.peer_pki.load().unwrap().unwrap().key.public().short_id();
    let authority = Authority::load(running.root()).await.unwrap();
    (this.id.0, this.name.clone(), key, authority.certificate().der().to_vec())
}

/// It is served, listed and certified where it is now, and nowhere else.
pub(super) async fn is_at_home(bed: &Bed, running: &Running) {
    let urls = |member: &Member| member.peer_urls.clone();
    assert_eq!(urls(running.this()), [bed.url().to_string()]);
    let listed = running.members().list().await.unwrap();
    let this = listed.iter().find(|member| member.id == running.this().id).unwrap();
    assert_eq!(this, running.this());
    let there = bed.data.etcd.peer_pki.load().unwrap().unwrap();
    assert_eq!(SubjectNames::of(&there.certificate).addresses, [bed.address()]);
    let authority = Authority::load(running.root()).await.unwrap();
    assert!(authority.issued().await.unwrap().contains(&there.certificate), "it can be revoked");
    // A client that doesn't know the member's name checks the address.
    let client = authority.issue(&Leaf::client("client".parse().unwrap())).await.unwrap();
    get(bed, authority.certificate(), Some(&client)).await.unwrap();
}

async fn come_back(bed: &mut Bed, address: IpAddr) -> (Node, Running) {
    bed.move_to(address);
    let mut node = bed.run(bed.restart());
    let running = node.running().await;
    (node, running)
}

pub(super) async fn a_member_alone_comes_back_at_another_address(version: Version) {
    let mut bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    running.root().put(b"/k", b"v").await.unwrap();
    let before = identity(&bed, &running).await;
    node.stop().await;
    for address in [elsewhere(2), elsewhere(3), elsewhere(3), elsewhere(1)] {
        let (node, running) = come_back(&mut bed, address).await;
        is_at_home(&bed, &running).await;
        assert_eq!(identity(&bed, &running).await, before);
        assert_eq!(running.root().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(running.members().list().await.unwrap().len(), 1);
        node.stop().await;
    }
}

pub(super) async fn a_member_comes_back_to_another_at_another_address(version: Version) {
    let (mut first, mut second) = (Bed::new(version, "one"), Bed::new(version, "two"));
    let mut node = first.run(first.create());
    let one = node.running().await;
    one.members().add_learner(&NewMember::new(second.name.clone(), second.url())).await.unwrap();
    let mut joined = second.run(second.join(&[&first], &one).await);
    let two = joined.running().await;
    let (was_one, was_two) = (identity(&first, &one).await, identity(&second, &two).await);

    // Without the one that moves, the other has no majority.
    node.stop().await;
    let (node, one) = come_back(&mut first, elsewhere(2)).await;
    assert_eq!(identity(&first, &one).await, was_one);
    is_at_home(&first, &one).await;
    one.root().put(b"/k", b"from the first").await.unwrap();
    assert_eq!(two.root().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    assert_eq!(two.members().list().await.unwrap(), one.members().list().await.unwrap());

    joined.stop().await;
    let (joined, two) = come_back(&mut second, elsewhere(3)).await;
    assert_eq!(identity(&second, &two).await, was_two);
    is_at_home(&second, &two).await;
    two.root().put(b"/k", b"from the second").await.unwrap();
    assert_eq!(one.root().get(b"/k").await.unwrap().unwrap().value, b"from the second");

    // They find each other where they are now.
    joined.stop().await;
    node.stop().await;
    let (mut node, mut joined) = (first.run(first.restart()), second.run(second.restart()));
    let (one, two) = (node.running().await, joined.running().await);
    assert_eq!(one.members().list().await.unwrap(), two.members().list().await.unwrap());
    let all = Range::new(KeyRange::key("/k"));
    assert_eq!(one.root().range(all).await.unwrap().kvs[0].value, b"from the second");
    joined.stop().await;
    node.stop().await;
}

pub(super) async fn one_of_three_comes_back_at_another_address(version: Version) {
    let mut beds = ["one", "two", "three"].map(|name| Bed::new(version, name));
    let [(first, one), (second, _), (third, _)] = three(&beds).await;
    third.stop().await;
    // The others go on meanwhile.
    retried_put(&*one.root(), b"without it").await;
    let (moved, three) = come_back(&mut beds[2], elsewhere(4)).await;
    is_at_home(&beds[2], &three).await;
    assert_eq!(three.root().get(b"/k").await.unwrap().unwrap().value, b"without it");
    // It counts: with it, one of the others can go.
    second.stop().await;
    retried_put(&*one.root(), b"with it").await;
    assert_eq!(three.root().get(b"/k").await.unwrap().unwrap().value, b"with it");
    moved.stop().await;
    first.stop().await;
}

/// Whoever leads may have been the one that went.
async fn retried_put(root: &dyn KvStore, value: &[u8]) {
    let putting = async {
        while let Err(error) = root.put(b"/k", value).await {
            assert!(error.is_retryable(), "{error:?}");
        }
    };
    tokio::time::timeout(crate::node::HANG, putting).await.expect("there is a majority");
}
