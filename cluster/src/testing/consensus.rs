//! The contract of consensus, as a check.

use crate::consensus::kv::{KeyRange, KvError, Range};
use crate::consensus::{MemberId, MembershipError, NewMember, PeerUrl, Running};
use crate::pki::Authority;

/// Checks that a member that runs, alone in a new cluster, keeps what consensus promises of its keys and members.
///
/// It adds a learner and removes it again, and writes below a space of its own.
///
/// # Panics
/// A promise is broken; the text says which.
pub async fn consensus_conformance(running: &Running) {
    alone(running).await;
    spaces(running).await;
    learners(running).await;
    Authority::load(running.root()).await.expect("a cluster that runs has its authority in its keys");
}

async fn alone(running: &Running) {
    let list = running.members().list().await.expect("list");
    assert_eq!(list, [running.this().clone()], "it is listed as it says of itself");
    assert!(list[0].name.is_some() && !list[0].is_learner, "{list:?}");
    let last = running.members().remove(running.this().id).await;
    assert!(matches!(last, Err(MembershipError::NoQuorum)), "the last member stays: {last:?}");
}

async fn spaces(running: &Running) {
    let (one, other) = (running.kv("conformance", "a"), running.kv("conformance", "ab"));
    let (one, other) = (one.expect("a name"), other.expect("a name"));
    one.put(b"/k", b"one").await.expect("put");
    other.put(b"/k", b"other").await.expect("put");
    let root = running.root().get(b"conformance:a/k").await.expect("get").expect("the root has all keys");
    assert_eq!(root.value, b"one");
    let all = one.range(Range::new(KeyRange::all())).await.expect("range");
    assert_eq!(
        all.kvs.iter().map(|kv| kv.key.as_slice()).collect::<Vec<_>>(),
        [b"/k"],
        "a space ends where it ends"
    );
    for foreign in [KeyRange::key("b/k"), KeyRange::prefix("b"), KeyRange::between("/", "z")] {
        let refused = one.range(Range::new(foreign)).await;
        assert!(
            matches!(refused, Err(KvError::InvalidKey { .. })),
            "no key leads out of its space: {refused:?}"
        );
    }
    assert_eq!(one.delete(KeyRange::all()).await.expect("delete"), 1);
    assert_eq!(other.delete(KeyRange::between("/", "0")).await.expect("delete"), 1, "the other has its own");
    for bad in ["", "A", "a:b", "a/b", "ä"] {
        assert!(running.kv(bad, "s").is_err() && running.kv("m", bad).is_err(), "{bad:?} is no name");
    }
}

async fn learners(running: &Running) {
    let members = running.members();
    // Addresses for documentation, at which nobody is. *Source:* RFC 5737.
    let new = |name: &str, address: &str| {
        let url = PeerUrl::new(address.parse().expect("an address"), 7834);
        NewMember::new(name.parse().expect("a name"), url)
    };
    let added = members.add_learner(&new("conformance-1", "198.51.100.1")).await.expect("add a learner");
    assert!(added.is_learner && added.name.is_none(), "it has not started: {added:?}");
    let again = members.add_learner(&new("conformance-1", "198.51.100.1")).await.expect("add the same again");
    assert_eq!(again.id, added.id, "one that is there is found");
    let second = members.add_learner(&new("conformance-2", "198.51.100.2")).await;
    assert!(matches!(second, Err(MembershipError::TooManyLearners)), "{second:?}");
    let early = members.promote(added.id).await;
    assert!(matches!(early, Err(MembershipError::NotInSync { .. })), "{early:?}");
    let unknown = members.promote(MemberId(0xdead_beef)).await;
    assert!(matches!(unknown, Err(MembershipError::Unknown { .. })), "{unknown:?}");
    members.promote(running.this().id).await.expect("a voter has its vote");
    assert_eq!(members.list().await.expect("list").len(), 2);
    members.remove(added.id).await.expect("remove a learner");
    members.remove(added.id).await.expect("one that is gone is gone");
    assert_eq!(members.list().await.expect("list").len(), 1);
}
