//! A control plane for the tests, and provisionerd in it.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector;
use kube::runtime::watcher::{self, watch_object, watcher};
use kube::{Api, Client, Resource};
use nodekeel_provisioner::SELECTED_NODE;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::gotool::SNAPSHOT_CRDS;
use testbed::{Kube, KubeUser, merge_patch};
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;

/// Timeout for expected events, on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) const DRIVER: &str = "volumes.nodekeel";

/// How often a daemon is killed at each moment: once, unless a stress run sets the variable.
pub(crate) fn kill_rounds() -> usize {
    std::env::var("NODEKEEL_VOLUME_KILLS").map_or(1, |count| count.parse().expect("a number"))
}

/// Installs the kinds of the snapshot API.
pub(crate) fn install_snapshot_api(kube: &Kube) {
    for manifest in SNAPSHOT_CRDS {
        kube.apply_manifests(manifest).expect("the kinds of the snapshot API");
    }
    let kind = "volumesnapshotcontents.snapshot.storage.k8s.io";
    kube.wait_for_condition("customresourcedefinition", kind, "condition=Established").expect("established");
}

/// Starts a control plane with the objects of deploy/.
pub(crate) fn start_control_plane() -> Kube {
    let account = KubeUser::service_account("nodekeel", "provisionerd");
    let builder = Kube::builder()
        .with_user(account)
        .with_user(KubeUser::new("nobody"))
        .with_controller_requests_per_second(500);
    let kube = builder.start().expect("a control plane");
    kube.apply_manifests(include_str!("../../../../deploy/namespace.yaml")).expect("the namespace");
    kube.apply_manifests(include_str!("../../../../deploy/rbac.yaml")).expect("the permissions");
    kube.apply_manifests(include_str!("../../../../deploy/storageclass.yaml")).expect("the classes");
    kube
}

pub(crate) fn test_runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Runs a test on a control plane, with the admin's client and a daemon that is not started yet.
pub(crate) fn run_with_daemon(node: &str, test: impl AsyncFnOnce(Client, TestDaemon)) {
    let kube = start_control_plane();
    test_runtime().block_on(async {
        let client = admin_client(&kube).await;
        test(client, TestDaemon::new(&account_kubeconfig(&kube), node.to_owned())).await;
    });
}

/// The kubeconfig of the account that deploy/rbac.yaml is for.
pub(crate) fn account_kubeconfig(kube: &Kube) -> PathBuf {
    kube.kubeconfig_file("system:serviceaccount:nodekeel:provisionerd").expect("an account")
}

pub(crate) async fn admin_client(kube: &Kube) -> Client {
    let file = Kubeconfig::read_from(kube.kubeconfig_file("admin").expect("a user")).expect("a kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("a configuration")).expect("a client")
}

pub(crate) fn claims_api(client: &Client) -> Api<PersistentVolumeClaim> {
    Api::namespaced(client.clone(), "default")
}

pub(crate) fn volumes_api(client: &Client) -> Api<PersistentVolume> {
    Api::all(client.clone())
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

pub(crate) async fn create_claim(client: &Client, manifest: Value) -> PersistentVolumeClaim {
    create_object(&claims_api(client), manifest).await
}

pub(crate) async fn delete_claim(client: &Client, name: &str) {
    claims_api(client).delete(name, &DeleteParams::default()).await.expect("the claim is deleted");
}

pub(crate) async fn patch_claim(client: &Client, name: &str, patch: Value) {
    let patch = Patch::Merge(patch);
    claims_api(client).patch(name, &PatchParams::default(), &patch).await.expect("a patch");
}

pub(crate) async fn patch_volume(client: &Client, name: &str, patch: Value) {
    let patch = Patch::Merge(patch);
    volumes_api(client).patch(name, &PatchParams::default(), &patch).await.expect("a patch");
}

/// The name of the volume of a claim.
pub(crate) fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"))
}

pub(crate) fn is_bound(claim: Option<&PersistentVolumeClaim>) -> bool {
    claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
}

/// True if a claim has this size, and nothing is in progress.
pub(crate) fn has_capacity(claim: Option<&PersistentVolumeClaim>, size: &str) -> bool {
    claim.and_then(|claim| claim.status.as_ref()).is_some_and(|status| {
        status.capacity.as_ref().is_some_and(|capacity| capacity["storage"].0 == size)
            && status.allocated_resource_statuses.is_none()
            && status.conditions.is_none()
    })
}

pub(crate) async fn wait_bound(client: &Client, name: &str) -> PersistentVolumeClaim {
    wait_object(&claims_api(client), name, is_bound).await.expect("it exists")
}

pub(crate) async fn wait_phase(client: &Client, volume: &str, phase: &str) {
    let is_so = |volume: Option<&PersistentVolume>| {
        volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some(phase)
    };
    wait_object(&volumes_api(client), volume, is_so).await;
}

pub(crate) async fn wait_volume_gone(client: &Client, volume: &str) {
    wait_object(&volumes_api(client), volume, |volume| volume.is_none()).await;
}

/// The value of an annotation.
pub(crate) fn annotation<'a, K: Resource>(object: Option<&'a K>, key: &str) -> Option<&'a str> {
    object?.meta().annotations.as_ref()?.get(key).map(String::as_str)
}

pub(crate) async fn create_object<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + Debug + DeserializeOwned + serde::Serialize,
{
    let object: K = serde_json::from_value(object).expect("an object of its kind");
    api.create(&PostParams::default(), &object).await.expect("the API server accepts the object")
}

/// Waits until an object meets a condition; `None` is a missing object.
pub(crate) async fn wait_object<K>(api: &Api<K>, name: &str, is_so: impl Fn(Option<&K>) -> bool) -> Option<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut states = pin!(watch_object(api.clone(), name).default_backoff());
    let mut last = None;
    let wait = async {
        while let Some(state) = states.next().await {
            if let Ok(object) = state {
                if is_so(object.as_ref()) {
                    return object;
                }
                last = object;
            }
        }
        panic!("a watch never ends")
    };
    let found = tokio::time::timeout(TIMEOUT, wait).await;
    found.unwrap_or_else(|_| panic!("{name} does not meet the condition: {last:?}"))
}

/// Waits until the objects with these labels meet a condition, which does not hold for none.
pub(crate) async fn wait_objects<K>(api: Api<K>, labels: &str, is_so: impl Fn(&[Arc<K>]) -> bool)
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (cache, writer) = reflector::store();
    let events = watcher(api, watcher::Config::default().labels(labels)).default_backoff().reflect(writer);
    let mut events = pin!(events);
    let wait = async {
        while events.next().await.is_some() {
            if is_so(&cache.state()) {
                return;
            }
        }
    };
    let found = tokio::time::timeout(TIMEOUT, wait).await;
    found.unwrap_or_else(|_| panic!("the objects do not meet the condition: {:?}", cache.state()));
}

/// provisionerd with private directories, for one node.
pub(crate) struct TestDaemon {
    pub(crate) base: tempfile::TempDir,
    pub(crate) quota_dir: tempfile::TempDir,
    pub(crate) node: String,
    pub(crate) kubeconfig: PathBuf,
}

impl TestDaemon {
    pub(crate) fn new(kubeconfig: &Path, node: String) -> Self {
        let [base, quota_dir] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        Self { base, quota_dir, node, kubeconfig: kubeconfig.to_owned() }
    }

    /// Starts provisionerd, which is killed when the child is dropped.
    pub(crate) fn start(&self, environment: &[(&str, &str)]) -> Child {
        self.spawn("127.0.0.1:0", &[], environment)
    }

    /// The same, with so many bytes to promise to volumes.
    pub(crate) fn start_promising(&self, bytes: u64, environment: &[(&str, &str)]) -> Child {
        let disk = rustix::fs::statvfs(self.base.path()).expect("a file system");
        let reserve = format!("--capacity-reserve={}", disk.f_blocks * disk.f_frsize - bytes);
        self.spawn("127.0.0.1:0", &[&reserve], environment)
    }

    /// The same, with its metrics at an address.
    pub(crate) fn start_listening(&self, listen: &str) -> Child {
        self.spawn(listen, &[], &[])
    }

    fn spawn(&self, listen: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Child {
        let mut command = self.command(&["run", "--no-csi", "--listen", listen]);
        command.args(arguments).envs(environment.iter().copied());
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.quota_dir.path().with_extension("log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log"));
        command.kill_on_drop(true).spawn().expect("provisionerd starts")
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
        command.env_clear().env("PROVISIONERD_BOOKS", self.quota_dir.path());
        command
    }

    /// Creates a claim that has selected the daemon's node.
    pub(crate) async fn create_claim(&self, client: &Client, name: &str) -> PersistentVolumeClaim {
        create_claim(client, claim_manifest(name, Some(&self.node), json!({}))).await
    }

    /// A file in a volume.
    pub(crate) fn file_of(&self, volume: &str) -> PathBuf {
        self.base.path().join("volumes").join(volume).join("file")
    }

    /// The log of all its incarnations so far.
    pub(crate) fn log_text(&self) -> String {
        fs::read_to_string(self.quota_dir.path().with_extension("log")).unwrap_or_default()
    }

    /// The names in a subdirectory of its directory.
    pub(crate) fn list_names(&self, subdirectory: &str) -> Vec<String> {
        list_names(&self.base.path().join(subdirectory))
    }

    /// The projects with limits.
    pub(crate) fn project_names(&self) -> Vec<String> {
        list_names(self.quota_dir.path())
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.quota_dir.path().with_extension("log"));
    }
}

pub(crate) fn list_names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}
