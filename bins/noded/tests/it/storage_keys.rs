//! The keys of a volume that node and cluster open together, in a guest: rotated, lost, recovered, and asked of peers.

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{NodeId, NodeStore, SecretBytes};
use nodekeel_localstorage::volume::UnlockKey;
use nodekeel_node::node::NodeHandle;
use nodekeel_node::parts::{ClusterKeySource, ClusterKeysFuture};
use nodekeel_node::v1::{
    AddRecoveryPassphraseRequest, ConfirmRecoveryPassphraseRequest, HealthRequest, RecoveryPassphrase,
    RestartRequest, RotateStorageKeysRequest, StorageEncryption, StorageResponse, TrimStorageRequest,
    UnlockStorageRequest,
};
use tonic::Code;

use crate::storage_cluster::{VolumeMember, wait_running, wait_temporary_removed};
use crate::storage_device::DeviceNode;

/// The encryption once the cluster's half of the key is in this state.
async fn wait_cluster_key(node: &mut DeviceNode, state: &str) -> StorageEncryption {
    let is = |status: &StorageResponse| {
        status.encryption.as_ref().is_some_and(|encryption| encryption.cluster_key == state)
    };
    node.wait_status(is).await.encryption.unwrap()
}

pub(crate) fn slots(encryption: &StorageEncryption) -> Vec<String> {
    let mut slots: Vec<_> =
        encryption.slots.iter().map(|slot| format!("{} {}", slot.kind, slot.generation)).collect();
    slots.sort();
    slots
}

pub(crate) async fn key_conditions(node: &mut DeviceNode) -> Vec<String> {
    let health = node.client.health(HealthRequest::default()).await.unwrap().into_inner();
    let about_keys = health.conditions.into_iter().filter(|condition| condition.object == "data volume");
    about_keys.map(|condition| condition.problem).collect()
}

/// The keys of the node in its cluster.
fn cluster_store(node: &DeviceNode) -> (NodeStore, NodeId) {
    let cluster: ClusterNode = node.node.extension().unwrap();
    (cluster.node_store().unwrap(), cluster.cluster_identity().unwrap().node_id)
}

pub(crate) async fn add_recovery(node: &mut DeviceNode) -> RecoveryPassphrase {
    let added = node.client.add_recovery_passphrase(AddRecoveryPassphraseRequest::default()).await;
    added.unwrap().into_inner().passphrase.unwrap()
}

/// Adds a passphrase, as an operator who has typed it back.
pub(crate) async fn confirm_recovery(node: &mut DeviceNode) -> RecoveryPassphrase {
    let passphrase = add_recovery(node).await;
    let request = ConfirmRecoveryPassphraseRequest { passphrase: Some(passphrase.clone()) };
    node.client.confirm_recovery_passphrase(request).await.unwrap();
    passphrase
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn keys_of_node_and_cluster_are_rotated_and_a_lost_half_needs_the_recovery_passphrase() {
    let member = VolumeMember::split("operator").await;
    let mut node = member.start().await;
    wait_running(&mut node).await;
    let encryption = wait_cluster_key(&mut node, "stored").await;
    assert_eq!(slots(&encryption), ["local 1", "split 1"]);
    let lacking = ["opens by the node unlock key alone until it has a recovery passphrase"];
    assert_eq!(key_conditions(&mut node).await, lacking);
    let refused = node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap_err();
    assert!(refused.message().contains("type nodectl storage recovery"), "{refused:?}");

    // A confirmed passphrase replaces those that are not confirmed.
    let first = add_recovery(&mut node).await;
    let second = add_recovery(&mut node).await;
    let unconfirmed = ["opens by the node unlock key alone until its recovery passphrase is confirmed"];
    assert_eq!(key_conditions(&mut node).await, unconfirmed);
    let confirm = |passphrase: &RecoveryPassphrase| ConfirmRecoveryPassphraseRequest {
        passphrase: Some(passphrase.clone()),
    };
    let old = node.client.confirm_recovery_passphrase(confirm(&first)).await.unwrap_err();
    assert_eq!(old.code(), Code::InvalidArgument, "{old:?}");
    node.client.confirm_recovery_passphrase(confirm(&second)).await.unwrap();
    wait_temporary_removed(&mut node).await;
    assert_eq!(key_conditions(&mut node).await, [""; 0]);

    node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap();
    let encryption = wait_cluster_key(&mut node, "stored").await;
    assert_eq!(slots(&encryption), ["recovery 2", "split 2"]);
    let trimmed = node.client.trim_storage(TrimStorageRequest {}).await.unwrap_err();
    assert!(trimmed.message().contains("encrypted and authenticated"), "{trimmed:?}");

    // An operator restores an old backup of etcd.
    let (nodes, id) = cluster_store(&node);
    let read = nodes.load_unlock_keys(&id, &encryption.volume).await.unwrap();
    nodes.replace_unlock_keys(&read, &[SecretBytes::new(vec![7; 32])]).await.unwrap();
    node.client.restart(RestartRequest { dn: "root.cluster.keys".into() }).await.unwrap();
    wait_cluster_key(&mut node, "lost").await;
    let lost = key_conditions(&mut node).await;
    assert!(lost.len() == 1 && lost[0].contains("recovery passphrase alone"), "{lost:?}");
    let refused = node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap_err();
    assert!(
        refused.code() == Code::FailedPrecondition && refused.message().contains("--recovery"),
        "{refused:?}"
    );
    let passphrase = Some(first);
    let void = node.client.rotate_storage_keys(RotateStorageKeysRequest { passphrase }).await.unwrap_err();
    assert_eq!(void.code(), Code::InvalidArgument, "{void:?}");
    let passphrase = Some(second.clone());
    node.client.rotate_storage_keys(RotateStorageKeysRequest { passphrase }).await.unwrap();
    let encryption = wait_cluster_key(&mut node, "stored").await;
    assert_eq!(slots(&encryption), ["recovery 2", "split 3"]);
    node.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");

    let mut node = member.start().await;
    node.wait_status(|status| status.state == "locked").await;
    let passphrase = Some(second);
    node.client.unlock_storage(UnlockStorageRequest { passphrase }).await.unwrap();
    wait_running(&mut node).await;
    wait_cluster_key(&mut node, "stored").await;
    node.stop().await;
}

/// Peers with these keys of the node.
#[derive(Debug)]
struct FixedPeers(Vec<UnlockKey>);

impl ClusterKeySource for FixedPeers {
    fn cluster_keys(&self) -> ClusterKeysFuture<'_> {
        Box::pin(std::future::ready(Ok(self.0.clone())))
    }
}

async fn start_with_peers(member: &VolumeMember, keys: Vec<UnlockKey>) -> DeviceNode {
    let builder = NodeHandle::builder("test.toml", member.config()).cluster_keys(FixedPeers(keys));
    DeviceNode::of(builder.data(member.fixture.data()).start().unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn a_node_that_starts_cold_opens_its_volume_by_the_key_of_its_peers_alone() {
    let member = VolumeMember::split("peers").await;
    let mut node = start_with_peers(&member, Vec::new()).await;
    let running = wait_running(&mut node).await;
    confirm_recovery(&mut node).await;
    wait_temporary_removed(&mut node).await;
    let encryption = wait_cluster_key(&mut node, "stored").await;
    let (nodes, id) = cluster_store(&node);
    let stored = nodes.load_unlock_keys(&id, &encryption.volume).await.unwrap();
    let [stored] = stored.keys() else { panic!("{stored:?}") };
    let right = UnlockKey::from_bytes(stored.expose_bytes()).unwrap();
    let wrong = UnlockKey::from_bytes(&[7; 32]).unwrap();
    node.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");

    let mut node = start_with_peers(&member, vec![wrong.clone()]).await;
    let is_refused = |status: &StorageResponse| {
        status.state == "locked" && status.detail.contains("the cluster unlock key is not that of volume")
    };
    node.wait_status(is_refused).await;
    node.stop().await;
    assert!(!member.fixture.is_open());

    // During a rotation its peers have two keys.
    let mut node = start_with_peers(&member, vec![wrong, right]).await;
    let again = wait_running(&mut node).await;
    assert_eq!((again.node, again.cluster), (running.node, running.cluster));
    assert_eq!(slots(&wait_cluster_key(&mut node, "stored").await), ["recovery 1", "split 1"]);
    node.stop().await;
}
