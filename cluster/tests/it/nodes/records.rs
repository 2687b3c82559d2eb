//! The nodes' records: made once, and changed from what was read.

use std::sync::Arc;

use nodekeel_cluster::consensus::kv::KvStore;
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::node::{ClusterId, NodeId, NodeRecord, NodeStore, RecordError, Roles};
use nodekeel_localstorage::pki::{PrivateKey, Template};
use prost::Message as _;

use crate::machine::ip;

/// The record of 2020, as another program would write it.
#[derive(Clone, PartialEq, prost::Message)]
struct Node {
    #[prost(bytes = "vec", tag = "1")]
    certificate: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    cluster_unlock_key: Vec<u8>,
    #[prost(string, tag = "3")]
    address: String,
    #[prost(message, optional, tag = "4")]
    roles: Option<NodeRoles>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NodeRoles {
    #[prost(message, optional, tag = "1")]
    consensus_member: Option<Named>,
    #[prost(message, optional, tag = "2")]
    kubernetes_worker: Option<Named>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Named {
    #[prost(string, tag = "1")]
    name: String,
}

fn node() -> (NodeId, NodeRecord) {
    let key = PrivateKey::generate().expect("a key");
    let certificate = Template::default().self_sign(&key).expect("a certificate");
    let id = NodeId::new("nodekeel-", &key.public()).expect("a name");
    let mut roles = Roles::none();
    roles.make_consensus_member(id.as_str().parse().expect("a name")).expect("the first");
    roles.make_kubernetes_worker(id.as_str()).expect("the first");
    (id, NodeRecord { certificate, unlock_key: None, address: Some(ip("192.0.2.7")), roles })
}

fn store() -> (Arc<MemoryKv>, NodeStore) {
    let kv = Arc::new(MemoryKv::new());
    (Arc::clone(&kv), NodeStore::new(kv))
}

#[tokio::test]
async fn a_record_has_the_key_and_the_field_numbers_of_2020() {
    let ((id, record), (kv, nodes)) = (node(), store());
    nodes.create(&id, &record).await.expect("it is made");
    let stored = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("it is read").expect("it is there");
    let theirs = Node::decode(&stored.value[..]).expect("it is one");
    assert_eq!(theirs.certificate, record.certificate.der());
    assert_eq!(theirs.address, "192.0.2.7");
    let roles = theirs.roles.clone().expect("it has some");
    assert_eq!(roles.consensus_member.map(|role| role.name), Some(id.to_string()));
    assert_eq!(roles.kubernetes_worker.map(|role| role.name), Some(id.to_string()));
    let sealed = Node { cluster_unlock_key: b"half a key".to_vec(), ..theirs };
    let read = NodeRecord::parse(&sealed.encode_to_vec()).expect("it is one");
    assert_eq!(read.unlock_key.as_ref().map(|key| key.expose()), Some(&b"half a key"[..]));
    assert!(!format!("{read:?}").contains("half"), "a secret is printed");
}

#[tokio::test]
async fn a_record_is_made_once_and_by_the_node_of_that_key_alone() {
    let ((id, record), (other, foreign), (_, nodes)) = (node(), node(), store());
    let first = nodes.create(&id, &record).await.expect("it is made");
    assert_eq!(nodes.create(&id, &record).await.expect("it is there"), first, "made again, it is the same");
    let wrong = nodes.create(&id, &foreign).await;
    assert!(matches!(wrong, Err(RecordError::Invalid { .. })), "{wrong:?}");
    let key = PrivateKey::generate().expect("a key");
    let renewed =
        NodeRecord { certificate: Template::default().self_sign(&key).expect("made"), ..record.clone() };
    assert!(nodes.create(&id, &renewed).await.is_err());
    assert!(matches!(nodes.update(&other, |_| {}).await, Err(RecordError::Absent { .. })));
    assert_eq!(nodes.list().await.expect("they are read").len(), 1);
}

#[tokio::test]
async fn changes_of_many_at_once_are_all_made() {
    let ((id, record), (kv, nodes)) = (node(), store());
    nodes.create(&id, &record).await.expect("it is made");
    let before = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("it is read").expect("it is there");
    // Each adds one to the address that it finds: an update that overwrote another's would be missing from the sum.
    let add_one = |nodes: NodeStore, id: NodeId| async move {
        nodes
            .update(&id, |record| {
                if let Some(std::net::IpAddr::V4(address)) = record.address {
                    record.address = Some(std::net::Ipv4Addr::from(u32::from(address) + 1).into());
                }
            })
            .await
    };
    let all = (0..10).map(|_| tokio::spawn(add_one(nodes.clone(), id.clone())));
    for done in futures_util::future::join_all(all).await {
        done.expect("it ends").expect("it is made");
    }
    let there = nodes.load(&id).await.expect("it is read").expect("it is there");
    assert_eq!(there.record.address, Some(ip("192.0.2.17")));
    let after = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("it is read").expect("it is there");
    assert_eq!(after.version, before.version + 10);
    nodes.update(&id, |_| {}).await.expect("nothing is to be done");
    let same = kv.get(format!("/nodes/{id}").as_bytes()).await.expect("it is read").expect("it is there");
    assert_eq!(same.version, after.version, "what stays the same is not written");
}

#[tokio::test]
async fn what_is_no_record_is_an_error_that_names_its_key() {
    let ((id, record), (kv, nodes)) = (node(), store());
    let key = format!("/nodes/{id}");
    for wrong in [&b""[..], b"\xff", b"\x0a\x01x"] {
        kv.put(key.as_bytes(), wrong).await.expect("it is put");
        for error in [nodes.load(&id).await.map(drop), nodes.create(&id, &record).await.map(drop)] {
            let Err(RecordError::Invalid { key: named, .. }) = error else { panic!("{error:?}") };
            assert_eq!(named, key);
        }
    }
    kv.put(b"/nodes/nobody", b"").await.expect("it is put");
    assert!(nodes.list().await.is_err());
}

#[tokio::test]
async fn a_role_is_given_once() {
    let (_, mut record) = node();
    let had = record.roles.clone();
    assert!(record.roles.make_consensus_member("another".parse().expect("a name")).is_err());
    assert!(record.roles.make_kubernetes_worker("another").is_err());
    assert_eq!(record.roles, had);
}

#[tokio::test]
async fn a_cluster_says_once_which_one_it_is() {
    let (kv, nodes) = store();
    assert!(matches!(nodes.cluster().await, Err(RecordError::NoCluster)));
    let (one, other) = (ClusterId::new([1; 16]), ClusterId::new([2; 16]));
    for asked in [one, other, one] {
        assert_eq!(nodes.found(asked).await.expect("it is said"), one);
    }
    assert_eq!(nodes.cluster().await.expect("it is said"), one);
    kv.put(b"/cluster", b"short").await.expect("it is put");
    assert!(matches!(nodes.cluster().await, Err(RecordError::NoCluster)));
}
