//! The CA, on a store in memory.

mod crl_sync;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use nodekeel_cluster::consensus::MemberName;
use nodekeel_cluster::consensus::kv::{
    KeyRange, KvError, KvStore, RangeResponse, Revision, Txn, TxnResponse, WatchStream,
};
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::pki::{CaError, CertificateSpec, ClusterCa, ISSUED_PREFIX, PendingCa, SubjectNames};
use nodekeel_localstorage::pki::Certificate;

pub(crate) fn member_name(name: &str) -> MemberName {
    name.parse().unwrap()
}

pub(crate) fn member_spec(of: &str) -> CertificateSpec {
    CertificateSpec::for_member(member_name(of), [192, 0, 2, 1].into())
}

pub(crate) async fn saved_ca() -> (Arc<dyn KvStore>, ClusterCa) {
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    let cluster_ca = PendingCa::generate().unwrap().save_to(Arc::clone(&root)).await.unwrap();
    (root, cluster_ca)
}

#[tokio::test]
async fn a_ca_is_saved_once_with_the_certificates_it_already_issued() {
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    assert!(matches!(ClusterCa::load_ca(Arc::clone(&root)).await, Err(CaError::NotFound)));
    let mut new = PendingCa::generate().unwrap();
    let first = new.issue_credentials(&member_spec("first")).unwrap();
    let kept = new.to_credentials().unwrap();
    let saved = new.save_to(Arc::clone(&root)).await.unwrap();
    assert_eq!(saved.list_issued().await.unwrap(), std::slice::from_ref(&first.certificate));
    let revision = root.range(KeyRange::all_keys()).await.unwrap().revision;
    // Killed before it knew of the success: the next process restores the CA from the disk, and saves it
    // again.
    let mut again = PendingCa::from_credentials(kept).unwrap();
    again.add_issued(first.certificate.clone()).unwrap();
    again.save_to(Arc::clone(&root)).await.unwrap();
    assert_eq!(
        root.range(KeyRange::all_keys()).await.unwrap().revision,
        revision,
        "a repeated save has changed the store"
    );
    let other = PendingCa::generate().unwrap().save_to(Arc::clone(&root)).await;
    assert!(matches!(other, Err(CaError::AnotherCa)), "{other:?}");
    let loaded = ClusterCa::load_ca(root).await.unwrap();
    assert_eq!(loaded.ca_certificate(), new.ca_certificate());
    assert!(!loaded.revocation_list().await.unwrap().is_revoked(&first.certificate));
}

#[tokio::test]
async fn a_certificate_names_its_subject_and_never_expires() {
    let (root, cluster_ca) = saved_ca().await;
    let member = cluster_ca.issue_credentials(&member_spec("member")).await.unwrap().certificate;
    let client = cluster_ca
        .issue_credentials(&CertificateSpec::for_client(member_name("client")))
        .await
        .unwrap()
        .certificate;
    for certificate in [&member, &client] {
        assert!(certificate.is_signed_by(cluster_ca.ca_certificate()) && !certificate.is_ca());
        let seconds = certificate.not_after().duration_since(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(seconds, Duration::from_secs(253_402_300_799), "9999-12-31T23:59:59Z");
        assert!(
            (12..=16).contains(&certificate.serial_number().len()) && certificate.serial_number()[0] < 0x80,
            "127 bits"
        );
    }
    let named = SubjectNames::from_certificate(&member);
    let peer_name = format!("etcd-peer.{}", cluster_ca.ca_certificate().public_key().short_id());
    assert_eq!(named.common_name.as_deref(), Some("member"));
    assert_eq!(named.dns_names, ["member".to_owned(), peer_name]);
    assert_eq!(named.ip_addresses, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    let named = SubjectNames::from_certificate(&client);
    assert!(named.dns_names.is_empty() && named.ip_addresses.is_empty() && named.is_named("client"));
    let recorded = root.range(KeyRange::prefix(ISSUED_PREFIX)).await.unwrap().kvs;
    assert_eq!(recorded.len(), 2, "each certificate is recorded before it is returned");
}

#[tokio::test]
async fn a_public_key_is_certified_without_its_private_key() {
    let (_root, cluster_ca) = saved_ca().await;
    let key = nodekeel_localstorage::pki::PrivateKey::generate().unwrap();
    let certificate = cluster_ca.certify_key(key.public_key(), &member_spec("member")).await.unwrap();
    assert_eq!(certificate.public_key(), key.public_key());
}

#[tokio::test]
async fn all_certificates_of_a_name_are_revoked_and_no_other() {
    let (_root, cluster_ca) = saved_ca().await;
    let mut issued: Vec<Certificate> = Vec::new();
    for of in ["gone", "gone", "stays", "gone"] {
        issued.push(cluster_ca.issue_credentials(&member_spec(of)).await.unwrap().certificate);
    }
    let client = cluster_ca
        .issue_credentials(&CertificateSpec::for_client(member_name("gone")))
        .await
        .unwrap()
        .certificate;
    assert_eq!(cluster_ca.revoke_name("gone").await.unwrap().len(), 4);
    let list = cluster_ca.revocation_list().await.unwrap();
    let revoked: Vec<_> =
        issued.iter().chain([&client]).map(|certificate| list.is_revoked(certificate)).collect();
    assert_eq!(revoked, [true, true, false, true, true]);
    let der = list.der_bytes().to_vec();
    assert_eq!(cluster_ca.revoke_name("gone").await.unwrap().len(), 4, "revoking again succeeds");
    assert_eq!(cluster_ca.revocation_list().await.unwrap().der_bytes(), der, "and changes nothing");
    let unknown = cluster_ca.revoke_name("nobody").await;
    assert!(matches!(unknown, Err(CaError::UnknownName { .. })), "{unknown:?}");
    let later = cluster_ca.issue_credentials(&member_spec("gone")).await.unwrap().certificate;
    assert!(
        !cluster_ca.revocation_list().await.unwrap().is_revoked(&later),
        "a readmitted name gets a valid certificate"
    );
}

/// A store whose calls yield to other tasks first.
#[derive(Debug)]
struct YieldingStore(Arc<dyn KvStore>);

#[async_trait]
impl KvStore for YieldingStore {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        tokio::task::yield_now().await;
        self.0.range(keys).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        tokio::task::yield_now().await;
        self.0.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        self.0.watch(keys, from).await
    }
}

#[tokio::test]
async fn concurrent_revocations_are_all_kept() {
    let (root, cluster_ca) = saved_ca().await;
    let mut issued = Vec::new();
    for number in 0..16 {
        issued.push(
            cluster_ca.issue_credentials(&member_spec(&format!("node-{number}"))).await.unwrap().certificate,
        );
    }
    let revoke = |number| {
        let root = Arc::clone(&root);
        async move {
            let cluster_ca = ClusterCa::load_ca(Arc::new(YieldingStore(root))).await.unwrap();
            cluster_ca.revoke_name(&format!("node-{number}")).await.unwrap();
        }
    };
    join_all((0..16).map(revoke)).await;
    let list = cluster_ca.revocation_list().await.unwrap();
    assert!(issued.iter().all(|certificate| list.is_revoked(certificate)), "a revocation is missing");
}

#[tokio::test]
async fn private_keys_are_never_printed() {
    let (root, cluster_ca) = saved_ca().await;
    let new = PendingCa::generate().unwrap();
    let raw = root.get(b"/etcd-ca/ca-key.der").await.unwrap().unwrap();
    let digits: String = raw.value[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let list = format!("{:?}", &raw.value[..4]);
    for text in [format!("{cluster_ca:?}"), format!("{new:?}"), format!("{raw:?}"), format!("{root:?}")] {
        assert!(!text.contains(&digits) && !text.contains(list.trim_end_matches(']')), "{text}");
    }
    assert!(format!("{raw:?}").contains("64 bytes"));
}
