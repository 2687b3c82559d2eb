//! Stored values of the CA are checked when they are loaded.

use std::sync::Arc;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore};
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::pki::{
    CA_CERT_PATH, CA_KEY_PATH, CRL_PATH, CaError, ClusterCa, PendingCa, SEALED_KEY_PATH,
};
use nodekeel_cluster::testing::fuzz_ca_values;
use proptest::prelude::*;

use super::{member_spec, saved_ca};

async fn stored_value(root: &Arc<dyn KvStore>, key: &str) -> Vec<u8> {
    root.get(key.as_bytes()).await.unwrap().unwrap().value
}

/// The error of loading the CA with another value under a key.
async fn load_error_with(root: &Arc<dyn KvStore>, key: &str, other: &[u8]) -> CaError {
    let right = stored_value(root, key).await;
    root.put(key.as_bytes(), other).await.unwrap();
    let loaded = ClusterCa::load_ca(Arc::clone(root)).await;
    assert_eq!(stored_value(root, key).await, other, "the invalid value was replaced");
    root.put(key.as_bytes(), &right).await.unwrap();
    ClusterCa::load_ca(Arc::clone(root)).await.unwrap();
    loaded.unwrap_err()
}

#[tokio::test]
async fn a_ca_value_truncated_at_any_byte_is_an_error_that_names_its_key() {
    let (root, cluster_ca) = saved_ca().await;
    let certificate = cluster_ca.issue_credentials(&member_spec("member")).await.unwrap().certificate;
    cluster_ca.revoke_name("member").await.unwrap();
    for key in [CA_CERT_PATH, CA_KEY_PATH, CRL_PATH] {
        let whole = stored_value(&root, key).await;
        for len in 0..whole.len() {
            let error = load_error_with(&root, key, &whole[..len]).await;
            assert!(error.to_string().contains(key), "{key} cut to {len}: {error}");
        }
        let more = load_error_with(&root, key, &[&whole[..], b"\0"].concat()).await;
        assert!(more.to_string().contains(key), "{more}");
    }
    let key = format!("/etcd-ca/certs/{}", hex(certificate.serial_number()));
    for len in 0..certificate.der_bytes().len() {
        root.put(key.as_bytes(), &certificate.der_bytes()[..len]).await.unwrap();
        let error = cluster_ca.list_issued().await.unwrap_err();
        assert!(error.to_string().contains(&key), "{error}");
        assert!(
            cluster_ca.revoke_name("member").await.is_err(),
            "an unreadable certificate may be one of the name"
        );
    }
}

#[tokio::test]
async fn a_ca_value_with_any_byte_changed_is_rejected() {
    let (root, cluster_ca) = saved_ca().await;
    let certificate = cluster_ca.issue_credentials(&member_spec("member")).await.unwrap().certificate;
    cluster_ca.revoke_name("member").await.unwrap();
    for key in [CA_CERT_PATH, CA_KEY_PATH, CRL_PATH] {
        let whole = stored_value(&root, key).await;
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            load_error_with(&root, key, &changed).await;
        }
    }
    let key = format!("/etcd-ca/certs/{}", hex(certificate.serial_number()));
    for at in 0..certificate.der_bytes().len() {
        let mut changed = certificate.der_bytes().to_vec();
        changed[at] ^= 1 << (at % 8);
        root.put(key.as_bytes(), &changed).await.unwrap();
        assert!(cluster_ca.list_issued().await.is_err(), "byte {at}");
    }
}

fn hex(serial: &[u8]) -> String {
    let digits: String = serial.iter().map(|byte| format!("{byte:02x}")).collect();
    digits.trim_start_matches("00").to_owned()
}

#[tokio::test]
async fn a_missing_ca_value_is_named_and_never_recreated() {
    for key in [CA_CERT_PATH, CA_KEY_PATH, CRL_PATH] {
        let (root, _authority) = saved_ca().await;
        root.delete(KeyRange::single_key(key)).await.unwrap();
        let error = ClusterCa::load_ca(Arc::clone(&root)).await.unwrap_err();
        let named = if key == CA_KEY_PATH { SEALED_KEY_PATH } else { key };
        assert!(matches!(&error, CaError::Incomplete { missing } if *missing == named), "{error:?}");
        let error = PendingCa::generate().unwrap().save_to(Arc::clone(&root)).await.unwrap_err();
        assert!(matches!(&error, CaError::Incomplete { .. } | CaError::AnotherCa), "{error:?}");
    }
}

#[tokio::test]
async fn values_of_another_ca_are_rejected() {
    let (root, cluster_ca) = saved_ca().await;
    let (other_root, other) = saved_ca().await;
    let mismatch = load_error_with(&root, CA_CERT_PATH, other.ca_certificate().der_bytes()).await;
    assert!(matches!(mismatch, CaError::KeyMismatch), "{mismatch:?}");
    let mismatch = load_error_with(&root, CA_KEY_PATH, &stored_value(&other_root, CA_KEY_PATH).await).await;
    assert!(matches!(mismatch, CaError::KeyMismatch), "{mismatch:?}");
    let forged = load_error_with(&root, CRL_PATH, &stored_value(&other_root, CRL_PATH).await).await;
    assert!(matches!(&forged, CaError::Malformed { key, .. } if key == CRL_PATH), "{forged:?}");
    let spec = cluster_ca.issue_credentials(&member_spec("member")).await.unwrap();
    let no_ca = load_error_with(&root, CA_CERT_PATH, spec.certificate.der_bytes()).await;
    assert!(matches!(no_ca, CaError::NotACa { .. }), "{no_ca:?}");
    let foreign = other.issue_credentials(&super::member_spec("member")).await.unwrap().certificate;
    let key = format!("/etcd-ca/certs/{}", hex(foreign.serial_number()));
    root.put(key.as_bytes(), foreign.der_bytes()).await.unwrap();
    let error = cluster_ca.list_issued().await.unwrap_err();
    assert!(matches!(error, CaError::NotIssued { .. }), "{error:?}");
}

#[tokio::test]
async fn a_certificate_under_another_serial_number_is_rejected() {
    let (root, cluster_ca) = saved_ca().await;
    let certificate = cluster_ca.issue_credentials(&member_spec("member")).await.unwrap().certificate;
    root.put(b"/etcd-ca/certs/00ff", certificate.der_bytes()).await.unwrap();
    let error = cluster_ca.list_issued().await.unwrap_err();
    assert!(error.to_string().contains("/etcd-ca/certs/00ff"), "{error}");
}

#[tokio::test]
async fn a_leaf_certificate_is_rejected_as_a_ca() {
    let mut new = PendingCa::generate().unwrap();
    let issued = new.issue_credentials(&member_spec("member")).unwrap();
    assert!(matches!(PendingCa::from_credentials(issued), Err(CaError::NotACa { .. })));
    let mut other = PendingCa::generate().unwrap();
    let foreign = other.issue_credentials(&member_spec("member")).unwrap().certificate;
    assert!(matches!(new.add_issued(foreign), Err(CaError::NotIssued { .. })));
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    assert!(new.save_to(root).await.is_ok());
}

proptest! {
    #[test]
    fn arbitrary_values_never_panic(bytes: Vec<u8>) {
        fuzz_ca_values(&bytes);
    }

    #[test]
    fn sixty_four_bytes_are_a_ca_key_only_if_both_halves_match(bytes in proptest::collection::vec(any::<u8>(), 64)) {
        fuzz_ca_values(&bytes);
    }
}
