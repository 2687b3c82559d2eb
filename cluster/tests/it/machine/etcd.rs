//! The same with a real etcd, and with a real process that is killed by SIGKILL: this program, run again for one test.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Settings};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::node::{Enrolment, EnrolmentSource, EspEnrolment, LocalNames};
use nodekeel_localstorage::tree::Site;
use nodekeel_localstorage::volume::Directory;
use nodekeel_localstorage::{Dir, Mode, OsPlacement};
use rustix::process::{Pid, Signal, getpid, kill_process};
use testbed::{Port, Scratch, free_port, gotool, leftovers, tools};

use super::bed::{Life, at, ip, said};

/// What a process that is run for its life is told: directory, ports of members and clients, etcd, what is killed, when.
const LIFE: &str = "NODEKEEL_CLUSTER_LIFE";
/// How many of the moments a test of them kills at: each so many-th one, or `all`.
const KILLS: &str = "NODEKEEL_CLUSTER_KILLS";
const HOST: &str = "127.0.0.1";
/// Longer than a life takes, unless it hangs.
const HANG: Duration = Duration::from_secs(60);

/// A machine on this one: its disks, and ports of its own.
struct Machine {
    scratch: Scratch,
    peer: Port,
    client: Port,
    binary: PathBuf,
}

/// What is killed at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Nobody,
    Node,
    Etcd,
}

impl Machine {
    fn new(binary: &Path) -> Self {
        let scratch = Scratch::new().expect("a directory");
        let top = Dir::open(scratch.path()).expect("it opens");
        for name in ["esp", "data"] {
            top.ensure_dir(name, Mode::PRIVATE_DIR).expect("it is made");
        }
        let (peer, client) = (free_port().expect("a port"), free_port().expect("a port"));
        Self { scratch, peer, client, binary: binary.to_owned() }
    }

    fn url(&self) -> PeerUrl {
        PeerUrl::new(ip(HOST), self.peer.number())
    }

    /// One life in this process.
    fn start(&self) -> Life {
        let deps = deps(self.scratch.path(), &self.binary, self.peer.number(), self.client.number());
        Life::of(Cluster::new(deps, settings()))
    }

    /// One life in a process of its own, which may be killed at its `nth` moment.
    fn live(&self, test: &str, victim: Victim, nth: usize) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("it has a path"));
        command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
        let (dir, binary) = (self.scratch.path().display(), self.binary.display());
        let told = format!("{dir};{};{};{binary};{victim:?};{nth}", self.peer.number(), self.client.number());
        command.env(LIFE, told).stdin(Stdio::null());
        command.output().expect("it starts")
    }
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.golden_tickets = true;
    settings
}

fn deps(disks: &Path, binary: &Path, peer: u16, client: u16) -> Deps {
    let dir = |name: &str| Dir::open(disks.join(name)).expect("it opens");
    let mut config = EtcdConfig::new(binary);
    (config.peer_port, config.client_port) = (peer, client);
    Deps {
        state: dir("esp"),
        enrolment: Enrolment::new([EnrolmentSource::Kept(enrolment(disks).enrolment.clone())]),
        network: Arc::new(StaticNetwork::new(at(HOST))),
        volume: Arc::new(Directory::new(dir("data"))),
        consensus: ConsensusSource::etcd(config),
        local: LocalNames::default(),
    }
}

fn enrolment(disks: &Path) -> EspEnrolment {
    let path = disks.join("esp");
    let placement = OsPlacement::new(Dir::open(&path).expect("it opens"));
    Site::new(Arc::new(placement), path).place().expect("it is placed")
}

/// The life that this process was started for, if it was started for one.
async fn live_if_told() -> bool {
    let Ok(told) = std::env::var(LIFE) else { return false };
    let told: Vec<&str> = told.split(';').collect();
    let [dir, peer, client, binary, victim, nth] = told[..] else { panic!("{told:?}") };
    let (disks, nth) = (PathBuf::from(dir), nth.parse::<usize>().expect("a number"));
    let port = |text: &str| text.parse::<u16>().expect("a port");
    let deps = deps(&disks, Path::new(binary), port(peer), port(client));
    let (victim, scratch) = (victim.to_owned(), disks.clone());
    let count = AtomicUsize::new(0);
    let killed = Arc::new(OnceLock::new());
    let at = Arc::clone(&killed);
    let hook = move |point: &str| {
        let now = count.fetch_add(1, Ordering::SeqCst);
        eprintln!("POINT {now} {point}");
        if now == nth {
            kill(&victim, &scratch);
            at.get_or_init(Instant::now);
        }
    };
    let life = Life::of(Cluster::with_points(deps, settings(), hook));
    let began = Instant::now();
    let finished = tokio::time::timeout(HANG, life.cluster.wait_finished()).await;
    if let (Ok(_), Some(killed)) = (&finished, killed.get()) {
        eprintln!("ENDED {}", killed.elapsed().as_millis());
    }
    match finished {
        Ok(Ok(membership)) => {
            let took = began.elapsed().as_millis();
            let kv = life.cluster.kv("test", "kills").expect("it runs");
            let kept = kv.get(b"/kept").await.expect("it is read").is_some();
            kv.put(b"/kept", b"yes").await.expect("it is put");
            let members = life.cluster.members().expect("it runs").list().await.expect("they are read");
            let nodes = life.cluster.nodes().expect("it runs").list().await.expect("they are read");
            let names: BTreeSet<_> = members.iter().filter_map(|member| member.name.clone()).collect();
            let ids: BTreeSet<_> = nodes.iter().map(|node| node.id.to_string()).collect();
            let ghosts = members.len() != names.len() || names != ids;
            let learners = members.iter().filter(|member| member.is_learner).count();
            let (node, cluster) = (membership.node, membership.cluster);
            eprintln!("RUNNING {node} {cluster} {} {ghosts} {learners} {kept} {took}", members.len());
        }
        Ok(Err(reason)) => eprintln!("FAILED {}", said(reason)),
        Err(_) => eprintln!("FAILED it hangs"),
    }
    life.end().await;
    true
}

fn kill(victim: &str, scratch: &Path) {
    match victim {
        "Node" => kill_process(getpid(), Signal::KILL).expect("it is this one"),
        "Etcd" => {
            let all = leftovers::processes(scratch).expect("they are listed");
            for etcd in all.iter().filter(|process| process.command.contains("--data-dir")) {
                // It may have ended meanwhile.
                let _ = kill_process(Pid::from_raw(etcd.pid).expect("a pid"), Signal::KILL);
            }
        }
        _ => {}
    }
}

/// What a life has said at its end: node, cluster, members, ghosts, learners, a key of an earlier life, milliseconds.
fn running(output: &Output) -> [String; 7] {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.strip_prefix("RUNNING "));
    let line = line.unwrap_or_else(|| panic!("{}: {text}", output.status));
    let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    words.try_into().expect("seven words")
}

/// How many milliseconds after the kill a life that went on was Running or Failed.
fn ended(output: &Output) -> u64 {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().find_map(|line| line.strip_prefix("ENDED "));
    line.and_then(|took| took.parse().ok()).unwrap_or_else(|| panic!("{}: {text}", output.status))
}

fn points(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = text.lines().filter_map(|line| line.strip_prefix("POINT "));
    lines.map(|line| line.split_once(' ').map_or("", |(_, point)| point).to_owned()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flow {
    Create,
    Join,
    Restart,
}

/// A machine that is about to go one way, and who else it takes.
async fn scene(flow: Flow, test: &str, binary: &Path) -> (Machine, Option<(Machine, Life)>) {
    let machine = Machine::new(binary);
    match flow {
        Flow::Create => (machine, None),
        Flow::Restart => {
            running(&machine.live(test, Victim::Nobody, 0));
            (machine, None)
        }
        Flow::Join => {
            let founder = Machine::new(binary);
            let life = founder.start();
            life.cluster.wait_finished().await.unwrap_or_else(|reason| panic!("{}", said(reason)));
            let tickets = life.cluster.golden_tickets().expect("they are enabled");
            let ticket = tickets.issue(&machine.url()).await.expect("it is made");
            enrolment(machine.scratch.path()).enrolment.write(&ticket.to_config()).expect("it is written");
            (machine, Some((founder, life)))
        }
    }
}

async fn killed_at_each_moment(test: &str, binary: &Path) {
    if live_if_told().await {
        return;
    }
    let every = match std::env::var(KILLS).ok().as_deref() {
        Some("all") => 1,
        Some(every) => every.parse().expect("a number, or all"),
        None => 4,
    };
    let (mut kills, mut slowest) = (0, 0);
    for flow in [Flow::Create, Flow::Join, Flow::Restart] {
        let (machine, others) = scene(flow, test, binary).await;
        let moments = points(&machine.live(test, Victim::Nobody, 0));
        end(others).await;
        for victim in [Victim::Node, Victim::Etcd] {
            for (nth, moment) in moments.iter().enumerate().skip(kills % every).step_by(every) {
                let (machine, others) = scene(flow, test, binary).await;
                let founded = others.as_ref().and_then(|(_, life)| life.cluster.node().ok());
                let before = (flow == Flow::Restart).then(|| running(&machine.live(test, Victim::Nobody, 0)));
                let killed = machine.live(test, victim, nth);
                let went_on = match victim {
                    Victim::Etcd => ended(&killed),
                    _ => {
                        assert_eq!(
                            killed.status.signal(),
                            Some(9),
                            "{flow:?} at {moment}: {:?}",
                            killed.status
                        );
                        0
                    }
                };
                let after = running(&machine.live(test, Victim::Nobody, 0));
                let [node, cluster, members, ghosts, learners, kept, took] = &after;
                let what = format!("{flow:?}, {victim:?} killed at {nth}, {moment}");
                let expected = if flow == Flow::Join { "2" } else { "1" };
                assert_eq!((&**members, &**ghosts, &**learners), (expected, "false", "0"), "{what}");
                if let Some(founded) = founded {
                    assert_eq!(*cluster, founded.cluster.to_string(), "{what}: a second cluster");
                }
                if let Some([had, was, ..]) = &before {
                    assert_eq!((node, cluster, &**kept), (had, was, "true"), "{what}");
                }
                let took: u64 = took.parse().expect("milliseconds");
                println!("{what}: {went_on} ms later at its end, and Running {took} ms after its next start");
                assert!(took < 10_000 && went_on < 10_000, "{what}: {went_on} ms, {took} ms");
                (kills, slowest) = (kills + 1, slowest.max(took).max(went_on));
                end(others).await;
            }
        }
    }
    println!("{kills} kills: all Running, 0 second clusters, 0 ghosts, 0 lost keys; slowest {slowest} ms");
}

async fn end(others: Option<(Machine, Life)>) {
    if let Some((_founder, life)) = others {
        life.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn a_node_killed_at_any_moment_goes_on_with_debians_etcd() {
    let binary = tools::find(tools::ETCD).unwrap();
    killed_at_each_moment("machine::etcd::a_node_killed_at_any_moment_goes_on_with_debians_etcd", &binary)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go"]
async fn a_node_killed_at_any_moment_goes_on_with_the_newest_etcd() {
    let binary = gotool::ETCD.program("etcd").unwrap();
    killed_at_each_moment("machine::etcd::a_node_killed_at_any_moment_goes_on_with_the_newest_etcd", &binary)
        .await;
}

/// Founding, joining and starting again, all of it real.
async fn two_nodes(binary: &Path) {
    let (first, second) = (Machine::new(binary), Machine::new(binary));
    let founder = first.start();
    let founded = founder.cluster.wait_finished().await.unwrap_or_else(|reason| panic!("{}", said(reason)));
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    for _ in 0..3 {
        let ticket = tickets.issue(&second.url()).await.expect("it is made");
        enrolment(second.scratch.path()).enrolment.write(&ticket.to_config()).expect("it is written");
    }
    let members = founder.cluster.members().expect("it runs");
    assert_eq!(
        members.list().await.expect("they are read").len(),
        2,
        "one learner, however often it was asked for"
    );
    let began = Instant::now();
    let joiner = second.start();
    let joined = joiner.cluster.wait_finished().await.unwrap_or_else(|reason| panic!("{}", said(reason)));
    println!("joined after {:.1?}", began.elapsed());
    assert_eq!(joined.cluster, founded.cluster);
    joiner.cluster.root_kv().expect("it runs").put(b"/k", b"from the second").await.expect("it is put");
    let there = founder.cluster.root_kv().expect("it runs").get(b"/k").await.expect("it is read");
    assert_eq!(there.map(|kv| kv.value), Some(b"from the second".to_vec()));
    joiner.end().await;
    founder.end().await;
    // The whole site starts again.
    let (founder, joiner) = (first.start(), second.start());
    for (life, before) in [(&founder, &founded), (&joiner, &joined)] {
        let again = life.cluster.wait_finished().await.unwrap_or_else(|reason| panic!("{}", said(reason)));
        assert_eq!(&again, before);
    }
    let there = joiner.cluster.root_kv().expect("it runs").get(b"/k").await.expect("it is read");
    assert_eq!(there.map(|kv| kv.value), Some(b"from the second".to_vec()));
    joiner.end().await;
    founder.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn two_nodes_become_a_cluster_and_start_again_with_debians_etcd() {
    two_nodes(&tools::find(tools::ETCD).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go"]
async fn two_nodes_become_a_cluster_and_start_again_with_the_newest_etcd() {
    two_nodes(&gotool::ETCD.program("etcd").unwrap()).await;
}
