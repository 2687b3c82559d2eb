//! The nodes of a cluster open each other's volumes by their APIs.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_cluster::node::{NodeId, SecretBytes};
use nodekeel_node::access::{PrivateKey, PublicKey};
use nodekeel_node::client::{self, ConnectError};
use nodekeel_node::node_v1::UnlockKeysRequest;
use nodekeel_node::node_v1::node_client::NodeClient;
use nodekeel_node::v1::{
    ClusterRequest, CreateGoldenTicketRequest, CreateJoinTicketRequest, RemoveNodeRequest,
    RotateStorageKeysRequest, StorageResponse, UnlockStorageRequest,
};
use testbed::{ReservedPort, ScratchDir, reserve_port};
use tokio::task::block_in_place;
use tonic::Code;

use crate::cluster::{MemberFixture, cluster_identity, join_cluster};
use crate::harness::{EtcdPorts, check, wait};
use crate::storage_cluster::{VolumeMember, cluster_config, wait_running, wait_temporary_removed};
use crate::storage_device::{DeviceFixture, DeviceNode};
use crate::storage_keys::{confirm_recovery, key_conditions};

const VOLUMES: [&str; 2] = ["11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"];

fn api_section(port: &ReservedPort) -> String {
    format!("[api]\naddress = \"{}\"\n", port.socket_address())
}

/// The key of a node's API, as a thief of its disk has it.
pub(crate) fn api_key(data: &Path) -> PrivateKey {
    PrivateKey::from_pem(&fs::read(data.join("api/key")).unwrap()).unwrap()
}

/// A node that is called.
#[derive(Clone, Copy)]
struct Called<'a> {
    port: &'a ReservedPort,
    key: PublicKey,
}

/// What it answers this caller: the keys, or the code of the refusal; an error of the connection as its text.
async fn ask(called: Called<'_>, caller: &PrivateKey, volume: &str) -> Result<Vec<Vec<u8>>, String> {
    let address = called.port.socket_address().to_string();
    let channel =
        client::connect_channel(address, called.key, caller).await.map_err(|error| match error {
            ConnectError::UnknownOperator { .. } => "not admitted".to_owned(),
            other => other.to_string(),
        })?;
    let request = UnlockKeysRequest { volume: volume.into(), of_cluster: false };
    let answer = NodeClient::new(channel).unlock_keys(request).await;
    answer.map(|answer| answer.into_inner().keys).map_err(|status| format!("{:?}", status.code()))
}

/// Waits for this answer.
async fn wait_answer(
    called: Called<'_>,
    caller: &PrivateKey,
    volume: &str,
    expected: Result<Vec<Vec<u8>>, String>,
) {
    let began = Instant::now();
    loop {
        let answer = ask(called, caller, volume).await;
        if answer == expected {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{answer:?} instead of {expected:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn the_api_of_a_node_gives_each_node_the_keys_of_its_own_volume_and_nothing_to_one_that_was_removed() {
    let ports = [(); 2].map(|()| reserve_port().unwrap());
    let operator = PrivateKey::generate().unwrap();
    let operators = format!(
        "operators = [{{ name = \"alice\", key = \"{}\", role = \"admin\" }}]\n",
        operator.public_key()
    );
    let first = MemberFixture::new().with_sections(&(api_section(&ports[0]) + &operators));
    let second = MemberFixture::new().with_sections(&api_section(&ports[1]));
    let (one, two) = block_in_place(|| join_cluster(&first, &second, "127.0.0.1"));
    let nodes = [&one, &two];
    let ids: [NodeId; 2] = nodes.map(|node| {
        node.wait_ready("root.api.peers");
        cluster_identity(node).0.as_str().unwrap().parse().unwrap()
    });
    let keys = nodes.map(|node| api_key(&node.data()));
    let called = [0, 1].map(|index| Called { port: &ports[index], key: keys[index].public_key() });
    for (node, other) in [(&one, 1), (&two, 0)] {
        let line = format!("{} {} {}\n", ids[other], keys[other].public_key(), ports[other].socket_address());
        let file = node.data().join("api/peers");
        wait("the peer in the file", || {
            let found = fs::read_to_string(&file)?;
            anyhow::ensure!(found == line, "{found:?} instead of {line:?}");
            Ok(())
        });
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(file).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
    }

    // One of them in this process writes what the volumes of both would have.
    let scratch = two.stop_and_keep();
    let two = second.start_here(&scratch);
    two.wait_ready("root.cluster").await;
    let nodes = two.extension::<ClusterNode>().unwrap().node_store().unwrap();
    for (index, id) in ids.iter().enumerate() {
        let read = nodes.load_unlock_keys(id, VOLUMES[index]).await.unwrap();
        let own = SecretBytes::new(vec![index as u8; 32]);
        nodes.replace_unlock_keys(&read, &[own]).await.unwrap();
    }
    let own = |index: usize| Ok(vec![vec![index as u8; 32]]);
    wait_answer(called[0], &keys[1], VOLUMES[1], own(1)).await;
    wait_answer(called[1], &keys[0], VOLUMES[0], own(0)).await;
    let is = |answer: Result<Vec<Vec<u8>>, String>, code: Code| assert_eq!(answer, Err(format!("{code:?}")));
    is(ask(called[0], &keys[1], VOLUMES[0]).await, Code::NotFound);
    is(ask(called[0], &operator, VOLUMES[1]).await, Code::PermissionDenied);
    let stranger = PrivateKey::generate().unwrap();
    assert_eq!(ask(called[0], &stranger, VOLUMES[1]).await, Err("not admitted".into()));
    // The key of a node is no operator's.
    let address = ports[0].socket_address().to_string();
    let channel = client::connect_channel(address, called[0].key, &keys[1]).await.unwrap();
    let mut control = client::NodeClient::new(channel);
    let refused = control.cluster(ClusterRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("Cluster is for operators"), "{refused:?}");
    let entries = one.ask(&["logs", "root.api.nodes"]);
    assert!(entries.contains(&format!("UnlockKeys by {}: ok", ids[1])), "{entries}");

    // Without a majority, and without an etcd.
    assert!(two.shutdown().await.stragglers.is_empty());
    assert_eq!(ask(called[0], &keys[1], VOLUMES[1]).await, own(1));
    let one = block_in_place(|| first.spawn(one.kill()));
    wait_answer(called[0], &keys[1], VOLUMES[1], own(1)).await;
    let two = second.start_here(&scratch);
    two.wait_ready("root.cluster").await;
    two.wait_ready("root.api.peers").await;
    block_in_place(|| one.wait_ready("root.api.peers"));
    block_in_place(|| one.ask(&["cluster", "remove", ids[1].as_str()]));
    let removed = Instant::now();
    wait_answer(called[0], &keys[1], VOLUMES[1], Err("not admitted".into())).await;
    let took = removed.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    let file = one.data().join("api/peers");
    wait("the file without the peer", || {
        anyhow::ensure!(fs::read(&file)?.is_empty());
        Ok(())
    });
    assert!(two.shutdown().await.stragglers.is_empty());
    block_in_place(|| one.stop());
}

#[test]
fn peers_are_asked_by_the_api_of_a_cluster() {
    let scratch = ScratchDir::new().unwrap();
    let storage = "[storage]\nkind = \"disk\"\ndevice = \"/dev/disk/by-id/none\"\nencryption = \"encrypted\"\n\
                   keys = \"split\"\ncold_start = \"peers\"\n";
    let cluster = "[cluster]\naddress = \"127.0.0.1\"\n";
    check(scratch.path(), &format!("{storage}{cluster}"), &[])
        .assert_fails(3, "storage.cold_start: \"peers\" requires [cluster] and [api], or [worker]");
    let port = reserve_port().unwrap();
    let with_api = check(scratch.path(), &format!("{storage}{cluster}{}", api_section(&port)), &[]);
    assert!(!with_api.stderr.contains("cold_start"), "{with_api:#?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn a_split_volume_opens_by_the_other_nodes_without_a_majority_until_its_node_is_removed() {
    let ports = [(); 2].map(|()| reserve_port().unwrap());
    let member = VolumeMember::split("peers").await;
    let config = member.config().replace("bootstrap = true", "bootstrap = true\ngolden_tickets = true")
        + &api_section(&ports[0]);
    let data = member.fixture.data();
    let checked = check(member.fixture.scratch.path(), &config, &[]).output();
    assert!(checked.contains("whose other nodes give it, or by an operator when all were off"), "{checked}");
    let mut split = DeviceNode::start(&config, &data).await;
    let running = wait_running(&mut split).await;
    let passphrase = confirm_recovery(&mut split).await;
    wait_temporary_removed(&mut split).await;
    let alone = ["has no other node that would open it at the next start: none of its cluster has [api]"];
    assert_eq!(key_conditions(&mut split).await, alone);

    let other_ports = EtcdPorts::reserve();
    let request =
        CreateGoldenTicketRequest { address: "127.0.0.1".into(), port: other_ports.peer.number().into() };
    let ticket = split.client.create_golden_ticket(request).await.unwrap().into_inner();
    let other_scratch = ScratchDir::new().unwrap();
    let other_data = other_scratch.path().join("data");
    fs::create_dir_all(other_data.join("esp")).unwrap();
    fs::write(other_data.join("esp/enrolment.pb"), &ticket.enrolment).unwrap();
    let other_config = "services.containerd.enable = false\n".to_owned()
        + &other_ports.section("[cluster]\naddress = \"127.0.0.1\"\ndeadline = \"10m\"\n")
        + &api_section(&ports[1]);
    let start_other = async || DeviceNode::start(&other_config, &other_data).await;
    let mut other = start_other().await;
    wait_running(&mut other).await;
    // Each knows the other, and the other has the key.
    let [of_split, of_other] = [&data, &other_data].map(|data| api_key(data));
    let called = Called { port: &ports[1], key: of_other.public_key() };
    let volume = split.wait_status(|status| status.encryption.is_some()).await.encryption.unwrap().volume;
    let began = Instant::now();
    while !matches!(ask(called, &of_split, &volume).await, Ok(keys) if keys.len() == 1)
        || fs::read_to_string(data.join("api/peers")).unwrap_or_default().is_empty()
    {
        assert!(began.elapsed() < Duration::from_secs(60), "the nodes don't know each other");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(key_conditions(&mut split).await, [""; 0]);
    split.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");

    // Of two voters, the other is no majority.
    let mut split = DeviceNode::start(&config, &data).await;
    let again = wait_running(&mut split).await;
    assert_eq!((again.node, again.cluster), (running.node.clone(), running.cluster));
    split.stop().await;
    other.stop().await;

    // Nobody has it: its reason names who was asked. It opens once the other is back.
    let mut split = DeviceNode::start(&config, &data).await;
    let address = ports[1].socket_address();
    let is_unreachable = |status: &StorageResponse| {
        status.state == "locked" && status.detail.contains(&format!("at {address}: can't be reached"))
    };
    split.wait_status(is_unreachable).await;
    let other = start_other().await;
    split.wait_open().await;
    wait_running(&mut split).await;

    // Stolen, and removed by the other.
    split.stop().await;
    let mut split = DeviceNode::start(&config, &data).await;
    wait_running(&mut split).await;
    let mut other = other;
    wait_running(&mut other).await;
    let remove = RemoveNodeRequest { node: running.node };
    other.client.remove_node(remove).await.unwrap();
    split.stop().await;
    let mut split = DeviceNode::start(&config, &data).await;
    let is_removed = |status: &StorageResponse| {
        status.state == "locked" && status.detail.contains("does not admit this node: it was removed")
    };
    split.wait_status(is_removed).await;
    assert!(!member.fixture.is_open());
    let passphrase = Some(passphrase);
    split.client.unlock_storage(UnlockStorageRequest { passphrase }).await.unwrap();
    split.wait_open().await;
    split.stop().await;
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn the_split_volume_of_a_worker_opens_by_a_voter_until_the_worker_is_removed() {
    let ports = [(); 2].map(|()| reserve_port().unwrap());
    let voter_scratch = ScratchDir::new().unwrap();
    let voter_data = voter_scratch.path().join("data");
    let voter_ports = EtcdPorts::reserve();
    let voter_config = "services.containerd.enable = false\n".to_owned()
        + &cluster_config(&voter_ports)
        + &api_section(&ports[0]);
    let start_voter = async || {
        let mut voter = DeviceNode::start(&voter_config, &voter_data).await;
        wait_running(&mut voter).await;
        voter.wait_ready("root.api.records").await;
        voter.wait_ready("root.api.peers").await;
        voter
    };
    let mut voter = start_voter().await;
    let request = CreateJoinTicketRequest { role: "worker".into(), ..Default::default() };
    let ticket = voter.client.create_join_ticket(request).await.unwrap().into_inner().ticket;

    let fixture = DeviceFixture::new(640).await;
    let keys = "encryption = \"encrypted-and-authenticated\"\nkeys = \"split\"\ncold_start = \"peers\"\nwipe = false\n\
                [worker]\n";
    let (config, data) = (fixture.config(keys) + &api_section(&ports[1]), fixture.data());
    fs::create_dir_all(data.join("esp")).unwrap();
    fs::write(data.join("esp/enrolment.pb"), ticket).unwrap();
    let start = async || DeviceNode::start(&config, &data).await;
    let mut worker = start().await;
    worker.wait_open().await;
    worker.wait_ready("root.api.worker").await;
    confirm_recovery(&mut worker).await;
    wait_temporary_removed(&mut worker).await;
    assert_eq!(key_conditions(&mut worker).await, [""; 0]);
    let [of_voter, of_worker] = [&voter_data, &data].map(|data| api_key(data));
    let called = Called { port: &ports[0], key: of_voter.public_key() };
    let volume = worker.wait_status(|status| status.encryption.is_some()).await.encryption.unwrap().volume;
    let has_key = async || {
        let began = Instant::now();
        while !matches!(ask(called, &of_worker, &volume).await, Ok(keys) if keys.len() == 1) {
            assert!(began.elapsed() < Duration::from_secs(60), "the voter has no key");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    has_key().await;
    worker.stop().await;
    assert!(!fixture.is_open(), "a stop closes the volume");

    let mut worker = start().await;
    worker.wait_open().await;
    worker.client.rotate_storage_keys(RotateStorageKeysRequest::default()).await.unwrap();
    has_key().await;
    worker.stop().await;

    // Its reason names who was asked. It opens by the new key once the voter is back.
    voter.stop().await;
    let mut worker = start().await;
    let address = ports[0].socket_address();
    let is_unreachable = |status: &StorageResponse| {
        status.state == "locked" && status.detail.contains(&format!("at {address}: can't be reached"))
    };
    worker.wait_status(is_unreachable).await;
    let mut voter = start_voter().await;
    worker.wait_open().await;
    worker.wait_ready("root.api.worker").await;

    let node = worker.client.cluster(ClusterRequest {}).await.unwrap().into_inner().node;
    voter.client.remove_node(RemoveNodeRequest { node }).await.unwrap();
    worker.stop().await;
    let mut worker = start().await;
    let is_removed = |status: &StorageResponse| {
        status.state == "locked" && status.detail.contains("does not admit this node: it was removed")
    };
    worker.wait_status(is_removed).await;
    assert!(!fixture.is_open());
    worker.stop().await;
    voter.stop().await;
}
