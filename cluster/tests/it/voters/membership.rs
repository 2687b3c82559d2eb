//! What a change of members costs, and when it is possible.

use std::time::{Duration, Instant};

use etcd_client::Client;
use nodekeel_cluster::consensus::MemberName;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::pki::CertificateSpec;
use nodekeel_localstorage::pki::RevocationList;
use rstest::rstest;
use tokio::time::{sleep, timeout};

use super::voter::{Voter, cluster_and_spare, get, put, start_cluster, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};

/// The most entries of the raft log that a join may take, from its ticket to its end, without those by which members see
/// whether they make progress.
const MAX_ENTRIES: u64 = 20;
/// How long a cluster is watched after a join.
const QUIET: Duration = Duration::from_secs(6);

async fn raft_index(client: &mut Client) -> u64 {
    client.status().await.unwrap().raft_index()
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_voters_join_with_at_most_20_raft_entries_each(#[case] version: EtcdVersion) {
    let (mut voters, mut joiner) = cluster_and_spare(1, version).await;
    let mut client = voters[0].client().await;
    let progress_period = EtcdConfig::new("etcd").progress_period;
    let mut entries = Vec::new();
    for _ in 0..4 {
        let begin = Instant::now();
        let before = raft_index(&mut client).await;
        joiner.give_ticket(&voters[0]).await;
        joiner.start();
        joiner.wait_running().await;
        sleep(QUIET).await;
        // In each period, at most one of each member that sees no other.
        let periods = begin.elapsed().div_duration_f64(progress_period).ceil() as u64;
        let allowed = MAX_ENTRIES + periods * (voters.len() as u64 + 1);
        entries.push((raft_index(&mut client).await - before, allowed));
        let next = Voter::new(&joiner.site, joiner.host + 1, version);
        voters.push(std::mem::replace(&mut joiner, next));
    }
    println!("raft entries of four joins, and the most that are allowed: {entries:?}");
    assert!(entries.iter().all(|(count, allowed)| count <= allowed), "{entries:?}");
    let members = voters[0].access().await.cluster_members().list_members().await.unwrap();
    assert!(members.len() == 5 && members.iter().all(|member| !member.is_learner), "{members:?}");
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_member_joins_right_after_another(#[values(Debian, Newest)] version: EtcdVersion) {
    let (mut voters, mut joiner) = cluster_and_spare(3, version).await;
    // etcd wants connections that are five seconds old.
    let started_at = Instant::now();
    joiner.give_ticket(&voters[0]).await;
    joiner.start();
    joiner.wait_running().await;
    println!("a join right after another took {:?}", started_at.elapsed());
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_of_a_cluster_with_a_dead_voter_waits_and_names_it_and_what_to_do(
    #[case] version: EtcdVersion,
) {
    let (mut voters, mut joiner) = cluster_and_spare(3, version).await;
    let (dead, url) = (voters[2].wait_running().await.node_id, voters[2].peer_url());
    voters[2].kill().await;
    joiner.give_ticket(&voters[0]).await;
    joiner.start();
    let expected = [
        "waits for the voters of its cluster: ",
        dead.as_str(),
        url.as_str(),
        "does not answer: start it, or remove it",
    ];
    let is_told =
        || joiner.node().condition().is_some_and(|reason| expected.iter().all(|part| reason.contains(part)));
    let told = async {
        while !is_told() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let told = timeout(Duration::from_secs(15), told).await;
    assert!(told.is_ok(), "{:?}", joiner.node().condition());
    // Once it is back, the node joins.
    voters[2].start();
    joiner.wait_running().await;
    voters.push(joiner);
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_was_cut_off_deposes_no_leader(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    let mut client = voters[0].client().await;
    let before = client.status().await.unwrap();
    let ids: Vec<_> =
        voters.iter().map(|voter| voter.node().cluster_access().unwrap().this_member().id.0).collect();
    // The first one answers the test, so it stays.
    let follower = (1..3).find(|voter| ids[*voter] != before.leader()).unwrap();
    let site = voters[0].site.clone();
    site.set_connected(follower, false).unwrap();
    sleep(Duration::from_secs(15)).await;
    site.set_connected(follower, true).unwrap();
    put(&voters[follower], "/k", "it is back").await;
    assert_eq!(get(&voters[0], "/k").await.as_deref(), Some("it is back"));
    let after = client.status().await.unwrap();
    assert_eq!((after.leader(), after.raft_term()), (before.leader(), before.raft_term()), "an election");
    stop_all(&mut voters).await;
}

#[rstest]
#[ignore = "soak: the newest etcd runs it, too"]
#[case::debian(Debian)]
#[ignore = "sampled: needs go, ip and root: it makes network namespaces"]
#[case::newest(Newest)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_list_of_revoked_certificates_is_restored_without_a_majority(#[case] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    // Of a node that was removed.
    let cluster_ca = voters[0].access().await.load_ca().await.unwrap();
    let name: MemberName = "removed".parse().unwrap();
    let removed = cluster_ca.issue_credentials(&CertificateSpec::for_client(name)).await.unwrap();
    cluster_ca.revoke_name("removed").await.unwrap();
    // Other keys are written after it.
    for number in 0..200 {
        put(&voters[0], &format!("/k/{number}"), &"v".repeat(1000)).await;
    }
    stop_all(&mut voters).await;
    let list_of = |voter: &Voter| voter.path("data/etcd/peer_crl");
    let list = std::fs::read(list_of(&voters[0])).unwrap();
    let revoked = RevocationList::from_der(&list, &removed.ca).unwrap();
    assert!(revoked.is_revoked(&removed.certificate));
    // A cold start of two; neither has a majority before both run.
    for voter in &mut voters[..2] {
        std::fs::remove_file(list_of(voter)).unwrap();
        voter.start();
    }
    for voter in &voters[..2] {
        voter.wait_running().await;
        assert_eq!(std::fs::read(list_of(voter)).unwrap(), list);
        put(voter, "/k", "v").await;
    }
    stop_all(&mut voters).await;
    // Without the data there is no list, and nothing is started.
    std::fs::remove_file(list_of(&voters[0])).unwrap();
    std::fs::write(voters[0].path("data/etcd/data/member/snap/db"), "damaged").unwrap();
    voters[0].start();
    let told = async {
        loop {
            match voters[0].node().condition() {
                Some(reason) if reason.contains("peer_crl is missing") => return reason,
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    let reason = timeout(Duration::from_secs(15), told).await.expect("the missing list is named");
    assert!(reason.contains("`nodectl cluster replace nodekeel-"), "{reason}");
    assert!(!voters[0].kill_etcd(), "its etcd was started");
    stop_all(&mut voters).await;
}
