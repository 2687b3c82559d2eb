//! One member: made, started again, killed.

use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::kv::{Follow, KeyRange, Update};
use nodekeel_cluster::pki::Authority;
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};
use rustix::process::{Signal, kill_process};
use testbed::leftovers;
use tokio::time::timeout;

use super::bed::{Bed, Version};
use crate::node::HANG;

pub(super) async fn the_keys_keep_the_contract(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    kv_conformance(running.root()).await;
    kv_conformance(running.kv("module", "space").unwrap()).await;
    node.stop().await;
}

pub(super) async fn a_member_alone_keeps_the_contract(version: Version) {
    let bed = Bed::new(version, "one");
    let began = Instant::now();
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    println!("{version:?}: a new cluster runs after {:?}", began.elapsed());
    let this = running.this();
    assert_eq!(this.name.as_deref(), Some("one"));
    assert_eq!(this.peer_urls, [bed.url().to_string()]);
    consensus_conformance(&running).await;
    node.stop().await;
    assert_eq!(leftovers::processes(bed.scratch.path()).unwrap(), []);
}

pub(super) async fn a_restart_finds_the_same_authority_and_data(version: Version) {
    let bed = Bed::new(version, "one");
    let mut first = bed.run(bed.create());
    let old = first.running().await;
    old.root().put(b"/k", b"v").await.unwrap();
    let ca = Authority::load(old.root()).await.unwrap().certificate().clone();
    let key = || bed.data.etcd.peer_pki.load().unwrap().unwrap().key.public();
    let had = key();
    first.stop().await;
    // By what it was told first, too: the disk decides.
    for start in [bed.restart(), bed.create()] {
        let mut again = bed.run(start);
        let running = again.running().await;
        assert_eq!(running.root().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(Authority::load(running.root()).await.unwrap().certificate().der(), ca.der());
        assert_eq!((running.this(), key()), (old.this(), had));
        again.stop().await;
    }
    let unsaved: Vec<_> = std::fs::read_dir(bed.data.etcd.path().join("new_authority")).unwrap().collect();
    assert!(unsaved.is_empty(), "the authority's key is in the keys of the cluster alone: {unsaved:?}");
}

pub(super) async fn etcd_killed_comes_back_and_watches_go_on(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    let root = running.root();
    let mut follow = Follow::new(running.root(), KeyRange::prefix("/k/"));
    assert!(matches!(follow.next().await.unwrap(), Update::All { kvs, .. } if kvs.is_empty()));
    for round in 0..3 {
        kill_process(bed.pid(), Signal::KILL).unwrap();
        let key = format!("/k/{round}");
        let put = async {
            while root.put(key.as_bytes(), b"").await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(HANG, put).await.expect("it comes back in time");
        let Update::Changes(changes) = timeout(HANG, follow.next()).await.unwrap().unwrap() else {
            panic!("nothing was compacted");
        };
        assert_eq!(changes[0].key(), key.as_bytes());
    }
    node.stop().await;
}

pub(super) async fn a_lease_that_can_not_be_kept_alive_is_told(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run(bed.create());
    let running = node.running().await;
    let lease = running.root().lease(Duration::from_secs(2)).await.unwrap();
    kill_process(bed.pid(), Signal::STOP).unwrap();
    timeout(Duration::from_secs(10), lease.ended()).await.expect("whoever holds it hears of it");
    kill_process(bed.pid(), Signal::CONT).unwrap();
    node.stop().await;
}

pub(super) async fn an_etcd_that_can_not_work_is_told(version: Version) {
    let bed = Bed::new(version, "one");
    let mut node = bed.run_with(bed.create(), &["--no-such-flag"]);
    let failure = node.failure().await;
    assert!(failure.contains("root.consensus.etcd") && failure.contains("exited with code"), "{failure}");
    node.stop().await;
    let mut node = bed.run(bed.create());
    node.running().await;
    node.stop().await;
}

pub(super) async fn a_member_may_have_an_address_of_ipv6(version: Version) {
    let bed = Bed::at(version, "one", std::net::Ipv6Addr::LOCALHOST.into());
    let mut node = bed.run(bed.create());
    node.running().await.root().put(b"/k", b"v").await.unwrap();
    node.stop().await;
}
