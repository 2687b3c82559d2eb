//! `noded check`: what a start would find, also while the node runs.

use std::fs;

use testbed::{ScratchDir, reserve_port};

use crate::harness::{NO_DAEMONS, NodedProcess, check, sleep_config};
use crate::health::wait_problem;

#[test]
fn a_node_that_runs_is_checked_without_being_disturbed() {
    let port = reserve_port().unwrap();
    let metrics = format!("[metrics]\naddress = \"127.0.0.1:{}\"\n", port.number());
    let config = format!("{NO_DAEMONS}{metrics}{}", sleep_config("a", ""));
    let node = NodedProcess::start(&config);
    for dn in ["root.metrics", "root.storage", "root.service.a"] {
        node.wait_ready(dn);
    }
    // The machine's clock may have a condition of its own.
    let events = || {
        let events = node.events().into_iter().filter(|event| event["change"] != "condition");
        events.collect::<Vec<_>>()
    };
    let before = events();
    let check = |config: &str| check(node.scratch.path(), config, &[]);
    let shown = check(&config).output();
    let says = format!(
        "process {} runs the node now: its data directory, ports and sockets count as free",
        node.pid()
    );
    assert!(shown.contains(&says) && shown.contains("root.service.a"), "{shown}");
    // A port of another program is in use, whoever runs.
    let etcd = |peer: u16| {
        let free = reserve_port().unwrap();
        format!(
            "services.containerd.enable = false\nkernel.log = false\n[services.etcd]\nbinary = \"/bin/true\"\n\
             client_port = {}\npeer_port = {peer}\n",
            free.number()
        )
    };
    let foreign = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let number = foreign.local_addr().unwrap().port();
    check(&etcd(number)).assert_fails(4, &format!("port {number} is in use by "));
    check("[nod]\n").assert_fails(3, "unknown field");
    assert_eq!(events(), before, "nothing has happened");
    node.stop();
}

#[test]
fn files_that_a_kubeconfig_names_and_preseed_directories_must_be_there() {
    let scratch = ScratchDir::new().unwrap();
    let kubeconfig = scratch.path().join("kubeconfig");
    fs::write(
        &kubeconfig,
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n\
         clusters: [{name: k, cluster: {server: \"https://127.0.0.1:1\", certificate-authority: ca.pem}}]\n\
         users: [{name: u, user: {}}]\n",
    )
    .unwrap();
    let config =
        format!("{NO_DAEMONS}[provisioner]\nkubeconfig = {kubeconfig:?}\nquota = \"none\"\ncsi = false\n");
    let ended = check(scratch.path(), &config, &[]);
    let ca = scratch.path().join("ca.pem");
    let says = format!("names certificate-authority {}, which can't be read: No such file", ca.display());
    assert!(
        ended.code == Some(4) && ended.stdout.contains("\nwarning: provisioner: the kubeconfig"),
        "{ended:?}"
    );
    assert!(ended.stdout.contains(&says), "{ended:?}");
    // The node starts: the file may come later.
    let node = NodedProcess::start_in(scratch, &config, &[]);
    assert!(node.ask(&["logs", "noded"]).contains(&says));
    let scratch = node.kill();
    fs::write(&ca, "").unwrap();
    check(scratch.path(), &config, &[]).output();
}

#[test]
#[ignore = "needs containerd and root"]
fn a_preseed_directory_that_is_missing_is_found_by_a_check() {
    let scratch = ScratchDir::new().unwrap();
    let images = scratch.path().join("images");
    let config = format!(
        "services.etcd.enable = false\nkernel.log = false\n[services.containerd]\npreseed = {images:?}\n"
    );
    let ended = check(scratch.path(), &config, &[]);
    let says = format!(
        "warning: containerd: the preseed directory {} can't be read: No such file",
        images.display()
    );
    assert!(ended.code == Some(4) && ended.stdout.contains(&says), "{ended:?}");
    let node = NodedProcess::start_in(scratch, &config, &[]);
    let found = wait_problem(&node, "root.containerd.preseed", "No such file");
    let hint = found["hint"].as_str().unwrap();
    assert!(hint.contains("mount its disk") && !hint.contains("repair or delete"), "{found}");
    let scratch = node.stop_and_keep();
    fs::create_dir_all(images.join("k8s.io")).unwrap();
    check(scratch.path(), &config, &[]).output();
    // An archive that no pass imports.
    fs::write(images.join("top.tar"), "").unwrap();
    let ended = check(scratch.path(), &config, &[]);
    let says = format!("{} is not imported: move it into", images.join("top.tar").display());
    assert!(ended.code == Some(4) && ended.stdout.contains(&says), "{ended:?}");
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_ready("root.containerd.preseed");
    let rows = node.ask_json(&["images"]);
    assert_eq!((&rows[0]["bundle"], &rows[0]["state"]), (&"top.tar".into(), &"wanted".into()), "{rows}");
    let health = node.ask_json(&["health"]);
    let mut conditions = health["conditions"].as_array().unwrap().iter();
    let found = conditions.find(|found| found["object"] == "misplaced archives").unwrap();
    assert!(found["severity"] == "warning" && found["problem"].as_str().unwrap().contains(&says), "{found}");
    node.stop();
}
