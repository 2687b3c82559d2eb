//! Where a node finds its enrolment configuration: the rows of the reference's table, corrected where the
//! original was wrong.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_cluster::node::{
    EnrolmentConfigError, EnrolmentSource, EnrolmentSources, EnrolmentTicket, GoldenTicket, TicketError,
};

use super::test_ticket;
use crate::enrolment::{NodeFixture, error_chain};

/// A node with its own file, and the file that QEMU would show.
struct ConfigSources {
    fixture: NodeFixture,
    firmware: PathBuf,
    sources: EnrolmentSources,
}

impl ConfigSources {
    fn new() -> Self {
        let fixture = NodeFixture::single_node();
        let firmware = fixture.disks.path().join("fw_cfg");
        let kept = EnrolmentSource::EspFile(fixture.ticket_file());
        let sources = EnrolmentSources::new([kept, EnrolmentSource::FwCfg(firmware.clone())]);
        Self { fixture, firmware, sources }
    }

    fn load_golden(&self) -> Arc<GoldenTicket> {
        match self.sources.load_ticket().expect("a valid ticket").expect("it exists") {
            EnrolmentTicket::Golden(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn write_esp_file(&self, content: &[u8]) {
        self.fixture.ticket_file().write(content).expect("written");
    }
}

#[test]
fn absent_sources_hold_no_ticket() {
    assert!(ConfigSources::new().sources.load_ticket().expect("readable sources").is_none());
}

#[test]
fn a_ticket_is_found_in_either_source_and_the_esp_file_wins() {
    let config = ConfigSources::new();
    let (esp, firmware) = (test_ticket("192.0.2.7"), test_ticket("192.0.2.8"));
    fs::write(&config.firmware, &*firmware.to_config()).expect("written");
    let found = config.load_golden();
    assert_eq!(found.digest(), firmware.digest());
    config.write_esp_file(&esp.to_config());
    let found = config.load_golden();
    assert_eq!((found.digest(), found.node_id()), (esp.digest(), esp.node_id()));
    // The other source is not even read.
    fs::write(&config.firmware, b"\xff").expect("written");
    let found = config.load_golden();
    assert_eq!(found.digest(), esp.digest());
}

#[test]
fn a_firmware_file_is_read_through_links() {
    let config = ConfigSources::new();
    let target = config.fixture.disks.path().join("by_key");
    fs::write(&target, &*test_ticket("192.0.2.7").to_config()).expect("written");
    symlink(&target, &config.firmware).expect("linked");
    assert!(config.sources.load_ticket().expect("a valid ticket").is_some());
}

#[test]
fn an_empty_config_is_an_error_and_not_absent() {
    let config = ConfigSources::new();
    fs::write(&config.firmware, &*test_ticket("192.0.2.7").to_config()).expect("written");
    config.write_esp_file(b"");
    let error = config.sources.load_ticket().expect_err("an empty config");
    assert!(
        matches!(error, EnrolmentConfigError::Malformed { source: TicketError::NoTicket, .. }),
        "{error:?}"
    );
}

#[test]
fn an_invalid_config_is_an_error_that_names_the_file_and_leaves_it_unchanged() {
    let config = ConfigSources::new();
    fs::write(&config.firmware, &*test_ticket("192.0.2.7").to_config()).expect("written");
    for wrong in [&b"\xff\xff"[..], b"\x0a\x01", b"golden ticket"] {
        config.write_esp_file(wrong);
        let text = error_chain(config.sources.load_ticket().expect_err("an invalid config"));
        assert!(text.contains("esp/enrolment.pb"), "{text}");
        assert_eq!(config.fixture.ticket_file().read().expect("it exists"), wrong);
    }
    config.fixture.ticket_file().remove().expect("removed");
    fs::write(&config.firmware, b"\xff").expect("written");
    let text = error_chain(config.sources.load_ticket().expect_err("an invalid config"));
    assert!(text.contains("fw_cfg"), "{text}");
}

#[test]
fn an_unreadable_config_is_an_error_and_never_absent() {
    let config = ConfigSources::new();
    fs::write(&config.firmware, &*test_ticket("192.0.2.7").to_config()).expect("written");
    let esp = config.fixture.disks.path().join("esp/enrolment.pb");
    fs::create_dir(&esp).expect("created");
    let error = config.sources.load_ticket().expect_err("a directory");
    assert!(
        matches!(&error, EnrolmentConfigError::Read { path, .. } if path.ends_with("esp/enrolment.pb")),
        "{error:?}"
    );
    fs::remove_dir(&esp).expect("removed");
    symlink("/nowhere", &esp).expect("linked");
    assert!(config.sources.load_ticket().is_err(), "a link was followed");
    fs::remove_file(&esp).expect("removed");
    fs::remove_file(&config.firmware).expect("removed");
    fs::create_dir(&config.firmware).expect("created");
    let error = config.sources.load_ticket().expect_err("a directory");
    assert!(
        matches!(&error, EnrolmentConfigError::Read { path, .. } if path == &config.firmware),
        "{error:?}"
    );
}

#[test]
fn a_fifo_is_an_error_and_not_a_wait() {
    let config = ConfigSources::new();
    let fifo = config.fixture.disks.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs").success());
    let enrolment = EnrolmentSources::new([EnrolmentSource::FwCfg(fifo)]);
    let text = error_chain(enrolment.load_ticket().expect_err("a FIFO"));
    assert!(text.contains("fifo: a FIFO, and not a file"), "{text}");
}

#[test]
fn an_endless_file_is_not_read_into_memory() {
    let enrolment = EnrolmentSources::new([EnrolmentSource::FwCfg("/dev/zero".into())]);
    let text = error_chain(enrolment.load_ticket().expect_err("an endless file"));
    assert!(text.contains("larger than"), "{text}");
    let config = ConfigSources::new();
    config.write_esp_file(&vec![0; (1 << 20) + 1]);
    let text = error_chain(config.sources.load_ticket().expect_err("an oversized config"));
    assert!(text.contains("esp/enrolment.pb") && text.contains("larger than"), "{text}");
}
