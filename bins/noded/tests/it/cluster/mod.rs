//! Cluster membership of a node, with the real etcd where it matters.

mod addresses;
mod bootstrap;
mod configuration;
mod tickets;

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value;
use testbed::{ReservedPort, ScratchDir, gotool, reserve_port};

use crate::harness::{NodedProcess, TEST_TIMEOUT, stderr_and_code};
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
