//! Kills at each kill point of a run: the next run resumes as the same node of the same cluster.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::memory::MemoryNetwork;
use nodekeel_cluster::enrolment::{ClusterNode, NodeMembership};

use super::node_fixture::{MemoryCluster, NodeFixture, NodeRun, error_chain};

/// What the killed node does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EnrolmentFlow {
    Bootstrap,
    Join,
    Restart,
}

/// The node that is killed, and the cluster that the flow needs.
struct KillScenario {
    network: MemoryNetwork,
    victim: NodeFixture,
    /// The cluster that the victim joins, if the flow needs one.
    cluster: Option<MemoryCluster>,
    /// The membership of the victim before the kill.
    before: Option<NodeMembership>,
}

impl KillScenario {
    async fn for_flow(flow: EnrolmentFlow) -> Self {
        if flow == EnrolmentFlow::Join {
            let cluster = MemoryCluster::start().await;
            let (victim, ticket) = cluster.invite("192.0.2.2").await;
            assert_eq!(ticket.digest(), cluster.issue("192.0.2.2").await.digest(), "another ticket");
            return Self { network: cluster.network.clone(), victim, cluster: Some(cluster), before: None };
        }
        let network = MemoryNetwork::new();
        let victim = NodeFixture::on_network(&network, "192.0.2.2");
        let mut scenario = Self { network, victim, cluster: None, before: None };
        if flow == EnrolmentFlow::Restart {
            let (run, membership) = scenario.victim.run_to_running().await;
            let kv = run.node.namespaced_kv("test", "kills").expect("a running node");
            kv.put(b"/kept", b"yes").await.expect("put");
            scenario.before = Some(membership);
            run.stop().await;
        }
        scenario
    }

    /// One run that is killed at its `nth` kill point, if it has as many; returns the points that it has
    /// passed.
    async fn run_until(&self, nth: usize) -> Vec<String> {
        let (points, count) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&points);
        let hook = move |point: &str| {
            let now = count.fetch_add(1, Ordering::SeqCst);
            if now > nth {
                return;
            }
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(point.to_owned());
            if now == nth {
                // Ends the run at once and silently, like a SIGKILL.
                std::panic::resume_unwind(Box::new("killed"));
            }
        };
        let run = NodeRun::start_once(ClusterNode::with_test_hook(
            self.victim.deps(),
            self.victim.settings.clone(),
            hook,
        ));
        let _ = run.wait_finished().await;
        run.stop().await;
        std::mem::take(&mut *points.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks the victim after its last start.
    async fn check_recovery(self, flow: EnrolmentFlow, killed_at: &str) -> Duration {
        let started_at = Instant::now();
        let run = self.victim.start();
        let membership = match run.wait_finished().await {
            Ok(membership) => membership,
            Err(reason) => {
                panic!("{flow:?}, killed {killed_at}: {}", error_chain(reason))
            }
        };
        let took = started_at.elapsed();
        assert_eq!(self.network.created_count(), 1, "{flow:?}, killed {killed_at}: a second cluster");
        let members = run.list_members().await;
        let nodes = run.list_records().await;
        let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
        let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
        assert_eq!(names, ids, "{flow:?}, killed {killed_at}: a stale member");
        assert_eq!(names.len(), members.len(), "{flow:?}, killed {killed_at}: a member that never started");
        assert_eq!(members.len(), if flow == EnrolmentFlow::Join { 2 } else { 1 });
        assert!(
            members.iter().all(|member| !member.is_learner),
            "{flow:?}, killed {killed_at}: a stuck learner"
        );
        if let Some(before) = &self.before {
            assert_eq!(&membership, before, "{flow:?}, killed {killed_at}: another node");
            let kv = run.node.namespaced_kv("test", "kills").expect("a running node");
            let kept = kv.get(b"/kept").await.expect("read");
            assert_eq!(
                kept.map(|kv| kv.value),
                Some(b"yes".to_vec()),
                "{flow:?}, killed {killed_at}: a lost key"
            );
        }
        run.stop().await;
        // A further restart changes nothing.
        let (run, again) = self.victim.run_to_running().await;
        assert_eq!(again, membership, "{flow:?}, killed {killed_at}: not the same after another start");
        run.stop().await;
        if let Some(cluster) = self.cluster {
            cluster.stop().await;
        }
        took
    }
}

async fn kill_points(flow: EnrolmentFlow) -> Vec<String> {
    let scenario = KillScenario::for_flow(flow).await;
    let points = scenario.run_until(usize::MAX - 1).await;
    scenario.check_recovery(flow, "never").await;
    points
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_at_any_point_resumes_as_the_same_node_of_the_same_cluster() {
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    for flow in [EnrolmentFlow::Bootstrap, EnrolmentFlow::Join, EnrolmentFlow::Restart] {
        let points = kill_points(flow).await;
        for (nth, point) in points.iter().enumerate() {
            let scenario = KillScenario::for_flow(flow).await;
            let had = scenario.run_until(nth).await;
            assert_eq!(had.last(), Some(point), "runs differ before the kill");
            let took = scenario.check_recovery(flow, point).await;
            println!("{flow:?}: killed at point {nth}, {point}: Running after {took:.1?}");
            (kills, slowest) = (kills + 1, slowest.max(took));
        }
    }
    println!(
        "{kills} kill points: all Running, no second cluster, stale member or lost key; slowest {slowest:.1?}"
    );
    assert!(kills >= 30, "only {kills} points");
    assert!(slowest < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_in_every_run_completes_in_the_first_run_that_survives() {
    for flow in [EnrolmentFlow::Bootstrap, EnrolmentFlow::Join, EnrolmentFlow::Restart] {
        let scenario = KillScenario::for_flow(flow).await;
        let mut runs = 0;
        // Each run ends one point later than the one before, and repeats what was not recorded.
        for nth in 0.. {
            let had = scenario.run_until(nth).await;
            runs += 1;
            if had.len() <= nth {
                break;
            }
        }
        println!("{flow:?}: {runs} runs");
        scenario.check_recovery(flow, "in every run").await;
    }
}
