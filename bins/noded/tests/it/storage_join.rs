//! A second node that joins by a golden ticket, with its data on its own encrypted volume, in a guest.

use std::fs;

use nodekeel_node::v1::{CreateGoldenTicketRequest, MembersRequest};
use testbed::ScratchDir;

use crate::harness::{EtcdPorts, NO_DAEMONS};
use crate::storage_cluster::{VolumeMember, cluster_config, wait_running, with_etcd};
use crate::storage_device::DeviceNode;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "soak: needs kernel with a disk of 1 GiB, etcd and 2 GiB of memory"]
async fn a_second_node_joins_on_its_encrypted_volume_and_is_running_again_after_a_reboot() {
    // Of two nodes of one host, one alone has a mapping.
    let (scratch, ports) = (ScratchDir::new().unwrap(), EtcdPorts::reserve());
    let config = with_etcd(NO_DAEMONS) + &cluster_config(&ports) + "golden_tickets = true\n";
    let mut first = DeviceNode::start(&config, &scratch.path().join("data")).await;
    let bootstrapped = wait_running(&mut first).await;

    let member = VolumeMember::new("encryption = \"encrypted\"\nkeys = \"local\"\n").await;
    let request = CreateGoldenTicketRequest { address: "127.0.0.1".into(), port: member.peer_port().into() };
    let ticket = first.client.create_golden_ticket(request).await.unwrap().into_inner();
    let esp = member.fixture.data().join("esp");
    fs::create_dir_all(&esp).unwrap();
    fs::write(esp.join("enrolment.pb"), &ticket.enrolment).unwrap();

    let mut second = member.start().await;
    let joined = wait_running(&mut second).await;
    assert_eq!((&joined.node, &joined.cluster), (&ticket.node, &bootstrapped.cluster));
    // With the joiner's vote, the cluster may elect a leader.
    wait_running(&mut first).await;
    let members = first.client.members(MembersRequest {}).await.unwrap().into_inner().members;
    assert!(members.len() == 2 && members.iter().all(|member| !member.is_learner), "{members:?}");
    second.stop().await;
    assert!(!member.fixture.is_open(), "a stop closes the volume");

    let mut second = member.start().await;
    let again = wait_running(&mut second).await;
    assert_eq!((again.node, again.cluster), (joined.node, joined.cluster));
    second.stop().await;
    first.stop().await;
}
