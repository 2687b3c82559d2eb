//! Several files of a directory changed at once.

use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::{Fault, MemPlacement};
use nodekeel_localstorage::testing::commit_record;
use nodekeel_localstorage::tree::{Data, Site};
use nodekeel_localstorage::{Placement as _, READ_LIMIT};
use proptest::prelude::*;

/// Two files that belong together, in what was placed again after a restart.
fn both(site: &Site) -> (Vec<u8>, Vec<u8>) {
    let data: Data = site.place().unwrap();
    let pki = data.node.credentials;
    (pki.certificate.read().unwrap(), pki.key.read().unwrap())
}

#[test]
fn a_commit_killed_or_failing_at_any_step_is_wholly_old_or_wholly_new() {
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full, Fault::Device] {
        let mut outcomes = Vec::new();
        for at in 1.. {
            let placement = Arc::new(MemPlacement::default());
            let site = Site::new(placement.clone(), "/data");
            let pki = site.place::<Data>().unwrap().node.credentials;
            pki.commit(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
            placement.fail(at, fault);
            let committed = pki.commit(&[(&pki.certificate, b"new"), (&pki.key, b"new key")]);
            placement.restart();
            let found = both(&site);
            let is_new = found == (b"new".to_vec(), b"new key".to_vec());
            let is_old = found == (b"old".to_vec(), b"old key".to_vec());
            assert!(is_new || is_old, "{fault:?} at {at}: {found:?}");
            assert!(is_new || committed.is_err(), "what was said to be done is done");
            let left: Vec<_> = site.place::<Data>().unwrap().node.credentials.list().unwrap();
            assert!(left.iter().all(|entry| entry.name != ".commit"), "{left:?}");
            outcomes.push(is_new);
            if committed.is_ok() {
                break;
            }
        }
        assert!(outcomes.contains(&true) && outcomes.len() > 4, "{outcomes:?}");
        // The first operation is the one that counts: only where it fails is anything old.
        assert_eq!(outcomes[0], fault == Fault::CrashAfter, "{fault:?}: {outcomes:?}");
        assert!(outcomes[1..].iter().all(|is_new| *is_new), "{fault:?}: {outcomes:?}");
    }
}

#[test]
fn a_record_cut_at_any_byte_is_no_commit() {
    let placement = Arc::new(MemPlacement::default());
    let site = Site::new(placement.clone(), "/data");
    let pki = site.place::<Data>().unwrap().node.credentials;
    pki.commit(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
    placement.fail(2, Fault::CrashAfter);
    pki.commit(&[(&pki.certificate, b"new"), (&pki.key, b"new key")]).unwrap_err();
    placement.restart();
    let path = Path::new("node/credentials/.commit");
    let record = placement.read(path).unwrap();
    placement.write(Path::new("node/credentials/cert.pem"), b"old", pki.certificate.mode()).unwrap();
    for len in 0..record.len() {
        placement.write(path, &record[..len], pki.key.mode()).unwrap();
        assert_eq!(both(&site).0, b"old", "cut at {len}");
    }
    placement.write(path, &record, pki.key.mode()).unwrap();
    assert_eq!(both(&site), (b"new".to_vec(), b"new key".to_vec()));
}

#[test]
fn a_commit_takes_files_of_its_own_directory_only() {
    let data: Data = Site::new(Arc::new(MemPlacement::default()), "/data").place().unwrap();
    let refused = data.node.credentials.commit(&[(&data.node.roles, b"all")]).unwrap_err();
    assert!(refused.to_string().contains("roles.pb"), "{refused}");
    assert!(!data.node.roles.exists().unwrap());
}

#[test]
fn a_commit_that_could_not_be_read_again_is_refused_and_changes_nothing() {
    let site = Site::new(Arc::new(MemPlacement::default()), "/data");
    let pki = site.place::<Data>().unwrap().node.credentials;
    pki.commit(&[(&pki.certificate, b"old"), (&pki.key, b"old key")]).unwrap();
    let half = vec![b'x'; usize::try_from(READ_LIMIT / 2).unwrap()];
    let refused = pki.commit(&[(&pki.certificate, &half), (&pki.key, &half)]).unwrap_err();
    assert!(refused.is_too_large(), "{refused:?}");
    assert_eq!(both(&site), (b"old".to_vec(), b"old key".to_vec()));
}

proptest! {
    #[test]
    fn arbitrary_records_never_panic(bytes: Vec<u8>) {
        commit_record(&bytes);
    }
}
