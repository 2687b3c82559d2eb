//! Clusters that are recovered from one of their voters.

use std::fs;
use std::time::Duration;

use nodekeel_cluster::consensus::{REMOVED_NODE, RecoveryError, RecoveryPlan};
use nodekeel_cluster::enrolment::ClusterRecoveryError;
use nodekeel_cluster::node::NodeId;
use rstest::rstest;
use tokio::time::{sleep, timeout};

use super::history::Random;
use super::replacement::assert_nodes;
use super::voter::{Voter, get, put, start_cluster, stop_all};
use crate::enrolment::error_chain;
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::retried;
use crate::member_run::HANG;

/// The record of a recovery, below the node's disks.
const RECORD: &str = "data/etcd/recovery";
/// etcd's log, and the one that takes its place.
const LOG: &str = "data/etcd/data/member/wal";
const RECOVERED_LOG: &str = "data/etcd/data/member/wal.recovered";

async fn node_id(voter: &Voter) -> NodeId {
    voter.wait_running().await.node_id
}

/// Recovers the cluster on the host of this voter.
async fn recover(voter: &Voter, node: &NodeId) -> Result<RecoveryPlan, ClusterRecoveryError> {
    let (handle, node) = (voter.node(), node.clone());
    voter.on_host(async move { handle.recover_cluster(&node).await }).await
}

async fn plan(voter: &Voter, node: &NodeId) -> Result<RecoveryPlan, ClusterRecoveryError> {
    let (handle, node) = (voter.node(), node.clone());
    voter.on_host(async move { handle.plan_recovery(&node).await }).await
}

async fn assert_keys(voter: &Voter, keys: usize) {
    for key in 0..keys {
        assert_eq!(get(voter, &format!("/k{key}")).await.as_deref(), Some("v"), "/k{key}");
    }
}

/// Three voters, of which the last two are lost. Each of this many keys was acknowledged by a majority with the first.
async fn lose_two(version: EtcdVersion, keys: usize) -> Vec<Voter> {
    let mut voters = start_cluster(3, version).await;
    voters[2].kill().await;
    for key in 0..keys {
        put(&voters[1], &format!("/k{key}"), "v").await;
    }
    // Whether the first knows yet that a majority has the last of them, or not.
    voters[1].kill().await;
    voters
}

/// Waits until the node says that it was removed; its etcd does not run.
async fn assert_removed(voter: &Voter) {
    voter.wait_condition(REMOVED_NODE).await;
    let condition = voter.node().condition();
    assert!(!voter.kill_etcd(), "its etcd was started: {condition:?}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_cluster_is_recovered_from_its_last_voter_and_those_that_come_back_stay_out(
    #[values(Debian, Newest)] version: EtcdVersion,
    #[values(false, true)] is_restarted: bool,
) {
    let mut voters = lose_two(version, 40).await;
    let (before, mut copy) = (voters[0].wait_running().await, None);
    if is_restarted {
        voters[0].stop().await;
        copy = Some(voters[0].copy_disks());
        voters[0].start();
        voters[0].wait_condition("waits for a majority").await;
    }
    let planned = plan(&voters[0], &before.node_id).await.unwrap();
    assert_eq!(planned.lost.len(), 2);
    assert!(planned.lost.iter().all(|member| !member.is_answering), "{planned:?}");
    let other: NodeId = planned.lost[0].name.as_deref().unwrap().parse().unwrap();
    let refused = recover(&voters[0], &other).await;
    assert!(matches!(refused, Err(ClusterRecoveryError::OtherNode { .. })), "{refused:?}");

    let recovered = timeout(HANG, recover(&voters[0], &before.node_id)).await;
    let recovered = recovered.unwrap_or_else(|_| panic!("{:?}", voters[0].node().condition()));
    assert_eq!(recovered.unwrap(), planned);
    assert_eq!(voters[0].wait_running().await.cluster_id, before.cluster_id);
    assert_keys(&voters[0], 40).await;
    put(&voters[0], "/after", "the recovery").await;
    assert_nodes(&voters[..1]).await;

    // Together they are a majority of the former cluster.
    for voter in &mut voters[1..] {
        voter.start();
    }
    for voter in &voters[1..] {
        assert_removed(voter).await;
    }
    // They have been told, and remember it.
    voters[0].stop().await;
    voters[1].stop().await;
    voters[1].start();
    assert_removed(&voters[1]).await;
    voters[0].start();
    assert_eq!(get(&voters[0], "/after").await.as_deref(), Some("the recovery"));
    for lost in 1..3 {
        assert_removed(&voters[lost]).await;
        let refused = plan(&voters[lost], &other).await;
        assert!(refused.is_err(), "{refused:?}");
        voters[lost].stop().await;
        voters[lost].reset();
        voters[lost].give_ticket(&voters[0]).await;
        voters[lost].start();
        voters[lost].wait_running().await;
    }
    assert_keys(&voters[2], 40).await;
    put(&voters[2], "/after", "the joins").await;
    assert_eq!(get(&voters[0], "/after").await.as_deref(), Some("the joins"));
    assert_nodes(&voters).await;
    // An older copy of its disks knows none of those that run, and waits for those that are lost.
    if let Some(copy) = copy {
        voters[0].stop().await;
        voters[0].restore_disks(&copy);
        voters[0].start();
        voters[0].wait_condition("waits for a majority").await;
        assert!(!voters[0].kill_etcd(), "the etcd of the older copy was started");
        assert_keys(&voters[1], 40).await;
    }
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_cluster_with_a_majority_is_not_recovered(#[values(Debian, Newest)] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    put(&voters[0], "/k0", "v").await;
    let node = node_id(&voters[0]).await;
    for _ in 0..2 {
        let refused = recover(&voters[0], &node).await.unwrap_err();
        assert!(
            matches!(&refused, ClusterRecoveryError::Member(RecoveryError::MajorityAnswers { .. })),
            "{refused:?}"
        );
        println!("{}", error_chain(refused));
        assert!(!voters[0].path(RECORD).exists());
        // One of three is dead.
        voters[2].kill().await;
    }
    // It was requested while both were gone, and they are back when it starts.
    voters[0].kill().await;
    voters[2].start();
    put(&voters[1], "/k1", "v").await;
    fs::write(voters[0].path(RECORD), "requested\n").unwrap();
    voters[0].start();
    assert_nodes(&voters).await;
    assert!(!voters[0].path(RECORD).exists());
    assert_keys(&voters[0], 2).await;
    stop_all(&mut voters).await;
}

/// The others are removed with their certificates, which it could not revoke.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_cluster_is_not_recovered_from_a_voter_that_has_lost_its_key_and_goes_on_with_another_one() {
    let mut voters = lose_two(Newest, 3).await;
    let node = node_id(&voters[0]).await;
    voters[0].kill().await;
    fs::remove_file(voters[0].path("data/etcd/voter_key")).unwrap();
    voters[0].start();
    retried(async || match recover(&voters[0], &node).await {
        Err(ClusterRecoveryError::Member(RecoveryError::Sealed)) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    assert!(!voters[0].path(RECORD).exists());
    voters[1].start();
    assert_keys(&voters[0], 3).await;
    assert_keys(&voters[1], 3).await;
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_recovery_killed_at_any_step_is_completed_by_the_next_start(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = lose_two(version, 20).await;
    let node = node_id(&voters[0]).await;
    // Killed after the request; while the log is written; before and while it takes its place.
    voters[0].kill().await;
    let before = voters[0].copy_disks();
    fs::write(voters[0].path(RECORD), "requested\n").unwrap();
    fs::create_dir(voters[0].path(RECOVERED_LOG)).unwrap();
    fs::write(voters[0].path(RECOVERED_LOG).join("0000000000000000-0000000000000000.wal"), "cut off")
        .unwrap();
    voters[0].start();
    assert_eq!(node_id(&voters[0]).await, node);
    assert_keys(&voters[0], 20).await;
    assert_nodes(&voters[..1]).await;
    for has_former_log in [true, false] {
        voters[0].kill().await;
        fs::rename(voters[0].path(LOG), voters[0].path(RECOVERED_LOG)).unwrap();
        if has_former_log {
            fs::create_dir(voters[0].path(LOG)).unwrap();
            for file in fs::read_dir(before.path().join("data/etcd/data/member/wal")).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), voters[0].path(LOG).join(file.file_name())).unwrap();
            }
        }
        fs::write(voters[0].path(RECORD), "alone\n").unwrap();
        voters[0].start();
        assert_nodes(&voters[..1]).await;
        assert_keys(&voters[0], 20).await;
        assert!(!voters[0].path(RECORD).exists() && !voters[0].path(RECOVERED_LOG).exists());
    }
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_recovery_killed_at_random_moments_ends_with_one_node(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut random = Random::from_seed(7);
    let mut voters = lose_two(version, 20).await;
    let node = node_id(&voters[0]).await;
    let (handle, of) = (voters[0].node(), node.clone());
    // It ends with its host.
    let requested = voters[0].on_host(async move {
        tokio::spawn(async move { handle.recover_cluster(&of).await });
    });
    requested.await;
    let requested = async {
        while !voters[0].path(RECORD).exists() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(HANG, requested).await.expect("requested in time");
    for kills in 0..6 {
        let pause = Duration::from_millis(random.below(400 + 300 * kills) as u64);
        println!("killed after {pause:?}");
        sleep(pause).await;
        voters[0].kill().await;
        voters[0].start();
    }
    assert_nodes(&voters[..1]).await;
    assert_keys(&voters[0], 20).await;
    let refused = retried(async || match plan(&voters[0], &node).await {
        Err(ClusterRecoveryError::Member(refused)) => Ok(refused),
        other => Err(format!("{other:?}")),
    });
    assert!(matches!(refused.await, RecoveryError::OnlyVoter));
    stop_all(&mut voters).await;
}

/// None finds the others at the addresses that it knows.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_site_whose_nodes_all_move_at_once_goes_on_from_one_of_them(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = start_cluster(3, version).await;
    put(&voters[1], "/k0", "v").await;
    assert_keys(&voters[0], 1).await;
    let before = voters[0].wait_running().await;
    stop_all(&mut voters).await;
    for voter in &mut voters {
        voter.move_to(voter.host + 3);
        voter.start();
    }
    for voter in &voters {
        voter.wait_condition("waits for a majority").await;
    }
    for voter in &mut voters[1..] {
        voter.stop().await;
        voter.reset();
    }
    recover(&voters[0], &before.node_id).await.unwrap();
    assert_eq!(voters[0].wait_running().await.cluster_id, before.cluster_id);
    for joiner in 1..3 {
        voters[joiner].give_ticket(&voters[0]).await;
        voters[joiner].start();
        voters[joiner].wait_running().await;
    }
    assert_keys(&voters[2], 1).await;
    assert_nodes(&voters).await;
    stop_all(&mut voters).await;
}
