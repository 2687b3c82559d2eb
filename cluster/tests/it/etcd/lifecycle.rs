//! One member: created, restarted, killed.

use std::time::Instant;

use nodekeel_cluster::consensus::kv::{KeyEvent, KeyRange, KvError, ListWatchUpdate, ListWatcher};
use nodekeel_cluster::testing::{consensus_conformance, kv_conformance};
use rstest::rstest;
use rustix::process::{Signal, kill_process};
use testbed::leftovers;
use tokio::time::timeout;

use super::EtcdVersion::{self, Debian, Newest};
use super::etcd_fixture::{EtcdFixture, retried, started_member};
use crate::member_run::HANG;
use crate::nodes::unlock_keys::check_unlock_keys;

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn etcd_keys_meet_the_store_contract(#[values(Debian, Newest)] version: EtcdVersion) {
    let (_fixture, node, running) = started_member(version).await;
    kv_conformance(running.root_kv()).await;
    kv_conformance(running.namespaced_kv("module", "space").unwrap()).await;
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn unlock_keys_are_kept_beside_the_record_of_their_node(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (_fixture, node, running) = started_member(version).await;
    check_unlock_keys(running.namespaced_kv("cluster", "enrolment").unwrap()).await;
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_single_member_meets_the_consensus_contract(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixture = EtcdFixture::new(version, "one");
    let started_at = Instant::now();
    let mut node = fixture.run(fixture.bootstrap_options());
    let running = node.wait_running().await;
    println!("{version:?}: a new cluster runs after {:?}", started_at.elapsed());
    let this = running.this_member();
    assert_eq!(this.name.as_deref(), Some("one"));
    assert_eq!(this.peer_urls, [fixture.peer_url().to_string()]);
    consensus_conformance(&running).await;
    node.stop().await;
    assert_eq!(leftovers::find_processes(fixture.scratch.path()).unwrap(), []);
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_restarted_member_has_the_same_ca_and_data(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixture = EtcdFixture::new(version, "one");
    let mut first = fixture.run(fixture.bootstrap_options());
    let old = first.wait_running().await;
    old.root_kv().put(b"/k", b"v").await.unwrap();
    let ca = old.load_ca().await.unwrap().ca_certificate().clone();
    let key = || fixture.data.etcd.peer_pki.load_credentials().unwrap().unwrap().key.public_key();
    let had = key();
    first.stop().await;
    // The original mode also works: the disk decides.
    for start in [fixture.restart_options(), fixture.bootstrap_options()] {
        let mut again = fixture.run(start);
        let running = again.wait_running().await;
        assert_eq!(running.root_kv().get(b"/k").await.unwrap().unwrap().value, b"v");
        assert_eq!(running.load_ca().await.unwrap().ca_certificate().der_bytes(), ca.der_bytes());
        assert_eq!((running.this_member(), key()), (old.this_member(), had));
        again.stop().await;
    }
    let unsaved: Vec<_> =
        std::fs::read_dir(fixture.data.etcd.path().join("new_authority")).unwrap().collect();
    assert!(unsaved.is_empty(), "the CA's key is stored in the cluster's keys alone: {unsaved:?}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_killed_etcd_restarts_and_its_watches_resume(#[values(Debian, Newest)] version: EtcdVersion) {
    let (fixture, node, running) = started_member(version).await;
    let root = running.root_kv();
    let mut follow = ListWatcher::new(running.root_kv(), KeyRange::prefix("/k/"));
    assert!(matches!(follow.next_update().await.unwrap(), ListWatchUpdate::Snapshot(kvs) if kvs.is_empty()));
    for round in 0..3 {
        kill_process(fixture.pid(), Signal::KILL).unwrap();
        let key = format!("/k/{round}");
        retried(async || root.put(key.as_bytes(), b"").await).await;
        let ListWatchUpdate::Events(changes) = timeout(HANG, follow.next_update()).await.unwrap().unwrap()
        else {
            panic!("a snapshot without a compaction");
        };
        assert_eq!(changes[0].key(), key.as_bytes());
    }
    node.stop().await;
}

/// As etcd's own compaction does once an hour.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_watch_of_compacted_changes_fails_and_one_of_later_changes_does_not(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let (fixture, node, running) = started_member(version).await;
    let (root, keys) = (running.root_kv(), KeyRange::single_key("/k"));
    let first = root.put(b"/k", b"1").await.unwrap();
    let last = root.put(b"/k", b"2").await.unwrap();
    let mut client = fixture.client().await;
    client.compact(last.0, None).await.unwrap();
    let compacted = match root.watch(keys.clone(), first).await {
        Ok(mut watch) => timeout(HANG, watch.next_events()).await.unwrap().unwrap().map(drop),
        Err(error) => Err(error),
    };
    assert!(matches!(compacted, Err(KvError::Compacted)), "{compacted:?}");
    let mut watch = root.watch(keys, last.next()).await.unwrap();
    let third = root.put(b"/k", b"3").await.unwrap();
    let events = timeout(HANG, watch.next_events()).await.unwrap().unwrap().unwrap();
    assert_eq!(events.iter().map(KeyEvent::mod_revision).collect::<Vec<_>>(), [third]);
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn an_etcd_that_cannot_start_fails_the_member_with_its_exit_code(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixture = EtcdFixture::new(version, "one");
    let mut node = fixture.run_with(fixture.bootstrap_options(), &["--no-such-flag"]);
    let failure = node.wait_failure().await;
    assert!(failure.contains("root.consensus.etcd") && failure.contains("exited with code"), "{failure}");
    node.stop().await;
    let mut node = fixture.run(fixture.bootstrap_options());
    node.wait_running().await;
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_member_serves_at_an_ipv6_address(#[values(Debian, Newest)] version: EtcdVersion) {
    let fixture = EtcdFixture::new_at(version, "one", std::net::Ipv6Addr::LOCALHOST.into());
    let mut node = fixture.run(fixture.bootstrap_options());
    node.wait_running().await.root_kv().put(b"/k", b"v").await.unwrap();
    node.stop().await;
}
