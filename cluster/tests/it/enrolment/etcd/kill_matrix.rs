//! A node and its etcd, killed at the kill points of each flow.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use super::super::node_fixture::{NodeRun, error_chain, ticket_file};
use super::NodeHost;
use super::run_process::{KillTarget, RECOVERY_LIMIT, RunReport, RunningReport, run_if_requested};

/// At how many of the kill points a test kills: every n-th, or `all`.
const KILLS_ENV: &str = "NODEKEEL_CLUSTER_KILLS";
/// The default distance of the kills: 9 kills.
const DEFAULT_STRIDE: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq)]
enum EnrolmentFlow {
    Bootstrap,
    Join,
    Restart,
}

const FLOWS: [EnrolmentFlow; 3] = [EnrolmentFlow::Bootstrap, EnrolmentFlow::Join, EnrolmentFlow::Restart];

/// A node that is about to run one flow, and the other nodes that the flow needs.
struct KillScenario<'a> {
    flow: EnrolmentFlow,
    test: &'a str,
    host: NodeHost,
    first_node: Option<(NodeHost, NodeRun)>,
    /// The report of an earlier run.
    before: Option<RunningReport>,
}

impl<'a> KillScenario<'a> {
    async fn prepare(flow: EnrolmentFlow, test: &'a str, binary: &Path) -> Self {
        let mut scenario = Self { flow, test, host: NodeHost::new(binary), first_node: None, before: None };
        match flow {
            EnrolmentFlow::Bootstrap => {}
            EnrolmentFlow::Restart => scenario.before = Some(scenario.run_without_kill().running_report()),
            EnrolmentFlow::Join => {
                let first_run = NodeHost::new(binary);
                let run = first_run.start();
                run.node.wait_finished().await.unwrap_or_else(|reason| panic!("{}", error_chain(reason)));
                let kv = run.node.namespaced_kv("test", "kills").expect("a running node");
                kv.put(b"/kept", b"by the first node").await.expect("put");
                let issuer = run.node.ticket_issuer().expect("golden tickets are enabled");
                let ticket = issuer.issue_ticket(&scenario.host.url()).await.expect("created");
                let disks = scenario.host.scratch.path();
                ticket_file(disks).write(&ticket.to_config()).expect("written");
                scenario.first_node = Some((first_run, run));
            }
        }
        scenario
    }

    /// A run without a kill.
    fn run_without_kill(&self) -> RunReport {
        RunReport::from_output(&self.host.run_in_process(self.test, KillTarget::Nobody, 0))
    }

    async fn stop(self) {
        if let Some((_founder, run)) = self.first_node {
            run.stop().await;
        }
    }

    /// Checks that the node is in the one cluster, as the one node, with every key.
    fn check(&self, ran: &RunningReport, disk: &DiskIdentity, is_key_put: bool, what: &str) {
        let members = if self.flow == EnrolmentFlow::Join { 2 } else { 1 };
        assert_eq!(
            (ran.members, ran.has_stale_members, ran.learners),
            (members, false, 0),
            "{what}: stale members"
        );
        assert!(ran.has_kept || !is_key_put, "{what}: a key is lost");
        let first_membership = match (&self.first_node, &disk.mark) {
            (Some((_, run)), _) => {
                Some(run.node.cluster_identity().expect("a running node").cluster_id.to_string())
            }
            // A bootstrapped cluster's id is the enrolment id on the volume.
            (None, Some(mark)) => Some(String::from_utf8_lossy(mark).trim().to_owned()),
            (None, None) => None,
        };
        assert!(
            first_membership.is_none_or(|first_membership| ran.cluster == first_membership),
            "{what}: a second cluster"
        );
        if let Some(before) = &self.before {
            assert_eq!((&ran.node, &ran.cluster), (&before.node, &before.cluster), "{what}");
        }
    }
}

/// What identifies the disk, as far as it was created.
struct DiskIdentity {
    mark: Option<Vec<u8>>,
    cluster_ca: Option<Vec<u8>>,
    key: Option<Vec<u8>>,
}

impl DiskIdentity {
    fn read_from(host: &NodeHost) -> Self {
        let data = host.scratch.path().join("data");
        let read = |path: &str| fs::read(data.join(path)).ok();
        let cluster_ca = read("etcd/peer_pki/ca.pem").or_else(|| read("etcd/new_authority/ca.pem"));
        Self { mark: read(".enrolment"), cluster_ca, key: read("node/credentials/cert-key.pem") }
    }

    /// Checks that everything that existed still exists.
    fn assert_kept_in(&self, later: &Self, what: &str) {
        let is_kept = |was: &Option<Vec<u8>>, is: &Option<Vec<u8>>| was.is_none() || was == is;
        assert!(is_kept(&self.mark, &later.mark), "{what}: another volume");
        assert!(is_kept(&self.cluster_ca, &later.cluster_ca), "{what}: another CA");
        assert!(is_kept(&self.key, &later.key), "{what}: another node");
    }

    fn is_complete(&self) -> bool {
        self.mark.is_some() && self.cluster_ca.is_some() && self.key.is_some()
    }
}

/// Recovery times in milliseconds.
#[derive(Clone, Copy, Default)]
struct RecoveryTimes {
    /// Until the run whose etcd was killed was Running or Failed, and served if it was Running.
    until_resumed: u64,
    /// Until the next run was Running.
    until_running: u64,
}

/// The flows, the victims and the two releases of etcd, shifted by 0 and 1, kill at different points.
pub(super) async fn kill_at_each_point(test: &str, binary: &Path, shift: usize) {
    if run_if_requested().await {
        return;
    }
    let every = match std::env::var(KILLS_ENV).ok().as_deref() {
        Some("all") => 1,
        Some(every) => every.parse().expect("a number, or all"),
        None => DEFAULT_STRIDE,
    };
    let (mut nodes, mut etcds, mut failed, mut slowest) = (0, 0, 0, RecoveryTimes::default());
    for (number, flow) in FLOWS.into_iter().enumerate() {
        let scenario = KillScenario::prepare(flow, test, binary).await;
        let moments = scenario.run_without_kill().kill_points();
        scenario.stop().await;
        for (victim, further) in [(KillTarget::Node, 0), (KillTarget::Etcd, every / 2)] {
            let first = (number + shift + further) % every;
            let some = moments.iter().enumerate().skip(first).step_by(every);
            for (nth, moment) in some {
                let what = format!("{flow:?}, {victim:?} killed at {nth}, {moment}");
                let scenario = KillScenario::prepare(flow, test, binary).await;
                let (took, has_failed) = match victim {
                    KillTarget::Etcd => kill_etcd(&scenario, nth, &what),
                    _ => (kill_node(&scenario, nth, &what), false),
                };
                scenario.stop().await;
                let RecoveryTimes { until_resumed, until_running: to_run } = took;
                assert!(
                    u128::from(until_resumed.max(to_run)) < RECOVERY_LIMIT.as_millis(),
                    "{what}: {until_resumed} ms, {to_run} ms"
                );
                *(if victim == KillTarget::Etcd { &mut etcds } else { &mut nodes }) += 1;
                failed += u32::from(has_failed);
                slowest.until_resumed = slowest.until_resumed.max(until_resumed);
                slowest.until_running = slowest.until_running.max(to_run);
            }
        }
    }
    println!(
        "{} kills, {nodes} of the node and {etcds} of etcd: Running {} ms after the next start at worst; where \
         etcd was killed, the node served {} ms later at worst ({failed} times it Failed before that); no second \
         cluster, stale member or lost key",
        nodes + etcds,
        slowest.until_running,
        slowest.until_resumed
    );
}

fn kill_node(scenario: &KillScenario<'_>, nth: usize, what: &str) -> RecoveryTimes {
    let before = DiskIdentity::read_from(&scenario.host);
    let killed = scenario.host.run_in_process(scenario.test, KillTarget::Node, nth);
    assert_eq!(killed.status.signal(), Some(9), "{what}: {:?}", killed.status);
    let to_run = next_run(scenario, &before, scenario.flow != EnrolmentFlow::Bootstrap, what).took;
    println!("{what}: Running {to_run} ms after its next start");
    RecoveryTimes { until_resumed: 0, until_running: to_run }
}

/// The recovery times, and whether the run that was hit has failed.
fn kill_etcd(scenario: &KillScenario<'_>, nth: usize, what: &str) -> (RecoveryTimes, bool) {
    let before = DiskIdentity::read_from(&scenario.host);
    let killed = RunReport::from_output(&scenario.host.run_in_process(scenario.test, KillTarget::Etcd, nth));
    assert_eq!(killed.killed_count(), 1, "{what}: one etcd was killed");
    let (ended, failed) = (killed.ended_after(), killed.failure());
    let hit = failed.is_none().then(|| killed.running_report());
    let serves = hit.as_ref().map_or(0, |_| killed.serving_after());
    let is_key_put = scenario.flow != EnrolmentFlow::Bootstrap;
    if let Some(hit) = &hit {
        scenario.check(hit, &DiskIdentity::read_from(&scenario.host), is_key_put, what);
    }
    let after = next_run(scenario, &before, is_key_put || hit.is_some(), what);
    if let Some(hit) = &hit {
        assert_eq!((&after.node, &after.cluster), (&hit.node, &hit.cluster), "{what}");
    }
    let how = failed.map_or_else(|| format!("serves {serves} ms later"), |why| format!("Failed, {why}"));
    println!("{what}: ended {ended} ms later, {how}, and Running {} ms after its next start", after.took);
    (RecoveryTimes { until_resumed: ended.max(serves), until_running: after.took }, failed.is_some())
}

/// The run after a kill, which must be in the one cluster, with the same identity.
fn next_run(
    scenario: &KillScenario<'_>,
    before: &DiskIdentity,
    is_key_put: bool,
    what: &str,
) -> RunningReport {
    let found = DiskIdentity::read_from(&scenario.host);
    before.assert_kept_in(&found, what);
    let ran = scenario.run_without_kill().running_report();
    let left = DiskIdentity::read_from(&scenario.host);
    found.assert_kept_in(&left, what);
    assert!(left.is_complete(), "{what}: the disk lacks a part of its identity");
    scenario.check(&ran, &left, is_key_put, what);
    ran
}
