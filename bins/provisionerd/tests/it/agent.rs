//! `provisionerd agent` on a real control plane with scheduler and fake nodes.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testbed::{FakeNode, Kube, KubeDaemon, KubeUser, command_output, wait_until};

use crate::cluster::{DRIVER, TIMEOUT, TestDaemon, account_kubeconfig, claim_manifest, test_runtime};

const ACCOUNT: &str = "system:serviceaccount:nodekeel:provisionerd-agent";
const SELECTED: &str = "/metadata/annotations/volume.kubernetes.io~1selected-node";
const TAINT: &str = "example.org/full";

/// A control plane with the objects of deploy/ and deploy/agent, whose nodes need no heartbeats.
fn start_control_plane() -> Kube {
    let builder = Kube::builder()
        .with_user(KubeUser::service_account("nodekeel", "provisionerd"))
        .with_user(KubeUser::service_account("nodekeel", "provisionerd-agent"))
        .with_argument(KubeDaemon::ControllerManager, "--node-monitor-grace-period=1h")
        .with_controller_requests_per_second(500);
    let kube = builder.start().expect("a control plane");
    for manifests in [
        include_str!("../../../../deploy/namespace.yaml"),
        include_str!("../../../../deploy/rbac.yaml"),
        include_str!("../../../../deploy/storageclass.yaml"),
        include_str!("../../../../deploy/agent/rbac.yaml"),
    ] {
        kube.apply_manifests(manifests).expect("the manifests");
    }
    kube
}

/// A running agent; killed when it is dropped.
struct TestAgent {
    child: Child,
    log: PathBuf,
}

impl TestAgent {
    fn start(kube: &Kube, identity: &str, flags: &[&str]) -> Self {
        let log = std::env::temp_dir().join(format!("nodekeel-agent-{}-{identity}.log", std::process::id()));
        let stderr = std::fs::File::create(&log).expect("a log");
        let mut command = agent_command(kube);
        command.args(["--listen=127.0.0.1:0", "--identity", identity]).args(flags);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        Self { child: command.spawn().expect("the agent starts"), log }
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn stop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process(pid, Signal::TERM).expect("it runs");
        let status = self.child.wait().expect("a status");
        assert_eq!(status.code(), Some(0), "{}", self.log_text());
    }

    fn kill(&mut self) {
        self.child.kill().expect("killed");
        let _ = self.child.wait();
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.log);
    }
}

fn agent_command(kube: &Kube) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear().args(["agent", "--driver", DRIVER, "--kubeconfig"]);
    command.arg(kube.kubeconfig_file(ACCOUNT).expect("an account"));
    command
}

fn kubectl(kube: &Kube, arguments: &[&str]) {
    command_output(kube.kubectl_command().args(arguments)).expect("kubectl succeeds");
}

fn holder(kube: &Kube) -> Option<String> {
    let mut get = kube.kubectl_command();
    get.args([
        "--namespace=nodekeel",
        "get",
        "lease",
        "provisionerd-agent",
        "--ignore-not-found",
        "--output=json",
    ]);
    let lease: Value = serde_json::from_str(&command_output(&mut get).expect("kubectl succeeds")).ok()?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

fn wait_leading(kube: &Kube, identity: &str) {
    let is_leading = || {
        let holder = holder(kube);
        ensure!(holder.as_deref() == Some(identity), "{holder:?} leads");
        Ok(())
    };
    wait_until(TIMEOUT, "the agent to lead", is_leading).unwrap_or_else(|error| panic!("{error:#}"));
}

/// A claim, and a pod that uses it.
fn create_pod(kube: &Kube, name: &str) {
    let claim = claim_manifest(name, None, json!({}));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "containers": [{
                "name": "main", "image": "none", "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": name } }],
        },
    });
    for object in [claim, pod] {
        kube.create_objects(&object.to_string()).expect("created");
    }
}

/// The reasons and notes of the events about an object.
fn events(kube: &Kube, about: &str, reason: &str) -> Vec<String> {
    let mut get = kube.kubectl_command();
    let selector = format!("--field-selector=involvedObject.name={about},reason={reason}");
    get.args(["get", "events", "--all-namespaces", &selector, "--output=json"]);
    let list: Value =
        serde_json::from_str(&command_output(&mut get).expect("kubectl succeeds")).expect("JSON");
    let items = list["items"].as_array().expect("a list").iter();
    items.map(|event| event["message"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
#[ignore = "needs kube"]
fn a_claim_whose_selected_node_is_without_the_driver_cordoned_or_deleted_is_served_elsewhere() {
    type Change = fn(&Kube, &str);
    let cases: [(&str, bool, Change, &str); 3] = [
        ("driverless", false, |_, _| {}, "does not have the driver"),
        ("cordoned", true, |kube, node| kubectl(kube, &["cordon", node]), "is cordoned"),
        ("deleted", true, |kube, node| kubectl(kube, &["delete", "node", node]), "does not exist"),
    ];
    let kube = start_control_plane();
    kube.create_fake_node(&FakeNode::new("good").with_driver(DRIVER)).expect("a node");
    let daemon = TestDaemon::new(&account_kubeconfig(&kube), "good".to_owned());
    let runtime = test_runtime();
    let _running = runtime.block_on(async { daemon.start(&[]) });
    let agent = TestAgent::start(&kube, "agent-1", &[]);
    wait_leading(&kube, "agent-1");
    for (name, has_driver, change, why) in cases {
        // Only the bad node takes the pod at first.
        kubectl(&kube, &["taint", "node", "good", &format!("{TAINT}=:NoSchedule")]);
        let node = FakeNode::new(name);
        kube.create_fake_node(&if has_driver { node.with_driver(DRIVER) } else { node }).expect("a node");
        create_pod(&kube, name);
        let is_selected = |claim: &Value| claim.pointer(SELECTED).is_some_and(|node| node == name);
        kube.wait_for_object("pvc", name, is_selected).expect("the scheduler selects the bad node");
        let changed = Instant::now();
        change(&kube, name);
        kubectl(&kube, &["taint", "node", "good", &format!("{TAINT}-")]);
        if name == "driverless" {
            kubectl(&kube, &["taint", "node", name, &format!("{TAINT}=:NoSchedule")]);
        }
        let bound = kube.wait_for_object("pvc", name, |claim| claim["status"]["phase"] == "Bound");
        let bound = bound.unwrap_or_else(|error| panic!("{name}: {error:#}\n{}", agent.log_text()));
        println!("{name}: bound on another node after {:?}", changed.elapsed());
        assert!(changed.elapsed() < Duration::from_secs(75), "15 s, on a machine that is five times slower");
        assert_eq!(bound.pointer(SELECTED).and_then(Value::as_str), Some("good"));
        let is_placed = |pod: &Value| pod["spec"]["nodeName"] == "good";
        kube.wait_for_object("pod", name, is_placed).expect("the pod is placed on the good node");
        let notes = events(&kube, name, "ProvisioningFailed");
        assert!(notes.iter().any(|note| note.contains(why) && note.contains(name)), "{notes:?}");
    }
    assert_eq!(daemon.list_names("volumes").len(), 3);
}

/// A released volume of a node.
fn create_volume(kube: &Kube, number: u32, node: &str, policy: &str) -> String {
    let uid = format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012x}");
    let name = format!("pvc-{uid}");
    let label = json!({ "key": format!("topology.{DRIVER}/node"), "operator": "In", "values": [node] });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {
            "name": name,
            "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER },
            "finalizers": ["external-provisioner.volume.kubernetes.io/finalizer"],
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
    kube.create_objects(&volume.to_string()).expect("a volume");
    kube.wait_for_object("pv", &name, |volume| volume["status"]["phase"] == "Released").expect("released");
    name
}

#[test]
#[ignore = "needs kube"]
fn volumes_of_a_deleted_node_are_reported_once_by_successive_leaders_and_removed_only_where_asked() {
    const REPORT: &str = "ReferencedNodeDeleted";
    let kube = start_control_plane();
    for node in ["lost", "stays"] {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    let [to_delete, to_retain] =
        [(1, "Delete"), (2, "Retain")].map(|(number, policy)| create_volume(&kube, number, "lost", policy));
    let of_another = create_volume(&kube, 3, "stays", "Delete");
    let flags = ["--node-gone-after=1s"];
    let mut first = TestAgent::start(&kube, "agent-1", &flags);
    wait_leading(&kube, "agent-1");
    let mut second = TestAgent::start(&kube, "agent-2", &flags);
    kubectl(&kube, &["delete", "node", "lost"]);
    // The garbage collector deletes that of a real node.
    kubectl(&kube, &["delete", "csinode", "lost"]);
    for volume in [&to_delete, &to_retain] {
        kube.wait_for_event(volume, REPORT).expect("reported");
    }
    first.kill();
    wait_leading(&kube, "agent-2");
    let has_reported = || {
        let log = second.log_text();
        ensure!(log.matches("the volume's node does not exist").count() == 2, "{log}");
        Ok(())
    };
    wait_until(TIMEOUT, "the new leader to find the same", has_reported).expect("it does");
    let counts = [&to_delete, &to_retain, &of_another].map(|volume| events(&kube, volume, REPORT).len());
    assert_eq!(counts, [1, 1, 0]);
    let stopped = Instant::now();
    second.stop();
    assert_eq!(holder(&kube), None, "released after {:?}", stopped.elapsed());
    for volume in [&to_delete, &to_retain, &of_another] {
        let found = kube.get_object("pv", volume).expect("it exists");
        assert!(found["metadata"]["deletionTimestamp"].is_null(), "{found}");
    }

    // Asked for, but not permitted.
    let flags = ["--node-gone-after=1s", "--remove-volumes-of-gone-nodes=1s"];
    let mut agent = TestAgent::start(&kube, "agent-3", &flags);
    let is_refused = || {
        let log = agent.log_text();
        ensure!(log.contains("missing permissions"), "{log}");
        Ok(())
    };
    wait_until(TIMEOUT, "the missing permissions to be named", is_refused).expect("they are");
    agent.stop();
    let remove_volumes = include_str!("../../../../deploy/agent/remove-volumes.yaml");
    kube.apply_manifests(remove_volumes).expect("the permissions");
    let agent = TestAgent::start(&kube, "agent-4", &flags);
    kube.wait_until_gone("pv", &to_delete).unwrap_or_else(|error| panic!("{error:#}\n{}", agent.log_text()));
    for volume in [&to_retain, &of_another] {
        let found = kube.get_object("pv", volume).expect("it exists");
        assert!(found["metadata"]["deletionTimestamp"].is_null(), "{found}");
    }
}

fn run_check(kube: &Kube, flags: &[&str]) -> Output {
    agent_command(kube).arg("--check").args(flags).output().expect("the agent runs")
}

#[test]
#[ignore = "needs kube"]
fn an_agent_with_the_permissions_of_deploy_passes_its_check_and_names_those_that_are_missing() {
    let kube = start_control_plane();
    let removal = "--remove-volumes-of-gone-nodes=1d";
    let passed = run_check(&kube, &[]);
    let text = String::from_utf8_lossy(&passed.stdout).into_owned();
    assert_eq!(passed.status.code(), Some(0), "{text}");
    let failed = run_check(&kube, &[removal]);
    let text = String::from_utf8_lossy(&failed.stdout).into_owned();
    assert_eq!(failed.status.code(), Some(4), "{text}");
    assert!(
        text.contains("patch, delete on persistentvolumes (core)") && text.contains("deploy/agent"),
        "{text}"
    );
    kube.apply_manifests(include_str!("../../../../deploy/agent/remove-volumes.yaml")).expect("applied");
    let passed = run_check(&kube, &[removal]);
    assert_eq!(passed.status.code(), Some(0), "{}", String::from_utf8_lossy(&passed.stdout));
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
