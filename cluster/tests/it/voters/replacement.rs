//! Voters that others take the place of.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::consensus::{MembershipError, PeerUrl, REMOVED_NODE};
use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{GoldenTicket, NodeId, NodeRemovalError, NodeReplacer, RemovalStep};
use nodekeel_supervisor::Failure;
use rstest::rstest;
use tokio::time::{sleep, timeout};

use super::history::{Random, SEED_ENV, number_from};
use super::voter::{Voter, get, put, start_cluster, stop_all};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::retried;
use crate::member_run::HANG;

/// The number of replacements.
const REPLACES_ENV: &str = "NODEKEEL_REPLACES";
const DEFAULT_REPLACES: u64 = 2;

async fn node_id(voter: &Voter) -> NodeId {
    voter.wait_running().await.node_id
}

/// Why a change of the members is refused, once there is a leader.
async fn refusal<T: Debug>(change: impl AsyncFn() -> Result<T, NodeRemovalError>) -> String {
    let refused = async || match change().await {
        Err(
            NodeRemovalError::Member { source: source @ MembershipError::UnhealthyCluster { .. }, .. }
            | NodeRemovalError::PrepareLeave(source @ MembershipError::UnhealthyCluster { .. }),
        ) => Ok(source.to_string()),
        other => Err(format!("{other:?}")),
    };
    retried(refused).await
}

/// Asserts that these voters, and no other nodes, have records, members and valid certificates.
pub(super) async fn assert_nodes(voters: &[Voter]) {
    let mut nodes = BTreeSet::new();
    for voter in voters {
        nodes.insert(node_id(voter).await.to_string());
    }
    let access = voters[0].access().await;
    let members = retried(async || access.cluster_members().list_members().await).await;
    assert!(members.iter().all(|member| !member.is_learner), "{members:?}");
    let members = members.into_iter().map(|member| member.name.unwrap_or_default());
    assert_eq!(members.collect::<BTreeSet<_>>(), nodes, "members");
    // The others remove those of a node that has left.
    retried(async || {
        let records = voters[0].node().node_store().unwrap().list_records().await;
        let records = records.map_err(|error| error.to_string())?;
        let records = records.iter().map(|stored| stored.id.to_string()).collect::<BTreeSet<_>>();
        if records != nodes {
            return Err(format!("records of {records:?}"));
        }
        let cluster_ca = access.load_ca().await.map_err(|error| error.to_string())?;
        let issued = cluster_ca.list_issued().await.map_err(|error| error.to_string())?;
        let revoked = cluster_ca.revocation_list().await.map_err(|error| error.to_string())?;
        let valid = issued.iter().filter(|certificate| !revoked.is_revoked(certificate));
        let valid = valid.filter_map(|certificate| certificate.common_name());
        let valid = valid.filter(|name| name.starts_with("nodekeel-")).map(str::to_owned);
        let valid = valid.collect::<BTreeSet<_>>();
        if valid == nodes { Ok(()) } else { Err(format!("certificates of {valid:?}")) }
    })
    .await;
}

fn replacer(node: &ClusterNode) -> Result<NodeReplacer, Failure> {
    Ok(NodeReplacer::new(node.node_remover()?, node.ticket_issuer()?))
}

/// Begins a replacement, and cuts the power of the host of `by` in the step after so many.
async fn interrupt(by: &mut Voter, old: &NodeId, successor: &PeerUrl, steps: usize, pause: Duration) {
    let node = by.node();
    if steps > 0 {
        retried(async || replacer(&node)?.record_successor(old, successor).await.map_err(Failure::from))
            .await;
    }
    for step in RemovalStep::ALL.iter().take(steps.saturating_sub(1)) {
        retried(async || node.node_remover()?.run_step(old, *step).await.map_err(Failure::from)).await;
    }
    let (old, successor) = (old.clone(), successor.clone());
    let all = by.on_host(async move {
        let replacing =
            async { replacer(&node)?.replace_node(&old, Some(&successor)).await.map_err(Failure::from) };
        let _ = tokio::time::timeout(pause, replacing).await;
    });
    all.await;
    by.kill().await;
    by.start();
    by.wait_running().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_replacement_killed_at_any_step_ends_with_one_successor(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let seed = number_from(SEED_ENV).unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    let replaces = number_from(REPLACES_ENV).unwrap_or(DEFAULT_REPLACES);
    println!("{SEED_ENV}={seed} {REPLACES_ENV}={replaces}");
    let mut random = Random::from_seed(seed);
    let mut voters = start_cluster(3, version).await;
    put(&voters[0], "/k", "v").await;
    for round in 0..replaces {
        let steps = (round as usize * 3 + random.below(3)) % (RemovalStep::ALL.len() + 2);
        let (is_dead, moves) = (random.below(2) == 0, random.below(2) == 0);
        let mut old = voters.remove(random.below(3));
        let (by, pause) = (random.below(2), Duration::from_millis(random.below(60) as u64));
        println!("{round}: after {steps} steps and {pause:?}; dead: {is_dead}, at another address: {moves}");
        let replaced = node_id(&old).await;
        if is_dead {
            old.kill().await;
        }
        let host = if moves {
            (0..).find(|host| voters.iter().chain([&old]).all(|voter| voter.host != *host))
        } else {
            None
        };
        let successor = Voter::new(&old.site, host.unwrap_or(old.host), version);
        let url = successor.peer_url();
        interrupt(&mut voters[by], &replaced, &url, steps, pause).await;
        // On either of the others.
        let completing = voters[random.below(2)].node();
        let given = (moves && steps == 0).then_some(&url);
        let replace =
            async || replacer(&completing)?.replace_node(&replaced, given).await.map_err(Failure::from);
        let ticket: GoldenTicket = retried(replace).await;
        assert_eq!(ticket.new_member().url, url);
        assert_eq!(retried(replace).await.to_config(), ticket.to_config(), "another ticket");
        old.stop().await;
        let mut joiner = if moves { successor } else { old };
        if !moves {
            joiner.reset();
        }
        joiner.take_ticket(&ticket);
        joiner.start();
        joiner.wait_running().await;
        assert_eq!(get(&joiner, "/k").await.as_deref(), Some("v"));
        voters.push(joiner);
        assert_nodes(&voters).await;
    }
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_replacement_that_would_lose_the_quorum_is_refused_and_changes_nothing(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let mut voters = start_cluster(3, version).await;
    let (running, dead) = (node_id(&voters[1]).await, node_id(&voters[2]).await);
    voters[2].kill().await;
    let node = voters[0].node();
    let text = refusal(async || replacer(&node).unwrap().replace_node(&running, None).await).await;
    assert!(text.contains(dead.as_str()) && text.contains("start it, or remove it"), "{text}");
    voters[2].start();
    assert_nodes(&voters).await;
    // Nothing of it is left.
    let tickets = node.namespaced_kv("cluster", "tickets").unwrap();
    let left = retried(async || tickets.range(KeyRange::prefix("/")).await).await;
    assert_eq!(left.kvs, []);
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_leader_is_removed_and_the_others_go_on(#[values(Debian, Newest)] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    let at = leader_of(&voters).await;
    let mut removed = voters.remove(at);
    let node = node_id(&removed).await;
    voters[0].node().node_remover().unwrap().remove_node(&node).await.unwrap();
    put(&voters[0], "/k", "after the removal").await;
    assert_eq!(get(&voters[1], "/k").await.as_deref(), Some("after the removal"));
    assert_nodes(&voters).await;
    // While it runs, and at each start.
    wait_removed(&removed).await;
    removed.stop().await;
    removed.start();
    wait_removed(&removed).await;
    assert!(!removed.kill_etcd(), "its etcd was started");
    removed.stop().await;
    stop_all(&mut voters).await;
}

/// The host of the leader.
async fn leader_of(voters: &[Voter]) -> usize {
    let leads = async || {
        let leader = voters[0].client().await.status().await.map_err(|error| error.to_string())?.leader();
        let is_leader = |voter: &Voter| {
            voter.node().cluster_access().is_ok_and(|access| access.this_member().id.0 == leader)
        };
        voters.iter().position(is_leader).ok_or("no leader".to_owned())
    };
    retried(leads).await
}

/// Leaves from its own host, once it has access to its cluster.
async fn leave(voter: &Voter) -> Result<NodeId, NodeRemovalError> {
    let remover = retried(async || voter.node().node_remover()).await;
    voter.on_host(async move { remover.leave().await }).await
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn nodes_leave_down_to_the_last_the_leader_too(#[values(Debian, Newest)] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    put(&voters[0], "/k", "v").await;
    // With one that is down, neither of the others may leave.
    let down = node_id(&voters[2]).await;
    voters[2].kill().await;
    let text = refusal(async || leave(&voters[0]).await).await;
    assert!(text.contains(down.as_str()) && text.contains("start it, or remove it"), "{text}");
    voters[2].start();
    assert_nodes(&voters).await;
    // First the leader, then the other one.
    for leads in [true, false] {
        let leader = leader_of(&voters).await;
        let at = if leads { leader } else { 1 - leader };
        let mut leaving = voters.remove(at);
        // etcd wants connections that are five seconds old.
        let left = retried(async || leave(&leaving).await.map_err(Failure::from)).await;
        println!("{version:?}: {left} left");
        put(&voters[0], "/k", "after it").await;
        assert_nodes(&voters).await;
        wait_removed(&leaving).await;
        leaving.stop().await;
    }
    let last = leave(&voters[0]).await.unwrap_err();
    assert!(matches!(last, NodeRemovalError::LastNode { .. }), "{last:?}");
    assert_nodes(&voters).await;
    stop_all(&mut voters).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_node_that_is_stopped_while_it_leaves_is_still_a_member_and_leaves_later(
    #[values(Debian, Newest)] version: EtcdVersion,
    #[values(false, true)] is_killed: bool,
) {
    let mut voters = start_cluster(3, version).await;
    let node = node_id(&voters[2]).await;
    // The step before the one that removes its member.
    let remover = retried(async || voters[2].node().node_remover()).await;
    retried(async || remover.announce_leave(&node).await).await;
    let root = voters[0].access().await.root_kv();
    let announced = || KeyRange::prefix("/etcd-departures/");
    assert_eq!(retried(async || root.range(announced()).await).await.kvs.len(), 1, "announced");
    if is_killed {
        voters[2].kill().await;
    } else {
        voters[2].stop().await;
    }
    voters[2].start();
    assert_nodes(&voters).await;
    assert_eq!(retried(async || root.range(announced()).await).await.kvs, [], "withdrawn");
    let mut leaving = voters.remove(2);
    assert_eq!(retried(async || leave(&leaving).await.map_err(Failure::from)).await, node);
    assert_nodes(&voters).await;
    wait_removed(&leaving).await;
    leaving.stop().await;
    stop_all(&mut voters).await;
}

/// Waits until the node says that it was removed, and what to do.
async fn wait_removed(voter: &Voter) {
    let is_told = || voter.node().condition().is_some_and(|reason| reason.contains(REMOVED_NODE));
    let told = async {
        while !is_told() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let told = timeout(HANG, told).await;
    assert!(told.is_ok(), "{:?}", voter.node().condition());
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, go, ip and root: it makes network namespaces"]
async fn a_node_that_was_removed_while_it_was_off_says_so(#[values(Debian, Newest)] version: EtcdVersion) {
    let mut voters = start_cluster(3, version).await;
    let node = node_id(&voters[2]).await;
    voters[2].kill().await;
    let removing = voters[0].node();
    retried(async || removing.node_remover()?.remove_node(&node).await.map_err(Failure::from)).await;
    voters[2].start();
    wait_removed(&voters[2]).await;
    stop_all(&mut voters).await;
}
