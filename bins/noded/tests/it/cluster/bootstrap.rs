//! A node that bootstraps a cluster, and restarts in it.

use std::fs;

use testbed::ScratchDir;

use super::{MemberFixture, cluster_identity, join_cluster, state_in_tree, wait_failing, wait_waiting};
use crate::harness::{NodedProcess, kill_process, make_fifo, sleep_config};

#[test]
#[ignore = "needs etcd"]
fn a_node_bootstraps_a_cluster_and_rejoins_it_after_any_kill() {
    let member = MemberFixture::new();
    let noded = member.start_new();
    let (node, cluster) = cluster_identity(&noded);
    let members = noded.ask_json(&["cluster", "members"]);
    assert_eq!((members[0]["name"].clone(), members[0]["this"].clone()), (node.clone(), true.into()));

    let log = noded.ask(&["-o", "json", "logs", "root.cluster.consensus.etcd", "--leveled"]);
    assert!(log.lines().count() > 10, "etcd's lines are parsed: {log}");

    let etcd = testbed::leftovers::find_processes(noded.scratch.path()).unwrap();
    let etcd = etcd.iter().find(|process| process.command.contains("--data-dir")).expect("etcd runs");
    kill_process(etcd.pid.try_into().unwrap());
    noded.wait_for_event("root.cluster.consensus.etcd", 2, "ready");

    let noded = member.restart(noded);
    assert_eq!(cluster_identity(&noded), (node.clone(), cluster));
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["history"], serde_json::json!(["New", "Restarting", "Running"]));
    let names = noded.data().join("names");
    let hosts = fs::read_to_string(names.join("hosts")).unwrap();
    assert!(hosts.contains(node.as_str().unwrap()), "{hosts}");

    // It looks at no ticket any more, not even at a directory in its place.
    let scratch = noded.kill();
    fs::create_dir(scratch.path().join("data/esp/enrolment.pb")).unwrap();
    let noded = member.start(scratch);
    assert_eq!(cluster_identity(&noded).0, node);
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_bootstrap_waits_until_the_node_has_looked_for_a_ticket() {
    let mut member = MemberFixture::new();
    let scratch = ScratchDir::new().unwrap();
    let gate = make_fifo(scratch.path(), "gate");
    let probe = format!("readiness = {{ probe = [\"/bin/cat\", {gate:?}], timeout = \"1h\" }}");
    let waits = "bootstrap = false\ndepends_on = [\"gate\"]";
    member.config = member.config.replace("bootstrap = true", waits) + &sleep_config("gate", &probe);
    let noded = member.spawn(scratch);
    let mut bootstrap = noded.nodectl_command(&["cluster", "bootstrap"]).spawn().unwrap();
    noded.follow(&["events", "-f", "cluster"]).find_value(|event| event["action"] == "bootstrap");
    assert!(bootstrap.try_wait().unwrap().is_none(), "the enrolment is new");
    fs::write(&gate, "open").unwrap();
    assert!(bootstrap.wait().unwrap().success());
    noded.wait_ready("root.cluster");
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_node_makes_a_cluster_only_where_permitted_once_and_says_what_to_type() {
    let mut member = MemberFixture::new();
    member.config = member.config.replace("bootstrap = true", "bootstrap = false");
    let noded = member.spawn(ScratchDir::new().unwrap());
    let detail = wait_waiting(&noded);
    let ticket = noded.data().join("esp/enrolment.pb");
    let expected =
        ["is not configured to bootstrap", ticket.to_str().unwrap(), "`nodectl cluster bootstrap`"];
    assert!(expected.iter().all(|part| detail.contains(part)), "{detail}");

    noded.ask(&["cluster", "bootstrap"]);
    noded.wait_ready("root.cluster");
    let (node, cluster) = cluster_identity(&noded);
    noded.nodectl(&["cluster", "bootstrap"]).assert_fails(1, "the node's enrolment is Running");
    let noded = member.restart(noded);
    assert_eq!(cluster_identity(&noded), (node, cluster));

    // The disk with the data is lost, and with it that the node was in a cluster: but not its record.
    let mut scratch = noded.kill();
    for bootstrap in ["bootstrap = false", "bootstrap = true"] {
        fs::remove_dir_all(scratch.path().join("data")).unwrap();
        let config = member.config.replace("bootstrap = false", bootstrap);
        let noded = NodedProcess::start_in(scratch, &config, &[]);
        let detail = wait_waiting(&noded);
        assert!(
            detail.contains("has been in a cluster before") && detail.contains("data.bootstrapped"),
            "{detail}"
        );
        noded.nodectl(&["cluster", "bootstrap"]).assert_fails(1, "has been in a cluster before");
        scratch = noded.kill();
    }
}

#[test]
#[ignore = "needs etcd"]
fn a_member_without_a_majority_is_not_running_within_5_s_and_running_again_with_it() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let (bootstrapped, joined) = join_cluster(&first, &second, "127.0.0.1");
    let silent = format!("1 of 2 members reachable (127.0.0.1:{} does not answer)", second.peer_port());
    bootstrapped.wait_ready("root.cluster");
    let scratch = joined.kill();
    let since = std::time::Instant::now();
    let status =
        wait_failing(&bootstrapped, "the loss of the majority", |_, detail| detail.contains(&silent));
    let took = since.elapsed();
    println!("told after {took:?}");
    assert!(took.as_secs() < 5, "{took:?}");
    assert_eq!(status["state"], "Unhealthy");
    let (state, why) = state_in_tree(&bootstrapped);
    assert!(state == "new" && why.contains(&silent), "{state}: {why}");
    let shown = bootstrapped.nodectl(&["cluster", "status"]).stdout;
    assert!(
        shown.starts_with("Unhealthy: node ") && shown.contains("start them, or restore the network"),
        "{shown}"
    );
    let ended = bootstrapped.nodectl(&["-o", "json", "health"]);
    let health = ended.json();
    let mut conditions = health["conditions"].as_array().unwrap().iter();
    let found = conditions.find(|found| found["object"] == "root.cluster");
    let found = found.unwrap_or_else(|| panic!("{health}"));
    assert_eq!((ended.code, &found["problem"]), (Some(6), &"can't take part in its cluster".into()));
    assert_eq!(found["waiting_for"], format!("a majority: {silent}"));
    assert_eq!(found["hint"], "start them, or restore the network to them");

    let joined = second.start(scratch);
    bootstrapped.wait_ready("root.cluster");
    for node in [&joined, &bootstrapped] {
        cluster_identity(node);
    }
    joined.stop();
    bootstrapped.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_node_in_its_cluster_needs_no_bootstrap_record_and_a_new_one_says_that_it_cannot_write_it() {
    let mut member = MemberFixture::new();
    let (scratch, elsewhere) = (ScratchDir::new().unwrap(), ScratchDir::new().unwrap());
    let disk = elsewhere.path().join("efi");
    let record = disk.join("nodekeel.bootstrapped");
    member.config.push_str(&format!("bootstrap_record = {record:?}\n"));
    let noded = member.spawn(scratch);
    wait_failing(&noded, "the failure", |status, detail| {
        status["state"] == "Failed" && detail.contains(record.to_str().unwrap())
    });

    fs::create_dir(&disk).unwrap();
    noded.wait_ready("root.cluster");
    let identity = cluster_identity(&noded);
    // Its disk is not mounted: that concerns only a node without a cluster.
    let scratch = noded.kill();
    fs::remove_dir_all(&disk).unwrap();
    let noded = member.start(scratch);
    assert_eq!(cluster_identity(&noded), identity);
    noded.stop();
}
