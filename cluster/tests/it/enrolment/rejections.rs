//! What a node rejects: creating data over existing data, another node's disk, a switch between bootstrap and
//! join.

use std::fs;

use nodekeel_cluster::consensus::memory::MemoryNetwork;
use nodekeel_cluster::enrolment::{
    ClusterNode, EnrolmentPhase, EnrolmentState, FailureReason, StepError, WaitCause, reset_enrolment,
};
use nodekeel_localstorage::volume::{ErasePolicy, VolumeContents, VolumeError};

use super::node_fixture::{
    MemoryCluster, NodeFixture, NodeRun, error_chain, node_address, peer_url, wait_condition,
    wait_without_address,
};

/// Why a step failed.
fn step_error(reason: &FailureReason) -> &StepError {
    let FailureReason::ActionFailed { source, .. } = reason else { panic!("{reason:?}") };
    source
}

#[tokio::test]
async fn a_data_volume_without_a_journal_is_rejected_until_its_erasure_is_configured() {
    let network = MemoryNetwork::new();
    let mut fixture = NodeFixture::on_network(&network, "192.0.2.1");
    let (run, first) = fixture.run_to_running().await;
    run.stop().await;
    let key = fixture.disks.path().join("data/node/credentials/cert-key.pem");
    let before = fs::read(&key).expect("it exists");
    assert!(reset_enrolment(&fixture.dir("esp")).expect("reset"));

    let reason = fixture.run_to_failure().await;
    let StepError::Volume(VolumeError::Occupied { found, .. }) = step_error(&reason) else {
        panic!("{reason:?}")
    };
    let found = found.clone();
    assert_eq!(fs::read(&key).expect("it exists"), before, "nothing was touched");
    assert_eq!(network.created_count(), 1);

    fixture.settings.erase = ErasePolicy::Exactly(VolumeContents::Files { entries: 77 });
    fixture.run_to_failure().await;
    assert_eq!(fs::read(&key).expect("the file exists"), before, "data was erased that was not named");

    fixture.settings.erase = ErasePolicy::Exactly(found);
    fixture.consensus = NodeFixture::on_network(&network, "192.0.2.1").consensus;
    let (run, second) = fixture.run_to_running().await;
    assert_ne!(second.node_id, first.node_id);
    run.stop().await;
    // The erasure was permitted once, not for ever.
    let (run, again) = fixture.run_to_running().await;
    assert_eq!(again, second);
    run.stop().await;
}

#[tokio::test]
async fn a_volume_with_foreign_files_is_rejected() {
    let fixture = NodeFixture::single_node();
    fs::write(fixture.disks.path().join("data/photos"), "mine").expect("written");
    let reason = fixture.run_to_failure().await;
    assert!(matches!(step_error(&reason), StepError::Volume(VolumeError::Occupied { .. })), "{reason:?}");
    assert_eq!(fs::read(fixture.disks.path().join("data/photos")).expect("it exists"), b"mine");
}

#[tokio::test]
async fn the_data_volume_of_another_node_is_rejected() {
    let (one, other) = (NodeFixture::single_node(), NodeFixture::single_node());
    for fixture in [&one, &other] {
        let (run, _) = fixture.run_to_running().await;
        run.stop().await;
    }
    fs::rename(one.disks.path().join("data"), one.disks.path().join("mine")).expect("renamed");
    fs::rename(other.disks.path().join("data"), one.disks.path().join("data")).expect("renamed");
    let reason = one.run_to_failure().await;
    assert!(matches!(step_error(&reason), StepError::ForeignVolume { .. }), "{reason:?}");
    fs::rename(one.disks.path().join("data"), other.disks.path().join("data")).expect("renamed");
    fs::rename(one.disks.path().join("mine"), one.disks.path().join("data")).expect("renamed");
    for fixture in [&one, &other] {
        let (run, _) = fixture.run_to_running().await;
        run.stop().await;
    }
}

#[tokio::test]
async fn a_lost_data_volume_is_reported_and_not_recreated() {
    let network = MemoryNetwork::new();
    let fixture = NodeFixture::on_network(&network, "192.0.2.1");
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
    fs::remove_dir_all(fixture.disks.path().join("data")).expect("removed");
    fs::create_dir(fixture.disks.path().join("data")).expect("created");
    let reason = fixture.run_to_failure().await;
    assert!(matches!(step_error(&reason), StepError::Volume(VolumeError::Absent { .. })), "{reason:?}");
    assert_eq!(fs::read_dir(fixture.disks.path().join("data")).expect("it exists").count(), 0);
    assert_eq!(network.created_count(), 1);
}

#[tokio::test]
async fn missing_or_foreign_credentials_are_reported_and_not_recreated() {
    let (fixture, other) = (NodeFixture::single_node(), NodeFixture::single_node());
    for one in [&fixture, &other] {
        let (run, _) = one.run_to_running().await;
        run.stop().await;
    }
    let (here, existing) =
        [&fixture, &other].map(|one| one.disks.path().join("data/node/credentials")).into();
    let parked = fixture.disks.path().join("parked");
    fs::rename(&here, &parked).expect("renamed");
    let reason = fixture.run_to_failure().await;
    assert!(matches!(step_error(&reason), StepError::CredentialsMissing { .. }), "{reason:?}");
    fs::remove_dir_all(&here).expect("an empty directory");
    fs::rename(&existing, &here).expect("renamed");
    let reason = fixture.run_to_failure().await;
    assert!(matches!(reason, FailureReason::NodeMismatch { .. }), "{reason:?}");
    fs::rename(&here, &existing).expect("renamed");
    fs::rename(&parked, &here).expect("renamed");
    let (run, _) = fixture.run_to_running().await;
    run.stop().await;
}

/// A run that fails once the decision is recorded.
pub(super) async fn interrupt(fixture: &NodeFixture) {
    let conflict = fixture.disks.path().join("data/conflict");
    fs::write(&conflict, "").expect("written");
    fixture.run_to_failure().await;
    fs::remove_file(conflict).expect("removed");
}

#[tokio::test]
async fn a_node_never_switches_between_bootstrap_and_join() {
    let cluster = MemoryCluster::start().await;
    let ticket = cluster.issue("192.0.2.2").await;

    // Bootstrap is in progress, and a ticket appears.
    let creating = cluster.node("192.0.2.2");
    interrupt(&creating).await;
    creating.give_ticket(&ticket);
    assert!(matches!(creating.run_to_failure().await, FailureReason::TicketDuringBootstrap));
    assert_eq!(cluster.network.created_count(), 1, "a cluster was bootstrapped");

    // A join is in progress, and the ticket is missing, or another.
    let joining = cluster.node("192.0.2.2");
    joining.give_ticket(&ticket);
    interrupt(&joining).await;
    joining.ticket_file().remove().expect("removed");
    assert!(matches!(joining.run_to_failure().await, FailureReason::TicketMissing { .. }));
    cluster.issuer().revoke_ticket(&peer_url("192.0.2.2")).await.expect("revoked");
    let another = cluster.issue("192.0.2.2").await;
    assert_ne!(another.node_id(), ticket.node_id());
    joining.give_ticket(&another);
    assert!(matches!(joining.run_to_failure().await, FailureReason::TicketChanged { .. }));
    assert_eq!(cluster.network.created_count(), 1);
    assert!(reset_enrolment(&joining.dir("esp")).expect("reset"));
    let (run, joined) = joining.run_to_running().await;
    assert_eq!(&joined.node_id, another.node_id());
    run.stop().await;
    cluster.stop().await;
}

/// A node that waits for a ticket, and has no address.
async fn waiting_node(cluster: &MemoryCluster, address: &str) -> (NodeFixture, NodeRun) {
    let mut fixture = cluster.node(address);
    fixture.settings.bootstrap = false;
    fixture.network.set_address(None);
    let run = fixture.start();
    assert_waits_without_instruction(&run.node).await;
    (fixture, run)
}

async fn assert_waits_without_instruction(node: &ClusterNode) {
    let waiting = node.wait_phase_left(EnrolmentPhase::New).await;
    assert!(matches!(waiting, EnrolmentState::Waiting(WaitCause::NoInstruction)), "{waiting:?}");
}

#[tokio::test]
async fn a_rejected_ticket_replaces_the_request_to_bootstrap() {
    let cluster = MemoryCluster::start().await;
    let ticket = cluster.issue("192.0.2.2").await;
    let (fixture, run) = waiting_node(&cluster, "192.0.2.3").await;
    let node = run.node.clone();
    fixture.give_ticket(&ticket);
    node.request_bootstrap().expect("it waits, also for its address");
    wait_without_address(&run).await;
    fixture.network.set_address(Some(node_address("192.0.2.3")));
    let reason = error_chain(run.wait_finished().await.expect_err("another host's ticket was accepted"));
    assert!(reason.contains("the ticket was issued for 192.0.2.2"), "{reason}");
    run.stop().await;

    fixture.ticket_file().remove().expect("removed");
    let run = NodeRun::start_once(node.clone());
    node.wait_phase_left(EnrolmentPhase::Failed).await;
    assert_waits_without_instruction(&node).await;
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_ticket_that_is_removed_before_the_address_is_known_replaces_the_request_to_bootstrap() {
    let cluster = MemoryCluster::start().await;
    let ticket = cluster.issue("192.0.2.2").await;
    let (fixture, run) = waiting_node(&cluster, "192.0.2.2").await;
    fixture.give_ticket(&ticket);
    wait_without_address(&run).await;
    run.node.request_bootstrap().expect("it waits, also for its address");
    fixture.ticket_file().remove().expect("removed");
    fixture.network.set_address(Some(node_address("192.0.2.2")));
    wait_condition(&run, &WaitCause::NoInstruction.to_string()).await;
    // It still waits for its ticket.
    fixture.give_ticket(&ticket);
    let joined = run.wait_finished().await.expect("it joins");
    assert_eq!(&joined.node_id, ticket.node_id());
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_joining_node_resumes_with_its_ticket_reissued_for_other_members() {
    let cluster = MemoryCluster::start().await;
    let (second, _) = cluster.invite("192.0.2.2").await;
    let (leaving, _) = second.run_to_running().await;
    let (joining, first_ticket) = cluster.invite("192.0.2.3").await;
    interrupt(&joining).await;

    let this = leaving.node.cluster_access().expect("a running node").this_member().id;
    let members = cluster.first.node.cluster_members().expect("a running node");
    members.remove_member(this).await.expect("removed");
    leaving.stop().await;
    let again = cluster.issue("192.0.2.3").await;
    assert_ne!(again.peers(), first_ticket.peers());
    joining.give_ticket(&again);
    let (run, joined) = joining.run_to_running().await;
    assert_eq!(&joined.node_id, first_ticket.node_id());
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn the_journal_of_another_program_is_an_error_that_names_it_and_is_left_unchanged() {
    let fixture = NodeFixture::single_node();
    fs::write(fixture.disks.path().join("esp/enrolment.0"), [7; 100]).expect("written");
    let reason = fixture.run_to_failure().await;
    assert!(matches!(step_error(&reason), StepError::Journal(_)), "{reason:?}");
    assert!(error_chain(reason).contains("enrolment.0"));
    assert_eq!(fs::read(fixture.disks.path().join("esp/enrolment.0")).expect("it exists"), [7; 100]);
    assert_eq!(fs::read_dir(fixture.disks.path().join("data")).expect("it exists").count(), 0);
}

#[tokio::test]
async fn a_second_process_is_rejected_while_the_first_runs() {
    let fixture = NodeFixture::single_node();
    let (run, _) = fixture.run_to_running().await;
    let reason = fixture.run_to_failure().await;
    let StepError::Journal(error) = step_error(&reason) else { panic!("{reason:?}") };
    assert!(error.is_in_use());
    run.stop().await;
}
