//! What a member finds on the disk, without an etcd.

use std::sync::Arc;

use nodekeel_localstorage::mem::{Fault, MemPlacement};
use nodekeel_localstorage::tree::{Data, Site};
use nodekeel_localstorage::{Mode as FileMode, Placement as _};

use super::*;
use crate::consensus::MemberName;
use crate::pki::NewAuthority;

struct Disk {
    placement: Arc<MemPlacement>,
    data: Data,
}

impl Disk {
    fn new() -> Disk {
        let placement = Arc::new(MemPlacement::new());
        let data = Site::new(placement.clone(), "/data").place().unwrap();
        Disk { placement, data }
    }

    /// As if etcd had begun to write.
    fn with_data(self) -> Disk {
        self.placement.create_dir(Path::new("etcd/data/member"), FileMode::PRIVATE_DIR).unwrap();
        self
    }

    fn prepare(&self, start: &Start) -> Result<Prepared, ConsensusError> {
        prepare(&self.data.etcd, start)
    }
}

fn name() -> MemberName {
    "one".parse().unwrap()
}

fn create() -> Start {
    Start::new_cluster(name(), [192, 0, 2, 1].into())
}

fn restart() -> Start {
    Start::restart(name(), [192, 0, 2, 1].into())
}

fn join() -> (Start, NewAuthority) {
    let mut authority = NewAuthority::generate().unwrap();
    let credentials = authority.issue(&Leaf::member(name(), [192, 0, 2, 1].into())).unwrap();
    let revoked = authority.none_revoked().unwrap();
    (Start::join(name(), [192, 0, 2, 1].into(), Vec::new(), Arc::new(credentials), revoked), authority)
}

/// All causes, joined.
fn told(error: &ConsensusError) -> String {
    let chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn a_new_member_killed_at_any_write_goes_on_with_one_authority() {
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full, Fault::Device] {
        for nth in 1.. {
            let disk = Disk::new();
            disk.placement.fail(nth, fault);
            let first = disk.prepare(&create());
            disk.placement.restart();
            let kept = Pki::load(&disk.data.etcd.extend::<Beside>().unwrap().authority).unwrap();
            let again = disk.prepare(&create()).unwrap();
            let new = again.new.as_ref().expect("it is not saved yet");
            assert_eq!(&again.credentials.ca, new.certificate());
            if let Some(kept) = kept {
                assert_eq!(&kept.certificate, new.certificate(), "what was kept is gone on with");
            }
            assert!(disk.data.etcd.load_revoked(new.certificate()).unwrap().is_some());
            assert!(matches!(again.initial, Initial::New { .. }));
            for file in ["ca.pem", "cert.pem", "cert-key.pem"] {
                let file = Path::new("etcd/peer_pki").join(file);
                assert!(disk.placement.read(&file).is_ok(), "etcd finds {}", file.display());
            }
            if first.is_ok() {
                assert!(nth > 5, "there were writes to fail at: {nth}");
                break;
            }
        }
    }
}

#[test]
fn a_saved_authority_is_forgotten_whoever_is_killed_meanwhile() {
    for nth in 1.. {
        let disk = Disk::new().with_data();
        disk.placement.remove(Path::new("etcd/data/member")).unwrap();
        disk.prepare(&create()).unwrap();
        let disk = disk.with_data();
        disk.placement.fail(nth, Fault::CrashAfter);
        let forgotten = forget_new(&disk.data.etcd);
        disk.placement.restart();
        let again = disk.prepare(&restart()).unwrap();
        assert!(
            matches!(again.initial, Initial::Known),
            "the data of what was once a member is never touched"
        );
        if let Some(new) = again.new {
            assert_eq!(new.certificate(), &again.credentials.ca, "it may be saved again");
        }
        forget_new(&disk.data.etcd).unwrap();
        assert!(disk.prepare(&create()).unwrap().new.is_none());
        let key = Path::new("etcd/new_authority/cert-key.pem");
        assert!(disk.placement.kind(key).unwrap().is_none(), "its key is on the disk no more");
        if forgotten.is_ok() {
            break;
        }
    }
}

#[test]
fn a_file_cut_at_any_byte_is_an_error_that_names_it_and_nothing_is_changed() {
    let disk = Disk::new();
    let mut new = disk.prepare(&create()).unwrap().new.unwrap();
    keep_client(&disk.data.etcd, &new.issue(&Leaf::client(name())).unwrap()).unwrap();
    let disk = disk.with_data();
    for file in [
        "etcd/client_pki/ca.pem",
        "etcd/client_pki/cert.pem",
        "etcd/client_pki/cert-key.pem",
        "etcd/peer_pki/ca.pem",
        "etcd/peer_pki/cert.pem",
        "etcd/peer_pki/cert-key.pem",
        "etcd/peer_crl",
        "etcd/new_authority/ca.pem",
        "etcd/new_authority/cert.pem",
        "etcd/new_authority/cert-key.pem",
    ] {
        let path = Path::new(file);
        let whole = disk.placement.read(path).unwrap();
        // Without the newline at its end it is the same.
        let until = whole.len() - usize::from(whole.ends_with(b"\n"));
        for len in 0..until {
            disk.placement.write(path, &whole[..len], FileMode::PRIVATE_FILE).unwrap();
            let start = if len % 2 == 0 { create() } else { restart() };
            let error = told(&disk.prepare(&start).unwrap_err());
            assert!(error.contains(file), "{file} cut to {len}: {error}");
            assert_eq!(disk.placement.read(path).unwrap(), &whole[..len], "it stays as it is");
        }
        disk.placement.write(path, &whole, FileMode::PRIVATE_FILE).unwrap();
        disk.prepare(&restart()).unwrap();
    }
}

#[test]
fn a_member_takes_over_what_it_was_given_once() {
    let (start, _) = join();
    let disk = Disk::new();
    for _ in 0..2 {
        let prepared = disk.prepare(&start).unwrap();
        assert!(matches!(prepared.initial, Initial::Existing { .. }) && prepared.new.is_none());
    }
    let (other, _) = join();
    let error = disk.prepare(&other).unwrap_err();
    assert!(matches!(error, ConsensusError::AnotherMember { .. }), "{error:?}");
    let error = disk.prepare(&create()).unwrap_err();
    assert!(
        matches!(error, ConsensusError::AnotherMember { .. }),
        "it has joined, so it makes no cluster: {error:?}"
    );
    let disk = disk.with_data();
    assert!(matches!(disk.prepare(&restart()).unwrap().initial, Initial::Known));
}

#[test]
fn a_joiner_killed_at_any_write_goes_on() {
    let (start, _) = join();
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full] {
        for nth in 1.. {
            let disk = Disk::new();
            disk.placement.fail(nth, fault);
            let first = disk.prepare(&start);
            disk.placement.restart();
            disk.prepare(&start).unwrap();
            if first.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn data_without_credentials_is_nobodys() {
    let disk = Disk::new().with_data();
    let (join, _) = join();
    for start in [create(), restart(), join] {
        let error = disk.prepare(&start).unwrap_err();
        assert!(matches!(error, ConsensusError::NoCredentials { .. }), "{error:?}");
    }
    assert!(disk.data.etcd.peer_pki.presence().unwrap().is_none());
    assert!(disk.data.etcd.extend::<Beside>().unwrap().authority.presence().unwrap().is_none());
}

#[test]
fn a_certificate_of_another_name_or_address_is_not_taken() {
    let (start, _) = join();
    let (mut renamed, mut moved) = (start.clone(), start);
    renamed.name = "two".parse().unwrap();
    moved.address = [192, 0, 2, 2].into();
    for start in [renamed, moved] {
        let disk = Disk::new();
        let error = disk.prepare(&start).unwrap_err();
        assert!(matches!(error, ConsensusError::NotCertified { .. }), "{error:?}");
        assert!(disk.data.etcd.peer_pki.presence().unwrap().is_none(), "and not stored");
    }
}

/// A member that has run, and its authority.
fn member() -> (Disk, NewAuthority) {
    let disk = Disk::new();
    let new = disk.prepare(&create()).unwrap().new.unwrap();
    forget_new(&disk.data.etcd).unwrap();
    (disk.with_data(), new)
}

fn elsewhere() -> Start {
    Start::restart(name(), [192, 0, 2, 9].into())
}

#[test]
fn a_member_has_another_address_once_its_client_has_a_certificate() {
    let (disk, mut new) = member();
    let error = disk.prepare(&elsewhere()).unwrap_err();
    assert!(matches!(error, ConsensusError::NotCertified { .. }), "nobody could certify it: {error:?}");
    keep_client(&disk.data.etcd, &new.issue(&Leaf::client(name())).unwrap()).unwrap();
    let prepared = disk.prepare(&elsewhere()).unwrap();
    assert!(prepared.client.is_some() && !prepared.is_certified_at([192, 0, 2, 9].into()));
    let mut renamed = elsewhere();
    renamed.name = "two".parse().unwrap();
    let error = disk.prepare(&renamed).unwrap_err();
    assert!(matches!(error, ConsensusError::NotCertified { .. }), "its name is for ever: {error:?}");
}

#[test]
fn a_client_of_another_authority_is_not_taken() {
    let (disk, _) = member();
    let mut other = NewAuthority::generate().unwrap();
    keep_client(&disk.data.etcd, &other.issue(&Leaf::client(name())).unwrap()).unwrap();
    let error = disk.prepare(&elsewhere()).unwrap_err();
    assert!(matches!(error, ConsensusError::AnotherMember { .. }), "{error:?}");
}

#[test]
fn a_member_that_moves_while_its_cluster_is_made_begins_where_it_is_then() {
    let disk = Disk::new();
    let before = disk.prepare(&create()).unwrap();
    let mut moved = create();
    moved.address = [192, 0, 2, 9].into();
    let prepared = disk.prepare(&moved).unwrap();
    assert!(prepared.is_certified_at([192, 0, 2, 9].into()));
    assert_eq!(prepared.credentials.ca, before.credentials.ca, "the authority is the same");
    assert!(matches!(prepared.initial, Initial::New { .. }));
}

#[test]
fn a_certificate_that_is_replaced_is_the_old_or_the_new_one_whatever_fails() {
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full, Fault::Device] {
        for nth in 1.. {
            let (disk, mut new) = member();
            keep_client(&disk.data.etcd, &new.issue(&Leaf::client(name())).unwrap()).unwrap();
            let address = [192, 0, 2, 9].into();
            let issued = new.issue(&Leaf::member(name(), address)).unwrap();
            disk.placement.fail(nth, fault);
            let kept = keep_member(&disk.data.etcd, &issued);
            disk.placement.restart();
            let prepared = disk.prepare(&elsewhere()).unwrap();
            assert!(kept.is_err() || prepared.is_certified_at(address));
            if kept.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn what_was_never_a_member_can_not_go_on() {
    let disk = Disk::new();
    let error = disk.prepare(&restart()).unwrap_err();
    assert!(matches!(error, ConsensusError::NoMember { .. }), "{error:?}");
    disk.prepare(&create()).unwrap();
    let error = disk.prepare(&restart()).unwrap_err();
    assert!(matches!(error, ConsensusError::NoMember { .. }), "and makes no second cluster: {error:?}");
}
