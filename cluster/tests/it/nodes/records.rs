//! The nodes' records: created once, and changed from the version that was read.

use std::sync::Arc;

use nodekeel_cluster::consensus::kv::KvStore;
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::node::{ClusterId, NodeId, NodeRecord, NodeRoles, NodeStore, NodeStoreError};
use nodekeel_localstorage::pki::{CertificateTemplate, PrivateKey};
use prost::Message as _;

use crate::enrolment::parse_ip;

/// The record of 2020, as another program would write it.
#[derive(Clone, PartialEq, prost::Message)]
struct NodeMessage {
    #[prost(bytes = "vec", tag = "1")]
    certificate: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    cluster_unlock_key: Vec<u8>,
    #[prost(string, tag = "3")]
    address: String,
    #[prost(message, optional, tag = "4")]
    roles: Option<RolesMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RolesMessage {
    #[prost(message, optional, tag = "1")]
    consensus_member: Option<RoleMessage>,
    #[prost(message, optional, tag = "2")]
    kubernetes_worker: Option<RoleMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RoleMessage {
    #[prost(string, tag = "1")]
    name: String,
}

pub(super) fn node_and_record() -> (NodeId, NodeRecord) {
    let key = PrivateKey::generate().expect("a key");
    let certificate = CertificateTemplate::default().self_sign(&key).expect("a certificate");
    let id = NodeId::from_key("nodekeel-", &key.public_key()).expect("a valid name");
    let mut roles = NodeRoles::empty();
    roles.set_consensus_member(id.as_str().parse().expect("a valid name")).expect("the first role");
    roles.set_kubernetes_worker(id.as_str()).expect("the first role");
    (id, NodeRecord { certificate, former_unlock_key: None, address: Some(parse_ip("192.0.2.7")), roles })
}

pub(super) fn store_pair() -> (Arc<MemoryKv>, NodeStore) {
    let kv = Arc::new(MemoryKv::new());
    (Arc::clone(&kv), NodeStore::new(kv))
}

#[tokio::test]
async fn a_record_has_the_key_and_the_field_numbers_of_2020() {
    let ((id, record), (kv, nodes)) = (node_and_record(), store_pair());
    nodes.create_record(&id, &record).await.expect("created");
    let stored = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("read").expect("it exists");
    let theirs = NodeMessage::decode(&stored.value[..]).expect("a valid message");
    assert_eq!(theirs.certificate, record.certificate.der_bytes());
    assert_eq!(theirs.address, "192.0.2.7");
    let roles = theirs.roles.clone().expect("roles");
    assert_eq!(roles.consensus_member.map(|role| role.name), Some(id.to_string()));
    assert_eq!(roles.kubernetes_worker.map(|role| role.name), Some(id.to_string()));
    let sealed = NodeMessage { cluster_unlock_key: b"half a key".to_vec(), ..theirs };
    let read = NodeRecord::from_bytes(&sealed.encode_to_vec()).expect("a valid message");
    assert_eq!(read.former_unlock_key.as_ref().map(|key| key.expose_bytes()), Some(&b"half a key"[..]));
    assert!(!format!("{read:?}").contains("half"), "a secret is printed");
}

#[tokio::test]
async fn a_record_is_created_once_and_only_for_the_node_of_its_key() {
    let ((id, record), (other, foreign), (_, nodes)) = (node_and_record(), node_and_record(), store_pair());
    let first = nodes.create_record(&id, &record).await.expect("created");
    assert_eq!(
        nodes.create_record(&id, &record).await.expect("the existing record"),
        first,
        "another record was created"
    );
    let wrong = nodes.create_record(&id, &foreign).await;
    assert!(matches!(wrong, Err(NodeStoreError::Invalid { .. })), "{wrong:?}");
    let key = PrivateKey::generate().expect("a key");
    let renewed = NodeRecord {
        certificate: CertificateTemplate::default().self_sign(&key).expect("created"),
        ..record.clone()
    };
    assert!(nodes.create_record(&id, &renewed).await.is_err());
    assert!(matches!(nodes.update_record(&other, |_| {}).await, Err(NodeStoreError::NotFound { .. })));
    assert_eq!(nodes.list_records().await.expect("listed").len(), 1);
}

#[tokio::test]
async fn concurrent_record_updates_are_all_applied() {
    let ((id, record), (kv, nodes)) = (node_and_record(), store_pair());
    nodes.create_record(&id, &record).await.expect("created");
    let before = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("read").expect("it exists");
    // Each update adds one to the address that it finds: an overwritten update would be missing from the sum.
    let add_one = |nodes: NodeStore, id: NodeId| async move {
        nodes
            .update_record(&id, |record| {
                if let Some(std::net::IpAddr::V4(address)) = record.address {
                    record.address = Some(std::net::Ipv4Addr::from(u32::from(address) + 1).into());
                }
            })
            .await
    };
    let all = (0..10).map(|_| tokio::spawn(add_one(nodes.clone(), id.clone())));
    for done in futures_util::future::join_all(all).await {
        done.expect("ended").expect("created");
    }
    let existing = nodes.load_record(&id).await.expect("read").expect("it exists");
    assert_eq!(existing.record.address, Some(parse_ip("192.0.2.17")));
    let after = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("read").expect("it exists");
    assert_eq!(after.version, before.version + 10);
    nodes.update_record(&id, |_| {}).await.expect("an update without a change");
    let same = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("read").expect("it exists");
    assert_eq!(same.version, after.version, "an unchanged record was written");
}

#[tokio::test]
async fn an_invalid_record_is_an_error_that_names_its_key() {
    let ((id, record), (kv, nodes)) = (node_and_record(), store_pair());
    let key = format!("/nodes/{id}");
    for wrong in [&b""[..], b"\xff", b"\x0a\x01x"] {
        kv.put(key.as_bytes(), wrong).await.expect("put");
        for error in
            [nodes.load_record(&id).await.map(drop), nodes.create_record(&id, &record).await.map(drop)]
        {
            let Err(NodeStoreError::Invalid { key: named, .. }) = error else { panic!("{error:?}") };
            assert_eq!(named, key);
        }
    }
    kv.put(b"/nodes/nobody", b"").await.expect("put");
    assert!(nodes.list_records().await.is_err());
}

#[tokio::test]
async fn a_role_is_set_once() {
    let (_, mut record) = node_and_record();
    let had = record.roles.clone();
    assert!(record.roles.set_consensus_member("another".parse().expect("a valid name")).is_err());
    assert!(record.roles.set_kubernetes_worker("another").is_err());
    assert_eq!(record.roles, had);
}

#[tokio::test]
async fn the_cluster_id_is_written_once() {
    let (kv, nodes) = store_pair();
    assert!(matches!(nodes.cluster_id().await, Err(NodeStoreError::ClusterIdMissing)));
    let (one, other) = (ClusterId::from_bytes([1; 16]), ClusterId::from_bytes([2; 16]));
    for asked in [one, other, one] {
        assert_eq!(nodes.init_cluster_id(asked).await.expect("written"), one);
    }
    assert_eq!(nodes.cluster_id().await.expect("written"), one);
    kv.put(b"/cluster", b"short").await.expect("put");
    assert!(matches!(nodes.cluster_id().await, Err(NodeStoreError::ClusterIdMissing)));
}
