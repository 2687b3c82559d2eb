//! Cluster membership of a node, with the real etcd where it matters.

use std::fs;
use std::process::Command;

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_cluster::node::GoldenTicket;
use nodekeel_localstorage::pki::RevocationList;
use serde_json::Value;
use testbed::{ReservedPort, ScratchDir, gotool, reserve_port};

use crate::harness::{NodedProcess, TEST_TIMEOUT, noded_command, stderr_and_code};
use crate::network_namespace::{TestNetwork, in_namespace};

/// The configuration of a member, which keeps its ports across restarts.
struct MemberFixture {
    config: String,
    ports: [ReservedPort; 2],
    /// The network namespace that it runs in, if not in this one.
    network: Option<String>,
}

impl MemberFixture {
    fn new() -> Self {
        Self::reachable_by("address = \"127.0.0.1\"", None)
    }

    fn reachable_by(how: &str, network: Option<&TestNetwork>) -> Self {
        let ports = [reserve_port().unwrap(), reserve_port().unwrap()];
        let config = format!(
            "services.containerd.enable = false\n[services.etcd]\nclient_port = {}\npeer_port = {}\n\
             [cluster]\n{how}\nbootstrap = true\ndeadline = \"60s\"\ngolden_tickets = true\n",
            ports[0].number(),
            ports[1].number()
        );
        Self { config, ports, network: network.map(|site| site.name.clone()) }
    }

    /// With the newest release of etcd instead of Debian's.
    fn on_newest_etcd(mut self) -> Self {
        let binary = gotool::ETCD.program_path("etcd").unwrap();
        let table = "[services.etcd]\n";
        self.config = self.config.replace(table, &format!("{table}binary = {binary:?}\n"));
        self
    }

    fn start(&self, scratch: ScratchDir) -> NodedProcess {
        let mut noded = NodedProcess::spawn(scratch, &self.config, &[], |command| {
            if let Some(network) = &self.network {
                *command = in_namespace(network, command);
            }
        });
        noded.wait_for_line("control socket at");
        noded.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
        noded
    }
}

/// Kills noded as a power cut would, and returns its directory.
fn kill_node(mut noded: NodedProcess) -> ScratchDir {
    noded.signal(Signal::SIGKILL);
    noded.wait();
    std::mem::replace(&mut noded.scratch, ScratchDir::new().unwrap())
}

fn cluster_identity(noded: &NodedProcess) -> (Value, Value) {
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["state"], "Running", "{status}");
    (status["node"].clone(), status["cluster"].clone())
}

#[test]
#[ignore = "needs etcd"]
fn a_node_bootstraps_a_cluster_and_rejoins_it_after_any_kill() {
    let member = MemberFixture::new();
    let noded = member.start(ScratchDir::new().unwrap());
    let (node, cluster) = cluster_identity(&noded);
    let members = noded.ask_json(&["cluster", "members"]);
    assert_eq!((members[0]["name"].clone(), members[0]["this"].clone()), (node.clone(), true.into()));

    let log = noded.ask(&["-o", "json", "logs", "root.cluster.consensus.etcd", "--leveled"]);
    assert!(log.lines().count() > 10, "etcd's lines are parsed: {log}");

    let etcd = testbed::leftovers::find_processes(noded.scratch.path()).unwrap();
    let etcd = etcd.iter().find(|process| process.command.contains("--data-dir")).expect("etcd runs");
    kill(Pid::from_raw(etcd.pid), Signal::SIGKILL).unwrap();
    noded.wait_for_event("root.cluster.consensus.etcd", 2, "ready");

    let noded = member.start(kill_node(noded));
    assert_eq!(cluster_identity(&noded), (node.clone(), cluster));
    let status = noded.ask_json(&["cluster", "status"]);
    assert_eq!(status["history"], serde_json::json!(["New", "Restarting", "Running"]));
    let names = noded.data().join("names");
    let hosts = fs::read_to_string(names.join("hosts")).unwrap();
    assert!(hosts.contains(node.as_str().unwrap()), "{hosts}");

    // It looks at no ticket any more, not even at a directory in its place.
    let scratch = kill_node(noded);
    fs::create_dir(scratch.path().join("data/esp/enrolment.pb")).unwrap();
    let noded = member.start(scratch);
    assert_eq!(cluster_identity(&noded).0, node);
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_second_node_joins_by_a_golden_ticket() {
    // etcd requires connections of members to come from the address of their certificate: on loopback, this
    // one.
    assert_joins(&MemberFixture::new(), &MemberFixture::new(), "127.0.0.1");
}

#[test]
#[ignore = "needs etcd"]
fn a_revoked_ticket_is_useless_and_its_address_is_free() {
    let bootstrapped = MemberFixture::new().start(ScratchDir::new().unwrap());
    let scratch = ScratchDir::new().unwrap();
    let file = |name| scratch.path().join(name).to_str().unwrap().to_owned();
    let (mistyped, wanted) = (file("mistyped.pb"), file("wanted.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.8", "7001", &mistyped));
    let (stderr, code) =
        stderr_and_code(&bootstrapped.nodectl(&create_ticket_args("127.0.0.9", "7001", &wanted)));
    let expected = "takes one at a time; the learner is at https://127.0.0.8:7001";
    let command = "nodectl cluster ticket withdraw --address 127.0.0.8 --port 7001";
    assert!(stderr.contains(expected) && stderr.contains(command) && code == Some(1), "{stderr} {code:?}");

    let command: Vec<_> = command.split(' ').skip(1).collect();
    assert_eq!(bootstrapped.ask_json(&command), serde_json::json!({"url": "https://127.0.0.8:7001"}));
    let members = bootstrapped.ask_json(&["cluster", "members"]);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    let credentials = GoldenTicket::from_config(&fs::read(&mistyped).unwrap()).unwrap().member_credentials();
    let list = bootstrapped.data().join("data/cluster/etcd/peer_crl");
    testbed::wait_until(TEST_TIMEOUT, "the revocation of the certificate", || {
        let revoked = RevocationList::from_der(&fs::read(&list)?, &credentials.ca)?;
        revoked.is_revoked(&credentials.certificate).then_some(()).context("not revoked yet")
    })
    .unwrap();

    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&command));
    assert!(stderr.contains("no ticket exists for https://127.0.0.8:7001") && code == Some(1), "{stderr}");
    let own = ["cluster", "ticket", "withdraw", "--address", "127.0.0.1"];
    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&own));
    assert!(stderr.contains("a voting member is already at") && code == Some(1), "{stderr}");
    let another = bootstrapped.ask_json(&create_ticket_args("127.0.0.9", "7001", &wanted));
    assert_ne!(another["node"], ticket["node"]);
    bootstrapped.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_comes_after_the_bootstrap_is_ignored_and_joins_once_the_node_is_reset() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let bootstrapped = first.start(ScratchDir::new().unwrap());
    let early = second.start(ScratchDir::new().unwrap());
    let alone = cluster_identity(&early);
    let (port, state) = (second.ports[1].number().to_string(), early.data().join("esp"));
    let (late, kept) = (state.join("enrolment.pb"), early.scratch.path().join("kept.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.1", &port, late.to_str().unwrap()));

    let early = second.start(kill_node(early));
    assert_eq!(cluster_identity(&early), alone);

    // As docs/noded.md, "Reset a node", describes.
    let scratch = kill_node(early);
    fs::rename(&late, &kept).unwrap();
    fs::remove_dir_all(scratch.path().join("data/data/cluster")).unwrap();
    fs::remove_dir_all(&state).unwrap();
    fs::create_dir(&state).unwrap();
    fs::rename(&kept, &late).unwrap();
    let joined = second.start(scratch);
    assert_eq!(cluster_identity(&joined), (ticket["node"].clone(), cluster_identity(&bootstrapped).1));

    // The ticket by which it has joined may be removed, and anything may be in its place.
    let joined = second.start(kill_node(joined));
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    fs::remove_file(&late).unwrap();
    fs::create_dir(&late).unwrap();
    let joined = second.start(kill_node(joined));
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    joined.stop();
    bootstrapped.stop();
}

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

fn assert_joins(first: &MemberFixture, second: &MemberFixture, address: &str) {
    let (bootstrapped, joined) = join_cluster(first, second, address);
    let before = cluster_identity(&joined);
    let joined = second.start(kill_node(joined));
    assert_eq!(cluster_identity(&joined), before);
    joined.stop();
    bootstrapped.stop();
}

/// The JSON of `cluster status`, which fails unless the node is Running.
fn failing_status(noded: &NodedProcess) -> anyhow::Result<Value> {
    let output = noded.nodectl(&["-o", "json", "cluster", "status"]);
    let (stderr, code) = stderr_and_code(&output);
    let status: Value = serde_json::from_slice(&output.stdout)?;
    anyhow::ensure!(code == Some(6), "{status}: {stderr} {code:?}");
    Ok(status)
}

/// The state of `root.cluster` in the tree, and what it waits for.
fn state_in_tree(noded: &NodedProcess) -> (String, String) {
    let tree = noded.ask_json(&["tree"]);
    let node =
        tree.as_array().unwrap().iter().find(|node| node["dn"] == "root.cluster").expect("in the tree");
    let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("waiting_for"))
}

/// Waits until the node waits for a ticket, and returns why.
fn wait_waiting(noded: &NodedProcess) -> String {
    let status = testbed::wait_until(TEST_TIMEOUT, "the wait for a ticket", || {
        let status = failing_status(noded)?;
        anyhow::ensure!(status["state"] == "Waiting", "{status}");
        Ok(status)
    });
    let detail = status.unwrap()["detail"].as_str().unwrap().to_owned();
    let (state, why) = state_in_tree(noded);
    assert!(state == "new" && why.starts_with("waits for a ticket"), "{state}: {why}");
    detail
}

#[test]
#[ignore = "needs etcd"]
fn a_node_makes_a_cluster_only_where_permitted_once_and_says_what_to_type() {
    let mut member = MemberFixture::new();
    member.config = member.config.replace("bootstrap = true", "bootstrap = false");
    let spawn = |scratch| {
        let mut noded = NodedProcess::spawn(scratch, &member.config, &[], |_| {});
        noded.wait_for_line("control socket at");
        noded
    };
    let noded = spawn(ScratchDir::new().unwrap());
    let detail = wait_waiting(&noded);
    let ticket = noded.data().join("esp/enrolment.pb");
    let expected =
        ["is not configured to bootstrap", ticket.to_str().unwrap(), "`nodectl cluster bootstrap`"];
    assert!(expected.iter().all(|part| detail.contains(part)), "{detail}");

    noded.ask(&["cluster", "bootstrap"]);
    noded.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
    let (node, cluster) = cluster_identity(&noded);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "bootstrap"]));
    assert!(stderr.contains("the node's enrolment is Running") && code == Some(1), "{stderr} {code:?}");
    let noded = member.start(kill_node(noded));
    assert_eq!(cluster_identity(&noded), (node, cluster));

    // The disk with the data is lost, and with it that the node was in a cluster: but not its record.
    let mut scratch = kill_node(noded);
    for bootstrap in ["bootstrap = false", "bootstrap = true"] {
        fs::remove_dir_all(scratch.path().join("data")).unwrap();
        let config = member.config.replace("bootstrap = false", bootstrap);
        let mut noded = NodedProcess::spawn(scratch, &config, &[], |_| {});
        noded.wait_for_line("control socket at");
        let detail = wait_waiting(&noded);
        assert!(
            detail.contains("has been in a cluster before") && detail.contains("data.bootstrapped"),
            "{detail}"
        );
        let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "bootstrap"]));
        assert!(stderr.contains("has been in a cluster before") && code == Some(1), "{stderr} {code:?}");
        scratch = kill_node(noded);
    }
}

#[test]
#[ignore = "needs etcd"]
fn a_member_without_a_majority_is_not_running_within_5_s_and_running_again_with_it() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let (bootstrapped, joined) = join_cluster(&first, &second, "127.0.0.1");
    let silent = format!("1 of 2 members reachable (127.0.0.1:{} does not answer)", second.ports[1].number());
    for _ in 0..2 {
        bootstrapped.ask(&["cluster", "status"]);
        assert_eq!(state_in_tree(&bootstrapped), ("ready".into(), String::new()));
    }
    let scratch = kill_node(joined);
    let since = std::time::Instant::now();
    let status = testbed::wait_until(TEST_TIMEOUT, "the loss of the majority", || {
        let status = failing_status(&bootstrapped)?;
        anyhow::ensure!(status["detail"].as_str().is_some_and(|detail| detail.contains(&silent)), "{status}");
        Ok(status)
    });
    let took = since.elapsed();
    println!("told after {took:?}");
    assert!(took.as_secs() < 5, "{took:?}");
    assert_eq!(status.unwrap()["state"], "Unhealthy");
    let (state, why) = state_in_tree(&bootstrapped);
    assert!(state == "new" && why.contains(&silent), "{state}: {why}");
    let text = bootstrapped.nodectl(&["cluster", "status"]);
    let shown = String::from_utf8(text.stdout).unwrap();
    assert!(
        shown.starts_with("Unhealthy: node ") && shown.contains("start them, or restore the network"),
        "{shown}"
    );
    let output = bootstrapped.nodectl(&["-o", "json", "health"]);
    let health: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let found =
        health["conditions"].as_array().unwrap().iter().find(|found| found["object"] == "root.cluster");
    let found = found.unwrap_or_else(|| panic!("{health}"));
    assert_eq!(
        (output.status.code(), &found["problem"]),
        (Some(6), &"can't take part in its cluster".into())
    );
    assert_eq!(found["waiting_for"], format!("a majority: {silent}"));
    assert_eq!(found["hint"], "start them, or restore the network to them");

    let joined = second.start(scratch);
    bootstrapped.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
    for node in [&joined, &bootstrapped] {
        cluster_identity(node);
    }
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

#[test]
#[ignore = "needs etcd"]
fn a_node_in_its_cluster_needs_no_bootstrap_record_and_a_new_one_says_that_it_cannot_write_it() {
    let mut member = MemberFixture::new();
    let (scratch, elsewhere) = (ScratchDir::new().unwrap(), ScratchDir::new().unwrap());
    let disk = elsewhere.path().join("efi");
    let record = disk.join("nodekeel.bootstrapped");
    member.config.push_str(&format!("bootstrap_record = {record:?}\n"));
    let mut noded = NodedProcess::spawn(scratch, &member.config, &[], |_| {});
    noded.wait_for_line("control socket at");
    testbed::wait_until(TEST_TIMEOUT, "the failure", || {
        let status = failing_status(&noded)?;
        let detail = status["detail"].as_str().unwrap_or_default();
        anyhow::ensure!(status["state"] == "Failed" && detail.contains(record.to_str().unwrap()), "{status}");
        Ok(())
    })
    .unwrap();

    fs::create_dir(&disk).unwrap();
    noded.ask(&["--timeout=60", "start", "--wait", "root.cluster"]);
    let identity = cluster_identity(&noded);
    // Its disk is not mounted: that concerns only a node without a cluster.
    let scratch = kill_node(noded);
    fs::remove_dir_all(&disk).unwrap();
    let noded = member.start(scratch);
    assert_eq!(cluster_identity(&noded), identity);
    noded.stop();
}

#[test]
fn a_bootstrap_record_in_the_data_directory_of_the_command_line_is_rejected() {
    let scratch = ScratchDir::new().unwrap();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    let config = format!(
        "services.containerd.enable = false\nservices.etcd.binary = \"/bin/true\"\n\
         [cluster]\naddress = \"127.0.0.1\"\nbootstrap_record = {:?}\n",
        data.join("record")
    );
    fs::write(&file, config).unwrap();
    let mut command =
        noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
    let (stderr, code) = stderr_and_code(&command.output().unwrap());
    assert!(stderr.contains("would be lost with it: use a file outside") && code == Some(4), "{stderr}");
}

fn create_ticket_args<'a>(address: &'a str, port: &'a str, file: &'a str) -> [&'a str; 10] {
    ["cluster", "ticket", "create", "--golden", "--address", address, "--port", port, "--file", file]
}

/// Starts both, and waits until the second has joined the first.
fn join_cluster(
    first: &MemberFixture,
    second: &MemberFixture,
    address: &str,
) -> (NodedProcess, NodedProcess) {
    let bootstrapped = first.start(ScratchDir::new().unwrap());
    let scratch = ScratchDir::new().unwrap();
    let state = scratch.path().join("data/esp");
    fs::create_dir_all(&state).unwrap();
    let ticket_file = state.join("enrolment.pb");
    let (port, file) = (second.ports[1].number().to_string(), ticket_file.to_str().unwrap());
    let create = create_ticket_args(address, &port, file);
    let ticket = bootstrapped.ask_json(&create);
    let again = stderr_and_code(&bootstrapped.nodectl(&create));
    assert!(again.0.contains("can't use") && again.1 == Some(1), "{again:?}");
    let spare = scratch.path().join("spare.pb");
    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&create_ticket_args(
        "127.0.0.9",
        &port,
        spare.to_str().unwrap(),
    )));
    assert!(stderr.contains("the cluster already has a learner") && code == Some(1), "{stderr} {code:?}");

    let joined = second.start(scratch);
    let (node, cluster) = cluster_identity(&joined);
    assert_eq!((&node, &cluster), (&ticket["node"], &cluster_identity(&bootstrapped).1));
    let members = bootstrapped.ask_json(&["cluster", "members"]);
    let votes: Vec<_> = members.as_array().unwrap().iter().map(|member| member["learner"].clone()).collect();
    assert_eq!(votes, [false, false], "{members}");
    let spare = bootstrapped.scratch.path().join("spare.pb");
    let (stderr, code) =
        stderr_and_code(&bootstrapped.nodectl(&create_ticket_args(address, &port, spare.to_str().unwrap())));
    assert!(stderr.contains("a voting member is already at") && code == Some(1), "{stderr} {code:?}");
    (bootstrapped, joined)
}

#[test]
fn a_development_node_without_etcd_keeps_its_cluster_in_memory() {
    let config = "services.containerd.enable = false\nservices.etcd.binary = \"/nowhere/etcd\"\n\
                  cluster.address = \"127.0.0.1\"\ncluster.bootstrap = true\n";
    let noded = NodedProcess::start_in(ScratchDir::new().unwrap(), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    let first = cluster_identity(&noded);
    assert_eq!(noded.ask_json(&["cluster", "members"]).as_array().map(Vec::len), Some(1));
    let ticket = noded.data().join("ticket");
    let create = [
        "cluster",
        "ticket",
        "create",
        "--golden",
        "--address=127.0.0.2",
        "--file",
        ticket.to_str().unwrap(),
    ];
    let (stderr, code) = stderr_and_code(&noded.nodectl(&create));
    assert!(stderr.contains("cluster.golden_tickets = true") && code == Some(1), "{stderr}");
    assert!(!ticket.exists());
    noded.ask(&["stop", "--wait", "root.cluster"]);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "members"]));
    assert!(stderr.contains("the node's enrolment is Failed") && code == Some(1), "{stderr} {code:?}");

    let noded = NodedProcess::start_in(kill_node(noded), config, &["--dev"]);
    noded.ask(&["start", "--wait", "root.cluster"]);
    assert_ne!(cluster_identity(&noded), first, "a cluster in memory is not kept");
    noded.stop();
}

#[test]
fn a_port_conflict_is_reported_only_at_the_address_of_the_member() {
    let (ports, scratch) = ([reserve_port().unwrap(), reserve_port().unwrap()], ScratchDir::new().unwrap());
    let [client, peer] = [ports[0].number(), ports[1].number()];
    let config = format!(
        "services.containerd.enable = false\ncluster.address = \"127.0.0.2\"\n\
         [services.etcd]\nbinary = \"/bin/true\"\nclient_port = {client}\npeer_port = {peer}\n"
    );
    let file = scratch.path().join("noded.toml");
    fs::write(&file, config).unwrap();
    let check = |taken| {
        let _held = std::net::TcpListener::bind((taken, client)).unwrap();
        let data = scratch.path().join("data");
        stderr_and_code(
            &noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()])
                .output()
                .unwrap(),
        )
    };
    assert_eq!(check("127.0.0.3"), (String::new(), Some(0)));
    let (stderr, code) = check("127.0.0.2");
    let expected = format!("(pid {}): set services.etcd.client_port to another port", std::process::id());
    assert!(stderr.contains(&expected) && code == Some(4), "{stderr}");
}

#[test]
fn a_node_without_a_cluster_section_reports_that() {
    let noded = NodedProcess::start(crate::harness::NO_DAEMONS);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["cluster", "status"]));
    assert!(stderr.contains("[cluster]") && code == Some(1), "{stderr}");
    noded.stop();
}

#[test]
fn an_impossible_cluster_is_rejected_before_anything_is_done() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    let data = scratch.path().join("data");
    let cases = [
        ("[cluster]\n", "requires cluster.address or cluster.interface"),
        ("[cluster]\naddress = \"0.0.0.0\"\n", "cluster.address"),
        ("[cluster]\naddress = \"127.0.0.1\"\ninterface = \"lo\"\n", "one of the two"),
        ("[cluster]\naddress = \"192.0.2.7\"\n", "no interface of this machine has the address 192.0.2.7"),
        ("[cluster]\ninterface = \"none0\"\n", "interface none0 does not exist"),
        ("services.etcd.enable = false\n[cluster]\naddress = \"127.0.0.1\"\n", "[cluster] requires etcd"),
    ];
    for (config, expected) in cases {
        fs::write(&file, config).unwrap();
        let mut command =
            noded_command(&["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{config}");
        let stderr =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(stderr.contains(expected), "{config}: {stderr}");
    }
    assert!(!data.exists());
}
