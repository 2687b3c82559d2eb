//! Every example runs and prints the expected output.

use std::process::Command;

/// The output of an example, which `cargo test` has built already.
fn example_output(name: &str) -> String {
    let deps = std::env::current_exe().expect("the path of the test binary");
    let target = deps.parent().and_then(|deps| deps.parent()).expect("the binary is in target/PROFILE/deps");
    let output = Command::new(target.join("examples").join(name)).output().expect("the example was built");
    let text = String::from_utf8(output.stdout).expect("UTF-8 output");
    assert!(
        output.status.success(),
        "{}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[track_caller]
fn assert_in_order(text: &str, pieces: &[&str]) {
    let mut rest = text;
    for piece in pieces {
        let at =
            rest.find(piece).unwrap_or_else(|| panic!("{piece:?} is missing, or out of order, in:\n{text}"));
        rest = &rest[at + piece.len()..];
    }
}

#[test]
fn supervise_shows_a_service_failing_restarting_and_reporting() {
    let pieces = [
        "root.flaky run 1  started",
        "dead: the disk has failed",
        "scheduled with backoff",
        "2 restarts, 2 consecutive failures",
        "run 2 exited dead: the disk has failed",
        "stopped, 0 stragglers",
    ];
    let text = example_output("supervise");
    assert_in_order(&text, &pieces);
    // A separate task delivers events, so the last one may be printed after the output of main.
    assert!(text.contains("root.flaky run 3  ready"), "{text}");
}

#[test]
fn child_process_shows_output_and_how_processes_end() {
    let text = example_output("child_process");
    assert_in_order(&text, &["root.worker", "root.once", "stopped, 0 stragglers"]);
    for piece in
        ["root.worker stdout run 1  ready to work", "root.worker stderr run 1  with a warning", "code 3"]
    {
        assert!(text.contains(piece), "{piece:?} is missing in:\n{text}");
    }
}

#[test]
fn log_tree_shows_backlog_and_stream() {
    let pieces = [
        "# backlog: everything",
        "checked the disk",
        "# live stream",
        "the disk has failed",
        "\"message\":\"no certificate\"",
    ];
    assert_in_order(&example_output("log_tree"), &pieces);
}

#[test]
fn place_tree_shows_a_declaration_and_what_it_becomes() {
    let pieces = [
        "# declared layout",
        "0700 pki/",
        "0600   cert-key.pem",
        "0640 sensors.json",
        "# written and read: [\"roof\", \"cellar\"]",
        "an absent file is not an error: None",
        "# created directories and files",
        "0750 acme-station/",
        "0640   sensors.json",
        "# a second new volume is rejected: /data ",
        "# after a restart the node's role is worker",
    ];
    assert_in_order(&example_output("place_tree"), &pieces);
}

#[test]
fn own_quota_shows_a_rejection_and_conforms() {
    let pieces = [
        "first: 60Mi bytes reserved",
        "second: 60Mi rejected",
        "second: 40Mi reserved",
        "first: 99 more files allowed",
        "a limit of 0 is rejected: true",
        "second, without first: 100Mi reserved",
        "conformance suite passed",
    ];
    assert_in_order(&example_output("own_quota"), &pieces);
}

#[test]
fn own_volume_store_conforms_and_rejects_overbooking() {
    let pieces = [
        "conformance suite passed",
        "000000000001: created",
        "000000000002 on this node",
        ": the claim goes",
    ];
    assert_in_order(&example_output("own_volume_store"), &pieces);
}

#[test]
fn own_data_volume_conforms_and_keeps_what_it_erases() {
    let pieces = [
        "conformance suite passed",
        "not erased: ",
        "the new volume has the identity: false",
        "the erased one still has it: node-7",
    ];
    assert_in_order(&example_output("own_data_volume"), &pieces);
}

#[test]
fn own_key_seal_conforms_and_never_takes_damage_for_absence() {
    let pieces = [
        "conformance suite passed",
        "key 07070707-0707-0707-0707-070707070707.1 is kept: true",
        "what is no key is an error: node unlock key 07070707-0707-0707-0707-070707070707.1 is damaged",
    ];
    assert_in_order(&example_output("own_key_seal"), &pieces);
}

#[test]
fn own_network_shows_an_address_that_comes_and_changes() {
    let pieces = [
        "without an address: CreatingCluster",
        "with an address: Running",
        "address in its record: Some(192.0.2.8)",
    ];
    assert_in_order(&example_output("own_network"), &pieces);
}

#[test]
fn own_consensus_runs_and_conforms() {
    let pieces = ["member own-1", "conformance suite passed, calls were counted: true"];
    assert_in_order(&example_output("own_consensus"), &pieces);
}

#[cfg(feature = "node")]
#[test]
fn own_node_runs_its_own_parts_and_rejoins_its_cluster_at_the_second_boot() {
    let ready = [
        "root.control             Ready",
        "root.lease               Ready",
        "root.cluster             Ready",
        "root.greeter             Ready",
        "root.service.listener    Ready",
        "the log of root.greeter: 1 line",
    ];
    let first = [
        "first boot",
        "volume: created",
        "cluster: New → CreatingCluster → Running",
        "boots in the cluster: 1",
    ];
    let second =
        ["second boot", "volume: mounted", "cluster: New → Restarting → Running", "boots in the cluster: 2"];
    let stopped = ["stopped, 0 stragglers"];
    let text = example_output("own_node");
    assert_in_order(&text, &[&first[..], &ready, &stopped, &second, &ready, &stopped].concat());
}
