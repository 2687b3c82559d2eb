//! Whoever asks, and however, gets the same answer.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testbed::{ScratchDir, reserve_port};

use crate::harness::{
    EtcdPorts, NO_DAEMONS, NO_DISKS, NodedProcess, http_get, service_config, sleep_config, wait,
};

/// What each way of asking says of the node, and of one of its runnables.
#[derive(Debug, PartialEq, Eq)]
struct Answers {
    tree: bool,
    status: bool,
    status_of_node: bool,
    health: bool,
    health_of_node: bool,
    metric_of_node: bool,
    readyz: bool,
}

impl Answers {
    fn ask(node: &NodedProcess, metrics: &std::path::Path, dn: &str) -> Self {
        let health = node.nodectl(&["-o", "json", "health"]);
        let has_problem = |found: &Value| found["object"] == dn && found["severity"] == "problem";
        let conditions = health.json()["conditions"].as_array().unwrap().clone();
        let tree = node.ask(&["-o", "json", "tree"]);
        let tree: Vec<Value> = serde_json::from_str(&tree).unwrap();
        let get = |path: &str| http_get(UnixStream::connect(metrics).unwrap(), path);
        Self {
            tree: tree.iter().find(|found| found["dn"] == dn).unwrap()["healthy"] == true,
            status: node.nodectl(&["status", dn]).code == Some(0),
            status_of_node: node.nodectl(&["status"]).code == Some(0),
            health: !conditions.iter().any(has_problem),
            health_of_node: health.code == Some(0),
            metric_of_node: get("/metrics").1.contains("\nnodekeel_healthy 1\n"),
            readyz: get("/readyz").0.contains("200"),
        }
    }

    /// All are of this opinion.
    fn all(well: bool) -> Self {
        Self {
            tree: well,
            status: well,
            status_of_node: well,
            health: well,
            health_of_node: well,
            metric_of_node: well,
            readyz: well,
        }
    }
}

/// Waits until all say the same, and returns how long that took.
fn wait_for_agreement(node: &NodedProcess, metrics: &std::path::Path, dn: &str, well: bool) -> Duration {
    let began = Instant::now();
    wait(dn, || {
        let answers = Answers::ask(node, metrics, dn);
        anyhow::ensure!(answers == Answers::all(well), "{answers:?}");
        Ok(())
    });
    began.elapsed()
}

#[test]
#[ignore = "needs etcd"]
fn tree_status_health_metrics_and_readiness_agree_on_each_trouble() {
    let (scratch, ports) = (ScratchDir::new().unwrap(), EtcdPorts::reserve());
    let metrics = scratch.path().join("metrics.sock");
    let alive = scratch.path().join("alive");
    std::fs::write(&alive, "").unwrap();
    let liveness = format!(
        "liveness = {{ probe = [\"/usr/bin/test\", \"-e\", {alive:?}], period = \"200ms\", failure_threshold = 1000 }}"
    );
    let loops = service_config("loops", "exit 3", "backoff = { initial = \"10ms\", max = \"10ms\" }");
    let config = format!(
        "services.containerd.enable = false\nkernel.log = false\n{NO_DISKS}{}[metrics]\naddress = {metrics:?}\n{}{}",
        ports.section(""),
        sleep_config("probed", &liveness),
        sleep_config("stopped", ""),
    );
    let node = NodedProcess::start_in(scratch, &config, &[]);
    for dn in ["root.etcd", "root.service.probed", "root.service.stopped"] {
        wait_for_agreement(&node, &metrics, dn, true);
    }
    let mut table = Vec::new();
    let mut show = |trouble: &str, dn: &str, well: bool| {
        table.push(format!(
            "{trouble}: {dn} agreed on after {:?}",
            wait_for_agreement(&node, &metrics, dn, well)
        ));
    };
    // A daemon that is frozen, and restarted for it.
    let processes = testbed::leftovers::find_processes(&node.data()).unwrap();
    let etcd = processes.iter().find(|process| process.command.contains("--data-dir")).expect("etcd runs");
    kill(Pid::from_raw(etcd.pid), Signal::SIGSTOP).unwrap();
    show("frozen", "root.etcd", false);
    show("restarted", "root.etcd", true);
    // A probe that fails, and succeeds again.
    std::fs::remove_file(&alive).unwrap();
    show("probe fails", "root.service.probed", false);
    std::fs::write(&alive, "").unwrap();
    show("probe succeeds", "root.service.probed", true);
    node.ask(&["stop", "--wait", "stopped"]);
    show("stopped", "root.service.stopped", false);
    node.ask(&["start", "--wait", "stopped"]);
    show("started", "root.service.stopped", true);
    // A crash loop, and the end of its definition.
    node.write_config(&format!("{config}{loops}"));
    node.ask(&["reload"]);
    show("crash loop", "root.service.loops", false);
    node.write_config(&format!("{config}{}", sleep_config("loops", "")));
    node.ask(&["reload"]);
    show("mended", "root.service.loops", true);
    assert_eq!(node.status("root.service.loops")["failures"], 0, "those of another definition");
    table.iter().for_each(|row| println!("{row}"));
    node.stop();
}

#[test]
fn they_agree_while_no_api_server_answers() {
    let (scratch, api) = (ScratchDir::new().unwrap(), reserve_port().unwrap());
    let metrics = scratch.path().join("metrics.sock");
    let kubeconfig = scratch.path().join("kubeconfig");
    std::fs::write(
        &kubeconfig,
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: \"http://127.0.0.1:{}\"}}}}]\nusers: [{{name: u, user: {{}}}}]\n",
            api.number()
        ),
    )
    .unwrap();
    let config = format!(
        "{NO_DAEMONS}{NO_DISKS}[metrics]\naddress = {metrics:?}\n\
         [provisioner]\nkubeconfig = {kubeconfig:?}\nquota = \"none\"\ncsi = false\n"
    );
    let node = NodedProcess::start_in(scratch, &config, &[]);
    wait_for_agreement(&node, &metrics, "root.provisioner", false);
    node.stop();
}
