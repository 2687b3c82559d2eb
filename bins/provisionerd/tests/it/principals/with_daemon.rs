//! The programs under all policies, and what provisionerd itself refuses.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use anyhow::ensure;
use nodekeel_provisioner::{SELECTED_NODE, STORAGE_PROVISIONER};
use serde_json::{Value, json};
use testbed::{Daemon, Kube, ScratchDir, wait_until};

use super::{Principal, start_control_plane, test_runtime, with};
use crate::cluster::{
    self, DRIVER, TIMEOUT, TestDaemon, claim_manifest, create, event_notes, sized, wait_bound, wait_for,
};

/// Waits until an event of this reason about a claim has a note with this part.
fn wait_noted(kube: &Kube, claim: &str, reason: &str, part: &str) {
    wait_until(TIMEOUT, part, || {
        let notes = event_notes(kube, claim, reason);
        ensure!(notes.iter().any(|note| note.contains(part)), "{notes:?}");
        Ok(())
    })
    .unwrap();
}

#[test]
#[ignore = "needs kube"]
fn provisionerd_and_its_agent_work_under_every_policy() {
    let kube = start_control_plane();
    let (node, agent) = test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "daemon").await;
        (node, Principal::of_pod(&kube, "provisionerd-agent", "node-b", "agent-live").await)
    });
    let daemon = TestDaemon::with_kubeconfig(&node.kubeconfig, "node-a");
    let running = daemon.start(&[], &[]);
    let placed = daemon.create_claim(&kube, "placed", json!({}));
    let immediate = json!({ "spec": { "storageClassName": "now" } });
    create(&kube, &claim_manifest("immediate", None, immediate));
    wait_bound(&kube, "placed");
    wait_bound(&kube, "immediate");

    kube.patch_object("pvc", "placed", &sized("2Mi")).expect("a patch");
    wait_for(&kube, "pvc", "placed", |claim| claim["status"]["capacity"]["storage"] == "2Mi");
    wait_until(TIMEOUT, "the capacity to be published", || {
        let found = kube.list_objects("csistoragecapacities")?;
        ensure!(found.len() == 2, "{found:?}");
        Ok(())
    })
    .unwrap();
    wait_noted(&kube, "placed", "ProvisioningSucceeded", &placed);

    create(&kube, &claim_manifest("imported", None, json!({})));
    let source = daemon.base.path().join("incoming");
    fs::create_dir(&source).expect("a directory");
    let import = daemon.command(&["import", "--claim=default/imported"]).arg(&source).output();
    let import = import.expect("provisionerd runs");
    assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
    wait_bound(&kube, "imported");

    kube.delete_object("pvc", "placed").expect("the claim is deleted");
    kube.wait_until_gone("pv", &placed).expect("the volume is removed");
    let log = running.read_log().expect("a log");
    assert!(!log.contains("ValidatingAdmissionPolicy"), "{log}");

    create(&kube, &claim_manifest("stuck", Some("node-gone"), json!({})));
    let mut program = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    program.args(["agent", "--listen=127.0.0.1:0", "--grace-period=0s", "--identity=agent-live"]);
    program.arg("--kubeconfig").arg(&agent.kubeconfig).env_clear();
    let _agent = Daemon::start(program, ScratchDir::new().expect("a directory"), || Ok(()));
    wait_for(&kube, "pvc", "stuck", |claim| claim["metadata"]["annotations"][SELECTED_NODE].is_null());
    wait_noted(&kube, "stuck", "ProvisioningFailed", "does not exist: deselected it");
}

/// A control plane, and the daemon of `node-a` without any policy.
fn start_daemon() -> (Kube, TestDaemon, Daemon) {
    let kube = cluster::start_control_plane();
    let daemon = TestDaemon::new(&kube, "node-a");
    let running = daemon.start(&[], &[]);
    (kube, daemon, running)
}

fn class_manifest(name: &str, provisioner: &str) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
        "provisioner": provisioner, "volumeBindingMode": "WaitForFirstConsumer",
    })
}

fn volume_names(kube: &Kube) -> BTreeSet<String> {
    let volumes = kube.list_objects("pv").expect("a list");
    volumes.iter().map(|volume| super::object_name(volume).to_owned()).collect()
}

#[test]
#[ignore = "needs kube"]
fn the_author_of_a_class_names_no_secret_and_no_unknown_parameter_or_option() {
    let (kube, daemon, _running) = start_daemon();
    for (name, fields, why) in [
        (
            "secret",
            json!({ "parameters": { "csi.storage.k8s.io/node-publish-secret-name": "jewels" } }),
            "invalid parameter \"csi.storage.k8s.io/node-publish-secret-name\"",
        ),
        ("path", json!({ "parameters": { "directory": "/etc" } }), "invalid parameter \"directory\""),
        ("option", json!({ "mountOptions": ["bind"] }), "the class's mountOptions \"bind\""),
    ] {
        create(&kube, &with(class_manifest(name, DRIVER), fields));
        daemon.create_claim(&kube, name, json!({ "spec": { "storageClassName": name } }));
        wait_noted(&kube, name, "ProvisioningFailed", why);
    }
    daemon.create_claim(&kube, "honest", json!({}));
    let honest = wait_bound(&kube, "honest");
    assert_eq!(volume_names(&kube), BTreeSet::from([honest]), "the others have none");
}

#[test]
#[ignore = "needs kube"]
fn the_author_of_a_claim_gets_no_volume_of_another_class_or_claim() {
    let (kube, daemon, _running) = start_daemon();
    create(&kube, &class_manifest("other", "other.example"));
    daemon.create_claim(&kube, "honest", json!({}));
    let honest = wait_bound(&kube, "honest");
    let forged = json!({
        "metadata": { "annotations": { STORAGE_PROVISIONER: DRIVER } }, "spec": { "storageClassName": "other" },
    });
    daemon.create_claim(&kube, "forged", forged);
    daemon.create_claim(&kube, "taken", json!({ "spec": { "volumeName": honest } }));
    // The watch has reported both before this one.
    daemon.create_claim(&kube, "later", json!({}));
    let later = wait_bound(&kube, "later");
    assert_eq!(volume_names(&kube), BTreeSet::from([honest, later]));
    for name in ["forged", "taken"] {
        let claim = kube.get_object("pvc", name).expect("it exists");
        assert_ne!(claim["status"]["phase"], "Bound", "{name}");
    }
}

#[test]
#[ignore = "needs kube"]
fn a_pod_on_the_hosts_network_reads_health_and_metrics_and_reaches_nothing_else() {
    let kube = cluster::start_control_plane();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
    let listen = format!("--listen=127.0.0.1:{port}");
    let running = TestDaemon::new(&kube, "node-a");
    let running = running.start(&[&listen], &[]);
    let ask = |request: &str| -> anyhow::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(format!("{request} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    wait_until(TIMEOUT, "the daemon to listen", || ask("GET /healthz").map(drop)).unwrap();
    for path in ["/healthz", "/metrics"] {
        assert!(ask(&format!("GET {path}")).expect("an answer").starts_with("HTTP/1.1 200"), "{path}");
    }
    for request in [
        "POST /healthz",
        "DELETE /metrics",
        "GET /",
        "GET /volumes",
        "GET /debug/pprof",
        "GET /../etc/passwd",
    ] {
        let answer = ask(request).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 4"), "{request}: {answer}");
    }
    // No other port, and no abstract socket, which has no owner.
    let process = Path::new("/proc").join(running.process_id().to_string());
    let descriptors = fs::read_dir(process.join("fd")).expect("its descriptors");
    let inode = |link: &Path| link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(str::to_owned);
    let own: BTreeSet<_> =
        descriptors.filter_map(|it| inode(&fs::read_link(it.ok()?.path()).ok()?)).collect();
    let sockets = |table: &str, inode: usize| -> Vec<Vec<String>> {
        let text = fs::read_to_string(process.join("net").join(table)).expect("a table of sockets");
        let rows =
            text.lines().skip(1).map(|row| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        rows.filter(|row| row.get(inode).is_some_and(|inode| own.contains(inode))).collect()
    };
    // *Source:* proc_net_tcp: the state is the fourth column, 0A is TCP_LISTEN.
    let listening: Vec<_> = ["tcp", "tcp6"]
        .into_iter()
        .flat_map(|table| sockets(table, 9))
        .filter(|row| row[3] == "0A")
        .collect();
    assert_eq!(listening.len(), 1, "{listening:?}");
    assert!(listening[0][1].ends_with(&format!(":{port:04X}")), "{listening:?}");
    let is_abstract = |row: &Vec<String>| row.get(7).is_some_and(|name| name.starts_with('@'));
    let abstracts: Vec<_> = sockets("unix", 6).into_iter().filter(is_abstract).collect();
    assert!(abstracts.is_empty(), "{abstracts:?}");
}
