//! Enrolment with a real etcd.

use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::enrolment::ConsensusFactory;
use rstest::rstest;
use rustix::process::{Signal, kill_process};
use testbed::reserve_port;

use super::kills::{EnrolmentFlow, FLOWS, KillScenario, RECOVERY_LIMIT};
use super::node_fixture::{NodeFixture, parse_ip};
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::etcd_processes;

/// At how many of the kill points a test kills: every n-th, or `all`.
const KILLS_ENV: &str = "NODEKEEL_CLUSTER_KILLS";
/// The default distance of the kills.
const DEFAULT_STRIDE: usize = 16;
/// The delay per kill point when an etcd is to be killed that does not run yet: all delays together exceed the time
/// until it is ready.
const KILL_DELAY: Duration = Duration::from_millis(23);

/// A node on this host, with dedicated ports.
fn etcd_node(version: EtcdVersion) -> NodeFixture {
    let ports = vec![reserve_port().expect("a port")];
    let mut config = EtcdConfig::new(version.binary());
    config.peer_port = ports[0].number();
    let url = PeerUrl::new(parse_ip("127.0.0.1"), config.peer_port);
    let fixture = NodeFixture::with_consensus(ConsensusFactory::etcd_on_volume(config), url);
    NodeFixture { _ports: ports, ..fixture }
}

/// Kills the etcd of the node with these disks; returns whether it ran.
fn kill_etcd(disks: &Path) -> bool {
    let killed = etcd_processes(disks).into_iter().filter(|pid| kill_process(*pid, Signal::KILL).is_ok());
    killed.count() > 0
}

/// Kills the etcd of a node that has not started it yet, a time after its start.
fn kill_etcd_later(disks: &Path, delay: Duration) -> JoinHandle<()> {
    let disks = disks.to_owned();
    thread::spawn(move || {
        let pause = |time| {
            #[expect(
                clippy::disallowed_methods,
                reason = "nothing notifies of a process that is started elsewhere"
            )]
            thread::sleep(time);
        };
        while etcd_processes(&disks).is_empty() {
            pause(Duration::from_millis(5));
        }
        pause(delay);
        while !kill_etcd(&disks) {
            pause(Duration::from_millis(5));
        }
    })
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_node_killed_at_any_point_or_whose_etcd_is_killed_there_resumes_as_the_same_node(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    kill_at_points(version, &FLOWS).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, etcdctl and go"]
async fn a_restore_killed_at_any_point_or_whose_etcd_is_killed_there_goes_on_as_the_same_cluster(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    kill_at_points(version, &[EnrolmentFlow::Restore]).await;
}

/// Kills nodes, and their etcds, at points of these flows.
async fn kill_at_points(version: EtcdVersion, flows: &[EnrolmentFlow]) {
    let every = match std::env::var(KILLS_ENV).ok().as_deref() {
        Some("all") => 1,
        Some(every) => every.parse().expect("a number, or all"),
        None => DEFAULT_STRIDE,
    };
    let (mut kills, mut slowest) = (0, Duration::ZERO);
    for (number, flow) in flows.iter().copied().enumerate() {
        let points = KillScenario::for_flow(flow, || etcd_node(version)).await.kill_points().await;
        for is_node_killed in [true, false] {
            // The flows, the victims and the releases are killed at different points.
            let further = if is_node_killed { 0 } else { every / 2 };
            let first = (number + usize::from(version == Newest) + further) % every;
            for (nth, point) in points.iter().enumerate().skip(first).step_by(every) {
                let scenario = KillScenario::for_flow(flow, || etcd_node(version)).await;
                let disks = scenario.victim.disks.path().to_owned();
                let strike = move || {
                    let is_killed = kill_etcd(&disks);
                    if is_node_killed {
                        // Silently: a SIGKILL of the node takes its etcd with it.
                        std::panic::resume_unwind(Box::new("killed"));
                    }
                    let delay = KILL_DELAY * u32::try_from(nth).expect("a small number");
                    (!is_killed).then(|| kill_etcd_later(&disks, delay))
                };
                scenario.run_until(nth, strike).await;
                let victim = if is_node_killed { "node" } else { "etcd" };
                let took = scenario.check_recovery(&format!("{point} ({victim})")).await;
                println!("{flow:?}, {victim} killed {point}: Running after {took:.1?}");
                (kills, slowest) = (kills + 1, slowest.max(took));
            }
        }
    }
    println!(
        "{version:?}: {kills} kills: all Running, no second cluster, stale member or lost key; {slowest:.1?}"
    );
    assert!(slowest < RECOVERY_LIMIT, "{slowest:?}");
}
