//! The real etcd and the real containerd under noded.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testbed::{Port, Scratch, free_port, tools};

use crate::harness::{Noded, failed};

/// A configuration with an etcd on ports of its own, which stay reserved with the result.
fn etcd_config() -> (String, [Port; 2]) {
    let ports = [free_port().unwrap(), free_port().unwrap()];
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nclient_port = {}\npeer_port = {}\n",
        ports[0].number(),
        ports[1].number()
    );
    (config, ports)
}

fn etcdctl(port: &Port, args: &[&str]) -> String {
    let mut command = Command::new(tools::find(tools::ETCDCTL).unwrap());
    command.env("ETCDCTL_API", "3").arg("--endpoints").arg(port.address().to_string()).args(args);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The pid of the child of a noded whose program is called so.
fn child_of(noded: &Noded, name: &str) -> Pid {
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
fn etcd_serves_when_it_is_ready_and_comes_back_with_its_data() {
    let (config, ports) = etcd_config();
    let noded = Noded::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    etcdctl(&ports[0], &["put", "greeting", "hello"]);

    kill(child_of(&noded, "etcd"), Signal::SIGKILL).unwrap();
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
fn etcd_keeps_its_data_over_a_restart_of_the_node() {
    let (config, ports) = etcd_config();
    let noded = Noded::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    etcdctl(&ports[0], &["put", "greeting", "hello"]);
    let scratch = Scratch::new().unwrap();
    let data = noded.data();
    let kept = scratch.path().join("data");
    let first = noded.scratch.path().to_owned();
    // The directory is moved away before the first one's is removed.
    let mut noded = noded;
    noded.signal(Signal::SIGTERM);
    assert_eq!(noded.wait().0.code(), Some(0));
    std::fs::rename(data, kept).unwrap();
    drop(noded);
    assert!(!first.exists());

    let again = Noded::start_in(scratch, &config, &[]);
    again.ask(&["start", "--wait", "root.etcd"]);
    assert_eq!(etcdctl(&ports[0], &["get", "--print-value-only", "greeting"]), "hello\n");
    again.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn containerd_answers_when_it_is_ready_and_keeps_to_its_directory() {
    let noded = Noded::start("services.etcd.enable = false\n");
    noded.ask(&["start", "--wait", "root.containerd"]);
    let socket = noded.data().join("run/containerd/containerd.sock");
    let ctr = || {
        let output = Command::new(tools::find(tools::CTR).unwrap())
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
    kill(child_of(&noded, "containerd"), Signal::SIGKILL).unwrap();
    noded.wait_for_event("root.containerd", 2, "ready");
    ctr();
    assert!(
        noded.data().join("containerd/root").exists() && noded.data().join("run/containerd/state").exists()
    );
    noded.stop();
}

/// What becomes of a plugin of the node's containerd: `ok`, `skip`, `error`.
fn plugin(noded: &Noded, kind: &str, name: &str) -> Option<String> {
    let mut ctr = Command::new(tools::find(tools::CTR).unwrap());
    ctr.arg("-a").arg(noded.data().join("run/containerd/containerd.sock"));
    let listed = testbed::output(ctr.args(["plugins", "ls"])).unwrap();
    let mut lines = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.find(|line| line.starts_with(&[kind, name]))?;
    line.last().map(|status| (*status).to_owned())
}

#[test]
#[ignore = "needs containerd and root"]
fn a_kubelet_is_served_where_the_configuration_says_so() {
    const CRI: (&str, &str) = ("io.containerd.grpc.v1", "cri");
    let started = |services: &str| {
        let noded = Noded::start(&format!("services.etcd.enable = false\n{services}"));
        noded.ask(&["start", "--wait", "root.containerd"]);
        noded
    };
    let without = started("");
    assert_eq!(plugin(&without, CRI.0, CRI.1), None);
    without.stop();
    // Where there is no directory for the networks' configuration, containerd makes one.
    let networks = Scratch::new().unwrap();
    let with = started(&format!(
        "[services.containerd.cri]\ndefault_runtime = \"runsc\"\ncni_conf = {:?}\n\
         [services.containerd.cri.runsc]\ndebug = true\n",
        networks.path().join("net.d")
    ));
    assert_eq!(plugin(&with, CRI.0, CRI.1).as_deref(), Some("ok"));
    with.wait_for_event("root.containerd.runsc", 1, "ready");
    with.stop();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_configuration_of_containerds_own_keeps_to_the_nodes_places() {
    let scratch = Scratch::new().unwrap();
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
    let noded = Noded::start(&config);
    noded.ask(&["start", "--wait", "root.containerd"]);
    assert_eq!(plugin(&noded, "io.containerd.snapshotter.v1", "native").as_deref(), Some("ok"));
    assert!(!elsewhere.exists(), "root, state and socket are the node's");
    noded.stop();
}

#[test]
#[ignore = "needs containerd, busybox and root"]
fn images_from_files_are_there_when_their_import_is_done() {
    let images = Scratch::new().unwrap();
    std::fs::create_dir(images.path().join("k8s.io")).unwrap();
    testbed::Image::busybox().unwrap().write(&images.path().join("k8s.io/busybox.tar")).unwrap();
    std::fs::write(images.path().join("k8s.io/bad.tar"), "no archive").unwrap();
    let preseed = images.path().display();
    let noded = Noded::start(&format!(
        "services.etcd.enable = false\n[services.containerd]\npreseed = \"{preseed}\"\nunpack = true\n"
    ));
    noded.wait_for_event("root.containerd.preseed", 1, "ready");
    let socket = noded.data().join("run/containerd/containerd.sock");
    let ctr = |arguments: &[&str]| {
        let mut ctr = Command::new(tools::find(tools::CTR).unwrap());
        testbed::output(ctr.arg("-a").arg(&socket).args(["-n", "k8s.io"]).args(arguments)).unwrap()
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
    let (said, code) =
        failed(&noded.nodectl(&["images", "--namespace=mine", "--import", bad.to_str().unwrap()]));
    assert!(said.contains("bad.tar") && said.contains("it ends too early") && code == Some(1), "{said}");
    let log = noded.ask(&["logs", "root.containerd.preseed"]);
    assert!(log.contains("preseeded busybox.tar into k8s.io: localhost/busybox:1"), "{log}");
    assert!(log.contains("bad.tar: it ends too early"), "the bad one is told: {log}");
    noded.ask(&["stop", "--wait", "root.containerd"]);
    let (said, code) = failed(&noded.nodectl(&["images"]));
    assert!(said.contains("containerd") && code == Some(1), "{said} {code:?}");
    noded.stop();
}

#[test]
#[ignore = "needs etcd, containerd and root"]
fn a_whole_node_comes_up_and_goes_down() {
    let (config, _ports) = etcd_config();
    let config = config.replace("services.containerd.enable = false\n", "");
    let noded = Noded::start(&config);
    noded.ask(&["start", "--wait", "root.etcd"]);
    noded.ask(&["start", "--wait", "root.containerd"]);
    assert!(noded.ask(&["status"]).contains("all 4 runnables are ready"));
    let etcd = child_of(&noded, "etcd");
    let containerd = child_of(&noded, "containerd");
    noded.stop();
    for pid in [etcd, containerd] {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} lives");
    }
}
