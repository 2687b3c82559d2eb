//! The address at which a node is a member.

use std::process::Command;

use testbed::ScratchDir;

use super::{MemberFixture, assert_joins, cluster_identity, join_cluster, list_members, wait_failing};
use crate::harness::NodedProcess;
use crate::network_namespace::TestNetwork;

/// A member at the address of this side of the link, and one behind the interface of the other side.
fn members_of(site: &TestNetwork) -> [MemberFixture; 2] {
    let here = format!("address = \"{}\"", site.link[0]);
    [
        MemberFixture::reachable_by(&here, None),
        MemberFixture::reachable_by("interface = \"uplink0\"", Some(site)),
    ]
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_at_the_address_of_its_interface() {
    let site = TestNetwork::new();
    let [first, second] = members_of(&site);
    assert_joins(&first, &second, &site.link[1]);
}

#[test]
#[ignore = "needs go, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_on_the_newest_etcd_too() {
    let site = TestNetwork::new();
    let [first, second] = members_of(&site).map(MemberFixture::on_newest_etcd);
    assert_joins(&first, &second, &site.link[1]);
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_whose_interface_changes_its_address_stays_the_same_node() {
    let site = TestNetwork::new();
    let there = &site.link[1];
    let [first, second] = members_of(&site);
    let (bootstrapped, joined) = join_cluster(&first, &second, there);
    let (node, cluster) = cluster_identity(&joined);
    let is_listed_at = |address: &str| {
        let members = list_members(&bootstrapped);
        let listed = members.as_array().unwrap().iter().find(|member| member["name"] == node);
        let url = format!("https://{address}:{}", second.peer_port());
        assert_eq!(listed.expect("the member is listed")["peer_urls"], serde_json::json!([url]), "{members}");
    };
    is_listed_at(there);

    // While it runs. It is one of two, so there is no quorum until it is back.
    site.change_address("del", there);
    site.change_address("add", &site.spare_address);
    joined.wait_for_event("root.cluster", 2, "ready");
    assert_eq!(cluster_identity(&joined), (node.clone(), cluster.clone()));
    is_listed_at(&site.spare_address);

    // While it is off: the other member reports that the cluster does not answer.
    let scratch = joined.kill();
    bootstrapped.nodectl(&["cluster", "members"]).assert_fails(1, "list the members");
    site.change_address("del", &site.spare_address);
    site.change_address("add", there);
    let joined = second.start(scratch);
    assert_eq!(cluster_identity(&joined), (node.clone(), cluster));
    is_listed_at(there);
    joined.stop();
    bootstrapped.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_copy_of_a_running_member_is_refused_at_another_address() {
    let member = MemberFixture::new();
    let scratch = member.start_new().kill();
    let copy = ScratchDir::new().unwrap();
    let mut copying = Command::new("cp");
    copying.arg("-a").arg(scratch.path().join("data")).arg(copy.path());
    assert!(copying.status().unwrap().success());

    let original = member.start(scratch);
    let identity = cluster_identity(&original);
    let config = member.config.replace("127.0.0.1", "127.0.0.2");
    let copied = NodedProcess::start_in(copy, &config, &[]);
    let reason = format!("already runs at https://127.0.0.1:{}", member.peer_port());
    wait_failing(&copied, "the refusal of the copy", |_, detail| {
        detail.contains(&reason) && detail.contains("must not run a copy")
    });
    assert_eq!(cluster_identity(&original), identity);
    original.stop();

    // Now it has moved.
    copied.wait_ready("root.cluster");
    assert_eq!(cluster_identity(&copied), identity);
    copied.stop();
}
