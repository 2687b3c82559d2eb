//! Two members.

use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::{MembershipError, NewMember, Running};
use nodekeel_cluster::pki::Authority;
use tokio::time::timeout;

use super::bed::{Bed, Version};
use crate::node::{HANG, Node};

pub(super) async fn a_learner_joins_and_is_promoted(version: Version) {
    let (first, second) = (Bed::new(version, "one"), Bed::new(version, "two"));
    let mut node = first.run(first.create());
    let one = node.running().await;
    one.root().put(b"/k", b"from the first").await.unwrap();
    let added = one.members().add_learner(&NewMember::new(second.name.clone(), second.url())).await.unwrap();
    assert!(added.is_learner);
    let start = second.join(&[&first], &one).await;
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
    let mut joined = second.run(second.join(&[&first], &one).await);
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

pub(super) async fn a_third_joins_and_one_that_is_removed_ends(version: Version) {
    let beds = ["one", "two", "three"].map(|name| Bed::new(version, name));
    let [(first, one), (mut removed, gone), (last, three)] = three(&beds).await;
    assert_eq!(one.members().list().await.unwrap().len(), 3);
    retried(async || one.members().remove(gone.this().id).await).await;
    println!("{version:?}: {}", removed.failure().await);
    assert!(gone.root().get(b"/k").await.is_err(), "what it gave out is of no use");
    three.root().put(b"/k", b"v").await.unwrap();
    assert_eq!(one.members().list().await.unwrap().len(), 2);
    removed.stop().await;
    last.stop().await;
    first.stop().await;
}

/// A cluster of these: the first has founded it, the others have joined and have their votes.
pub(super) async fn three(beds: &[Bed; 3]) -> [(Node, Running); 3] {
    let mut first = beds[0].run(beds[0].create());
    let one = first.running().await;
    let mut joined = Vec::new();
    for number in 1..3 {
        let (there, bed) = (beds[..number].iter().collect::<Vec<_>>(), &beds[number]);
        let new = NewMember::new(bed.name.clone(), bed.url());
        retried(async || one.members().add_learner(&new).await).await;
        let mut node = bed.run(bed.join(&there, &one).await);
        let running = node.running().await;
        joined.push((node, running));
    }
    let (third, second) = (joined.pop().unwrap(), joined.pop().unwrap());
    [(first, one), second, third]
}

/// etcd refuses a change as long as it has not heard of all members for five seconds.
pub(super) async fn retried<T>(change: impl AsyncFn() -> Result<T, MembershipError>) -> T {
    let changing = async {
        loop {
            match change().await {
                Ok(changed) => return changed,
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(HANG, changing).await.expect("it is done in time")
}
