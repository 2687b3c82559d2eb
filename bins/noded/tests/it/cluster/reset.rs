//! A node that is reset: it leaves its cluster's data, and starts as a new one.

use std::fs;
use std::net::TcpListener;

use testbed::ScratchDir;

use super::{MemberFixture, cluster_identity, join_cluster, wait_failing, wait_waiting};
use crate::harness::{Ended, node_command};

#[test]
#[ignore = "needs etcd"]
fn a_reset_removes_exactly_the_enrolment_and_can_be_interrupted_and_repeated() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let (bootstrapped, joined) = join_cluster(&first, &second, "127.0.0.1");
    let data = joined.data();
    // The key of a volume that is not attached, and data of other parts.
    fs::write(data.join("esp/0a1b.1.key"), "key").unwrap();
    fs::create_dir_all(data.join("data/volumes/pvc")).unwrap();
    let plan = joined.nodectl(&["reset"]);
    plan.assert_fails(1, "nothing was changed");
    for line in ["data/cluster: ", "esp/enrolment.pb: the ticket", "esp/0a1b.1.key: a key of a volume"] {
        assert!(plan.stdout.contains(line), "{line}: {plan:#?}");
    }
    assert!(
        plan.stdout.contains(
            "its membership stays in its cluster: remove it on another member, by nodectl cluster remove NODE"
        ),
        "{plan:#?}"
    );
    cluster_identity(&joined);

    // An interruption after the first step: the node is no new one, and the reset is repeated.
    let scratch = joined.stop_and_keep();
    fs::remove_dir_all(data.join("data/cluster")).unwrap();
    let joined = second.spawn(scratch);
    wait_failing(&joined, "the failure", |status, _| status["state"] == "Failed");
    let done = joined.nodectl(&["reset", "--yes"]).output();
    assert!(done.starts_with("removed:\n") && done.contains("esp/enrolment.0"), "{done}");
    wait_waiting(&joined);
    assert!(!data.join("esp/enrolment.pb").exists());
    assert!(data.join("esp/0a1b.1.key").exists() && data.join("data/volumes/pvc").exists());
    joined.stop();
    drop(bootstrapped);
}

#[test]
#[ignore = "needs etcd"]
fn a_node_that_bootstrapped_does_so_again_only_if_its_reset_permits_it() {
    let member = MemberFixture::new();
    let node = member.start_new();
    let (_, cluster) = cluster_identity(&node);
    node.nodectl(&["reset", "--yes"]).output();
    assert!(wait_waiting(&node).contains("has been in a cluster before"));

    // While it does not run; not while it does.
    Ended::of(node_command("reset", node.scratch.path(), &member.config).arg("--yes"))
        .assert_fails(5, "is in use by");
    let scratch = node.stop_and_keep();
    let done =
        Ended::of(node_command("reset", scratch.path(), &member.config).args(["--yes", "--bootstrap"]));
    assert!(done.output().contains("data.bootstrapped: the record that permits no other bootstrap"));
    let node = member.start(scratch);
    assert_ne!(cluster_identity(&node).1, cluster);
    node.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_reset_ends_a_bootstrap_that_was_requested_and_is_not_over() {
    let mut member = MemberFixture::new();
    member.config = member.config.replace("bootstrap = true", "bootstrap = false");
    let node = member.spawn(ScratchDir::new().unwrap());
    wait_waiting(&node);
    let occupied = TcpListener::bind(format!("127.0.0.1:{}", member.peer_port())).unwrap();
    node.ask(&["cluster", "bootstrap"]);
    wait_failing(&node, "the failure", |status, _| status["state"] == "CreatingCluster");
    node.nodectl(&["reset", "--yes", "--bootstrap"]).output();
    wait_waiting(&node);

    // A snapshot that was staged, and whose restore has not begun, is none of another cluster.
    drop(occupied);
    let staged = node.data().join("data/cluster.restore");
    fs::write(&staged, "secrets").unwrap();
    node.ask(&["cluster", "bootstrap"]);
    node.wait_ready("root.cluster");
    assert!(!staged.exists());
    node.stop();
}
