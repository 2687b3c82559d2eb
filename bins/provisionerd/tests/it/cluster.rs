//! A control plane with the objects of `deploy/`, and provisionerd as a process next to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nodekeel_provisioner::SELECTED_NODE;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::gotool::SNAPSHOT_CRDS;
use testbed::{Daemon, Kube, KubeDaemon, KubeUser, ScratchDir, merge_patch};

/// Timeout for expected events, on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) const DRIVER: &str = "volumes.nodekeel";

/// How often a daemon is killed at each moment: once, unless a stress run sets the variable.
pub(crate) fn kill_rounds() -> usize {
    std::env::var("NODEKEEL_VOLUME_KILLS").map_or(1, |count| count.parse().expect("a number"))
}

/// Before and after each step, as provisionerd names these moments.
pub(crate) fn moments_of(steps: &[&str]) -> Vec<String> {
    steps.iter().flat_map(|step| ["Before", "After"].map(|side| format!("{side} {step}"))).collect()
}

/// Starts a control plane with the accounts, permissions and classes of deploy/, whose nodes need no heartbeats.
pub(crate) fn start_control_plane() -> Kube {
    let kube = Kube::builder()
        .with_user(KubeUser::service_account("nodekeel", "provisionerd"))
        .with_user(KubeUser::service_account("nodekeel", "provisionerd-agent"))
        .with_user(KubeUser::new("nobody"))
        .with_argument(KubeDaemon::ControllerManager, "--node-monitor-grace-period=1h")
        .with_controller_requests_per_second(500)
        .start()
        .expect("a control plane");
    for manifests in [
        include_str!("../../../../deploy/namespace.yaml"),
        include_str!("../../../../deploy/rbac.yaml"),
        include_str!("../../../../deploy/agent/rbac.yaml"),
        include_str!("../../../../deploy/storageclass.yaml"),
    ] {
        kube.apply_manifests(manifests).expect("the manifests");
    }
    kube
}

/// Installs the kinds of the snapshot API.
pub(crate) fn install_snapshot_api(kube: &Kube) {
    for manifest in SNAPSHOT_CRDS {
        kube.apply_manifests(manifest).expect("the kinds of the snapshot API");
    }
    let kind = "volumesnapshotcontents.snapshot.storage.k8s.io";
    kube.wait_for_condition("customresourcedefinition", kind, "condition=Established").expect("established");
}

/// A claim of 1 MiB with the shipped class, changed by a patch. With a node, the scheduler has selected that.
pub(crate) fn claim_manifest(name: &str, node: Option<&str>, patch: Value) -> Value {
    let mut claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
            "storageClassName": "nodekeel",
        },
    });
    if let Some(node) = node {
        claim["metadata"]["annotations"] = json!({ SELECTED_NODE: node });
    }
    merge_patch(&mut claim, patch);
    claim
}

/// A pod with a volume of the claim of its name; no kubelet runs it.
pub(crate) fn pod_manifest(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "containers": [{
                "name": "main", "image": "none", "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": name } }],
        },
    })
}

/// The patch of a claim that requests so much.
pub(crate) fn sized(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

pub(crate) fn create(kube: &Kube, object: &Value) -> Value {
    kube.create_objects(&object.to_string()).expect("the API server accepts the object")
}

pub(crate) fn wait_for(kube: &Kube, kind: &str, name: &str, is_so: impl FnMut(&Value) -> bool) -> Value {
    kube.wait_for_object_within(TIMEOUT, kind, name, is_so).unwrap()
}

/// Waits until a claim is bound, and gives the name of its volume.
pub(crate) fn wait_bound(kube: &Kube, claim: &str) -> String {
    let claim = wait_for(kube, "pvc", claim, |claim| claim["status"]["phase"] == "Bound");
    claim["spec"]["volumeName"].as_str().expect("a bound claim has a volume").to_owned()
}

pub(crate) fn wait_phase(kube: &Kube, volume: &str, phase: &str) {
    wait_for(kube, "pv", volume, |volume| volume["status"]["phase"] == phase);
}

/// The notes of the events of this reason about an object.
pub(crate) fn event_notes(kube: &Kube, about: &str, reason: &str) -> Vec<String> {
    let events = kube.list_objects("events").expect("a list").into_iter();
    let events = events.filter(|event| event["involvedObject"]["name"] == about && event["reason"] == reason);
    events.map(|event| event["message"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Waits until a daemon has logged a text, and gives the line.
pub(crate) fn wait_logged(daemon: &Daemon, text: &str) -> String {
    testbed::wait_until(TIMEOUT, text, || {
        let log = daemon.read_log()?;
        log.lines()
            .find(|line| line.contains(text))
            .map(str::to_owned)
            .ok_or_else(|| anyhow::anyhow!("{log}"))
    })
    .unwrap()
}

/// What one node has of provisionerd: a directory of volumes, and one of limits, which are kept in files.
pub(crate) struct TestDaemon {
    pub(crate) base: TempDir,
    pub(crate) limits: TempDir,
    pub(crate) node: String,
    kubeconfig: PathBuf,
}

impl TestDaemon {
    /// For the account that deploy/rbac.yaml is for.
    pub(crate) fn new(kube: &Kube, node: &str) -> Self {
        let account = kube.kubeconfig_file("system:serviceaccount:nodekeel:provisionerd");
        Self::with_kubeconfig(&account.expect("an account"), node)
    }

    pub(crate) fn with_kubeconfig(kubeconfig: &Path, node: &str) -> Self {
        let [base, limits] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        Self { base, limits, node: node.to_owned(), kubeconfig: kubeconfig.to_owned() }
    }

    /// A command of provisionerd with the directory and the node of this daemon.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        self.command_on(&self.node, arguments)
    }

    /// The same on another node.
    pub(crate) fn command_on(&self, node: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        command.args(arguments).args(["--driver", DRIVER, "--node", node]);
        command.arg("--directory").arg(self.base.path()).arg("--kubeconfig").arg(&self.kubeconfig);
        command.env_clear().env("PROVISIONERD_BOOKS", self.limits.path());
        command.env("PROVISIONERD_LISTEN", "127.0.0.1:0");
        command
    }

    /// Starts `run` with further arguments and environment variables; dropping it is a kill.
    pub(crate) fn start(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Daemon {
        let mut command = self.command(&[&["run", "--no-csi"][..], arguments].concat());
        command.envs(environment.iter().copied());
        Daemon::start(command, ScratchDir::new().expect("a directory"), || Ok(()))
            .expect("provisionerd starts")
    }

    /// The argument by which so many bytes can be promised to volumes.
    pub(crate) fn reserve_all_but(&self, bytes: u64) -> String {
        let disk = rustix::fs::statvfs(self.base.path()).expect("a file system");
        format!("--capacity-reserve={}", disk.f_blocks * disk.f_frsize - bytes)
    }

    /// Creates a claim that has selected the daemon's node, and gives the name that its volume will have.
    pub(crate) fn create_claim(&self, kube: &Kube, name: &str, patch: Value) -> String {
        let claim = create(kube, &claim_manifest(name, Some(&self.node), patch));
        format!("pvc-{}", claim["metadata"]["uid"].as_str().expect("a UID"))
    }

    /// A file in a volume.
    pub(crate) fn file_of(&self, volume: &str) -> PathBuf {
        self.base.path().join("volumes").join(volume).join("file")
    }

    /// The names in a subdirectory of its directory.
    pub(crate) fn list_names(&self, subdirectory: &str) -> Vec<String> {
        list_names(&self.base.path().join(subdirectory))
    }
}

pub(crate) fn list_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}
