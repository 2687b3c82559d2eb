//! The real etcd and the real containerd under noded.

use std::fs;

use testbed::{BUSYBOX_IMAGE, ContainerImage, ScratchDir, gotool, reserve_port, tools};

use crate::harness::{EtcdPorts, NodedProcess, etcdctl, kill_process, sleep_config, wait_gone};

/// A configuration with an etcd and without containerd.
fn etcd_config(ports: &EtcdPorts) -> String {
    format!("services.containerd.enable = false\n{}", ports.section(""))
}

/// A node with an etcd that serves, and has a key.
fn start_with_greeting(config: &str, ports: &EtcdPorts) -> NodedProcess {
    let noded = NodedProcess::start(config);
    noded.wait_ready("root.etcd");
    ports.etcdctl(&["put", "greeting", "hello"]);
    noded
}

const GET: [&str; 3] = ["get", "--print-value-only", "greeting"];

/// Kills the process of a runnable.
fn kill_runnable(noded: &NodedProcess, dn: &str) {
    kill_process(child_pid(noded, dn));
}

/// The pid of noded's child with the program name of a part.
fn child_pid(noded: &NodedProcess, dn: &str) -> u64 {
    let name = dn.strip_prefix("root.").unwrap();
    let tasks = fs::read_dir(format!("/proc/{}/task", noded.pid())).unwrap().flatten();
    let children: String =
        tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok()).collect();
    let called =
        |pid: &&str| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
    let pid = children.split_whitespace().find(called);
    pid.unwrap_or_else(|| panic!("no {name} among {children}")).parse().unwrap()
}

#[test]
#[ignore = "needs etcd"]
fn etcd_serves_when_it_is_ready_and_restarts_with_its_data() {
    let ports = EtcdPorts::reserve();
    let noded = start_with_greeting(&etcd_config(&ports), &ports);
    kill_runnable(&noded, "root.etcd");
    noded.wait_for_event("root.etcd", 2, "ready");
    assert_eq!(ports.etcdctl(&GET), "hello\n");
    let exit = &noded.status("root.etcd")["exits"][0];
    assert_eq!((exit["signal"].as_i64(), exit["state"].as_str()), (Some(9), Some("dead")), "{exit}");

    let log = noded.ask(&["-o", "json", "logs", "root.etcd", "--leveled"]);
    assert!(log.lines().count() > 10, "{log}");
    let raw = noded.ask(&["-o", "json", "logs", "root.etcd", "--raw"]);
    assert!(raw.lines().count() <= 5, "etcd's lines are parsed: {raw}");
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_reload_moves_etcd_to_another_port_with_its_data() {
    let ports = EtcdPorts::reserve();
    let config = format!("{}{}", etcd_config(&ports), sleep_config("user", "depends_on = [\"etcd\"]"));
    let noded = start_with_greeting(&config, &ports);
    noded.wait_for_event("root.service.user", 1, "ready");
    let other = reserve_port().unwrap();
    let [from, to] = [&ports.client, &other].map(|port| format!("client_port = {}", port.number()));
    noded.write_config(&config.replace(&from, &to));
    assert_eq!(noded.ask(&["reload"]), "reloaded:\n  restart root.etcd: services.etcd.client_port\n");
    noded.wait_for_event("root.etcd", 2, "ready");
    assert_eq!(etcdctl(&other, &GET), "hello\n");
    assert_eq!(noded.status("root.service.user")["generation"], 1, "a dependent runs on");
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn etcd_keeps_its_data_across_a_restart_of_the_node() {
    let ports = EtcdPorts::reserve();
    let config = etcd_config(&ports);
    let noded = start_with_greeting(&config, &ports);
    let again = NodedProcess::start_in(noded.stop_and_keep(), &config, &[]);
    again.wait_ready("root.etcd");
    assert_eq!(ports.etcdctl(&GET), "hello\n");
    again.stop();
}

#[test]
#[ignore = "needs etcd"]
fn the_etcd_of_a_cluster_knows_every_variable_that_it_is_given() {
    let newest = gotool::ETCD.program_path("etcd").unwrap();
    let debian = tools::find_tool(tools::ETCD).unwrap();
    for etcd in [debian.as_path(), newest.as_path()] {
        let ports = EtcdPorts::reserve();
        let section = ports.section(&format!("binary = {etcd:?}\n"));
        let config = format!(
            "services.containerd.enable = false\n{section}[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\n"
        );
        let mut node = NodedProcess::spawn(ScratchDir::new().unwrap(), &config, &[], |_| {});
        let mut lines = node.wait_for_line("control socket at");
        node.wait_ready("root.cluster");
        lines.extend(node.stop());
        assert!(!lines.iter().any(|line| line.contains("unrecognized environment variable")), "{lines:#?}");
    }
}

#[test]
#[ignore = "needs containerd and root"]
fn containerd_answers_when_it_is_ready_and_stays_in_its_directory() {
    let noded = NodedProcess::start("services.etcd.enable = false\n");
    noded.wait_ready("root.containerd");
    noded.ctr(&["version"]).unwrap();
    let log = noded.ask(&["-o", "json", "logs", "root.containerd", "--leveled"]);
    assert!(log.lines().count() > 10, "{log}");
    kill_runnable(&noded, "root.containerd");
    noded.wait_for_event("root.containerd", 2, "ready");
    noded.ctr(&["version"]).unwrap();
    for directory in ["data/containerd/root", "run/containerd/state"] {
        assert!(noded.data().join(directory).exists(), "{directory}");
    }
    noded.stop();
}

/// The status of a plugin of the node's containerd: `ok`, `skip`, `error`.
fn plugin_status(noded: &NodedProcess, kind: &str, name: &str) -> Option<String> {
    let listed = noded.ctr(&["plugins", "ls"]).unwrap();
    let mut lines = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|line| line.starts_with(&[kind, name]))?;
    line.last().map(|status| (*status).to_owned())
}

#[test]
#[ignore = "needs containerd and root"]
fn containerd_serves_the_cri_only_where_it_is_configured() {
    const CRI: (&str, &str) = ("io.containerd.grpc.v1", "cri");
    let started = |services: &str| {
        let noded = NodedProcess::start(&format!("services.etcd.enable = false\n{services}"));
        noded.wait_ready("root.containerd");
        noded
    };
    let without = started("");
    assert_eq!(plugin_status(&without, CRI.0, CRI.1), None);
    without.stop();
    // containerd creates the directory of the CNI configuration if it does not exist.
    let networks = ScratchDir::new().unwrap();
    let with = started(&format!(
        "[services.containerd.cri]\ndefault_runtime = \"runsc\"\ncni_conf = {:?}\n\
         [services.containerd.cri.runsc]\ndebug = true\n",
        networks.path().join("net.d")
    ));
    assert_eq!(plugin_status(&with, CRI.0, CRI.1).as_deref(), Some("ok"));
    with.wait_for_event("root.containerd.runsc", 1, "ready");
    with.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_custom_containerd_configuration_keeps_root_state_and_socket_of_the_node() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("containerd.toml");
    let elsewhere = scratch.path().join("elsewhere");
    let text = format!(
        "version = 2\nroot = \"{0}/root\"\nstate = \"{0}/state\"\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
         [grpc]\naddress = \"{0}/sock\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{1}/opt\"\n",
        elsewhere.display(),
        scratch.path().display()
    );
    fs::write(&file, text).unwrap();
    let config =
        format!("services.etcd.enable = false\nservices.containerd.config = \"{}\"\n", file.display());
    let noded = NodedProcess::start(&config);
    noded.wait_ready("root.containerd");
    assert_eq!(plugin_status(&noded, "io.containerd.snapshotter.v1", "native").as_deref(), Some("ok"));
    assert!(!elsewhere.exists(), "root, state and socket are the node's");
    noded.stop();
}

#[test]
#[ignore = "needs containerd, busybox and root"]
fn images_from_files_are_present_when_their_import_is_done() {
    let images = ScratchDir::new().unwrap();
    let directory = images.path().join("k8s.io");
    let (archive, bad) = (directory.join("busybox.tar"), directory.join("bad.tar"));
    fs::create_dir(&directory).unwrap();
    ContainerImage::busybox().unwrap().write_archive(&archive).unwrap();
    fs::write(&bad, "no archive").unwrap();
    let noded = NodedProcess::start(&format!(
        "services.etcd.enable = false\n[services.containerd]\npreseed = {:?}\nunpack = true\n",
        images.path()
    ));
    noded.wait_for_event("root.containerd.preseed", 1, "ready");
    assert_eq!(noded.ctr(&["images", "ls", "-q"]).unwrap().trim(), BUSYBOX_IMAGE);
    let snapshots = noded.ctr(&["snapshots", "ls"]).unwrap();
    assert!(snapshots.contains("Committed"), "its layer is unpacked: {snapshots}");
    let same = noded.ask_json(&["images"]);
    assert_eq!(same[0]["name"], BUSYBOX_IMAGE, "{same}");
    let import = ["images", "--namespace=mine", "--import", archive.to_str().unwrap()];
    assert_eq!(noded.ask_json(&import)[0]["digest"], same[0]["digest"]);
    assert_eq!(noded.ask_json(&["images", "--namespace=mine"]).as_array().map(Vec::len), Some(1));
    let refused = noded.nodectl(&["images", "--namespace=mine", "--import", bad.to_str().unwrap()]);
    refused.assert_fails(1, "bad.tar");
    refused.assert_fails(1, "archive truncated");
    let log = noded.ask(&["logs", "root.containerd.preseed"]);
    assert!(log.contains("/k8s.io/busybox.tar: localhost/busybox:1"), "{log}");
    assert!(log.contains("bad.tar: image archive truncated"), "the invalid archive is logged: {log}");
    noded.ask(&["stop", "--wait", "root.containerd"]);
    noded.nodectl(&["images"]).assert_fails(1, "containerd");
    noded.stop();
}

#[test]
#[ignore = "needs etcd, containerd and root"]
fn a_complete_node_starts_and_stops() {
    let ports = EtcdPorts::reserve();
    let noded = NodedProcess::start(&ports.section(""));
    let daemons = ["root.etcd", "root.containerd"];
    daemons.iter().for_each(|dn| noded.wait_ready(dn));
    let status = noded.ask(&["status"]);
    assert!(status.contains("all ") && status.contains(" runnables are ready"), "{status}");
    let pids = daemons.map(|dn| child_pid(&noded, dn));
    noded.stop();
    pids.into_iter().for_each(wait_gone);
}
