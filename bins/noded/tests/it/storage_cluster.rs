//! A cluster of one on a volume that node and cluster open together, in a guest.

use crate::harness::EtcdPorts;
use crate::storage_device::{DeviceFixture, DeviceNode};
use nodekeel_node::v1::{
    AddRecoveryPassphraseRequest, ClusterRequest, ClusterResponse, ConfirmRecoveryPassphraseRequest,
    StorageResponse, UnlockStorageRequest,
};

/// A member whose volume is on a disk, which keeps its ports.
pub(crate) struct VolumeMember {
    pub(crate) fixture: DeviceFixture,
    keys: String,
    ports: EtcdPorts,
}

impl VolumeMember {
    /// A volume that node and cluster open together.
    pub(crate) async fn split(cold_start: &str) -> Self {
        let keys = format!(
            "encryption = \"encrypted-and-authenticated\"\nkeys = \"split\"\ncold_start = {cold_start:?}\n\
             wipe = false\n"
        );
        Self::new(&keys).await
    }

    /// A volume with these keys of `[storage]`.
    pub(crate) async fn new(keys: &str) -> Self {
        let ports = EtcdPorts::reserve();
        let keys = keys.to_owned() + &cluster_config(&ports);
        Self { fixture: DeviceFixture::new(640).await, keys, ports }
    }

    pub(crate) fn peer_port(&self) -> u16 {
        self.ports.peer.number()
    }

    pub(crate) fn config(&self) -> String {
        with_etcd(&self.fixture.config(&self.keys))
    }

    pub(crate) async fn start(&self) -> DeviceNode {
        DeviceNode::start(&self.config(), &self.fixture.data()).await
    }
}

/// etcd, and a cluster that the node bootstraps unless it has a ticket.
pub(crate) fn cluster_config(ports: &EtcdPorts) -> String {
    let cluster = "[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\ndeadline = \"10m\"\n";
    ports.section(cluster)
}

/// A configuration without daemons, but with etcd.
pub(crate) fn with_etcd(config: &str) -> String {
    config.replace("services.etcd.enable = false\n", "")
}

pub(crate) async fn wait_running(node: &mut DeviceNode) -> ClusterResponse {
    loop {
        node.wait_ready("root.cluster").await;
        let status = node.client.cluster(ClusterRequest {}).await.unwrap().into_inner();
        // Its cluster may elect another leader, which takes readiness, too.
        if status.state != "Unhealthy" {
            assert_eq!(status.state, "Running", "{status:?}");
            return status;
        }
    }
}

/// The kinds of all key slots, once the cluster has its half of the key.
async fn wait_settled(node: &mut DeviceNode) -> Vec<String> {
    let is_stored = |status: &StorageResponse| {
        status.encryption.as_ref().is_some_and(|encryption| encryption.cluster_key == "stored")
    };
    let status = node.wait_status(is_stored).await;
    status.encryption.unwrap().slots.into_iter().map(|slot| slot.kind).collect()
}

/// Waits until the node unlock key alone opens the volume no more.
pub(crate) async fn wait_temporary_removed(node: &mut DeviceNode) {
    let is_removed = |status: &StorageResponse| {
        status
            .encryption
            .as_ref()
            .is_some_and(|encryption| encryption.slots.iter().all(|slot| slot.kind != "local"))
    };
    node.wait_status(is_removed).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn a_cluster_of_one_on_a_split_volume_starts_cold_by_its_operator() {
    let member = VolumeMember::split("operator").await;
    let mut node = member.start().await;
    node.wait_open().await;
    let running = wait_running(&mut node).await;
    assert_eq!(wait_settled(&mut node).await, ["local", "split"], "the temporary slot stays");
    let request = AddRecoveryPassphraseRequest::default();
    let passphrase = node.client.add_recovery_passphrase(request).await.unwrap().into_inner().passphrase;
    assert_eq!(
        wait_settled(&mut node).await,
        ["local", "split", "recovery"],
        "the operator has not confirmed it"
    );
    let request = ConfirmRecoveryPassphraseRequest { passphrase: passphrase.clone() };
    node.client.confirm_recovery_passphrase(request).await.unwrap();
    wait_temporary_removed(&mut node).await;
    node.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");

    let mut node = member.start().await;
    let status = node.wait_status(|status| status.state == "locked").await;
    assert!(status.detail.contains("no local key slot"), "{status:?}");
    let (problem, hint) = node.storage_health().await;
    assert!(problem.starts_with("is locked: ") && hint == "`nodectl storage unlock`", "{problem}; {hint}");
    node.client.unlock_storage(UnlockStorageRequest { passphrase }).await.unwrap();
    let again = wait_running(&mut node).await;
    assert_eq!((again.node, again.cluster), (running.node, running.cluster));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn a_cluster_of_one_on_a_split_volume_starts_cold_by_its_local_key() {
    let member = VolumeMember::split("local").await;
    let mut node = member.start().await;
    let running = wait_running(&mut node).await;
    assert_eq!(wait_settled(&mut node).await, ["local", "split"]);
    node.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");
    let mut node = member.start().await;
    let again = wait_running(&mut node).await;
    assert_eq!((again.node, again.cluster), (running.node, running.cluster));
    node.stop().await;
}
