//! Where a node is told how to get into a cluster: the rows of the reference's table, with what is right instead of what
//! the original did.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use nodekeel_cluster::node::{Enrolment, EnrolmentError, EnrolmentSource, TicketError};

use super::ticket;
use crate::machine::{Bed, said};

/// A machine with its own file, and what QEMU would show.
struct Places {
    bed: Bed,
    firmware: PathBuf,
    enrolment: Enrolment,
}

impl Places {
    fn new() -> Self {
        let bed = Bed::alone();
        let firmware = bed.disks.path().join("fw_cfg");
        let kept = EnrolmentSource::Kept(bed.enrolment().enrolment.clone());
        let enrolment = Enrolment::new([kept, EnrolmentSource::Firmware(firmware.clone())]);
        Self { bed, firmware, enrolment }
    }

    fn keep(&self, content: &[u8]) {
        self.bed.enrolment().enrolment.write(content).expect("it is written");
    }
}

#[test]
fn where_nothing_is_told_there_is_no_ticket() {
    assert!(Places::new().enrolment.load().expect("nothing is wrong").is_none());
}

#[test]
fn a_ticket_is_found_in_either_place_and_the_nodes_own_wins() {
    let places = Places::new();
    let (own, shown) = (ticket("192.0.2.7"), ticket("192.0.2.8"));
    fs::write(&places.firmware, &*shown.to_config()).expect("it is written");
    let found = places.enrolment.load().expect("it is good").expect("it is there");
    assert_eq!(found.digest(), shown.digest());
    places.keep(&own.to_config());
    let found = places.enrolment.load().expect("it is good").expect("it is there");
    assert_eq!((found.digest(), found.node()), (own.digest(), own.node()));
    // The other is not even read.
    fs::write(&places.firmware, b"\xff").expect("it is written");
    let found = places.enrolment.load().expect("it is good").expect("it is there");
    assert_eq!(found.digest(), own.digest());
}

#[test]
fn the_kernel_shows_files_through_links() {
    let places = Places::new();
    let target = places.bed.disks.path().join("by_key");
    fs::write(&target, &*ticket("192.0.2.7").to_config()).expect("it is written");
    symlink(&target, &places.firmware).expect("it is linked");
    assert!(places.enrolment.load().expect("it is good").is_some());
}

#[test]
fn an_empty_file_is_no_ticket_and_is_not_absent() {
    let places = Places::new();
    fs::write(&places.firmware, &*ticket("192.0.2.7").to_config()).expect("it is written");
    places.keep(b"");
    let error = places.enrolment.load().expect_err("it is empty");
    assert!(matches!(error, EnrolmentError::Malformed { source: TicketError::NoTicket, .. }), "{error:?}");
}

#[test]
fn what_is_no_configuration_is_an_error_that_names_the_file_and_stays() {
    let places = Places::new();
    fs::write(&places.firmware, &*ticket("192.0.2.7").to_config()).expect("it is written");
    for wrong in [&b"\xff\xff"[..], b"\x0a\x01", b"golden ticket"] {
        places.keep(wrong);
        let text = said(places.enrolment.load().expect_err("it is none"));
        assert!(text.contains("esp/enrolment.pb"), "{text}");
        assert_eq!(places.bed.enrolment().enrolment.read().expect("it is there"), wrong);
    }
    places.bed.enrolment().enrolment.remove().expect("it is removed");
    fs::write(&places.firmware, b"\xff").expect("it is written");
    let text = said(places.enrolment.load().expect_err("it is none"));
    assert!(text.contains("fw_cfg"), "{text}");
}

#[test]
fn what_can_not_be_read_is_an_error_and_never_absent() {
    let places = Places::new();
    fs::write(&places.firmware, &*ticket("192.0.2.7").to_config()).expect("it is written");
    let own = places.bed.disks.path().join("esp/enrolment.pb");
    fs::create_dir(&own).expect("it is made");
    let error = places.enrolment.load().expect_err("a directory");
    assert!(
        matches!(&error, EnrolmentError::Read { path, .. } if path.ends_with("esp/enrolment.pb")),
        "{error:?}"
    );
    fs::remove_dir(&own).expect("it is removed");
    symlink("/nowhere", &own).expect("it is linked");
    assert!(places.enrolment.load().is_err(), "the node's own file is no link");
    fs::remove_file(&own).expect("it is removed");
    fs::remove_file(&places.firmware).expect("it is removed");
    fs::create_dir(&places.firmware).expect("it is made");
    let error = places.enrolment.load().expect_err("a directory");
    assert!(matches!(&error, EnrolmentError::Read { path, .. } if path == &places.firmware), "{error:?}");
}

#[test]
fn a_file_without_end_is_not_read_into_memory() {
    let enrolment = Enrolment::new([EnrolmentSource::Firmware("/dev/zero".into())]);
    let text = said(enrolment.load().expect_err("it has no end"));
    assert!(text.contains("larger than"), "{text}");
    let places = Places::new();
    places.keep(&vec![0; (1 << 20) + 1]);
    let text = said(places.enrolment.load().expect_err("no ticket is as large"));
    assert!(text.contains("esp/enrolment.pb") && text.contains("larger than"), "{text}");
}
