//! Files and values written by release 0.1.0 are read by this one; `testdata/golden/README.md` lists them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore};
use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryKv, MemoryNetwork};
use nodekeel_cluster::consensus::{DEFAULT_PEER_PORT, PeerUrl, StartOptions};
use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_cluster::node::{GoldenTicket, NodeId};
use nodekeel_cluster::pki::ClusterCa;
use nodekeel_localstorage::step_journal::{StepJournal, StepList};
use testbed::command_output;

use crate::enrolment::{NodeFixture, NodeRun, error_chain, parse_ip};
use crate::member_run::MemberRun;
use crate::nodes::local_names;

fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(name)
}

/// Names and identifiers that the first release reported while it wrote the files.
fn expected(name: &str) -> String {
    let table = fs::read_to_string(golden_path("expected.tsv")).unwrap();
    let rows: BTreeMap<_, _> = table.lines().filter_map(|line| line.split_once('\t')).collect();
    rows[name].to_owned()
}

/// The keys of a cluster of the first release, with their values.
fn golden_keys(name: &str) -> Vec<(String, Vec<u8>)> {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    let table = fs::read_to_string(golden_path(name)).unwrap();
    let rows = table.lines().map(|line| line.split_once('\t').unwrap());
    rows.map(|(key, hex)| (key.to_owned(), hex.as_bytes().chunks(2).map(byte).collect())).collect()
}

async fn store_with(keys: &str) -> Arc<dyn KvStore> {
    let store = MemoryKv::new();
    for (key, value) in golden_keys(keys) {
        store.put(key.as_bytes(), &value).await.unwrap();
    }
    Arc::new(store)
}

/// A node with the disks of the first release.
fn node_with_disks(consensus: Arc<MemoryConsensus>, address: &str, disks: &str) -> NodeFixture {
    let fixture = NodeFixture::in_memory(consensus, address);
    let mut copy = Command::new("cp");
    copy.arg("-r").arg(golden_path(disks).join(".")).arg(fixture.disks.path());
    command_output(&mut copy).unwrap();
    fixture
}

/// A member in memory whose store contains the keys of a cluster of the first release, as if it had run in it.
async fn member_with_keys(network: &MemoryNetwork, node: &str, keys: &str) -> Arc<MemoryConsensus> {
    let consensus = Arc::new(MemoryConsensus::on_network(network));
    let start = StartOptions::new_cluster(node.parse().unwrap(), parse_ip("192.0.2.1"));
    let mut member = MemberRun::start(&*consensus, start);
    let root = member.wait_running().await.root_kv();
    root.delete(KeyRange::all_keys()).await.unwrap();
    for (key, value) in golden_keys(keys) {
        root.put(key.as_bytes(), &value).await.unwrap();
    }
    member.supervisor.shutdown().await;
    consensus
}

/// The node that bootstrapped the cluster of the first release.
async fn bootstrapped_node() -> (MemoryNetwork, NodeFixture) {
    let network = MemoryNetwork::new();
    let consensus = member_with_keys(&network, &expected("node"), "keys.tsv").await;
    (network, node_with_disks(consensus, "192.0.2.1", "bootstrapped"))
}

/// The same, in its cluster again by this release, where it issues tickets.
async fn first_node() -> (MemoryNetwork, NodeFixture, NodeRun) {
    let (network, mut fixture) = bootstrapped_node().await;
    fixture.settings.golden_tickets = true;
    let run = fixture.start();
    run.wait_finished().await.expect("the node is in its cluster");
    (network, fixture, run)
}

#[tokio::test]
async fn an_enrolment_journal_and_the_keys_of_the_first_release_are_read() {
    let (network, _fixture, run) = first_node().await;
    let membership = run.wait_finished().await.expect("the node is in its cluster");
    assert_eq!(membership.node_id.to_string(), expected("node"));
    assert_eq!(membership.cluster_id.to_string(), expected("cluster"));
    assert_eq!(run.phases(), "New Restarting Running");
    assert_eq!(network.created_count(), 1);
    run.stop().await;
}

/// Records the steps of the node's journal as a release with these steps would have, once all were done.
fn rewrite_steps(fixture: &NodeFixture, names: &[&str]) {
    let steps = |names: &[&str]| StepList::try_new(names.iter().copied()).unwrap();
    let open = || StepJournal::open(&fixture.dir("esp"), "enrolment").unwrap();
    let recorded = steps(&["storage", "identity", "consensus", "record"]).start_run(open(), b"").unwrap();
    let state = recorded.recorded_state().to_vec();
    recorded.remove_journal().unwrap();
    let mut run = steps(names).start_run(open(), &state).unwrap();
    while run.current_step().is_some() {
        run.complete_step(state.clone()).unwrap();
    }
}

#[tokio::test]
async fn a_node_of_a_release_with_fewer_steps_stays_in_its_cluster_and_runs_the_new_one() {
    let (network, fixture) = bootstrapped_node().await;
    rewrite_steps(&fixture, &["storage", "identity", "consensus"]);
    for _ in 0..2 {
        let (run, membership) = fixture.run_to_running().await;
        assert_eq!(membership.node_id.to_string(), expected("node"));
        assert_eq!(membership.cluster_id.to_string(), expected("cluster"));
        run.stop().await;
        let journal = StepJournal::open(&fixture.dir("esp"), "enrolment").unwrap();
        let steps = StepList::try_new(["storage", "identity", "consensus", "record"]).unwrap();
        assert_eq!(steps.start_run(journal, b"").unwrap().current_step(), None, "the step was not recorded");
    }
    assert_eq!(network.created_count(), 1);
}

#[tokio::test]
async fn the_journal_of_a_newer_release_is_rejected_by_its_unknown_step_and_left_unchanged() {
    let (_network, fixture) = bootstrapped_node().await;
    rewrite_steps(&fixture, &["storage", "attest", "identity", "consensus", "record"]);
    let slots = || {
        ["esp/enrolment.0", "esp/enrolment.1"].map(|file| fs::read(fixture.disks.path().join(file)).unwrap())
    };
    let before = slots();
    let reason = fixture.run_to_failure().await;
    let text = error_chain(reason);
    assert!(
        text.contains("enrolment.0 was written by a newer release (step \"attest\" is unknown)"),
        "{text}"
    );
    assert_eq!(slots(), before);
}

#[tokio::test]
async fn node_records_of_the_first_release_are_read() {
    let (_network, _fixture, run) = first_node().await;
    let nodes = run.node.node_store().unwrap();
    let load = async |name: &str| {
        let id: NodeId = expected(name).parse().unwrap();
        let stored = nodes.load_record(&id).await.unwrap().expect("a record");
        assert!(id.matches_key(&stored.record.certificate.public_key()));
        stored.record
    };
    let own = load("node").await;
    assert_eq!(own.address, Some(parse_ip("192.0.2.1")));
    assert_eq!(own.roles.consensus_member().map(|name| name.to_string()), Some(expected("node")));
    assert_eq!(own.roles.kubernetes_worker(), Some(&*expected("node")));
    let full = load("full-record").await;
    assert_eq!(full.former_unlock_key.unwrap().expose_bytes(), b"a share of a key");
    assert_eq!(full.address, Some(parse_ip("2001:db8::7")));
    assert_eq!(full.roles.consensus_member().map(|name| name.as_str()), Some("other-name"));
    assert_eq!(full.roles.kubernetes_worker(), Some("worker-1"));
    let empty = load("empty-record").await;
    assert!(empty.former_unlock_key.is_none() && empty.address.is_none());
    assert!(empty.roles.consensus_member().is_none() && empty.roles.kubernetes_worker().is_none());
    assert_eq!(nodes.list_records().await.unwrap().len(), 3);
    run.stop().await;
}

#[tokio::test]
async fn the_ca_of_the_first_release_is_loaded_with_its_certificates_and_revocations() {
    let ca = ClusterCa::load_ca(store_with("keys.tsv").await).await.unwrap();
    let (issued, revoked) = (ca.list_issued().await.unwrap(), ca.revocation_list().await.unwrap());
    assert_eq!(issued.len(), 3);
    let revoked: Vec<_> = issued.iter().filter(|certificate| revoked.is_revoked(certificate)).collect();
    let [revoked] = &revoked[..] else { panic!("{} revoked certificates", revoked.len()) };
    let names = nodekeel_cluster::pki::SubjectNames::from_certificate(revoked);
    assert!(names.is_named(&expected("revoked-member")), "{names:?}");
    assert_eq!(ca.revoke_name(&expected("joining-node")).await.unwrap().len(), 1);
    assert_eq!(ca.list_issued().await.unwrap(), issued);
}

#[test]
fn a_golden_ticket_of_the_first_release_is_read_with_the_same_digest() {
    let config = fs::read(golden_path("join-interrupted/esp/enrolment.pb")).unwrap();
    let ticket = GoldenTicket::from_config(&config).unwrap();
    let digest: String = ticket.digest().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(digest, expected("ticket-digest"));
    assert_eq!(ticket.node_id().to_string(), expected("joining-node"));
    assert_eq!(ticket.to_config()[..], config[..], "the ticket is written differently");
    assert_eq!(ticket.peers()[0].name.to_string(), expected("node"));
    assert_eq!(ticket.new_member().url, PeerUrl::new(parse_ip("192.0.2.2"), DEFAULT_PEER_PORT));
}

#[tokio::test]
async fn a_join_that_the_first_release_started_is_completed_by_the_ticket_it_has_stored() {
    let (network, _first, first_run) = first_node().await;
    let url = PeerUrl::new(parse_ip("192.0.2.2"), DEFAULT_PEER_PORT);
    let ticket = first_run.node.ticket_issuer().unwrap().issue_ticket(&url).await.unwrap();
    assert_eq!(ticket.node_id().to_string(), expected("joining-node"), "the stored ticket was not found");
    let second =
        node_with_disks(Arc::new(MemoryConsensus::on_network(&network)), "192.0.2.2", "join-interrupted");
    let (run, membership) = second.run_to_running().await;
    assert_eq!(membership.node_id.to_string(), expected("joining-node"));
    assert_eq!(membership.cluster_id.to_string(), expected("cluster"));
    assert_eq!(run.phases(), "New Joining Running");
    run.stop().await;
    first_run.stop().await;
    assert_eq!(network.created_count(), 1);
}

#[tokio::test]
async fn a_node_that_joined_with_the_first_release_restarts_as_the_same_node() {
    let network = MemoryNetwork::new();
    let consensus = member_with_keys(&network, &expected("joining-node"), "keys-joined.tsv").await;
    let fixture = node_with_disks(consensus, "192.0.2.2", "joined");
    let (run, membership) = fixture.run_to_running().await;
    assert_eq!(membership.node_id.to_string(), expected("joining-node"));
    assert_eq!(membership.cluster_id.to_string(), expected("cluster"));
    assert_eq!(run.node.phase_history()[1], EnrolmentPhase::Restarting);
    run.stop().await;
}

/// It was permitted by default then, and not recorded outside of the journal.
#[tokio::test]
async fn a_bootstrap_that_the_first_release_started_is_completed_and_recorded_although_nothing_permits_it_now()
 {
    for (disks, has_mark, has_node) in [
        ("bootstrap-decided", false, false),
        ("bootstrap-storage", true, false),
        ("bootstrap-identity", true, true),
    ] {
        let network = MemoryNetwork::new();
        let consensus = Arc::new(MemoryConsensus::on_network(&network));
        let mut fixture = node_with_disks(consensus, "192.0.2.1", disks);
        fixture.settings.bootstrap = false;
        let (run, membership) = fixture.run_to_running().await;
        run.stop().await;
        for file in ["data/.enrolment", "esp/bootstrapped"] {
            let written = fs::read_to_string(fixture.disks.path().join(file)).unwrap();
            assert_eq!(written.trim_end(), membership.cluster_id.to_string(), "{disks}: {file}");
        }
        if has_mark {
            assert_eq!(membership.cluster_id.to_string(), expected(&format!("{disks}-enrolment")));
        }
        if has_node {
            assert_eq!(membership.node_id.to_string(), expected(&format!("{disks}-node")));
        }
    }
}

#[tokio::test]
async fn a_node_that_the_first_release_enrolled_keeps_running_without_a_record() {
    let (_network, mut fixture) = bootstrapped_node().await;
    fixture.settings.bootstrap = false;
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
    assert!(!fixture.disks.path().join("esp/bootstrapped").exists());
}

#[tokio::test]
async fn the_names_of_the_host_are_those_of_the_first_release() {
    let (_network, fixture) = bootstrapped_node().await;
    let golden = |name: &str| fs::read_to_string(golden_path("bootstrapped/run").join(name)).unwrap();
    for name in ["hosts", "machine-id"] {
        fs::remove_file(fixture.disks.path().join("run").join(name)).unwrap();
    }
    let names = fixture.disks.path().join("run");
    let mut deps = fixture.deps();
    deps.local_names = local_names(&names);
    let run = NodeRun::start_once(ClusterNode::new(deps, fixture.settings.clone()));
    run.wait_finished().await.expect("the node is in its cluster");
    for name in ["hosts", "machine-id"] {
        assert_eq!(fs::read_to_string(names.join(name)).unwrap(), golden(name));
    }
    run.stop().await;
}
