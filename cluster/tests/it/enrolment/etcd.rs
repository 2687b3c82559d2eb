//! Enrolment with a real etcd, and with a real process that is killed by SIGKILL: this program, run again for
//! one test.

mod kill_matrix;
mod run_process;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::StaticNetwork;
use testbed::{ReservedPort, ScratchDir, gotool, reserve_port, tools};

use super::node_fixture::{
    NodeRun, create_disks, error_chain, node_address, node_deps, parse_ip, ticket_file,
};

const HOST: &str = "127.0.0.1";

/// A node on this host: its disks, and dedicated ports.
struct NodeHost {
    scratch: ScratchDir,
    peer: ReservedPort,
    client: ReservedPort,
    binary: PathBuf,
}

impl NodeHost {
    fn new(binary: &Path) -> Self {
        let scratch = ScratchDir::new().expect("a directory");
        create_disks(scratch.path());
        let (peer, client) = (reserve_port().expect("a port"), reserve_port().expect("a port"));
        Self { scratch, peer, client, binary: binary.to_owned() }
    }

    fn url(&self) -> PeerUrl {
        PeerUrl::new(parse_ip(HOST), self.peer.number())
    }

    /// One run in this process.
    fn start(&self) -> NodeRun {
        let deps = etcd_deps(self.scratch.path(), &self.binary, self.peer.number(), self.client.number());
        NodeRun::start_once(ClusterNode::new(deps, test_settings()))
    }
}

fn test_settings() -> EnrolmentSettings {
    let mut settings = EnrolmentSettings::default();
    settings.golden_tickets = true;
    settings.bootstrap = true;
    settings
}

fn etcd_deps(disks: &Path, binary: &Path, peer: u16, client: u16) -> Deps {
    let mut config = EtcdConfig::new(binary);
    (config.peer_port, config.client_port) = (peer, client);
    let network = Arc::new(StaticNetwork::new(node_address(HOST)));
    node_deps(disks, network, ConsensusFactory::etcd_on_volume(config))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn a_node_killed_at_any_point_resumes_with_debians_etcd() {
    let binary = tools::find_tool(tools::ETCD).unwrap();
    kill_matrix::kill_at_each_point(
        "enrolment::etcd::a_node_killed_at_any_point_resumes_with_debians_etcd",
        &binary,
        0,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go"]
async fn a_node_killed_at_any_point_resumes_with_the_newest_etcd() {
    let binary = gotool::ETCD.program_path("etcd").unwrap();
    kill_matrix::kill_at_each_point(
        "enrolment::etcd::a_node_killed_at_any_point_resumes_with_the_newest_etcd",
        &binary,
        1,
    )
    .await;
}

/// Bootstrap, join and restart, without any fake.
async fn two_nodes(binary: &Path) {
    let (first, second) = (NodeHost::new(binary), NodeHost::new(binary));
    let first_run = first.start();
    let first_membership =
        first_run.node.wait_finished().await.unwrap_or_else(|reason| panic!("{}", error_chain(reason)));
    let issuer = first_run.node.ticket_issuer().expect("golden tickets are enabled");
    for _ in 0..3 {
        let ticket = issuer.issue_ticket(&second.url()).await.expect("created");
        ticket_file(second.scratch.path()).write(&ticket.to_config()).expect("written");
    }
    let members = first_run.node.cluster_members().expect("a running node");
    assert_eq!(
        members.list_members().await.expect("listed").len(),
        2,
        "repeated requests added a second learner"
    );
    let started_at = Instant::now();
    let joiner = second.start();
    let joined = joiner.node.wait_finished().await.unwrap_or_else(|reason| panic!("{}", error_chain(reason)));
    println!("joined after {:.1?}", started_at.elapsed());
    assert_eq!(joined.cluster_id, first_membership.cluster_id);
    joiner.node.root_kv().expect("a running node").put(b"/k", b"from the second").await.expect("put");
    let existing = first_run.node.root_kv().expect("a running node").get(b"/k").await.expect("read");
    assert_eq!(existing.map(|kv| kv.value), Some(b"from the second".to_vec()));
    joiner.stop().await;
    first_run.stop().await;
    // All nodes start again.
    let (first_run, joiner) = (first.start(), second.start());
    for (run, before) in [(&first_run, &first_membership), (&joiner, &joined)] {
        let again = run.node.wait_finished().await.unwrap_or_else(|reason| panic!("{}", error_chain(reason)));
        assert_eq!(&again, before);
    }
    let existing = joiner.node.root_kv().expect("a running node").get(b"/k").await.expect("read");
    assert_eq!(existing.map(|kv| kv.value), Some(b"from the second".to_vec()));
    joiner.stop().await;
    first_run.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd"]
async fn two_nodes_form_a_cluster_and_restart_with_debians_etcd() {
    two_nodes(&tools::find_tool(tools::ETCD).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go"]
async fn two_nodes_form_a_cluster_and_restart_with_the_newest_etcd() {
    two_nodes(&gotool::ETCD.program_path("etcd").unwrap()).await;
}
