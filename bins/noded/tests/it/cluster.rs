//! Cluster membership of a node, with the real etcd where it matters.

use std::fs;

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
             [cluster]\n{how}\ndeadline = \"60s\"\ngolden_tickets = true\n",
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
    let names = noded.data().join("cluster/names");
    let hosts = fs::read_to_string(names.join("hosts")).unwrap();
    assert!(hosts.contains(node.as_str().unwrap()), "{hosts}");
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
    let expected = "the cluster already has a learner; the learner is at https://127.0.0.8:7001";
    let command = "nodectl cluster ticket withdraw --address 127.0.0.8 --port 7001";
    assert!(stderr.contains(expected) && stderr.contains(command) && code == Some(1), "{stderr} {code:?}");

    let command: Vec<_> = command.split(' ').skip(1).collect();
    assert_eq!(bootstrapped.ask_json(&command), serde_json::json!({"url": "https://127.0.0.8:7001"}));
    let members = bootstrapped.ask_json(&["cluster", "members"]);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    let credentials = GoldenTicket::from_config(&fs::read(&mistyped).unwrap()).unwrap().member_credentials();
    let list = bootstrapped.data().join("cluster/volume/etcd/peer_crl");
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
fn a_ticket_that_comes_after_the_bootstrap_is_logged_and_joins_once_the_node_is_reset() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let bootstrapped = first.start(ScratchDir::new().unwrap());
    let early = second.start(ScratchDir::new().unwrap());
    let alone = cluster_identity(&early);
    let (port, state) = (second.ports[1].number().to_string(), early.data().join("cluster/state"));
    let (late, kept) = (state.join("enrolment.pb"), early.scratch.path().join("kept.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.1", &port, late.to_str().unwrap()));

    let count_warnings = |noded: &NodedProcess| {
        noded.ask(&["logs", "root.cluster"]).matches("ignoring the ticket for").count()
    };
    assert_eq!(count_warnings(&early), 0);
    let early = second.start(kill_node(early));
    assert_eq!((cluster_identity(&early), count_warnings(&early)), (alone, 1));

    // As docs/noded.md, "Reset a node", describes.
    let scratch = kill_node(early);
    fs::rename(&late, &kept).unwrap();
    fs::remove_dir_all(scratch.path().join("data/cluster")).unwrap();
    fs::create_dir_all(&state).unwrap();
    fs::rename(&kept, &late).unwrap();
    let joined = second.start(scratch);
    assert_eq!(cluster_identity(&joined), (ticket["node"].clone(), cluster_identity(&bootstrapped).1));

    // The ticket by which it has joined is not logged, and may be removed.
    let joined = second.start(kill_node(joined));
    assert_eq!((&cluster_identity(&joined).0, count_warnings(&joined)), (&ticket["node"], 0));
    fs::remove_file(&late).unwrap();
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
    let state = scratch.path().join("data/cluster/state");
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
                  cluster.address = \"127.0.0.1\"\n";
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
    assert!(stderr.contains("the node is Failed, not Running") && code == Some(1), "{stderr} {code:?}");

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
