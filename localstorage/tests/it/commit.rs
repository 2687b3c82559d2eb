//! Atomic replacement of several files of a directory.

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
use nodekeel_localstorage::pki::PkiError;
use nodekeel_localstorage::testing::fuzz_commit_record;
use nodekeel_localstorage::tree::LayoutTarget;
use nodekeel_localstorage::{FileMode, FileStore as _, READ_LIMIT};
use proptest::prelude::*;

use crate::monogon_root::DataPartition;

/// Reads two files of a commit through a layout created after a restart.
fn read_both_files(target: &LayoutTarget) -> (Vec<u8>, Vec<u8>) {
    let data: DataPartition = target.create_layout().unwrap();
    let pki = data.node.credentials;
    (pki.certificate.read().unwrap(), pki.key.read().unwrap())
}

#[test]
fn a_commit_killed_or_failing_at_any_step_is_all_old_or_all_new() {
    for fault in [
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
        InjectedFault::NoSpace,
        InjectedFault::IoError,
    ] {
        let mut outcomes = Vec::new();
        for at in 1.. {
            let store = Arc::new(MemFileStore::default());
            let target = LayoutTarget::new(store.clone(), "/data");
            let pki = target.create_layout::<DataPartition>().unwrap().node.credentials;
            pki.commit_files(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
            store.fail_nth(at, fault);
            let committed = pki.commit_files(&[(&pki.certificate, b"new"), (&pki.key, b"new key")]);
            store.clear_fault();
            let found = read_both_files(&target);
            let is_new = found == (b"new".to_vec(), b"new key".to_vec());
            let is_old = found == (b"old".to_vec(), b"old key".to_vec());
            assert!(is_new || is_old, "{fault:?} at {at}: {found:?}");
            assert!(is_new || committed.is_err(), "a reported commit is durable");
            let left: Vec<_> =
                target.create_layout::<DataPartition>().unwrap().node.credentials.list().unwrap();
            assert!(left.iter().all(|entry| entry.name != ".commit"), "{left:?}");
            outcomes.push(is_new);
            if committed.is_ok() {
                break;
            }
        }
        assert!(outcomes.contains(&true) && outcomes.len() > 4, "{outcomes:?}");
        // The first operation is the commit: the files are old only if it fails.
        assert_eq!(outcomes[0], fault == InjectedFault::CrashAfter, "{fault:?}: {outcomes:?}");
        assert!(outcomes[1..].iter().all(|is_new| *is_new), "{fault:?}: {outcomes:?}");
    }
}

/// A directory with a half-replayed commit: the certificate is new, the key is old, the record is complete.
fn half_replayed_commit() -> (Arc<MemFileStore>, LayoutTarget, Vec<u8>) {
    let store = Arc::new(MemFileStore::default());
    let target = LayoutTarget::new(store.clone(), "/data");
    let pki = target.create_layout::<DataPartition>().unwrap().node.credentials;
    pki.commit_files(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
    store.fail_nth(2, InjectedFault::CrashAfter);
    pki.commit_files(&[(&pki.certificate, b"new"), (&pki.key, b"new key")]).unwrap_err();
    store.clear_fault();
    assert_eq!(
        (pki.certificate.read().unwrap(), pki.key.read().unwrap()),
        (b"new".into(), b"old key".into())
    );
    let record = store.read(Path::new(RECORD)).unwrap();
    (store, target, record)
}

const RECORD: &str = "node/credentials/.commit";

#[test]
fn a_damaged_commit_record_beside_half_replayed_files_is_an_error_and_stays() {
    let (store, target, record) = half_replayed_commit();
    let zeroed = vec![0; record.len()];
    let flipped: Vec<u8> = record.iter().map(|byte| byte ^ 1).collect();
    let cuts = (0..record.len()).map(|len| &record[..len]);
    for damaged in cuts.chain([&zeroed[..], &flipped]) {
        store.write(Path::new(RECORD), damaged, FileMode::PRIVATE_FILE).unwrap();
        let error = anyhow::Error::from(target.create_layout::<DataPartition>().unwrap_err());
        let text = format!("{error:#}");
        assert!(
            text.contains("credentials/.commit: this record of an interrupted file update is damaged"),
            "{text}"
        );
        assert_eq!(store.read(Path::new(RECORD)).unwrap(), damaged, "the record was changed");
    }
    store.write(Path::new(RECORD), &record, FileMode::PRIVATE_FILE).unwrap();
    assert_eq!(read_both_files(&target), (b"new".to_vec(), b"new key".to_vec()), "the record was restored");
}

#[test]
fn credentials_beside_a_damaged_commit_record_are_not_loaded() {
    let (store, target, record) = half_replayed_commit();
    let pki = target.create_layout::<DataPartition>().unwrap().node.credentials;
    store.write(Path::new(RECORD), &record[..record.len() - 1], FileMode::PRIVATE_FILE).unwrap();
    let error = pki.load_credentials().unwrap_err();
    let PkiError::Read { source, .. } = &error else { panic!("{error:?}") };
    assert!(source.is_damaged_commit(), "{error:?}");
}

#[test]
fn a_commit_accepts_only_files_of_its_directory() {
    let data: DataPartition =
        LayoutTarget::new(Arc::new(MemFileStore::default()), "/data").create_layout().unwrap();
    let rejected = data.node.credentials.commit_files(&[(&data.node.roles, b"all")]).unwrap_err();
    assert!(rejected.to_string().contains("roles.pb"), "{rejected}");
    assert!(!data.node.roles.exists().unwrap());
}

#[test]
fn a_commit_over_the_read_limit_is_rejected_and_changes_nothing() {
    let target = LayoutTarget::new(Arc::new(MemFileStore::default()), "/data");
    let pki = target.create_layout::<DataPartition>().unwrap().node.credentials;
    pki.commit_files(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
    let half = vec![b'x'; usize::try_from(READ_LIMIT / 2).unwrap()];
    let rejected = pki.commit_files(&[(&pki.certificate, &half), (&pki.key, &half)]).unwrap_err();
    assert!(rejected.is_too_large(), "{rejected:?}");
    assert_eq!(read_both_files(&target), (b"old".to_vec(), b"old key".to_vec()));
}

proptest! {
    #[test]
    fn arbitrary_records_never_panic(bytes: Vec<u8>) {
        fuzz_commit_record(&bytes);
    }
}
