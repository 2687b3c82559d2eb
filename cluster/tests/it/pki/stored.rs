//! What is loaded is checked.

use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore};
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::pki::{Authority, AuthorityError, CA, CA_KEY, NewAuthority, REVOKED};
use nodekeel_cluster::testing::authority_values;
use proptest::prelude::*;

use super::{leaf, saved};

async fn value(root: &Arc<dyn KvStore>, key: &str) -> Vec<u8> {
    root.get(key.as_bytes()).await.unwrap().unwrap().value
}

/// The error of loading with another value under a key.
async fn with(root: &Arc<dyn KvStore>, key: &str, other: &[u8]) -> AuthorityError {
    let right = value(root, key).await;
    root.put(key.as_bytes(), other).await.unwrap();
    let loaded = Authority::load(Arc::clone(root)).await;
    assert_eq!(value(root, key).await, other, "nothing is put right by itself");
    root.put(key.as_bytes(), &right).await.unwrap();
    Authority::load(Arc::clone(root)).await.unwrap();
    loaded.unwrap_err()
}

#[tokio::test]
async fn a_value_cut_at_any_byte_is_an_error_that_names_it() {
    let (root, authority) = saved().await;
    let certificate = authority.issue(&leaf("member")).await.unwrap().certificate;
    authority.revoke("member").await.unwrap();
    for key in [CA, CA_KEY, REVOKED] {
        let whole = value(&root, key).await;
        for len in 0..whole.len() {
            let error = with(&root, key, &whole[..len]).await;
            assert!(error.to_string().contains(key), "{key} cut to {len}: {error}");
        }
        let more = with(&root, key, &[&whole[..], b"\0"].concat()).await;
        assert!(more.to_string().contains(key), "{more}");
    }
    let key = format!("/etcd-ca/certs/{}", hex(certificate.serial()));
    for len in 0..certificate.der().len() {
        root.put(key.as_bytes(), &certificate.der()[..len]).await.unwrap();
        let error = authority.issued().await.unwrap_err();
        assert!(error.to_string().contains(&key), "{error}");
        assert!(authority.revoke("member").await.is_err(), "what can't be read may be who is meant");
    }
}

#[tokio::test]
async fn a_value_with_any_byte_changed_is_refused() {
    let (root, authority) = saved().await;
    let certificate = authority.issue(&leaf("member")).await.unwrap().certificate;
    authority.revoke("member").await.unwrap();
    for key in [CA, CA_KEY, REVOKED] {
        let whole = value(&root, key).await;
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            with(&root, key, &changed).await;
        }
    }
    let key = format!("/etcd-ca/certs/{}", hex(certificate.serial()));
    for at in 0..certificate.der().len() {
        let mut changed = certificate.der().to_vec();
        changed[at] ^= 1 << (at % 8);
        root.put(key.as_bytes(), &changed).await.unwrap();
        assert!(authority.issued().await.is_err(), "byte {at}");
    }
}

fn hex(serial: &[u8]) -> String {
    let digits: String = serial.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.trim_start_matches("00").to_owned()
}

#[tokio::test]
async fn what_is_missing_is_named_and_never_made_anew() {
    for key in [CA, CA_KEY, REVOKED] {
        let (root, _authority) = saved().await;
        root.delete(KeyRange::key(key)).await.unwrap();
        let error = Authority::load(Arc::clone(&root)).await.unwrap_err();
        assert!(matches!(&error, AuthorityError::Incomplete { missing } if *missing == key), "{error:?}");
        let error = NewAuthority::generate().unwrap().save(Arc::clone(&root)).await.unwrap_err();
        assert!(matches!(&error, AuthorityError::Incomplete { .. } | AuthorityError::Another), "{error:?}");
    }
}

#[tokio::test]
async fn values_of_another_authority_are_refused() {
    let (root, authority) = saved().await;
    let (other_root, other) = saved().await;
    let mismatch = with(&root, CA, other.certificate().der()).await;
    assert!(matches!(mismatch, AuthorityError::KeyMismatch), "{mismatch:?}");
    let mismatch = with(&root, CA_KEY, &value(&other_root, CA_KEY).await).await;
    assert!(matches!(mismatch, AuthorityError::KeyMismatch), "{mismatch:?}");
    let forged = with(&root, REVOKED, &value(&other_root, REVOKED).await).await;
    assert!(matches!(&forged, AuthorityError::Malformed { key, .. } if key == REVOKED), "{forged:?}");
    let leaf = authority.issue(&leaf("member")).await.unwrap();
    let no_ca = with(&root, CA, leaf.certificate.der()).await;
    assert!(matches!(no_ca, AuthorityError::NotAnAuthority { .. }), "{no_ca:?}");
    let foreign = other.issue(&super::leaf("member")).await.unwrap().certificate;
    let key = format!("/etcd-ca/certs/{}", hex(foreign.serial()));
    root.put(key.as_bytes(), foreign.der()).await.unwrap();
    let error = authority.issued().await.unwrap_err();
    assert!(matches!(error, AuthorityError::NotIssued { .. }), "{error:?}");
}

#[tokio::test]
async fn a_certificate_under_another_serial_number_is_refused() {
    let (root, authority) = saved().await;
    let certificate = authority.issue(&leaf("member")).await.unwrap().certificate;
    root.put(b"/etcd-ca/certs/00ff", certificate.der()).await.unwrap();
    let error = authority.issued().await.unwrap_err();
    assert!(error.to_string().contains("/etcd-ca/certs/00ff"), "{error}");
}

#[tokio::test]
async fn a_leaf_is_no_authority_on_the_disk_either() {
    let mut new = NewAuthority::generate().unwrap();
    let issued = new.issue(&leaf("member")).unwrap();
    assert!(matches!(NewAuthority::from_credentials(issued), Err(AuthorityError::NotAnAuthority { .. })));
    let mut other = NewAuthority::generate().unwrap();
    let foreign = other.issue(&leaf("member")).unwrap().certificate;
    assert!(matches!(new.issued_before(foreign), Err(AuthorityError::NotIssued { .. })));
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    assert!(new.save(root).await.is_ok());
}

/// A certificate, and a list with an entry.
fn valid() -> [Vec<u8>; 2] {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let (_, authority) = saved().await;
        let certificate = authority.issue(&leaf("member")).await.unwrap().certificate;
        authority.revoke("member").await.unwrap();
        [certificate.der().to_vec(), authority.revoked().await.unwrap().der().to_vec()]
    })
}

#[test]
fn no_valid_value_with_bytes_changed_put_in_or_taken_out_makes_it_panic() {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let (valid, mut runner) = (valid(), proptest::test_runner::TestRunner::new(config));
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), 0..3u8, any::<u8>()), 1..4);
    let mutated = runner.run(&(0..valid.len(), edits), |(which, edits)| {
        let mut bytes = valid[which].clone();
        for (at, edit, byte) in edits {
            let at = at.index(bytes.len());
            match edit {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        authority_values(&bytes);
        Ok(())
    });
    mutated.unwrap();
}

proptest! {
    #[test]
    fn arbitrary_values_never_panic(bytes: Vec<u8>) {
        authority_values(&bytes);
    }

    #[test]
    fn any_64_bytes_are_a_key_only_where_its_halves_belong_together(bytes in proptest::collection::vec(any::<u8>(), 64)) {
        authority_values(&bytes);
    }
}
