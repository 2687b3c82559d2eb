//! A Kubernetes control plane whose daemons are parts and services of one node, and depend on each other.

use std::process::Command;
use std::time::Instant;

use nix::sys::signal::Signal;
use testbed::{Kube, KubeDaemon, command_output};

use crate::harness::NodedProcess;

const ETCD: &str = "root.etcd";
const APISERVER: &str = "root.service.kube-apiserver";
/// The users of the API server until its end.
const CLIENTS: [&str; 3] =
    ["root.service.kube-controller-manager", "root.service.kube-scheduler", "root.provisioner"];

/// The program and arguments of a command.
fn command_words(command: &Command) -> Vec<&str> {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_str().unwrap()).collect()
}

/// The configuration of a daemon as a service that is ready when it answers.
fn daemon_config(kube: &Kube, daemon: KubeDaemon, depends_on: &str) -> String {
    let (command, probe) = (kube.daemon_command(daemon).unwrap(), kube.health_command(daemon).unwrap());
    let variables = probe.get_envs().map(|(name, value)| (name.to_str().unwrap(), value.unwrap()));
    let variables: Vec<_> = variables.map(|(name, value)| format!("{name} = {value:?}")).collect();
    format!(
        "[[service]]\nname = {:?}\ncommand = {:?}\nreadiness = {{ probe = {:?}, timeout = \"120s\" }}\n\
         environment = {{ {} }}\ndepends_on = [{depends_on:?}]\nlog = \"klog\"\ngrace = \"75s\"\n",
        daemon.program_name(),
        command_words(&command),
        command_words(&probe),
        variables.join(", "),
    )
}

/// The configuration of a node that runs all of a control plane, and a provisioner that uses it.
fn control_plane_config(kube: &Kube) -> String {
    let [client_port, peer_port] = kube.etcd_ports();
    let etcd = kube.programs().program_path("etcd");
    let apiserver = KubeDaemon::Apiserver.program_name();
    [
        // The clients come first: the dependencies alone give the order.
        daemon_config(kube, KubeDaemon::Scheduler, apiserver),
        daemon_config(kube, KubeDaemon::ControllerManager, apiserver),
        daemon_config(kube, KubeDaemon::Apiserver, "etcd"),
        format!(
            "[provisioner]\nkubeconfig = {:?}\ncsi = false\nquota = \"none\"\ndepends_on = [{apiserver:?}]\n",
            kube.kubeconfig_file("admin").unwrap()
        ),
        format!(
            "[services]\ncontainerd.enable = false\n\
             etcd = {{ binary = {etcd:?}, client_port = {client_port}, peer_port = {peer_port} }}\n"
        ),
    ]
    .concat()
}

#[test]
#[ignore = "needs kube"]
fn a_control_plane_of_parts_and_services_starts_without_a_failed_run_and_stops_in_order() {
    let daemons = KubeDaemon::ALL;
    let kube = daemons.into_iter().fold(Kube::builder(), |kube, daemon| kube.without_daemon(daemon));
    let kube = kube.start().unwrap();
    let mut noded = NodedProcess::start(&control_plane_config(&kube));
    let events = noded.follow(&["events", "-f"]);

    // Everything is ready in its first run.
    let started = Instant::now();
    let mut unready: Vec<&str> = [ETCD, APISERVER].into_iter().chain(CLIENTS).collect();
    events.find_value(|event| {
        assert_ne!(event["change"], "exited", "{event}");
        unready.retain(|dn| event["change"] != "ready" || event["dn"] != **dn);
        unready.is_empty()
    });
    println!("ready after {:?}", started.elapsed());
    let tree = noded.ask_json(&["tree"]);
    for node in tree.as_array().unwrap() {
        let runs = (&node["state"], &node["generation"], &node["restarts"], &node["exits"]);
        assert_eq!(runs, (&"ready".into(), &1.into(), &0.into(), &serde_json::json!([])), "{node}");
    }

    // A request with an unknown token is an error in the API server's log.
    let request = command_output(kube.kubectl_command().args(["--token=unknown", "get", "--raw", "/api"]));
    assert!(request.is_err(), "{request:?}");
    let errors = noded.follow(&["logs", "-f", "--min-level", "error", APISERVER]);
    let entry = errors.find_value(|entry| {
        assert!(matches!(entry["level"].as_str(), Some("error" | "fatal")), "{entry}");
        entry["message"] == "Unable to authenticate the request"
    });
    assert!(entry["fields"].to_string().contains("invalid bearer token"), "{entry}");

    // Each is asked to stop when its users have ended, within its grace period.
    let (started, mut exited) = (Instant::now(), Vec::new());
    noded.signal(Signal::SIGTERM);
    events.find_value(|event| {
        let dn = event["dn"].as_str().unwrap();
        let users = match dn {
            APISERVER => &CLIENTS[..],
            ETCD => &[APISERVER],
            _ => &[],
        };
        match event["change"].as_str().unwrap() {
            "canceling" => {
                assert!(users.iter().all(|user| exited.iter().any(|dn| dn == user)), "{exited:?}");
            }
            "exited" => {
                assert_eq!(event["state"], "canceled", "{event}");
                exited.push(dn.to_owned());
            }
            "killed" => panic!("{event}"),
            _ => {}
        }
        dn == ETCD && event["change"] == "canceling"
    });
    let (status, lines) = noded.wait_end();
    println!("stopped after {:?}", started.elapsed());
    assert_eq!(status.code(), Some(0), "{lines:#?}");
}
