//! What a node never does: found over what is there, take another's disk, go another way than it began.

use std::fs;

use nodekeel_cluster::consensus::memory::MemoryNet;
use nodekeel_cluster::consensus::{PEER_PORT, PeerUrl};
use nodekeel_cluster::machine::{Reason, StepError, forget};
use nodekeel_localstorage::volume::{Contents, Erase, VolumeError};

use super::bed::{Bed, founder, ip, said};

/// Why a step failed.
fn step_error(reason: &Reason) -> &StepError {
    let Reason::Step { source, .. } = reason else { panic!("{reason:?}") };
    source
}

#[tokio::test]
async fn a_data_set_without_a_journal_is_refused_until_it_is_given_up_by_name() {
    let net = MemoryNet::new();
    let mut bed = Bed::on(&net, "192.0.2.1");
    let (life, first) = bed.runs().await;
    life.end().await;
    let key = bed.disks.path().join("data/node/credentials/cert-key.pem");
    let before = fs::read(&key).expect("it is there");
    assert!(forget(&bed.dir("esp")).expect("it is forgotten"));

    let reason = bed.fails().await;
    let StepError::Volume(VolumeError::Occupied { found, .. }) = step_error(&reason) else {
        panic!("{reason:?}")
    };
    let found = found.clone();
    assert_eq!(fs::read(&key).expect("it is there"), before, "nothing was touched");
    assert_eq!(net.clusters(), 1);

    bed.settings.erase = Erase::Exactly(Contents::Files { entries: 77 });
    bed.fails().await;
    assert_eq!(fs::read(&key).expect("it is there"), before, "something else was given up");

    bed.settings.erase = Erase::Exactly(found);
    bed.consensus = std::sync::Arc::new(nodekeel_cluster::consensus::memory::MemoryConsensus::on(&net));
    let (life, second) = bed.runs().await;
    assert_ne!(second.node, first.node);
    life.end().await;
    // It was given up once, and not for ever.
    let (life, again) = bed.runs().await;
    assert_eq!(again, second);
    life.end().await;
}

#[tokio::test]
async fn somebodys_files_are_no_place_for_a_cluster() {
    let bed = Bed::alone();
    fs::write(bed.disks.path().join("data/photos"), "mine").expect("it is written");
    let reason = bed.fails().await;
    assert!(matches!(step_error(&reason), StepError::Volume(VolumeError::Occupied { .. })), "{reason:?}");
    assert_eq!(fs::read(bed.disks.path().join("data/photos")).expect("it is there"), b"mine");
}

#[tokio::test]
async fn the_disk_of_another_node_is_told_from_this_ones() {
    let (one, other) = (Bed::alone(), Bed::alone());
    for bed in [&one, &other] {
        let (life, _) = bed.runs().await;
        life.end().await;
    }
    fs::rename(one.disks.path().join("data"), one.disks.path().join("mine")).expect("it is moved");
    fs::rename(other.disks.path().join("data"), one.disks.path().join("data")).expect("it is moved");
    let reason = one.fails().await;
    assert!(matches!(step_error(&reason), StepError::ForeignVolume { .. }), "{reason:?}");
    fs::rename(one.disks.path().join("data"), other.disks.path().join("data")).expect("it is moved");
    fs::rename(one.disks.path().join("mine"), one.disks.path().join("data")).expect("it is moved");
    for bed in [&one, &other] {
        let (life, _) = bed.runs().await;
        life.end().await;
    }
}

#[tokio::test]
async fn a_lost_disk_is_told_and_no_new_one_is_made() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.1");
    let (life, _) = bed.runs().await;
    life.end().await;
    fs::remove_dir_all(bed.disks.path().join("data")).expect("it is removed");
    fs::create_dir(bed.disks.path().join("data")).expect("it is made");
    let reason = bed.fails().await;
    assert!(matches!(step_error(&reason), StepError::Volume(VolumeError::Absent { .. })), "{reason:?}");
    assert_eq!(fs::read_dir(bed.disks.path().join("data")).expect("it is there").count(), 0);
    assert_eq!(net.clusters(), 1);
}

#[tokio::test]
async fn lost_or_foreign_credentials_are_told_and_none_are_made_in_their_place() {
    let (bed, other) = (Bed::alone(), Bed::alone());
    for one in [&bed, &other] {
        let (life, _) = one.runs().await;
        life.end().await;
    }
    let (here, there) = [&bed, &other].map(|one| one.disks.path().join("data/node/credentials")).into();
    let parked = bed.disks.path().join("parked");
    fs::rename(&here, &parked).expect("it is moved");
    let reason = bed.fails().await;
    assert!(matches!(step_error(&reason), StepError::CredentialsGone { .. }), "{reason:?}");
    fs::remove_dir_all(&here).expect("placed, and empty");
    fs::rename(&there, &here).expect("it is moved");
    let reason = bed.fails().await;
    assert!(matches!(reason, Reason::OtherIdentity { .. }), "{reason:?}");
    fs::rename(&here, &there).expect("it is moved");
    fs::rename(&parked, &here).expect("it is moved");
    let (life, _) = bed.runs().await;
    life.end().await;
}

#[tokio::test]
async fn a_node_that_began_one_way_does_not_go_another() {
    let net = MemoryNet::new();
    let (_first, founder) = founder(&net).await;
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    let url = PeerUrl::new(ip("192.0.2.2"), PEER_PORT);
    let ticket = tickets.issue(&url).await.expect("it is made");

    // It has begun to found, and is given a ticket.
    let creating = Bed::on(&net, "192.0.2.2");
    fs::write(creating.disks.path().join("data/in the way"), "").expect("it is written");
    creating.fails().await;
    fs::remove_file(creating.disks.path().join("data/in the way")).expect("it is removed");
    creating.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");
    assert!(matches!(creating.fails().await, Reason::TicketAfterCreation));
    assert_eq!(net.clusters(), 1, "it founded none");

    // It has begun to join, and the ticket is gone, or another.
    let joining = Bed::on(&net, "192.0.2.2");
    fs::write(joining.disks.path().join("data/in the way"), "").expect("it is written");
    joining.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");
    joining.fails().await;
    fs::remove_file(joining.disks.path().join("data/in the way")).expect("it is removed");
    joining.enrolment().enrolment.remove().expect("it is removed");
    assert!(matches!(joining.fails().await, Reason::TicketGone { .. }));
    tickets.withdraw(&url).await.expect("it is withdrawn");
    let another = tickets.issue(&url).await.expect("it is made");
    assert_ne!(another.node(), ticket.node());
    joining.enrolment().enrolment.write(&another.to_config()).expect("it is written");
    assert!(matches!(joining.fails().await, Reason::TicketChanged { .. }));
    assert_eq!(net.clusters(), 1);
    assert!(forget(&joining.dir("esp")).expect("it is forgotten"));
    let (life, joined) = joining.runs().await;
    assert_eq!(&joined.node, another.node());
    life.end().await;
    founder.end().await;
}

#[tokio::test]
async fn a_node_that_began_to_join_goes_on_with_its_ticket_as_it_is_made_again_for_other_members() {
    let net = MemoryNet::new();
    let (_first, founder) = founder(&net).await;
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    let join = async |address: &str| {
        let bed = Bed::on(&net, address);
        let ticket = tickets.issue(&PeerUrl::new(ip(address), PEER_PORT)).await.expect("it is made");
        bed.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");
        (bed, ticket)
    };
    let (second, _) = join("192.0.2.2").await;
    let (leaving, _) = second.runs().await;
    let (joining, begun) = join("192.0.2.3").await;
    fs::write(joining.disks.path().join("data/in the way"), "").expect("it is written");
    joining.fails().await;
    fs::remove_file(joining.disks.path().join("data/in the way")).expect("it is removed");

    let this = leaving.cluster.member().expect("it runs").this().id;
    founder.cluster.members().expect("it runs").remove(this).await.expect("it is removed");
    leaving.end().await;
    let again = tickets.issue(&PeerUrl::new(ip("192.0.2.3"), PEER_PORT)).await.expect("it is made");
    assert_ne!(again.peers(), begun.peers());
    joining.enrolment().enrolment.write(&again.to_config()).expect("it is written");
    let (life, joined) = joining.runs().await;
    assert_eq!(&joined.node, begun.node());
    life.end().await;
    founder.end().await;
    assert_eq!(net.clusters(), 1);
}

#[tokio::test]
async fn the_journal_of_another_program_is_an_error_that_names_it_and_stays() {
    let bed = Bed::alone();
    fs::write(bed.disks.path().join("esp/enrolment.0"), [7; 100]).expect("it is written");
    let reason = bed.fails().await;
    assert!(matches!(step_error(&reason), StepError::Journal(_)), "{reason:?}");
    assert!(said(reason).contains("enrolment.0"));
    assert_eq!(fs::read(bed.disks.path().join("esp/enrolment.0")).expect("it is there"), [7; 100]);
    assert_eq!(fs::read_dir(bed.disks.path().join("data")).expect("it is there").count(), 0);
}

#[tokio::test]
async fn a_second_process_is_refused_while_the_first_runs() {
    let bed = Bed::alone();
    let (life, _) = bed.runs().await;
    let reason = bed.fails().await;
    let StepError::Journal(error) = step_error(&reason) else { panic!("{reason:?}") };
    assert!(error.is_in_use());
    life.end().await;
}
