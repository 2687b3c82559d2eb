//! The contract of consensus, as a conformance check.

use crate::consensus::kv::{KeyRange, KvError};
use crate::consensus::{ClusterAccess, MemberId, MembershipError, NewMember, PeerUrl};

/// Checks that a running member, alone in a new cluster, meets the contract of its keys and members.
///
/// It adds a learner and removes it again, and writes in a dedicated namespace.
///
/// # Panics
/// If the contract is broken; the text names the broken rule.
pub async fn consensus_conformance(running: &ClusterAccess) {
    check_single_member(running).await;
    check_namespaces(running).await;
    check_learners(running).await;
    let cluster_ca = running.load_ca().await.expect("a running cluster has its CA in its keys");
    assert!(cluster_ca.can_sign(), "a running member can't sign for its CA");
}

async fn check_single_member(running: &ClusterAccess) {
    let list = running.cluster_members().list_members().await.expect("list");
    assert_eq!(list, [running.this_member().clone()], "the list differs from the member's own entry");
    assert!(list[0].name.is_some() && !list[0].is_learner, "{list:?}");
    let alone = running.cluster_members().prepare_leave().await;
    assert!(matches!(alone, Err(MembershipError::QuorumLoss)), "the last member may leave: {alone:?}");
    let last = running.cluster_members().remove_member(running.this_member().id).await;
    assert!(matches!(last, Err(MembershipError::QuorumLoss)), "the last member was removed: {last:?}");
}

async fn check_namespaces(running: &ClusterAccess) {
    let (one, other) =
        (running.namespaced_kv("conformance", "a"), running.namespaced_kv("conformance", "ab"));
    let (one, other) = (one.expect("a valid name"), other.expect("a valid name"));
    one.put(b"/k", b"one").await.expect("put");
    other.put(b"/k", b"other").await.expect("put");
    let root = running.root_kv().get(b"conformance:a/k").await.expect("get").expect("the root has all keys");
    assert_eq!(root.value, b"one");
    let all = one.range(KeyRange::all_keys()).await.expect("range");
    assert_eq!(
        all.kvs.iter().map(|kv| kv.key.as_slice()).collect::<Vec<_>>(),
        [b"/k"],
        "a namespace has keys of another"
    );
    for foreign in [KeyRange::single_key("b/k"), KeyRange::prefix("b")] {
        let refused = one.range(foreign).await;
        assert!(
            matches!(refused, Err(KvError::InvalidKey { .. })),
            "a key leads out of its namespace: {refused:?}"
        );
    }
    assert_eq!(one.delete(KeyRange::all_keys()).await.expect("delete"), 1);
    assert_eq!(
        other.delete(KeyRange::prefix("/")).await.expect("delete"),
        1,
        "the other key was deleted, too"
    );
    for bad in ["", "A", "a:b", "a/b", "ä"] {
        assert!(
            running.namespaced_kv(bad, "s").is_err() && running.namespaced_kv("m", bad).is_err(),
            "{bad:?} was accepted"
        );
    }
}

async fn check_learners(running: &ClusterAccess) {
    let members = running.cluster_members();
    // Addresses for documentation, which no host has. *Source:* RFC 5737.
    let new = |name: &str, address: &str| {
        let url = PeerUrl::new(address.parse().expect("an address"), 7834);
        NewMember::new(name.parse().expect("a valid name"), url)
    };
    let added = members.add_learner(&new("conformance-1", "198.51.100.1")).await.expect("add a learner");
    assert!(added.is_learner && added.name.is_none(), "a learner that has not started: {added:?}");
    let again = members.add_learner(&new("conformance-1", "198.51.100.1")).await.expect("add the same again");
    assert_eq!(again.id, added.id, "an existing learner was not found");
    let second = members.add_learner(&new("conformance-2", "198.51.100.2")).await;
    assert!(matches!(second, Err(MembershipError::TooManyLearners)), "{second:?}");
    let early = members.promote_member(added.id).await;
    assert!(matches!(early, Err(MembershipError::LearnerNotReady { .. })), "{early:?}");
    let unknown = members.promote_member(MemberId(0xdead_beef)).await;
    assert!(matches!(unknown, Err(MembershipError::MemberNotFound { .. })), "{unknown:?}");
    members.promote_member(running.this_member().id).await.expect("promoting a voter succeeds");
    assert_eq!(members.list_members().await.expect("list").len(), 2);
    members.remove_member(added.id).await.expect("remove a learner");
    members.remove_member(added.id).await.expect("removing a removed member succeeds");
    assert_eq!(members.list_members().await.expect("list").len(), 1);
}
