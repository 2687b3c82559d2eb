//! The programs under all policies, and what provisionerd itself refuses.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::Client;
use kube::api::{Api, ListParams};
use nodekeel_provisioner::{SELECTED_NODE, STORAGE_PROVISIONER};
use serde_json::json;
use testbed::wait_until;
use tokio::process::Command;

use super::{Principal, start_control_plane, with};
use crate::client_cluster::{
    self as cluster, DRIVER, TIMEOUT, TestDaemon, claim_manifest, run_with_daemon, test_runtime,
};

#[test]
#[ignore = "needs kube"]
fn provisionerd_and_its_agent_work_under_every_policy() {
    let kube = start_control_plane();
    test_runtime().block_on(async {
        let admin = cluster::admin_client(&kube).await;
        let node = Principal::of_node(&kube, "daemon").await;
        let agent = Principal::of_pod(&kube, "provisionerd-agent", "node-b", "agent-live").await;
        let daemon = TestDaemon::new(&node.kubeconfig, "node-a".to_owned());
        let _daemon = daemon.start(&[]);
        let resizable = json!({ "spec": { "storageClassName": "nodekeel" } });
        cluster::create_claim(&admin, claim_manifest("placed", Some("node-a"), resizable)).await;
        let immediate = json!({ "spec": { "storageClassName": "now" } });
        cluster::create_claim(&admin, claim_manifest("immediate", None, immediate)).await;
        let placed = cluster::wait_bound(&admin, "placed").await;
        cluster::wait_bound(&admin, "immediate").await;

        let larger = json!({ "spec": { "resources": { "requests": { "storage": "2Mi" } } } });
        cluster::patch_claim(&admin, "placed", larger).await;
        let claims = cluster::claims_api(&admin);
        cluster::wait_object(&claims, "placed", |claim| cluster::has_capacity(claim, "2Mi")).await;
        let capacities: Api<CSIStorageCapacity> = Api::namespaced(admin.clone(), "nodekeel");
        let labels = format!("csi.storage.k8s.io/drivername={DRIVER}");
        cluster::wait_objects(capacities, &labels, |found| found.len() == 2).await;
        wait_event(&admin, "placed", "Successfully provisioned").await;

        cluster::create_claim(&admin, claim_manifest("imported", None, json!({}))).await;
        let source = daemon.base.path().join("incoming");
        fs::create_dir(&source).expect("a directory");
        let import = daemon.command(&["import", "--claim=default/imported"]).arg(&source).output().await;
        let import = import.expect("provisionerd runs");
        assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
        cluster::wait_bound(&admin, "imported").await;

        cluster::delete_claim(&admin, "placed").await;
        cluster::wait_volume_gone(&admin, &cluster::volume_name(&placed)).await;
        let log = daemon.log_text();
        assert!(!log.contains("ValidatingAdmissionPolicy"), "{log}");

        cluster::create_claim(&admin, claim_manifest("stuck", Some("node-gone"), json!({}))).await;
        let mut program = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        program.args(["agent", "--listen=127.0.0.1:0", "--grace-period=0s", "--identity=agent-live"]);
        program.arg("--kubeconfig").arg(&agent.kubeconfig).env_clear().kill_on_drop(true);
        let _agent = program.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("the agent starts");
        let is_free =
            |claim: Option<&_>| claim.is_some() && cluster::annotation(claim, SELECTED_NODE).is_none();
        cluster::wait_object(&claims, "stuck", is_free).await;
        wait_event(&admin, "stuck", "does not exist: deselected it").await;
    });
}

/// Waits until an event about a claim has a note with this part.
async fn wait_event(client: &Client, claim: &str, part: &str) {
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let is_wanted = |event: &Event| {
        event.regarding.as_ref().and_then(|about| about.name.as_deref()) == Some(claim)
            && event.note.as_deref().is_some_and(|note| note.contains(part))
    };
    cluster::wait_objects(events, "", |found| found.iter().any(|event| is_wanted(event))).await;
}

#[test]
#[ignore = "needs kube"]
fn the_author_of_a_class_names_no_secret_and_no_unknown_parameter_or_option() {
    run_with_daemon("node-a", async |client, daemon| {
        let _daemon = daemon.start(&[]);
        let classes: Api<StorageClass> = Api::all(client.clone());
        for (name, fields, why) in [
            (
                "secret",
                json!({ "parameters": { "csi.storage.k8s.io/node-publish-secret-name": "jewels" } }),
                "invalid parameter \"csi.storage.k8s.io/node-publish-secret-name\"",
            ),
            ("path", json!({ "parameters": { "directory": "/etc" } }), "invalid parameter \"directory\""),
            ("option", json!({ "mountOptions": ["bind"] }), "the class's mountOptions \"bind\""),
        ] {
            let class = json!({
                "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
                "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
            });
            cluster::create_object(&classes, with(class, fields)).await;
            let claim = claim_manifest(name, Some("node-a"), json!({ "spec": { "storageClassName": name } }));
            cluster::create_claim(&client, claim).await;
            wait_event(&client, name, why).await;
        }
        daemon.create_claim(&client, "honest").await;
        cluster::wait_bound(&client, "honest").await;
        assert_eq!(volume_names(&client).await.len(), 1, "the others have none");
    });
}

async fn volume_names(client: &Client) -> Vec<String> {
    let volumes = cluster::volumes_api(client).list(&ListParams::default()).await.expect("a list");
    volumes.items.into_iter().filter_map(|volume| volume.metadata.name).collect()
}

#[test]
#[ignore = "needs kube"]
fn the_author_of_a_claim_gets_no_volume_of_another_class_or_claim() {
    run_with_daemon("node-a", async |client, daemon| {
        let _daemon = daemon.start(&[]);
        let classes: Api<StorageClass> = Api::all(client.clone());
        let other = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "other" },
            "provisioner": "other.example", "volumeBindingMode": "WaitForFirstConsumer",
        });
        cluster::create_object(&classes, other).await;
        daemon.create_claim(&client, "honest").await;
        let honest = cluster::wait_bound(&client, "honest").await;
        let forged = json!({
            "metadata": { "annotations": { STORAGE_PROVISIONER: DRIVER } }, "spec": { "storageClassName": "other" },
        });
        cluster::create_claim(&client, claim_manifest("forged", Some("node-a"), forged)).await;
        let taken = json!({ "spec": { "volumeName": cluster::volume_name(&honest) } });
        cluster::create_claim(&client, claim_manifest("taken", Some("node-a"), taken)).await;
        // The watch has reported both before this one.
        daemon.create_claim(&client, "later").await;
        let later = cluster::wait_bound(&client, "later").await;
        let mut expected = [&honest, &later].map(cluster::volume_name);
        expected.sort();
        let mut found = volume_names(&client).await;
        found.sort();
        assert_eq!(found, expected);
        for name in ["forged", "taken"] {
            let claim = cluster::claims_api(&client).get(name).await.expect("it exists");
            assert!(!cluster::is_bound(Some(&claim)), "{name}");
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn a_pod_on_the_hosts_network_reads_health_and_metrics_and_reaches_nothing_else() {
    run_with_daemon("node-a", async |_, daemon| {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
        let child = daemon.start_listening(&format!("127.0.0.1:{port}"));
        let ask = |request: &str| -> anyhow::Result<String> {
            let mut stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.write_all(
                format!("{request} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes(),
            )?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        let is_up = || ask("GET /healthz").map(drop);
        tokio::task::block_in_place(|| wait_until(TIMEOUT, "the daemon to listen", is_up))
            .expect("it listens");
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
        let process = Path::new("/proc").join(child.id().expect("it runs").to_string());
        let descriptors = fs::read_dir(process.join("fd")).expect("its descriptors");
        let own: BTreeSet<_> = descriptors
            .filter_map(|it| {
                fs::read_link(it.ok()?.path())
                    .ok()?
                    .to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')
                    .map(str::to_owned)
            })
            .collect();
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
        let abstracts: Vec<_> = sockets("unix", 6)
            .into_iter()
            .filter(|row| row.get(7).is_some_and(|name| name.starts_with('@')))
            .collect();
        assert!(abstracts.is_empty(), "{abstracts:?}");
    });
}
