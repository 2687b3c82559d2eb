//! The address at which a node is a member.

use std::process::Command;

use testbed::ScratchDir;

use super::{MemberFixture, assert_joins, cluster_identity, failing_status, join_cluster, kill_node};
use crate::harness::{NodedProcess, TEST_TIMEOUT, stderr_and_code};
use crate::network_namespace::TestNetwork;

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_at_the_address_of_its_interface() {
    let site = TestNetwork::new();
    let [here, there] = &site.link;
    let first = MemberFixture::reachable_by(&format!("address = \"{here}\""), None);
    assert_joins(&first, &MemberFixture::reachable_by("interface = \"uplink0\"", Some(&site)), there);
}

#[test]
#[ignore = "needs go, ip and root: it makes a network namespace"]
fn a_node_in_a_private_network_joins_on_the_newest_etcd_too() {
    let site = TestNetwork::new();
    let [here, there] = &site.link;
    let first = MemberFixture::reachable_by(&format!("address = \"{here}\""), None).on_newest_etcd();
    assert_joins(
        &first,
        &MemberFixture::reachable_by("interface = \"uplink0\"", Some(&site)).on_newest_etcd(),
        there,
    );
}

#[test]
#[ignore = "needs etcd, ip and root: it makes a network namespace"]
fn a_node_whose_interface_changes_its_address_stays_the_same_node() {
    let site = TestNetwork::new();
    let [here, there] = &site.link;
    let first = MemberFixture::reachable_by(&format!("address = \"{here}\""), None);
    let second = MemberFixture::reachable_by("interface = \"uplink0\"", Some(&site));
    let (bootstrapped, joined) = join_cluster(&first, &second, there);
    let (node, cluster) = cluster_identity(&joined);
    let is_listed_at = |address: &str| {
        let members = bootstrapped.ask_json(&["cluster", "members"]);
        let listed = members.as_array().unwrap().iter().find(|member| member["name"] == node);
        let url = format!("https://{address}:{}", second.ports[1].number());
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
    let scratch = kill_node(joined);
    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&["cluster", "members"]));
    assert!(stderr.contains("list the members") && code == Some(1), "{stderr} {code:?}");
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
    let scratch = kill_node(member.start(ScratchDir::new().unwrap()));
    let copy = ScratchDir::new().unwrap();
    let mut copying = Command::new("cp");
    copying.arg("-a").arg(scratch.path().join("data")).arg(copy.path());
    assert!(copying.status().unwrap().success());

    let original = member.start(scratch);
    let identity = cluster_identity(&original);
    let config = member.config.replace("127.0.0.1", "127.0.0.2");
    let mut copied = NodedProcess::spawn(copy, &config, &[], |_| {});
    copied.wait_for_line("control socket at");
    let reason = format!("already runs at https://127.0.0.1:{}", member.ports[1].number());
    testbed::wait_until(TEST_TIMEOUT, "the refusal of the copy", || {
        let status = failing_status(&copied)?;
        let detail = status["detail"].as_str().unwrap_or_default();
        anyhow::ensure!(detail.contains(&reason) && detail.contains("must not run a copy"), "{status}");
        Ok(())
    })
    .unwrap();
    assert_eq!(cluster_identity(&original), identity);
    original.stop();

    // Now it has moved.
    copied.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
    assert_eq!(cluster_identity(&copied), identity);
    copied.stop();
}
