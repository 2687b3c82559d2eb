//! Cluster membership of a node, with the real etcd where it matters.

mod addresses;
mod backup;
mod bootstrap;
mod configuration;
mod join_tickets;
mod reset;
mod tickets;
mod workers;

use std::fs;
use std::process::{Command, Stdio};

use nodekeel_node::node::NodeHandle;
use serde_json::Value;
use testbed::{PrivateNetwork, ScratchDir, gotool, tools};

use crate::harness::{EtcdPorts, NodedProcess, wait};

/// The configuration of a member, which keeps its ports across restarts.
pub(crate) struct MemberFixture {
    config: String,
    ports: EtcdPorts,
    /// The network namespace that it runs in, if not in this one.
    network: Option<String>,
}

impl MemberFixture {
    pub(crate) fn new() -> Self {
        Self::reachable_by("address = \"127.0.0.1\"", None)
    }

    fn reachable_by(how: &str, network: Option<&PrivateNetwork>) -> Self {
        let ports = EtcdPorts::reserve();
        let config = format!(
            "services.containerd.enable = false\n{}[cluster]\n{how}\nbootstrap = true\ndeadline = \"60s\"\n\
             golden_tickets = true\n",
            ports.section("")
        );
        Self { config, ports, network: network.map(|site| site.namespace(0)) }
    }

    /// With more sections in its configuration.
    pub(crate) fn with_sections(mut self, sections: &str) -> Self {
        self.config.push_str(sections);
        self
    }

    /// With the newest release of etcd instead of Debian's.
    fn on_newest_etcd(mut self) -> Self {
        let binary = gotool::ETCD.program_path("etcd").unwrap();
        let table = "[services.etcd]\n";
        self.config = self.config.replace(table, &format!("{table}binary = {binary:?}\n"));
        self
    }

    /// Starts it, and does not wait for its cluster.
    pub(crate) fn spawn(&self, scratch: ScratchDir) -> NodedProcess {
        let mut noded = NodedProcess::spawn(scratch, &self.config, &[], |command| {
            if let Some(network) = &self.network {
                // The same process: ip(8) executes it.
                let mut within = Command::new(tools::find_tool(tools::IP).unwrap());
                within.args(["netns", "exec", network]).arg(command.get_program()).args(command.get_args());
                within.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).stderr(Stdio::piped());
                *command = within;
            }
        });
        noded.wait_for_line("control socket at");
        noded
    }

    /// Starts it, and waits until it is in its cluster.
    fn start(&self, scratch: ScratchDir) -> NodedProcess {
        let noded = self.spawn(scratch);
        noded.wait_ready("root.cluster");
        noded
    }

    /// Starts it in this process.
    pub(crate) fn start_here(&self, scratch: &ScratchDir) -> NodeHandle {
        NodeHandle::builder("test.toml", &*self.config).data(scratch.path().join("data")).start().unwrap()
    }

    pub(crate) fn start_new(&self) -> NodedProcess {
        self.start(ScratchDir::new().unwrap())
    }

    /// Kills it, and starts it again.
    fn restart(&self, noded: NodedProcess) -> NodedProcess {
        self.start(noded.kill())
    }

    fn peer_port(&self) -> String {
        self.ports.peer.number().to_string()
    }
}

/// The ids of a node that is in its cluster and of the cluster, once the node takes part: a busy machine may elect
/// another leader at any moment, and until then each member is `Unhealthy`.
pub(crate) fn cluster_identity(noded: &NodedProcess) -> (Value, Value) {
    wait("the node to take part in its cluster", || {
        let status = noded.nodectl(&["-o", "json", "cluster", "status"]).json();
        let state = &status["state"];
        assert!(state == "Running" || state == "Unhealthy", "{status}");
        anyhow::ensure!(state == "Running", "{status}");
        Ok((status["node"].clone(), status["cluster"].clone()))
    })
}

/// The members of the node's cluster, once it has a leader.
fn list_members(noded: &NodedProcess) -> Value {
    wait("the list of members", || {
        let ended = noded.nodectl(&["-o", "json", "cluster", "members"]);
        anyhow::ensure!(ended.code == Some(0), "{ended:#?}");
        Ok(ended.json())
    })
}

fn assert_joins(first: &MemberFixture, second: &MemberFixture, address: &str) {
    let (bootstrapped, joined) = join_cluster(first, second, address);
    let before = cluster_identity(&joined);
    let joined = second.restart(joined);
    assert_eq!(cluster_identity(&joined), before);
    joined.stop();
    bootstrapped.stop();
}

/// Waits until `cluster status` fails with a status that satisfies the predicate.
fn wait_failing(noded: &NodedProcess, what: &str, is: impl Fn(&Value, &str) -> bool) -> Value {
    wait(what, || {
        let ended = noded.nodectl(&["-o", "json", "cluster", "status"]);
        let status: Value = serde_json::from_str(&ended.stdout)?;
        let detail = status["detail"].as_str().unwrap_or_default();
        anyhow::ensure!(ended.code == Some(6) && is(&status, detail), "{status}");
        Ok(status)
    })
}

/// The state of `root.cluster` in the tree, and what it waits for.
fn state_in_tree(noded: &NodedProcess) -> (String, String) {
    let node = noded.status("root.cluster");
    let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
    (text("state"), text("waiting_for"))
}

/// Waits until the node waits for a ticket, and returns why.
fn wait_waiting(noded: &NodedProcess) -> String {
    let status = wait_failing(noded, "the wait for a ticket", |status, _| status["state"] == "Waiting");
    let (state, why) = state_in_tree(noded);
    assert!(state == "new" && why.starts_with("waits for a ticket"), "{state}: {why}");
    status["detail"].as_str().unwrap().to_owned()
}

pub(crate) fn create_ticket_args<'a>(address: &'a str, port: &'a str, file: &'a str) -> [&'a str; 10] {
    ["cluster", "ticket", "create", "--golden", "--address", address, "--port", port, "--file", file]
}

/// Starts both, and waits until the second has joined the first.
pub(crate) fn join_cluster(
    first: &MemberFixture,
    second: &MemberFixture,
    address: &str,
) -> (NodedProcess, NodedProcess) {
    let bootstrapped = first.start_new();
    let scratch = ScratchDir::new().unwrap();
    let state = scratch.path().join("data/esp");
    fs::create_dir_all(&state).unwrap();
    let ticket_file = state.join("enrolment.pb");
    let (port, file) = (second.peer_port(), ticket_file.to_str().unwrap());
    let create = create_ticket_args(address, &port, file);
    let ticket = bootstrapped.ask_json(&create);
    bootstrapped.nodectl(&create).assert_fails(1, "can't use");
    let joined = second.start(scratch);
    let (node, cluster) = cluster_identity(&joined);
    assert_eq!((&node, &cluster), (&ticket["node"], &cluster_identity(&bootstrapped).1));
    let members = list_members(&bootstrapped);
    let votes: Vec<_> = members.as_array().unwrap().iter().map(|member| member["learner"].clone()).collect();
    assert_eq!(votes, [false, false], "{members}");
    let spare = bootstrapped.scratch.path().join("spare.pb");
    let create = create_ticket_args(address, &port, spare.to_str().unwrap());
    bootstrapped.nodectl(&create).assert_fails(1, "a voting member is already at");
    (bootstrapped, joined)
}
