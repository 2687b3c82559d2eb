//! The same with a real etcd, and with a real process that is killed by SIGKILL: this program, run again for one test.

mod life;
mod matrix;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Settings};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::node::{Enrolment, EnrolmentSource, EspEnrolment, LocalNames};
use nodekeel_localstorage::tree::Site;
use nodekeel_localstorage::volume::Directory;
use nodekeel_localstorage::{Dir, Mode, OsPlacement};
use testbed::{Port, Scratch, free_port, gotool, tools};

use super::bed::{Life, at, ip, said};

const HOST: &str = "127.0.0.1";

/// A machine on this one: its disks, and ports of its own.
struct Machine {
    scratch: Scratch,
    peer: Port,
    client: Port,
    binary: PathBuf,
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn a_node_killed_at_any_moment_goes_on_with_debians_etcd() {
    let binary = tools::find(tools::ETCD).unwrap();
    matrix::killed_at_each_moment(
        "machine::etcd::a_node_killed_at_any_moment_goes_on_with_debians_etcd",
        &binary,
        0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go"]
async fn a_node_killed_at_any_moment_goes_on_with_the_newest_etcd() {
    let binary = gotool::ETCD.program("etcd").unwrap();
    matrix::killed_at_each_moment(
        "machine::etcd::a_node_killed_at_any_moment_goes_on_with_the_newest_etcd",
        &binary,
        1,
    )
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
