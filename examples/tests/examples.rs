//! Every example runs, and prints what it is there to show.

use std::process::Command;

/// What an example printed. `cargo test` has built it already.
fn printed(name: &str) -> String {
    let deps = std::env::current_exe().expect("the test binary knows its path");
    let target = deps.parent().and_then(|deps| deps.parent()).expect("it lies in target/PROFILE/deps");
    let output = Command::new(target.join("examples").join(name)).output().expect("the example was built");
    let text = String::from_utf8(output.stdout).expect("it prints text");
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
        "dead: the disk went away",
        "scheduled with backoff",
        "2 restarts, 2 failures in a row",
        "run 2 ended dead: the disk went away",
        "stopped, 0 stragglers",
    ];
    let text = printed("supervise");
    assert_in_order(&text, &pieces);
    // Events are delivered by a task of their own, so the last one may come after what main says of it.
    assert!(text.contains("root.flaky run 3  ready"), "{text}");
}

#[test]
fn child_process_shows_output_and_how_processes_end() {
    let text = printed("child_process");
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
        "# everything",
        "looked at the disk",
        "# what comes after that",
        "the disk is gone",
        "\"message\":\"no certificate\"",
    ];
    assert_in_order(&printed("log_tree"), &pieces);
}

#[test]
fn place_tree_shows_a_declaration_and_what_it_becomes() {
    let pieces = [
        "# what is declared",
        "0700 pki/",
        "0600   cert-key.pem",
        "0640 sensors.json",
        "# what is written is read: [\"roof\", \"cellar\"]",
        "absent, which is no error: None",
        "# what is there now",
        "0750 acme-station/",
        "0640   sensors.json",
        "# a second new volume: /data holds",
        "# after a restart the node's role is worker",
    ];
    assert_in_order(&printed("place_tree"), &pieces);
}

#[test]
fn own_quota_shows_a_refusal_and_conforms() {
    let pieces = [
        "first may take 60Mi bytes",
        "second may not take 60Mi",
        "second may take 40Mi",
        "first may make 99 more files",
        "a limit of 0 is refused: true",
        "second may take 100Mi",
        "it conforms",
    ];
    assert_in_order(&printed("own_quota"), &pieces);
}

#[test]
fn own_volume_store_conforms_and_refuses_to_overbook() {
    let pieces =
        ["the store keeps the contract", "000000000001: made", "000000000002 on this node: the claim goes"];
    assert_in_order(&printed("own_volume_store"), &pieces);
}

#[test]
fn own_network_shows_an_address_that_comes_and_changes() {
    let pieces = [
        "without an address it is CreatingCluster",
        "with one it is Running",
        "its record has Some(192.0.2.8)",
    ];
    assert_in_order(&printed("own_network"), &pieces);
}

#[test]
fn own_consensus_runs_and_conforms() {
    let pieces = ["a member called own-1", "it conforms, and its calls were counted: true"];
    assert_in_order(&printed("own_consensus"), &pieces);
}

#[test]
fn custom_node_founds_a_cluster_and_goes_back_to_it() {
    let pieces = [
        "first boot",
        "storage: a new volume",
        "service: boot 1",
        "cluster: New → CreatingCluster → Running",
        "second boot",
        "storage: the volume that is there",
        "service: boot 2",
        "cluster: New → Restarting → Running",
    ];
    assert_in_order(&printed("custom_node"), &pieces);
}
