//! `provisionerd agent` on a real control plane with scheduler and fake nodes.

use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use nodekeel_provisioner::{FINALIZER, PROVISIONED_BY, SELECTED_NODE};
use serde_json::json;
use testbed::{Daemon, FakeNode, Kube, ScratchDir, command_output, wait_until};

use crate::cluster::{
    DRIVER, TIMEOUT, TestDaemon, claim_manifest, create, event_notes, pod_manifest, sized,
    start_control_plane, wait_bound, wait_for, wait_logged, wait_phase,
};

fn agent_command(kube: &Kube, flags: &[&str]) -> Command {
    let account =
        kube.kubeconfig_file("system:serviceaccount:nodekeel:provisionerd-agent").expect("an account");
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear().args(["agent", "--driver", DRIVER, "--kubeconfig"]).arg(account).args(flags);
    command
}

/// Starts an agent; dropping it is a kill.
pub(crate) fn start_agent(kube: &Kube, identity: &str, flags: &[&str]) -> Daemon {
    let mut command = agent_command(kube, flags);
    command.args(["--listen=127.0.0.1:0", "--identity", identity]);
    Daemon::start(command, ScratchDir::new().expect("a directory"), || Ok(())).expect("the agent starts")
}

fn kubectl(kube: &Kube, arguments: &[&str]) {
    command_output(kube.kubectl_command().args(arguments)).unwrap();
}

/// Waits until the lease is of this agent, or of none.
pub(crate) fn wait_leading(kube: &Kube, identity: Option<&str>) {
    let leading = wait_until(TIMEOUT, "the lease", || {
        let lease = kube.find_object("lease", "nodekeel/provisionerd-agent")?.unwrap_or_default();
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty());
        ensure!(holder == identity, "{holder:?} leads");
        Ok(())
    });
    leading.unwrap();
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_claim_whose_selected_node_is_without_the_driver_cordoned_or_deleted_is_served_elsewhere() {
    const TAINT: &str = "example.org/full";
    let kube = start_control_plane();
    kube.create_fake_node(&FakeNode::new("good").with_driver(DRIVER)).expect("a node");
    let daemon = TestDaemon::new(&kube, "good");
    let _running = daemon.start(&[], &[]);
    let _agent = start_agent(&kube, "agent-1", &[]);
    wait_leading(&kube, Some("agent-1"));
    for (name, change, why) in [
        (
            "driverless",
            &["taint", "node", "driverless", "example.org/full=:NoSchedule"][..],
            "does not have the driver",
        ),
        ("cordoned", &["cordon", "cordoned"], "is cordoned"),
        ("deleted", &["delete", "node", "deleted"], "does not exist"),
    ] {
        // Only the bad node takes the pod at first.
        kubectl(&kube, &["taint", "node", "good", &format!("{TAINT}=:NoSchedule")]);
        let node = FakeNode::new(name);
        let node = if name == "driverless" { node } else { node.with_driver(DRIVER) };
        kube.create_fake_node(&node).expect("a node");
        create(&kube, &claim_manifest(name, None, json!({})));
        create(&kube, &pod_manifest(name));
        wait_for(&kube, "pvc", name, |claim| claim["metadata"]["annotations"][SELECTED_NODE] == name);
        let changed = Instant::now();
        kubectl(&kube, change);
        kubectl(&kube, &["taint", "node", "good", &format!("{TAINT}-")]);
        wait_bound(&kube, name);
        assert!(changed.elapsed() < Duration::from_secs(75), "15 s, on a machine that is five times slower");
        let claim = kube.get_object("pvc", name).expect("it exists");
        assert_eq!(claim["metadata"]["annotations"][SELECTED_NODE], "good");
        wait_for(&kube, "pod", name, |pod| pod["spec"]["nodeName"] == "good");
        let notes = event_notes(&kube, name, "ProvisioningFailed");
        assert!(notes.iter().any(|note| note.contains(why) && note.contains(name)), "{notes:?}");
    }
    assert_eq!(daemon.list_names("volumes").len(), 3);

    // A pod that its author places is told what to type.
    create(&kube, &claim_manifest("bypass", None, json!({})));
    let mut pod = pod_manifest("bypass");
    pod["spec"]["nodeName"] = "good".into();
    create(&kube, &pod);
    kube.wait_for_event("bypass", "ProvisioningFailed").expect("an event");
    let notes = event_notes(&kube, "bypass", "ProvisioningFailed");
    let select = format!("{SELECTED_NODE}=good");
    assert!(notes.len() == 1 && notes[0].contains(&select), "{notes:?}");
    kubectl(&kube, &["annotate", "pvc", "bypass", &select]);
    wait_bound(&kube, "bypass");
    // The scheduler finds no node for a second claim where the first one is.
    create(&kube, &claim_manifest("huge", None, sized("100Ti")));
    let mut pod = pod_manifest("torn");
    let claims = ["cordoned", "huge"];
    let volume = |name: &str| json!({ "name": name, "persistentVolumeClaim": { "claimName": name } });
    pod["spec"]["volumes"] = claims.map(volume).into_iter().collect();
    pod["spec"]["containers"][0]["volumeMounts"] =
        claims.map(|name| json!({ "name": name, "mountPath": format!("/{name}") })).into_iter().collect();
    create(&kube, &pod);
    kube.wait_for_event("torn", "ProvisioningFailed").expect("an event");
    let notes = event_notes(&kube, "torn", "ProvisioningFailed");
    let why = "claim cordoned is on node good, which has no room for claim huge";
    assert!(notes.len() == 1 && notes[0].contains(why), "{notes:?}");
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_claim_with_immediate_binding_that_no_node_has_room_for_gets_one_event_and_then_a_node() {
    const NODES: [&str; 3] = ["node-a", "node-b", "node-c"];
    let kube = start_control_plane();
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "now" },
        "provisioner": DRIVER, "volumeBindingMode": "Immediate",
    });
    create(&kube, &class);
    for node in NODES {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    let daemons = NODES.map(|node| TestDaemon::new(&kube, node));
    let start = |daemon: &TestDaemon, room| daemon.start(&[&daemon.reserve_all_but(room)], &[]);
    let mut running: Vec<_> = daemons.iter().map(|daemon| start(daemon, 8 << 20)).collect();
    let _agent = start_agent(&kube, "agent-1", &[]);
    wait_leading(&kube, Some("agent-1"));
    let create_claim = |name: &str, size: &str| {
        let mut patch = sized(size);
        patch["spec"]["storageClassName"] = "now".into();
        create(&kube, &claim_manifest(name, None, patch));
    };
    create_claim("small", "4Mi");
    wait_bound(&kube, "small");
    create_claim("large", "100Mi");
    let created = Instant::now();
    kube.wait_for_event("large", "ProvisioningFailed").expect("an event");
    println!("the event came after {:.1?}", created.elapsed());
    // Each further claim changes the figures, and the event about the last one comes after two renewals of all Leases.
    create_claim("another", "1Mi");
    wait_bound(&kube, "another");
    create_claim("huge", "100Ti");
    kube.wait_for_event("huge", "ProvisioningFailed").expect("an event");
    let notes = event_notes(&kube, "large", "ProvisioningFailed");
    assert_eq!(notes.len(), 1, "{notes:?}");
    for said in ["no node has room for the 100Mi", "storage class now", "has the most", "Delete volumes"] {
        assert!(notes[0].contains(said), "{notes:?}");
    }
    assert_eq!(event_notes(&kube, "small", "ProvisioningFailed"), [""; 0]);

    drop(running.pop());
    running.push(start(&daemons[2], 200 << 20));
    let enlarged = Instant::now();
    wait_bound(&kube, "large");
    println!("with room, it was served after {:.1?}", enlarged.elapsed());
    assert!(enlarged.elapsed() < Duration::from_secs(75), "15 s, on a machine that is five times slower");
    let claim = kube.get_object("pvc", "large").expect("it exists");
    assert_eq!(claim["metadata"]["annotations"][SELECTED_NODE], NODES[2]);
    assert_eq!(event_notes(&kube, "large", "ProvisioningFailed"), notes);
}

#[test]
#[ignore = "sampled: needs kube"]
fn volumes_of_a_deleted_node_are_reported_once_by_successive_leaders_and_removed_only_where_asked() {
    const REPORT: &str = "ReferencedNodeDeleted";
    let kube = start_control_plane();
    for node in ["lost", "stays"] {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    let volumes = [("lost", "Delete"), ("lost", "Retain"), ("stays", "Delete")];
    let mut number = 0;
    let [to_delete, to_retain, of_another] = volumes.map(|(node, policy)| {
        number += 1;
        let uid = format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012x}");
        let name = format!("pvc-{uid}");
        let label = json!({ "key": format!("topology.{DRIVER}/node"), "operator": "In", "values": [node] });
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {
                "name": name,
                "annotations": { PROVISIONED_BY: DRIVER },
                "finalizers": [FINALIZER],
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": { "storage": "1Mi" },
                "claimRef": {
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                    "namespace": "default", "name": format!("gone-{number}"), "uid": uid,
                },
                "csi": { "driver": DRIVER, "volumeHandle": name },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [label] }] } },
                "persistentVolumeReclaimPolicy": policy,
                "storageClassName": "nodekeel",
            },
        });
        create(&kube, &volume);
        wait_phase(&kube, &name, "Released");
        name
    });
    let assert_kept = |volume: &str| {
        let found = kube.get_object("pv", volume).expect("it exists");
        assert!(found["metadata"]["deletionTimestamp"].is_null(), "{found}");
    };
    let flags = ["--node-gone-after=1s"];
    let first = start_agent(&kube, "agent-1", &flags);
    wait_leading(&kube, Some("agent-1"));
    let mut second = start_agent(&kube, "agent-2", &flags);
    kubectl(&kube, &["delete", "node", "lost"]);
    // The garbage collector deletes that of a real node.
    kubectl(&kube, &["delete", "csinode", "lost"]);
    for volume in [&to_delete, &to_retain] {
        kube.wait_for_event(volume, REPORT).expect("reported");
    }
    drop(first);
    wait_leading(&kube, Some("agent-2"));
    let has_reported = || {
        let log = second.read_log()?;
        ensure!(log.matches("the volume's node does not exist").count() == 2, "{log}");
        Ok(())
    };
    wait_until(TIMEOUT, "the new leader to find the same", has_reported).unwrap();
    let counts = [&to_delete, &to_retain, &of_another].map(|volume| event_notes(&kube, volume, REPORT).len());
    assert_eq!(counts, [1, 1, 0]);
    let status = second.terminate(TIMEOUT).expect("a signal").expect("it ends");
    assert!(status.success(), "{status}");
    wait_leading(&kube, None);
    for volume in [&to_delete, &to_retain, &of_another] {
        assert_kept(volume);
    }

    // Asked for, but not permitted.
    let flags = ["--node-gone-after=1s", "--remove-volumes-of-gone-nodes=1s"];
    let refused = start_agent(&kube, "agent-3", &flags);
    wait_logged(&refused, "missing permissions");
    drop(refused);
    kube.apply_manifests(include_str!("../../../../deploy/agent/remove-volumes.yaml"))
        .expect("the permissions");
    let _agent = start_agent(&kube, "agent-4", &flags);
    wait_until(TIMEOUT, "the volume to be removed", || {
        ensure!(kube.find_object("pv", &to_delete)?.is_none(), "it exists");
        Ok(())
    })
    .unwrap();
    for volume in [&to_retain, &of_another] {
        assert_kept(volume);
    }
}

#[test]
#[ignore = "sampled: needs kube"]
fn an_agent_with_the_permissions_of_deploy_passes_its_check_and_names_those_that_are_missing() {
    const REMOVAL: &str = "--remove-volumes-of-gone-nodes=1d";
    let kube = start_control_plane();
    let check = |flags: &[&str], code: i32| {
        let output =
            agent_command(&kube, &[&["--check"][..], flags].concat()).output().expect("the agent runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        text
    };
    check(&[], 0);
    let text = check(&[REMOVAL], 4);
    let missing = "patch, delete on persistentvolumes (core)";
    assert!(text.contains(missing) && text.contains("deploy/agent"), "{text}");
    kube.apply_manifests(include_str!("../../../../deploy/agent/remove-volumes.yaml")).expect("applied");
    check(&[REMOVAL], 0);
}

#[test]
fn an_agent_whose_address_is_in_use_exits_with_4_and_names_the_flag() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear().args(["agent", "--kubeconfig=/nowhere", "--listen", &address]);
    let output = command.output().expect("the agent runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{text}");
    assert!(text.contains("--listen"), "{text}");
}
