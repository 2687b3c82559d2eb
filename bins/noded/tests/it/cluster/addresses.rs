//! The address at which a node is a member.

use std::net::Ipv4Addr;
use std::process::Command;

use testbed::{PrivateNetwork, ScratchDir};

use super::{MemberFixture, assert_joins, cluster_identity, join_cluster, list_members, wait_failing};
use crate::harness::NodedProcess;

/// A member in this network namespace, and one behind the interface of a host.
fn members_of(site: &PrivateNetwork) -> [MemberFixture; 2] {
    let here = format!("address = \"{}\"", site.own_address());
    [MemberFixture::reachable_by(&here, None), MemberFixture::reachable_by("interface = \"up0\"", Some(site))]
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_at_the_address_of_its_interface() {
    let site = PrivateNetwork::new(1).unwrap();
    let [first, second] = members_of(&site);
    assert_joins(&first, &second, &site.address(0).to_string());
}

#[test]
#[ignore = "needs go, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_on_the_newest_etcd_too() {
    let site = PrivateNetwork::new(1).unwrap();
    let [first, second] = members_of(&site).map(MemberFixture::on_newest_etcd);
    assert_joins(&first, &second, &site.address(0).to_string());
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_whose_interface_changes_its_address_stays_the_same_node() {
    let site = PrivateNetwork::new(1).unwrap();
    let (there, elsewhere) = (site.address(0), site.address(1));
    let [first, second] = members_of(&site);
    let (bootstrapped, joined) = join_cluster(&first, &second, &there.to_string());
    let (node, cluster) = cluster_identity(&joined);
    let is_listed_at = |address: Ipv4Addr| {
        let members = list_members(&bootstrapped);
        let listed = members.as_array().unwrap().iter().find(|member| member["name"] == node);
        let url = format!("https://{address}:{}", second.peer_port());
        assert_eq!(listed.expect("the member is listed")["peer_urls"], serde_json::json!([url]), "{members}");
    };
    is_listed_at(there);

    // While it runs. It is one of two, so there is no quorum until it is back.
    site.change_address(0, "del", there).unwrap();
    site.change_address(0, "add", elsewhere).unwrap();
    joined.wait_for_event("root.cluster", 2, "ready");
    assert_eq!(cluster_identity(&joined), (node.clone(), cluster.clone()));
    is_listed_at(elsewhere);

    // While it is off: the other member reports that the cluster does not answer.
    let scratch = joined.kill();
    bootstrapped.nodectl(&["cluster", "members"]).assert_fails(1, "list the members");
    site.change_address(0, "del", elsewhere).unwrap();
    site.change_address(0, "add", there).unwrap();
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
