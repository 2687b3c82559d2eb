//! The real etcd and the real containerd under noded.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::{ReservedPort, ScratchDir, reserve_port, tools};

use crate::harness::{NodedProcess, service_config, stderr_and_code};

/// A configuration with an etcd on free ports, which stay reserved while the result exists.
fn etcd_config() -> (String, [ReservedPort; 2]) {
    let ports = [reserve_port().unwrap(), reserve_port().unwrap()];
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nclient_port = {}\npeer_port = {}\n",
        ports[0].number(),
        ports[1].number()
    );
    (config, ports)
}

fn etcdctl(port: &ReservedPort, args: &[&str]) -> String {
    let mut command = Command::new(tools::find_tool(tools::ETCDCTL).unwrap());
    command.env("ETCDCTL_API", "3").arg("--endpoints").arg(port.socket_address().to_string()).args(args);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The pid of noded's child with this program name.
fn child_pid(noded: &NodedProcess, name: &str) -> Pid {
    let children = format!("/proc/{}/task", noded.pid());
    let tasks = std::fs::read_dir(children).unwrap().flatten();
    let pids: Vec<String> = tasks
        .flat_map(|task| std::fs::read_to_string(task.path().join("children")))
        .flat_map(|text| text.split_whitespace().map(String::from).collect::<Vec<_>>())
        .collect();
    let called = |pid: &&String| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
    };
    let pid = pids.iter().find(called).unwrap_or_else(|| panic!("no {name} among {pids:?}"));
    Pid::from_raw(pid.parse().unwrap())
}

#[test]
#[ignore = "needs etcd"]
fn etcd_serves_when_it_is_ready_and_restarts_with_its_data() {
    let (config, ports) = etcd_config();
    let noded = NodedProcess::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    etcdctl(&ports[0], &["put", "greeting", "hello"]);

    kill(child_pid(&noded, "etcd"), Signal::SIGKILL).unwrap();
    noded.wait_for_event("root.etcd", 2, "ready");
    assert_eq!(etcdctl(&ports[0], &["get", "--print-value-only", "greeting"]), "hello\n");
    let status = noded.ask_json(&["status", "root.etcd"]);
    let exit = &status["node"]["exits"][0];
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
    let (config, ports) = etcd_config();
    let dependent = "environment = { PATH = \"/usr/bin:/bin\" }\ndepends_on = [\"etcd\"]";
    let config = format!("{config}\n{}", service_config("user", "exec sleep 1000", dependent));
    let noded = NodedProcess::start(&config);
    noded.wait_for_event("root.service.user", 1, "ready");
    etcdctl(&ports[0], &["put", "greeting", "hello"]);
    let other = reserve_port().unwrap();
    let [from, to] = [&ports[0], &other].map(|port| format!("client_port = {}", port.number()));
    std::fs::write(noded.scratch.path().join("noded.toml"), config.replace(&from, &to)).unwrap();
    assert_eq!(noded.ask(&["reload"]), "reloaded:\n  restart root.etcd: services.etcd.client_port\n");
    noded.wait_for_event("root.etcd", 2, "ready");
    assert_eq!(etcdctl(&other, &["get", "--print-value-only", "greeting"]), "hello\n");
    let generation = noded.ask_json(&["status", "root.service.user"])["node"]["generation"].clone();
    assert_eq!(generation, 1, "a dependent runs on");
    noded.stop();
}

#[test]
#[ignore = "needs etcd"]
fn etcd_keeps_its_data_across_a_restart_of_the_node() {
    let (config, ports) = etcd_config();
    let noded = NodedProcess::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    etcdctl(&ports[0], &["put", "greeting", "hello"]);
    let scratch = ScratchDir::new().unwrap();
    let data = noded.data();
    let kept = scratch.path().join("data");
    let first = noded.scratch.path().to_owned();
    // Move the data before the first noded's directory is removed.
    let mut noded = noded;
    noded.signal(Signal::SIGTERM);
    assert_eq!(noded.wait().0.code(), Some(0));
    std::fs::rename(data, kept).unwrap();
    drop(noded);
    assert!(!first.exists());

    let again = NodedProcess::start_in(scratch, &config, &[]);
    again.ask(&["start", "--wait", "root.etcd"]);
    assert_eq!(etcdctl(&ports[0], &["get", "--print-value-only", "greeting"]), "hello\n");
    again.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn containerd_answers_when_it_is_ready_and_stays_in_its_directory() {
    let noded = NodedProcess::start("services.etcd.enable = false\n");
    noded.ask(&["start", "--wait", "root.containerd"]);
    let socket = noded.data().join("run/containerd/containerd.sock");
    let ctr = || {
        let output = Command::new(tools::find_tool(tools::CTR).unwrap())
            .arg("-a")
            .arg(&socket)
            .arg("version")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    ctr();
    let log = noded.ask(&["-o", "json", "logs", "root.containerd", "--leveled"]);
    assert!(log.lines().count() > 10, "{log}");
    kill(child_pid(&noded, "containerd"), Signal::SIGKILL).unwrap();
    noded.wait_for_event("root.containerd", 2, "ready");
    ctr();
    assert!(
        noded.data().join("data/containerd/root").exists()
            && noded.data().join("run/containerd/state").exists()
    );
    noded.stop();
}

/// The status of a plugin of the node's containerd: `ok`, `skip`, `error`.
fn plugin_status(noded: &NodedProcess, kind: &str, name: &str) -> Option<String> {
    let mut ctr = Command::new(tools::find_tool(tools::CTR).unwrap());
    ctr.arg("-a").arg(noded.data().join("run/containerd/containerd.sock"));
    let listed = testbed::command_output(ctr.args(["plugins", "ls"])).unwrap();
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
        noded.ask(&["start", "--wait", "root.containerd"]);
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
    std::fs::write(&file, text).unwrap();
    let config =
        format!("services.etcd.enable = false\nservices.containerd.config = \"{}\"\n", file.display());
    let noded = NodedProcess::start(&config);
    noded.ask(&["start", "--wait", "root.containerd"]);
    assert_eq!(plugin_status(&noded, "io.containerd.snapshotter.v1", "native").as_deref(), Some("ok"));
    assert!(!elsewhere.exists(), "root, state and socket are the node's");
    noded.stop();
}

#[test]
#[ignore = "needs containerd, busybox and root"]
fn images_from_files_are_present_when_their_import_is_done() {
    let images = ScratchDir::new().unwrap();
    std::fs::create_dir(images.path().join("k8s.io")).unwrap();
    testbed::ContainerImage::busybox()
        .unwrap()
        .write_archive(&images.path().join("k8s.io/busybox.tar"))
        .unwrap();
    std::fs::write(images.path().join("k8s.io/bad.tar"), "no archive").unwrap();
    let preseed = images.path().display();
    let noded = NodedProcess::start(&format!(
        "services.etcd.enable = false\n[services.containerd]\npreseed = \"{preseed}\"\nunpack = true\n"
    ));
    noded.wait_for_event("root.containerd.preseed", 1, "ready");
    let socket = noded.data().join("run/containerd/containerd.sock");
    let ctr = |arguments: &[&str]| {
        let mut ctr = Command::new(tools::find_tool(tools::CTR).unwrap());
        testbed::command_output(ctr.arg("-a").arg(&socket).args(["-n", "k8s.io"]).args(arguments)).unwrap()
    };
    assert_eq!(ctr(&["images", "ls", "-q"]).trim(), testbed::BUSYBOX_IMAGE);
    assert!(ctr(&["snapshots", "ls"]).contains("Committed"), "its layer is unpacked");
    let same = noded.ask_json(&["images"]);
    assert_eq!(same[0]["name"], testbed::BUSYBOX_IMAGE, "{same}");
    let archive = images.path().join("k8s.io/busybox.tar");
    let import = ["images", "--namespace=mine", "--import", archive.to_str().unwrap()];
    assert_eq!(noded.ask_json(&import)[0]["digest"], same[0]["digest"]);
    assert_eq!(noded.ask_json(&["images", "--namespace=mine"]).as_array().map(Vec::len), Some(1));
    let bad = images.path().join("k8s.io/bad.tar");
    let (stderr, code) =
        stderr_and_code(&noded.nodectl(&["images", "--namespace=mine", "--import", bad.to_str().unwrap()]));
    assert!(
        stderr.contains("bad.tar") && stderr.contains("archive truncated") && code == Some(1),
        "{stderr}"
    );
    let log = noded.ask(&["logs", "root.containerd.preseed"]);
    assert!(log.contains("preseeded busybox.tar into k8s.io: localhost/busybox:1"), "{log}");
    assert!(log.contains("bad.tar: image archive truncated"), "the invalid archive is logged: {log}");
    noded.ask(&["stop", "--wait", "root.containerd"]);
    let (stderr, code) = stderr_and_code(&noded.nodectl(&["images"]));
    assert!(stderr.contains("containerd") && code == Some(1), "{stderr} {code:?}");
    noded.stop();
}

#[test]
#[ignore = "needs etcd, containerd and root"]
fn a_complete_node_starts_and_stops() {
    let (config, _ports) = etcd_config();
    let config = config.replace("services.containerd.enable = false\n", "");
    let noded = NodedProcess::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    noded.ask(&["start", "--wait", "root.containerd"]);
    let status = noded.ask(&["status"]);
    assert!(status.contains("all ") && status.contains(" runnables are ready"), "{status}");
    let etcd = child_pid(&noded, "etcd");
    let containerd = child_pid(&noded, "containerd");
    noded.stop();
    for pid in [etcd, containerd] {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} is running");
    }
}
