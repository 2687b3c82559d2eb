//! `provisionerd volumes move` between two daemons on a real control plane, killed at each step and repeated.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::json;
use tempfile::TempDir;
use testbed::{FakeNode, KillPlace, KillTally, Kube, command_output, gotool};

use crate::cluster::{
    DRIVER, TestDaemon, create, kill_rounds, moments_of, pod_manifest, start_control_plane, wait_bound,
    wait_for,
};

/// The steps of the mover, and then those of the nodes.
pub(crate) const STEPS: [&str; 11] = [
    "RecordMove",
    "UpdateVolume",
    "DeletePersistentVolume",
    "RemoveFinalizer",
    "CreatePersistentVolume",
    "SelectNode",
    "CreateDirectory",
    "SetLimits",
    "CopyTree",
    "RenameIntoPlace",
    "MoveToTrash",
];
/// Has only the permissions of deploy/move.
const OPERATOR: &str = "nobody";
const NODES: [&str; 2] = ["node-a", "node-b"];

/// A kubectl that runs provisionerd of the node of a pod here, as in its container.
fn fake_kubectl(kube: &Kube, daemons: &[TestDaemon; 2]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, script: String| {
        let path = directory.path().join(name);
        fs::write(&path, script).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    };
    let here = directory.path().display();
    write(
        "kubectl",
        format!(
            "#!/bin/sh\nfor it; do shift; case $it in pod-*) pod=$it;; --) break;; esac; done\nshift\nexec {here}/$pod \"$@\"\n"
        ),
    );
    for daemon in daemons {
        let command = daemon.command(&[]);
        let quote = |text: &std::ffi::OsStr| format!("'{}'", text.to_str().expect("UTF-8"));
        let variables: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some(format!("{}={}", name.to_str()?, quote(value?))))
            .collect();
        let arguments: Vec<_> = command.get_args().map(quote).collect();
        let (variables, arguments) = (variables.join(" "), arguments.join(" "));
        let program = quote(command.get_program());
        write(
            &format!("pod-{}", daemon.node),
            format!(
                "#!/bin/sh\nexec env PROVISIONERD_KUBELET={here} {variables} {program} \"$@\" {arguments}\n"
            ),
        );
        create(
            kube,
            &json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": format!("pod-{}", daemon.node), "namespace": "nodekeel",
                    "labels": { "app.kubernetes.io/name": "provisionerd" },
                },
                "spec": { "nodeName": daemon.node, "containers": [{ "name": "provisionerd", "image": "none" }] },
            }),
        );
    }
    directory
}

struct Mover<'a> {
    kube: &'a Kube,
    kubectl: &'a Path,
}

impl Mover<'_> {
    fn run(&self, arguments: &[&str], kill_at: Option<&str>) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        command.arg("volumes").args(arguments).args(["--driver", DRIVER, "--kubeconfig"]);
        command.arg(self.kube.kubeconfig_file(OPERATOR).expect("an account"));
        let path = std::env::var("PATH").expect("a PATH");
        command.env_clear().env("PATH", format!("{}:{path}", self.kubectl.display()));
        command.envs(kill_at.map(|moment| ("PROVISIONERD_KILL_AT", moment)));
        command.output().expect("provisionerd runs")
    }

    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments, None);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn refuse(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments, None);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).expect("UTF-8")
    }
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_move_killed_at_each_step_ends_with_the_data_on_one_node() {
    let kube = start_control_plane();
    kube.apply_manifests(include_str!("../../../../deploy/move/rbac.yaml")).expect("the roles");
    for (binding, role, place) in
        [("clusterrolebinding", "--clusterrole", "default"), ("rolebinding", "--role", "nodekeel")]
    {
        let role = format!("{role}=provisionerd-move");
        let user = format!("--user={OPERATOR}");
        let bind = ["create", "-n", place, binding, "provisionerd-move", &role, &user];
        command_output(kube.kubectl_command().args(bind)).expect("bound");
    }
    for node in NODES {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    let daemons = NODES.map(|node| TestDaemon::new(&kube, node));
    let kubectl = fake_kubectl(&kube, &daemons);
    let running = daemons.each_ref().map(|daemon| daemon.start(&[], &[]));
    for node in NODES {
        let pod = format!("nodekeel/pod-{node}");
        let status = json!({ "status": { "phase": "Running" } });
        kube.patch_status("pod", &pod, &status).expect("a pod runs");
    }
    let mover = Mover { kube: &kube, kubectl: kubectl.path() };
    let volume = daemons[0].create_claim(&kube, "data", json!({}));
    wait_bound(&kube, "data");
    wait_for(&kube, "pv", &volume, |volume| volume["status"]["phase"] == "Bound");
    fs::write(daemons[0].file_of(&volume), "0").expect("written");
    let places = || daemons.each_ref().map(|daemon| fs::read_to_string(daemon.file_of(&volume)).ok());
    let check_settled = |at: usize, text: &str| {
        let mut wanted = [None, None];
        wanted[at] = Some(text.to_owned());
        assert_eq!(places(), wanted);
        for daemon in &daemons {
            assert_eq!(daemon.list_names(".import"), Vec::<String>::new(), "nothing is left");
        }
        let records = command_output(kube.kubectl_command().args([
            "get",
            "-n",
            "nodekeel",
            "-o",
            "name",
            "configmaps",
        ]));
        assert!(!records.expect("a list").contains("move-"));
        let object = kube.get_object("pv", &volume).expect("a PersistentVolume");
        assert_eq!(object["spec"]["persistentVolumeReclaimPolicy"], "Delete");
    };

    let (mut at, mut tally) = (0, KillTally::default());
    for round in 0..kill_rounds() {
        for (number, moment) in moments_of(&STEPS).into_iter().enumerate() {
            let other = 1 - at;
            let text = format!("{round} {number}");
            fs::write(daemons[at].file_of(&volume), &text).expect("written");
            let killed = mover.run(&["move", "default/data", "--to", NODES[other]], Some(&moment));
            // On a node, the mover sees that the other process has died.
            assert!(
                killed.status.signal() == Some(9) || killed.status.code() == Some(1),
                "{moment}: {killed:?}"
            );
            assert!(String::from_utf8_lossy(&killed.stderr).contains(&moment), "{moment}: {killed:?}");
            // Every third one is cancelled, which comes too late once the volume is on the other node.
            let is_moved = if number % 3 == 2 {
                let output = mover.run(&["move", "default/data", "--cancel"], None);
                let said = format!("{output:?}");
                assert!(output.status.success() || said.contains("is not being moved"), "{moment}: {said}");
                said.contains("too late")
                    || kube.get_object("pv", &volume).is_ok_and(|it| it.to_string().contains(NODES[other]))
            } else {
                mover.succeed(&["move", "default/data", "--to", NODES[other]]);
                true
            };
            at = if is_moved { other } else { at };
            check_settled(at, &text);
            wait_for(&kube, "pv", &volume, |volume| volume["status"]["phase"] == "Bound");
            tally.record(KillPlace::Host, &moment);
        }
    }
    tally.print_lines();

    // The scheduler places a pod where the volume is, and then it is not moved, and nothing is changed.
    wait_bound(&kube, "data");
    create(&kube, &pod_manifest("data"));
    let placed = wait_for(&kube, "pod", "data", |pod| pod["spec"]["nodeName"].is_string());
    assert_eq!(placed["spec"]["nodeName"], NODES[at]);
    let other = NODES[1 - at];
    let before = kube.get_object("pv", &volume).expect("a PersistentVolume");
    let refused = mover.refuse(&["move", "default/data", "--to", other]);
    assert!(refused.contains("pod data uses the claim"), "{refused}");
    let refused = mover.refuse(&["drain", NODES[at], "--to", other]);
    assert!(refused.contains("1 volumes are left"), "{refused}");
    // No kubelet ends it.
    let delete = ["delete", "pod", "data", "--force", "--grace-period=0"];
    command_output(kube.kubectl_command().args(delete)).expect("deleted");
    let refused = mover.refuse(&["move", "default/data", "--to", "node-c"]);
    assert!(refused.contains("runs on node node-c") && refused.contains("nothing was changed"), "{refused}");
    assert_eq!(kube.get_object("pv", &volume).expect("a PersistentVolume"), before);

    // The plugin of kubectl is the same program. It is found by the real one, and itself calls the one above.
    let plugin = kubectl.path().join("kubectl-nodekeel");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_provisionerd"), &plugin).expect("a link");
    let real = gotool::KUBERNETES.program_path("kubectl").expect("kubectl");
    let plugin_command = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(&real);
        command.args(["nodekeel", name, "--kubeconfig"]);
        command.arg(kube.kubeconfig_file(OPERATOR).expect("an account")).args(arguments);
        let path = std::env::var("PATH").expect("a PATH");
        command.env_clear().env("PATH", format!("{}:{path}", kubectl.path().display()));
        command
    };
    let run_plugin = |name: &str, arguments: &[&str]| command_output(&mut plugin_command(name, arguments));
    let plugins =
        command_output(Command::new(&real).env_clear().env("PATH", kubectl.path()).args(["plugin", "list"]));
    assert!(plugins.expect("a list").contains("kubectl-nodekeel"));
    let listed = run_plugin("volumes", &[]).expect("listed");
    assert_eq!(listed.matches("node node-").count(), 2, "{listed}");
    assert_eq!(listed.matches(&volume).count(), 1, "{listed}");
    let only = run_plugin("volumes", &["--node", NODES[at], "--", "--json"]).expect("listed");
    assert!(only.contains("\"volumes\": [") && only.contains(&volume), "{only}");
    let to_itself = run_plugin("move", &["default/data", "--to", NODES[at]]).expect("it is there");
    assert!(to_itself.contains("is already there"), "{to_itself}");
    let absent = format!("{:#}", run_plugin("check", &["--node=node-c"]).expect_err("no such node"));
    assert!(absent.contains("runs on node node-c"), "{absent}");

    // A kubelet that hangs is named, and hides no other node; a move begins nothing.
    let pod = kubectl.path().join(format!("pod-{}", NODES[0]));
    let script = fs::read(&pod).expect("a script");
    fs::write(&pod, "#!/bin/sh\nexec sleep 600\n").expect("written");
    let hung = plugin_command("volumes", &["--timeout=2"]).output().expect("it runs");
    let [listed, problem] = [&hung.stdout, &hung.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(problem.contains("node node-a has not answered within 2 s"), "{hung:?}");
    assert!(!hung.status.success() && listed.contains("node node-b:"), "{hung:?}");
    assert_eq!(listed.matches(&volume).count(), usize::from(at == 1), "{hung:?}");
    let refused = mover.refuse(&["move", "default/data", "--to", other, "--timeout=2"]);
    assert!(
        refused.contains("node node-a has not answered") && refused.contains("nothing was changed"),
        "{refused}"
    );
    fs::write(&pod, script).expect("written");

    // A copy that stalls names the node, and is resumed.
    let pod = kubectl.path().join(format!("pod-{}", NODES[at]));
    let script = fs::read_to_string(&pod).expect("a script");
    let stalls = "case \"$*\" in *--check*) ;; *send*) echo begun; exec sleep 600;; esac\nexec ";
    fs::write(&pod, script.replacen("exec ", stalls, 1)).expect("written");
    let refused = mover.refuse(&["move", "default/data", "--to", other, "--timeout=10"]);
    let named = format!("node {} has not answered within 10 s", NODES[at]);
    assert!(refused.contains(&named) && refused.contains("repeat the command to resume"), "{refused}");
    fs::write(&pod, script).expect("written");
    mover.succeed(&["move", "default/data", "--to", other]);
    let (at, other) = (1 - at, NODES[at]);

    // A drain completes what was interrupted, without a PersistentVolume.
    fs::write(daemons[at].file_of(&volume), "last").expect("written");
    let moment = "After DeletePersistentVolume";
    mover.run(&["move", "default/data", "--to", other], Some(moment));
    let drained = mover.succeed(&["drain", NODES[at], "--to", other]);
    assert!(drained.contains("moved claim default/data"), "{drained}");
    check_settled(1 - at, "last");
    drop(running);
}

/// Runs a command, with these bytes as its input.
fn run_with(mut command: Command, input: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("provisionerd runs");
    // One that refuses does not read.
    let _ = child.stdin.take().expect("its input").write_all(input);
    child.wait_with_output().expect("its output")
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_node_takes_a_volume_that_has_no_persistent_volume_into_its_own_store_alone() {
    let kube = start_control_plane();
    for node in NODES {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    let (daemons, kubelet) =
        (NODES.map(|node| TestDaemon::new(&kube, node)), tempfile::tempdir().expect("a directory"));
    let running = daemons.each_ref().map(|daemon| daemon.start(&[], &[]));
    // Each store is that of its node by a volume.
    let [volume, _] = [(0, "data"), (1, "other")].map(|(at, claim)| {
        let volume = daemons[at].create_claim(&kube, claim, json!({}));
        wait_bound(&kube, claim);
        wait_for(&kube, "pv", &volume, |volume| volume["status"]["phase"] == "Bound");
        volume
    });
    fs::write(daemons[0].file_of(&volume), "text").expect("written");
    drop(running);
    let run = |at: usize, arguments: &[&str], input: &[u8]| {
        let mut command = daemons[at].command(&[&["volumes"][..], arguments].concat());
        command.env("PROVISIONERD_KUBELET", kubelet.path());
        run_with(command, input)
    };
    let sent = run(0, &["send", &volume], b"");
    assert!(sent.status.success(), "{sent:?}");
    let stream = sent.stdout;
    let receive = |arguments: &[&str], input: &[u8]| {
        run(1, &[&["receive", &volume, "--owner", "1", "--bytes", "1Mi"][..], arguments].concat(), input)
    };
    let refused = |arguments: &[&str], input: &[u8], text: &str| {
        let output = receive(arguments, input);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(text), "{arguments:?}: {text}: {said}");
        assert_eq!(daemons[1].list_names(".import"), Vec::<String>::new(), "{arguments:?}");
        assert!(!daemons[1].list_names("volumes").contains(&volume), "{arguments:?}");
    };

    let checked = receive(&["--check"], &stream);
    assert!(checked.status.success(), "{checked:?}");
    refused(&[], &stream, "has a PersistentVolume");
    for check in [&["--check"][..], &[]] {
        let with = |more: &[&'static str]| [check, more].concat();
        refused(&with(&["--expect-node", "node-a"]), &stream, "not the one of the move");
        refused(&with(&["--expect-driver", "x.y"]), &stream, "not the one of the move");
        refused(&with(&["--store", "fast"]), &stream, "there is no store fast");
        // The volume is also in another store of the node.
        let other = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(other.path().join("volumes").join(&volume)).expect("a volume");
        let stores = format!("fast={}", other.path().display());
        refused(&[check, &["--stores", &stores]].concat(), &stream, "in another store of this node");
        // The disk of another node, or none.
        let id = daemons[1].base.path().join("store-id");
        let own = fs::read(&id).expect("an identity");
        fs::copy(daemons[0].base.path().join("store-id"), &id).expect("another identity");
        refused(check, &stream, "is not a store of this node");
        fs::remove_file(&id).expect("removed");
        refused(check, &stream, "is not a store of this node");
        fs::write(&id, own).expect("written");
    }

    // As during a move.
    let mut object = kube.get_object("pv", &volume).expect("a PersistentVolume");
    let retain = r#"{"metadata":{"finalizers":null},"spec":{"persistentVolumeReclaimPolicy":"Retain"}}"#;
    let patch = |patch: &str| {
        let patch = ["patch", "pv", &volume, "--type=merge", "-p", patch];
        command_output(kube.kubectl_command().args(patch)).expect("patched");
    };
    patch(retain);
    command_output(kube.kubectl_command().args(["delete", "--wait=false", "pv", &volume])).expect("deleted");
    // The API server has added its own.
    if kube.get_object("pv", &volume).is_ok() {
        patch(retain);
    }
    kube.wait_until_gone("pv", &volume).expect("deleted");
    refused(&["--check"], &stream, "no PersistentVolume on another node");
    refused(&[], &[&stream[..], b"x"].concat(), "damaged");
    refused(&[], &stream[..stream.len() - 1], "damaged");
    for input in [&stream[..], &stream[..stream.len() / 2]] {
        let received = receive(&[], input);
        assert!(received.status.success(), "it is there by now: {received:?}");
    }
    assert_eq!(fs::read_to_string(daemons[1].file_of(&volume)).expect("the file"), "text");
    let settled = run(1, &["settle", &volume], b"");
    assert!(!settled.status.success(), "it is not known where it is used: {settled:?}");

    // It was cancelled: the copy is named, with what to type, and does that.
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        object["metadata"].as_object_mut().expect("metadata").remove(field);
    }
    object.as_object_mut().expect("an object").remove("status");
    create(&kube, &object);
    let orphans = String::from_utf8(daemons[1].command(&["orphans"]).output().expect("a list").stdout);
    let orphans = orphans.expect("UTF-8");
    assert!(orphans.contains(&volume) && orphans.contains("`provisionerd volumes settle ID`"), "{orphans}");
    for at in [0, 1] {
        let settled = run(at, &["settle", &volume], b"");
        assert!(settled.status.success(), "{settled:?}");
    }
    assert!(daemons[0].file_of(&volume).exists());
    refused(&[], &stream, "has a PersistentVolume");
}
