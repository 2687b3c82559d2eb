//! Two members.

use std::time::Instant;

use nodekeel_cluster::consensus::NewMember;
use nodekeel_cluster::pki::Authority;

use super::bed::{Bed, Version};

pub(super) async fn a_learner_joins_and_is_promoted(version: Version) {
    let (first, second) = (Bed::new(version, "one"), Bed::new(version, "two"));
    let mut node = first.run(first.create());
    let one = node.running().await;
    one.root().put(b"/k", b"from the first").await.unwrap();
    let added = one.members().add_learner(&NewMember::new(second.name.clone(), second.url())).await.unwrap();
    assert!(added.is_learner);
    let start = second.join(&first, &one).await;
    let began = Instant::now();
    let mut joined = second.run(start);
    let two = joined.running().await;
    println!("{version:?}: from the joiner's start to its vote {:?}", began.elapsed());
    assert_eq!(two.this().id, added.id);
    assert_eq!(two.root().get(b"/k").await.unwrap().unwrap().value, b"from the first");
    let members = two.members().list().await.unwrap();
    assert!(members.len() == 2 && members.iter().all(|member| !member.is_learner), "{members:?}");
    assert_eq!(members, one.members().list().await.unwrap());
    let (ca, other) =
        (Authority::load(one.root()).await.unwrap(), Authority::load(two.root()).await.unwrap());
    assert_eq!(ca.certificate(), other.certificate());
    two.root().put(b"/k", b"from the second").await.unwrap();
    assert_eq!(one.root().get(b"/k").await.unwrap().unwrap().value, b"from the second");
    joined.stop().await;
    node.stop().await;
}

pub(super) async fn members_that_start_again_find_each_other(version: Version) {
    let (first, second) = (Bed::new(version, "one"), Bed::new(version, "two"));
    let mut node = first.run(first.create());
    let one = node.running().await;
    one.members().add_learner(&NewMember::new(second.name.clone(), second.url())).await.unwrap();
    let mut joined = second.run(second.join(&first, &one).await);
    joined.running().await.root().put(b"/k", b"v").await.unwrap();
    joined.stop().await;
    node.stop().await;
    let (mut node, mut joined) = (first.run(first.restart()), second.run(second.restart()));
    let (one, two) = (node.running().await, joined.running().await);
    assert_eq!(one.root().get(b"/k").await.unwrap().unwrap().value, b"v");
    assert_eq!(one.members().list().await.unwrap(), two.members().list().await.unwrap());
    joined.stop().await;
    node.stop().await;
}
