//! Kills at each kill point of a run: the next run resumes as the same node of the same cluster.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nodekeel_cluster::backup::stage_snapshot;
use nodekeel_cluster::consensus::memory::MemoryNetwork;
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase, NodeMembership};
use nodekeel_cluster::node::{ClusterId, JoinTicketLimits};
use nodekeel_localstorage::Dir;
use tokio::task::JoinHandle as JoinHandleOfTask;

use super::node_fixture::{InProcessVoter, NodeFixture, NodeRun, error_chain};

/// Longest time until a node runs after its last start.
pub(super) const RECOVERY_LIMIT: Duration = Duration::from_secs(10);

/// What the killed node does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum EnrolmentFlow {
    Bootstrap,
    Join,
    /// By a join ticket.
    Enrol,
    Restart,
    /// Of a cluster that is lost; the store in memory has no snapshots.
    Restore,
}

pub(super) const FLOWS: [EnrolmentFlow; 4] =
    [EnrolmentFlow::Bootstrap, EnrolmentFlow::Join, EnrolmentFlow::Enrol, EnrolmentFlow::Restart];

/// The node that is killed, and the cluster that the flow needs.
pub(super) struct KillScenario {
    flow: EnrolmentFlow,
    pub(super) victim: NodeFixture,
    /// The first node of the cluster that the victim joins, if it joins one.
    first: Option<(NodeFixture, NodeRun)>,
    /// The membership of the victim before the kill.
    before: Option<NodeMembership>,
    /// The cluster that the victim restores, if it restores one.
    lost: Option<ClusterId>,
}

impl KillScenario {
    /// With nodes that can reach each other.
    pub(super) async fn for_flow(flow: EnrolmentFlow, new_node: impl Fn() -> NodeFixture) -> Self {
        let mut scenario = Self { flow, victim: new_node(), first: None, before: None, lost: None };
        let put_kept = async |run: &NodeRun| {
            let kv = run.node.namespaced_kv("test", "kills").expect("a running node");
            kv.put(b"/kept", b"yes").await.expect("put");
        };
        match flow {
            EnrolmentFlow::Bootstrap => {}
            EnrolmentFlow::Join => {
                let mut first = new_node();
                first.settings.golden_tickets = true;
                let (run, _) = first.run_to_running().await;
                put_kept(&run).await;
                let issuer = run.node.ticket_issuer().expect("golden tickets are enabled");
                scenario
                    .victim
                    .give_ticket(&issuer.issue_ticket(&scenario.victim.url).await.expect("created"));
                scenario.first = Some((first, run));
            }
            EnrolmentFlow::Enrol => {
                let first = new_node();
                let (run, _) = first.run_to_running().await;
                put_kept(&run).await;
                let voter = InProcessVoter::new(&run.node, "the victim");
                scenario.victim.give_join_ticket(&voter.create_ticket(&JoinTicketLimits::default()).await);
                scenario.victim.enroller = Some(Arc::new(voter));
                scenario.first = Some((first, run));
            }
            EnrolmentFlow::Restart => {
                let (run, membership) = scenario.victim.run_to_running().await;
                put_kept(&run).await;
                run.stop().await;
                scenario.before = Some(membership);
            }
            EnrolmentFlow::Restore => {
                let former = new_node();
                let (run, lost) = former.run_to_running().await;
                put_kept(&run).await;
                let victim = &mut scenario.victim;
                let disk = Dir::open(victim.disks.path()).expect("a disk");
                let pieces = read_snapshot(&run.node).await;
                stage_snapshot(&disk, Path::new("snapshot"), pieces).expect("a whole snapshot");
                run.stop().await;
                victim.settings.bootstrap = false;
                victim.settings.snapshot = Some(victim.disks.path().join("snapshot"));
                scenario.lost = Some(lost.cluster_id);
            }
        }
        scenario
    }

    /// One run with a strike at its `nth` kill point, if it has as many: it ends the run there, or returns a thread
    /// that strikes soon. Returns the points that the run has passed up to there.
    pub(super) async fn run_until(
        &self,
        nth: usize,
        strike: impl Fn() -> Option<JoinHandle<()>> + Send + Sync + 'static,
    ) -> Vec<String> {
        let (points, count) = (Arc::new(Mutex::new(Vec::new())), AtomicUsize::new(0));
        let striking = Arc::new(Mutex::new(None));
        let (seen, thread) = (Arc::clone(&points), Arc::clone(&striking));
        let hook = move |point: &str| {
            let now = count.fetch_add(1, Ordering::SeqCst);
            if now <= nth {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push(point.to_owned());
            }
            if now == nth {
                let started = strike();
                *thread.lock().unwrap_or_else(PoisonError::into_inner) = started;
            }
        };
        let node = ClusterNode::with_test_hook(self.victim.deps(), self.victim.settings.clone(), hook);
        let run = NodeRun::start_once(node);
        let operator = self.request_restore(&run);
        let _ = run.wait_finished().await;
        operator.abort();
        let striking = striking.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(striking) = striking {
            tokio::task::spawn_blocking(|| striking.join()).await.expect("joined").expect("it has struck");
        }
        run.stop().await;
        std::mem::take(&mut *points.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// An operator, who asks a node that waits for it to restore the cluster.
    fn request_restore(&self, run: &NodeRun) -> JoinHandleOfTask<()> {
        let (node, is_asked) = (run.node.clone(), self.lost.is_some());
        tokio::spawn(async move {
            node.wait_phase_left(EnrolmentPhase::New).await;
            if is_asked {
                // A run that resumes does not wait.
                let _ = node.request_restore();
            }
        })
    }

    /// All kill points of a run.
    pub(super) async fn kill_points(self) -> Vec<String> {
        let points = self.run_until(usize::MAX, || None).await;
        self.check_recovery("never").await;
        points
    }

    /// What identifies the victim's disk, as far as it was created: the enrolment, the cluster's CA and the node's
    /// key.
    fn disk_identity(&self) -> [Option<Vec<u8>>; 3] {
        let read = |path: &str| fs::read(self.victim.disks.path().join("data").join(path)).ok();
        let ca = read("etcd/peer_pki/ca.pem").or_else(|| read("etcd/new_authority/ca.pem"));
        [read(".enrolment"), ca, read("node/credentials/cert-key.pem")]
    }

    /// Starts the victim for the last time; returns how long it took until it ran as the one node of the one cluster.
    pub(super) async fn check_recovery(self, killed_at: &str) -> Duration {
        let what = format!("{:?}, killed {killed_at}", self.flow);
        let (left, started_at) = (self.disk_identity(), Instant::now());
        let run = self.victim.start();
        let operator = self.request_restore(&run);
        let membership =
            run.wait_finished().await.unwrap_or_else(|reason| panic!("{what}: {}", error_chain(reason)));
        let took = started_at.elapsed();
        operator.abort();
        let (members, nodes) = (run.list_members().await, run.list_records().await);
        let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
        let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
        assert_eq!(names, ids, "{what}: a stale member");
        assert_eq!(names.len(), members.len(), "{what}: a member that never started");
        assert_eq!(members.len(), 1 + usize::from(self.first.is_some()), "{what}: {members:?}");
        assert!(members.iter().all(|member| !member.is_learner), "{what}: a stuck learner");
        if let Some(before) = &self.before {
            assert_eq!(&membership, before, "{what}: another node");
        }
        if let Some((_, first)) = &self.first {
            let cluster = first.node.cluster_identity().expect("a running node").cluster_id;
            assert_eq!(membership.cluster_id, cluster, "{what}: a second cluster");
        }
        if let Some(lost) = self.lost {
            assert_eq!(membership.cluster_id, lost, "{what}: another cluster");
            assert!(!self.victim.disks.path().join("snapshot").exists(), "{what}: its snapshot is left");
        }
        if self.flow != EnrolmentFlow::Bootstrap {
            let kv = run.node.namespaced_kv("test", "kills").expect("a running node");
            assert!(kv.get(b"/kept").await.expect("read").is_some(), "{what}: a lost key");
        }
        run.stop().await;
        for (was, is) in left.into_iter().zip(self.disk_identity()) {
            assert!(was.is_none() || was == is, "{what}: another volume, CA or key");
        }
        // A further restart changes nothing.
        let (run, again) = self.victim.run_to_running().await;
        assert_eq!(again, membership, "{what}: not the same after another start");
        run.stop().await;
        if let Some((_fixture, first)) = self.first {
            first.stop().await;
        }
        took
    }
}

/// A snapshot of the node's cluster.
pub(crate) async fn read_snapshot(node: &ClusterNode) -> Vec<Vec<u8>> {
    let maintenance = node.cluster_access().expect("a running node").store_maintenance().expect("an etcd");
    let mut snapshot = maintenance.snapshot().await.expect("a snapshot");
    let mut pieces = Vec::new();
    while let Some(piece) = snapshot.next_piece().await.expect("the next piece") {
        pieces.push(piece);
    }
    pieces
}

/// Nodes of a network in memory, with an address each.
fn memory_nodes(network: &MemoryNetwork) -> impl Fn() -> NodeFixture {
    let last = AtomicUsize::new(1);
    move || NodeFixture::on_network(network, &format!("192.0.2.{}", last.fetch_add(1, Ordering::SeqCst)))
}

/// Ends the run at once and silently, like a SIGKILL.
fn kill_node() -> Option<JoinHandle<()>> {
    std::panic::resume_unwind(Box::new("killed"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_at_any_point_resumes_as_the_same_node_of_the_same_cluster() {
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    for flow in FLOWS {
        let points =
            KillScenario::for_flow(flow, memory_nodes(&MemoryNetwork::new())).await.kill_points().await;
        for (nth, point) in points.iter().enumerate() {
            let network = MemoryNetwork::new();
            let scenario = KillScenario::for_flow(flow, memory_nodes(&network)).await;
            let passed = scenario.run_until(nth, kill_node).await;
            assert_eq!(passed.last(), Some(point), "runs differ before the kill");
            slowest = slowest.max(scenario.check_recovery(point).await);
            assert_eq!(network.created_count(), 1, "{flow:?}, killed {point}: a second cluster");
            kills += 1;
        }
    }
    println!(
        "{kills} kill points: all Running, no second cluster, stale member or lost key; slowest {slowest:.1?}"
    );
    assert!(kills >= 30, "only {kills} points");
    assert!(slowest < RECOVERY_LIMIT);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_killed_in_every_run_completes_in_the_first_run_that_survives() {
    for flow in FLOWS {
        let network = MemoryNetwork::new();
        let scenario = KillScenario::for_flow(flow, memory_nodes(&network)).await;
        let mut runs = 0;
        // Each run ends one point later than the one before, and repeats what was not recorded.
        while scenario.run_until(runs, kill_node).await.len() > runs {
            runs += 1;
        }
        println!("{flow:?}: {} runs", runs + 1);
        scenario.check_recovery("in every run").await;
        assert_eq!(network.created_count(), 1, "{flow:?}: a second cluster");
    }
}
