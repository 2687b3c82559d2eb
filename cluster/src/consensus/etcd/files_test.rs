//! A member's files on disk, without an etcd.

use std::sync::Arc;

use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
use nodekeel_localstorage::tree::LayoutTarget;
use nodekeel_localstorage::{FileMode, FileStore as _};

use super::*;
use crate::consensus::MemberName;
use crate::consensus::etcd::EtcdLayout;
use crate::pki::PendingCa;

struct TestDisk {
    placement: Arc<MemFileStore>,
    data: EtcdLayout,
}

impl TestDisk {
    fn new() -> TestDisk {
        let placement = Arc::new(MemFileStore::new());
        let data = LayoutTarget::new(placement.clone(), "/data").create_layout().unwrap();
        TestDisk { placement, data }
    }

    /// As if etcd had started to write.
    fn with_data(self) -> TestDisk {
        self.placement.create_dir(Path::new("etcd/data/member"), FileMode::PRIVATE_DIR).unwrap();
        self
    }

    /// As if etcd had a log.
    fn with_log(self) -> TestDisk {
        let disk = self.with_data();
        disk.placement.create_dir(Path::new("etcd/data/member/wal"), FileMode::PRIVATE_DIR).unwrap();
        disk.placement.write(Path::new("etcd/data/member/wal/0.wal"), b"", FileMode::PRIVATE_FILE).unwrap();
        disk
    }

    /// As an earlier release did when the member served for the first time.
    fn store_client(&self, ca: &mut PendingCa) {
        let client = ca.issue_credentials(&CertificateSpec::for_client(member_name())).unwrap();
        let dirs = self.data.etcd.add_layout::<PkiDirs>().unwrap();
        dirs.former_client.store_credentials(&client).unwrap();
    }

    fn prepare(&self, start: &StartOptions) -> Result<PreparedFiles, ConsensusError> {
        prepare_files(&self.data.etcd, start)
    }
}

fn member_name() -> MemberName {
    "one".parse().unwrap()
}

fn bootstrap_options() -> StartOptions {
    StartOptions::new_cluster(member_name(), [192, 0, 2, 1].into())
}

fn restart_options() -> StartOptions {
    StartOptions::restart_member(member_name(), [192, 0, 2, 1].into())
}

fn join_options() -> (StartOptions, PendingCa) {
    let mut pending_ca = PendingCa::generate().unwrap();
    let credentials = pending_ca
        .issue_credentials(&CertificateSpec::for_member(member_name(), [192, 0, 2, 1].into()))
        .unwrap();
    let revoked = pending_ca.empty_revocation_list().unwrap();
    (
        StartOptions::join_cluster(
            member_name(),
            [192, 0, 2, 1].into(),
            Vec::new(),
            Arc::new(credentials),
            revoked,
        ),
        pending_ca,
    )
}

/// All causes, joined.
fn error_chain(error: &ConsensusError) -> String {
    let chain = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[test]
fn a_new_member_killed_at_any_write_resumes_with_one_ca() {
    for fault in [
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
        InjectedFault::NoSpace,
        InjectedFault::IoError,
    ] {
        for nth in 1.. {
            let disk = TestDisk::new();
            disk.placement.fail_nth(nth, fault);
            let first = disk.prepare(&bootstrap_options());
            disk.placement.clear_fault();
            let kept = PkiDir::load_credentials(&disk.data.etcd.add_layout::<PkiDirs>().unwrap().pending_ca)
                .unwrap();
            let again = disk.prepare(&bootstrap_options()).unwrap();
            let new = again.pending_ca.as_ref().expect("a CA that is not saved yet");
            assert_eq!(&again.credentials.ca, new.ca_certificate());
            if let Some(kept) = kept {
                assert_eq!(&kept.certificate, new.ca_certificate(), "the kept CA is resumed");
            }
            assert!(disk.data.etcd.load_revocation_list(new.ca_certificate()).unwrap().is_some());
            assert!(matches!(again.initial_cluster, InitialCluster::New { .. }));
            for file in ["ca.pem", "cert.pem", "cert-key.pem"] {
                let file = Path::new("etcd/peer_pki").join(file);
                assert!(disk.placement.read(&file).is_ok(), "etcd finds no {}", file.display());
            }
            if first.is_ok() {
                assert!(nth > 5, "only {nth} writes to fail at");
                break;
            }
        }
    }
}

#[test]
fn a_saved_ca_is_removed_from_the_disk_despite_kills() {
    for nth in 1.. {
        let disk = TestDisk::new().with_data();
        disk.placement.remove(Path::new("etcd/data/member")).unwrap();
        disk.prepare(&bootstrap_options()).unwrap();
        let disk = disk.with_data();
        disk.placement.fail_nth(nth, InjectedFault::CrashAfter);
        let forgotten = remove_pending_ca(&disk.data.etcd);
        disk.placement.clear_fault();
        let again = disk.prepare(&restart_options()).unwrap();
        assert!(
            matches!(again.initial_cluster, InitialCluster::FromData),
            "the data of a former member was touched"
        );
        if let Some(new) = again.pending_ca {
            assert_eq!(new.ca_certificate(), &again.credentials.ca, "the CA can't be saved again");
        }
        remove_pending_ca(&disk.data.etcd).unwrap();
        assert!(disk.prepare(&bootstrap_options()).unwrap().pending_ca.is_none());
        let key = Path::new("etcd/new_authority/cert-key.pem");
        assert!(disk.placement.file_kind(key).unwrap().is_none(), "the CA's key is still on the disk");
        if forgotten.is_ok() {
            break;
        }
    }
}

#[test]
fn a_truncated_member_file_is_an_error_that_names_it_and_changes_nothing() {
    let disk = TestDisk::new();
    disk.prepare(&bootstrap_options()).unwrap();
    let disk = disk.with_data();
    for file in [
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
        // Without the final newline the content is the same.
        let until = whole.len() - usize::from(whole.ends_with(b"\n"));
        for len in 0..until {
            disk.placement.write(path, &whole[..len], FileMode::PRIVATE_FILE).unwrap();
            let start = if len % 2 == 0 { bootstrap_options() } else { restart_options() };
            let error = error_chain(&disk.prepare(&start).unwrap_err());
            assert!(error.contains(file), "{file} cut to {len}: {error}");
            assert_eq!(disk.placement.read(path).unwrap(), &whole[..len], "the file was changed");
        }
        disk.placement.write(path, &whole, FileMode::PRIVATE_FILE).unwrap();
        disk.prepare(&restart_options()).unwrap();
    }
}

#[test]
fn a_member_stores_its_join_credentials_once() {
    let (start, _) = join_options();
    let disk = TestDisk::new();
    for _ in 0..2 {
        let prepared = disk.prepare(&start).unwrap();
        assert!(
            matches!(prepared.initial_cluster, InitialCluster::Existing { .. })
                && prepared.pending_ca.is_none()
        );
    }
    let (other, _) = join_options();
    let error = disk.prepare(&other).unwrap_err();
    assert!(matches!(error, ConsensusError::ForeignCredentials { .. }), "{error:?}");
    let error = disk.prepare(&bootstrap_options()).unwrap_err();
    assert!(
        matches!(error, ConsensusError::ForeignCredentials { .. }),
        "a joined member created a cluster: {error:?}"
    );
    let disk = disk.with_data();
    assert!(matches!(disk.prepare(&restart_options()).unwrap().initial_cluster, InitialCluster::FromData));
}

#[test]
fn a_joining_member_killed_at_any_write_resumes() {
    let (start, _) = join_options();
    for fault in [InjectedFault::CrashBefore, InjectedFault::CrashAfter, InjectedFault::NoSpace] {
        for nth in 1.. {
            let disk = TestDisk::new();
            disk.placement.fail_nth(nth, fault);
            let first = disk.prepare(&start);
            disk.placement.clear_fault();
            disk.prepare(&start).unwrap();
            if first.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn a_host_keeps_its_claim_and_asks_nothing_once_etcd_has_a_log() {
    let (start, mut ca) = join_options();
    let disk = TestDisk::new();
    let claim = |disk: &TestDisk| disk.prepare(&start).unwrap().join_claim.expect("a claim");
    let first = claim(&disk);
    assert_eq!(first, claim(&disk), "a restart claims anew");
    assert_ne!(first, claim(&TestDisk::new()), "another host claims the same");
    // A log follows a recorded claim.
    let disk = disk.with_log();
    assert!(disk.prepare(&start).unwrap().join_claim.is_none());

    // The first release made no claims: an operator vouches for its member until it has served.
    let dirs = disk.data.etcd.add_layout::<PkiDirs>().unwrap();
    dirs.join_claim.remove().unwrap();
    let error = disk.prepare(&start).unwrap_err();
    assert!(matches!(error, ConsensusError::Unclaimed { .. }), "{error:?}");
    assert!(!dirs.join_claim.exists().unwrap(), "a claim was made beside a log");
    // It has served, and its client needs no credentials any more.
    disk.store_client(&mut ca);
    assert!(disk.prepare(&start).unwrap().join_claim.is_none());
    assert!(dirs.former_client.credential_presence().unwrap().is_absent());
    assert!(disk.prepare(&start).unwrap().join_claim.is_none(), "it asks after all");

    // A complete member asks nothing, whatever is left of its files.
    assert!(disk.prepare(&restart_options()).unwrap().join_claim.is_none());
}

#[test]
fn the_former_credentials_of_a_client_are_removed_whatever_fails() {
    for fault in [InjectedFault::CrashBefore, InjectedFault::CrashAfter, InjectedFault::NoSpace] {
        for nth in 1.. {
            let (disk, mut new) = started_member();
            disk.store_client(&mut new);
            disk.placement.fail_nth(nth, fault);
            let first = disk.prepare(&restart_options());
            disk.placement.clear_fault();
            disk.prepare(&restart_options()).unwrap();
            let dirs = disk.data.etcd.add_layout::<PkiDirs>().unwrap();
            assert!(dirs.former_client.credential_presence().unwrap().is_absent());
            assert!(dirs.join_claim.exists().unwrap());
            if first.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn a_damaged_claim_is_replaced() {
    let (start, _) = join_options();
    let disk = TestDisk::new();
    disk.prepare(&start).unwrap();
    let path = Path::new("etcd/join_claim");
    let first = disk.placement.read(path).unwrap();
    for content in [&first[..5], b""] {
        disk.placement.write(path, content, FileMode::PRIVATE_FILE).unwrap();
        disk.prepare(&start).unwrap();
        let again = disk.placement.read(path).unwrap();
        assert!(again.len() == first.len() && again != first);
    }
}

#[test]
fn member_data_without_credentials_is_rejected() {
    let disk = TestDisk::new().with_data();
    let (join, _) = join_options();
    for start in [bootstrap_options(), restart_options(), join] {
        let error = disk.prepare(&start).unwrap_err();
        assert!(matches!(error, ConsensusError::CredentialsMissing { .. }), "{error:?}");
    }
    assert!(disk.data.etcd.peer_pki.credential_presence().unwrap().is_absent());
    assert!(
        disk.data.etcd.add_layout::<PkiDirs>().unwrap().pending_ca.credential_presence().unwrap().is_absent()
    );
}

#[test]
fn a_certificate_of_another_name_or_address_is_rejected() {
    let (start, _) = join_options();
    let (mut renamed, mut moved) = (start.clone(), start);
    renamed.name = "two".parse().unwrap();
    moved.address = [192, 0, 2, 2].into();
    for start in [renamed, moved] {
        let disk = TestDisk::new();
        let error = disk.prepare(&start).unwrap_err();
        assert!(matches!(error, ConsensusError::CertificateMismatch { .. }), "{error:?}");
        assert!(
            disk.data.etcd.peer_pki.credential_presence().unwrap().is_absent(),
            "rejected credentials were stored"
        );
    }
}

/// A member that has run, and its CA.
fn started_member() -> (TestDisk, PendingCa) {
    let disk = TestDisk::new();
    let new = disk.prepare(&bootstrap_options()).unwrap().pending_ca.unwrap();
    remove_pending_ca(&disk.data.etcd).unwrap();
    (disk.with_data(), new)
}

fn restart_elsewhere() -> StartOptions {
    StartOptions::restart_member(member_name(), [192, 0, 2, 9].into())
}

#[test]
fn a_member_changes_its_address_once_etcd_has_a_log() {
    let (disk, _) = started_member();
    let error = disk.prepare(&restart_elsewhere()).unwrap_err();
    assert!(matches!(error, ConsensusError::CertificateMismatch { .. }), "without a log: {error:?}");
    let disk = disk.with_log();
    assert!(!disk.prepare(&restart_elsewhere()).unwrap().is_certified_at([192, 0, 2, 9].into()));
    let mut renamed = restart_elsewhere();
    renamed.name = "two".parse().unwrap();
    let error = disk.prepare(&renamed).unwrap_err();
    assert!(matches!(error, ConsensusError::CertificateMismatch { .. }), "the name was changed: {error:?}");
}

#[test]
fn a_member_readdressed_during_bootstrap_starts_at_its_new_address() {
    let disk = TestDisk::new();
    let before = disk.prepare(&bootstrap_options()).unwrap();
    let mut moved = bootstrap_options();
    moved.address = [192, 0, 2, 9].into();
    let prepared = disk.prepare(&moved).unwrap();
    assert!(prepared.is_certified_at([192, 0, 2, 9].into()));
    assert_eq!(prepared.credentials.ca, before.credentials.ca, "the CA changed");
    assert!(matches!(prepared.initial_cluster, InitialCluster::New { .. }));
}

#[test]
fn a_replaced_certificate_is_the_old_or_the_new_one_after_any_failure() {
    for fault in [
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
        InjectedFault::NoSpace,
        InjectedFault::IoError,
    ] {
        for nth in 1.. {
            let (disk, mut new) = started_member();
            let disk = disk.with_log();
            let address = [192, 0, 2, 9].into();
            let issued = new.issue_credentials(&CertificateSpec::for_member(member_name(), address)).unwrap();
            disk.placement.fail_nth(nth, fault);
            let kept = store_member_credentials(&disk.data.etcd, &issued);
            disk.placement.clear_fault();
            let prepared = disk.prepare(&restart_elsewhere()).unwrap();
            assert!(kept.is_err() || prepared.is_certified_at(address));
            if kept.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn a_directory_without_member_data_cannot_restart() {
    let disk = TestDisk::new();
    let error = disk.prepare(&restart_options()).unwrap_err();
    assert!(matches!(error, ConsensusError::NoMember { .. }), "{error:?}");
    disk.prepare(&bootstrap_options()).unwrap();
    let error = disk.prepare(&restart_options()).unwrap_err();
    assert!(matches!(error, ConsensusError::NoMember { .. }), "a second cluster was created: {error:?}");
}
