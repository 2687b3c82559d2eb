//! A lone node whose volume it opens together with a Tang server, in a guest.

use std::fs;
use std::time::{Duration, Instant};

use nodekeel_node::v1::{RotateStorageKeysRequest, StorageResponse};
use testbed::TangServer;

use crate::storage_device::{DeviceFixture, DeviceNode, TOLD_WITHIN};
use crate::storage_keys::{key_conditions, slots};

/// The slots of the volume once a Tang server keeps the other half of its key.
async fn stored_slots(node: &mut DeviceNode) -> Vec<String> {
    let is_stored = |status: &StorageResponse| {
        status.encryption.as_ref().is_some_and(|encryption| encryption.cluster_key == "stored")
    };
    slots(&node.wait_status(is_stored).await.encryption.unwrap())
}

/// Waits until health says that the volume is locked, since this server does not answer.
async fn wait_locked(node: &mut DeviceNode, server: &TangServer) {
    let began = Instant::now();
    let unreachable = format!("is locked: Tang server {}: can't be reached", server.url());
    loop {
        let (problem, hint) = node.storage_health().await;
        if problem.starts_with(&unreachable) && hint == "`nodectl storage unlock`" {
            break;
        }
        assert!(began.elapsed() < TOLD_WITHIN, "{problem}; {hint}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB and tang"]
async fn a_lone_node_opens_its_volume_while_its_tang_server_answers_and_a_thief_does_not() {
    let fixture = DeviceFixture::new(384).await;
    let mut server = TangServer::start().unwrap();
    let keys = format!(
        "encryption = \"encrypted\"\nkeys = \"split\"\ncold_start = \"tang\"\n\
         tang = [{{ url = {:?}, thumbprint = {:?} }}]\n",
        server.url(),
        server.thumbprint().unwrap()
    );
    // Its creation does not wait for the network.
    server.stop();
    let mut node = fixture.start(&keys).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let pending = node.wait_status(|status| {
        status.encryption.as_ref().is_some_and(|encryption| encryption.cluster_key == "pending")
    });
    let detail = pending.await.encryption.unwrap().cluster_key_detail;
    assert!(detail.contains(&format!("Tang server {}: can't be reached", server.url())), "{detail}");
    let conditions = key_conditions(&mut node).await;
    let temporary =
        "opens by the node unlock key alone until a Tang server keeps the other half: can't store";
    assert!(conditions.iter().any(|problem| problem.starts_with(temporary)), "{conditions:?}");
    server.listen().unwrap();
    assert_eq!(stored_slots(&mut node).await, ["split 1"]);
    assert_eq!(key_conditions(&mut node).await, ["has no recovery passphrase"]);
    node.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap();
    assert_eq!(stored_slots(&mut node).await, ["split 2"]);
    node.stop().await;
    assert!(!fixture.is_open());

    // With the one after the outage.
    let restarts = std::env::var("NODEKEEL_TANG_RESTARTS").map_or(3, |count| count.parse::<usize>().unwrap());
    for _ in 1..restarts {
        let node = fixture.start(&keys).await;
        node.wait_open().await;
        assert_eq!(fs::read_to_string(fixture.volume().join("witness")).unwrap(), "data");
        node.stop().await;
        assert!(!fixture.is_open());
    }

    server.stop();
    let mut node = fixture.start(&keys).await;
    wait_locked(&mut node, &server).await;
    assert!(!fixture.is_open());
    server.listen().unwrap();
    node.wait_open().await;
    assert_eq!(fs::read_to_string(fixture.volume().join("witness")).unwrap(), "data");
    assert_eq!(node.storage_health().await, Default::default());
    node.stop().await;

    // The disk and a copy of its ESP, where no such server is.
    server.stop();
    let stolen = fixture.scratch.path().join("stolen");
    let esp = stolen.join("esp");
    fs::create_dir_all(&esp).unwrap();
    for entry in fs::read_dir(fixture.data().join("esp")).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), esp.join(entry.file_name())).unwrap();
        }
    }
    let mut thief = DeviceNode::start(&fixture.config(&keys), &stolen).await;
    wait_locked(&mut thief, &server).await;
    assert!(!fixture.is_open());
    thief.stop().await;
}
