//! A control plane that tests share; each test has a separate driver, namespace and nodes in it.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, Namespace, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::watcher::watch_object;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreOptions, DriverName, FINALIZER, NodeName, Provisioner, ProvisionerConfig,
    ProvisionerIdentity, RunError, SELECTED_NODE, StepMoment, VolumeId, VolumeStep,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::{Kube, KubeUser, SharedKube};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

pub(crate) use testbed::merge_patch as merge;

pub(crate) use crate::fixture::names;
use crate::service::harness::{AttemptCounts, RunningProvisioner};

/// Timeout of waits, on a busy machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(150);

/// Starts a control plane in which the provisioner has the permissions of deploy/.
pub(crate) fn start_control_plane() -> Kube {
    let account = KubeUser::service_account("nodekeel", "provisionerd");
    let builder = Kube::builder()
        .with_user(account)
        .with_user(KubeUser::new("nobody"))
        .with_user(KubeUser::new("reader"))
        .with_controller_requests_per_second(500);
    let kube = builder.start().expect("a control plane");
    kube.apply_manifests(include_str!("../../../../deploy/namespace.yaml")).expect("the namespace");
    kube.apply_manifests(include_str!("../../../../deploy/rbac.yaml")).expect("the RBAC rules");
    kube
}

/// The shared control plane, which runs as long as any test holds it.
pub(crate) fn shared_control_plane() -> Arc<Kube> {
    static SHARED: SharedKube = SharedKube::new();
    SHARED.get_or_start(start_control_plane)
}

/// Runs a test in the shared control plane.
pub(crate) fn run_test(name: &'static str, test: impl AsyncFnOnce(TestCluster)) {
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    runtime.block_on(async { test(TestCluster::new(&kube, name).await).await });
}

pub(crate) fn test_runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// The driver, the namespace and the clients of one test.
#[derive(Clone)]
pub(crate) struct TestCluster {
    pub(crate) name: &'static str,
    pub(crate) driver: DriverName,
    pub(crate) admin: Client,
    account: Client,
}

pub(crate) async fn user_client(kube: &Kube, user: &str) -> Client {
    let file = Kubeconfig::read_from(kube.kubeconfig_file(user).expect("a user")).expect("a kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("a configuration")).expect("a client")
}

impl TestCluster {
    /// A namespace and a class that wait for the first consumer, both named after the test.
    pub(crate) async fn new(kube: &Kube, name: &'static str) -> Self {
        let driver = DriverName::try_new(format!("{name}.nodekeel.example")).expect("a driver name");
        let cluster = Self::with_driver(kube, name, driver).await;
        cluster.create_class(name, json!({})).await;
        cluster
    }

    /// The same with another driver, and without the class.
    pub(crate) async fn with_driver(kube: &Kube, name: &'static str, driver: DriverName) -> Self {
        let admin = user_client(kube, "admin").await;
        let account = user_client(kube, "system:serviceaccount:nodekeel:provisionerd").await;
        let cluster = Self { name, driver, admin, account };
        cluster
            .create_object::<Namespace>(
                Api::all(cluster.admin.clone()),
                json!({ "metadata": { "name": name } }),
            )
            .await;
        cluster
    }

    /// The same with provisioners that run as another user.
    pub(crate) fn with_account(self, account: Client) -> Self {
        Self { account, ..self }
    }

    pub(crate) fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.admin.clone(), self.name)
    }

    pub(crate) fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.admin.clone())
    }

    pub(crate) fn classes(&self) -> Api<StorageClass> {
        Api::all(self.admin.clone())
    }

    /// The name of one of this test's nodes.
    pub(crate) fn node_name(&self, node: &str) -> String {
        format!("{}-{node}", self.name)
    }

    pub(crate) async fn create_object<K>(&self, api: Api<K>, object: Value) -> K
    where
        K: Clone + Debug + DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).expect("a valid object");
        api.create(&PostParams::default(), &object).await.expect("create")
    }

    pub(crate) async fn delete_object<K: Clone + Debug + DeserializeOwned>(&self, api: &Api<K>, name: &str) {
        api.delete(name, &DeleteParams::default()).await.expect("delete");
    }

    /// A class of this test's driver that waits for the first consumer, changed by a patch.
    pub(crate) async fn create_class(&self, name: &str, patch: Value) -> StorageClass {
        let mut class = json!({
            "metadata": { "name": name },
            "provisioner": self.driver.as_str(),
            "reclaimPolicy": "Delete",
            "volumeBindingMode": "WaitForFirstConsumer",
        });
        merge(&mut class, patch);
        self.create_object(self.classes(), class).await
    }

    /// A claim of 1 MiB with selected node `a`, changed by a patch.
    pub(crate) async fn create_claim(&self, name: &str, patch: Value) -> PersistentVolumeClaim {
        let mut claim = json!({
            "metadata": { "name": name, "annotations": { SELECTED_NODE: self.node_name("a") } },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Mi" } },
                "storageClassName": self.name,
            },
        });
        merge(&mut claim, patch);
        self.create_object(self.claims(), claim).await
    }

    /// Waits until a claim is bound, and returns its volume.
    pub(crate) async fn wait_bound(&self, claim: &str) -> PersistentVolume {
        let is_bound =
            |claim: Option<&PersistentVolumeClaim>| claim.is_some_and(|claim| phase(claim) == "Bound");
        let claim = wait_for_object(&self.claims(), claim, is_bound).await.expect("bound");
        let name = claim.spec.and_then(|spec| spec.volume_name).expect("a bound claim names its volume");
        self.volumes().get(&name).await.expect("a bound claim has its volume")
    }

    /// Waits until a volume is released.
    pub(crate) async fn wait_released(&self, volume: &str) -> PersistentVolume {
        let is_released = |volume: Option<&PersistentVolume>| {
            volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some("Released")
        };
        wait_for_object(&self.volumes(), volume, is_released).await.expect("released")
    }

    /// Waits until an object is deleted.
    pub(crate) async fn wait_deleted<K>(&self, api: &Api<K>, name: &str)
    where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        wait_for_object(api, name, |object| object.is_none()).await;
    }

    /// Waits for an event by this driver about a claim or a volume, and returns its type and its message.
    pub(crate) async fn wait_for_event(&self, about: &str, reason: &str) -> (String, String) {
        let selector = format!("involvedObject.name={about},reason={reason}");
        let config = watcher::Config::default().fields(&selector);
        let events = watcher(Api::<Event>::all(self.admin.clone()), config).default_backoff();
        // Tests share the control plane, and names of claims with it.
        let is_ours = |event: &Event| event.reporting_component.as_deref() == Some(self.driver.as_str());
        let ours = |event: Result<Event, _>| std::future::ready(event.ok().filter(is_ours));
        let mut events = pin!(events.applied_objects().filter_map(ours));
        let first = tokio::time::timeout(WAIT_TIMEOUT, events.next()).await;
        let event =
            first.unwrap_or_else(|_| panic!("no {reason} about {about}")).expect("a watch does not end");
        (event.type_.unwrap_or_default(), event.message.unwrap_or_default())
    }

    /// The reasons of the events by this driver about an object.
    pub(crate) async fn event_reasons(&self, about: &str) -> Vec<String> {
        let params = ListParams::default().fields(&format!("involvedObject.name={about}"));
        let events = Api::<Event>::all(self.admin.clone()).list(&params).await.expect("events").items;
        let ours = |event: &Event| event.reporting_component.as_deref() == Some(self.driver.as_str());
        events.into_iter().filter(ours).map(|event| event.reason.unwrap_or_default()).collect()
    }

    /// The volumes of this test's driver.
    pub(crate) async fn driver_volumes(&self) -> Vec<PersistentVolume> {
        let all = self.volumes().list(&ListParams::default()).await.expect("a list").items;
        let is_own = |volume: &PersistentVolume| {
            volume
                .spec
                .as_ref()
                .and_then(|spec| spec.csi.as_ref())
                .is_some_and(|csi| csi.driver == self.driver.as_str())
        };
        all.into_iter().filter(is_own).collect()
    }

    /// Starts a provisioner for one of this test's nodes, and waits until it is ready.
    pub(crate) async fn start_provisioner(&self, node: &str) -> TestNode {
        self.start_provisioner_with(&self.node_name(node), Some(FINALIZER.to_owned())).await
    }

    pub(crate) async fn start_provisioner_with(&self, node: &str, finalizer: Option<String>) -> TestNode {
        let base = tempfile::tempdir().expect("a directory");
        self.start_provisioner_in(node, finalizer, base).await
    }

    /// The same with a directory that another run has left.
    pub(crate) async fn start_provisioner_in(
        &self,
        node: &str,
        finalizer: Option<String>,
        base: tempfile::TempDir,
    ) -> TestNode {
        TestNode::start(self, node, finalizer, base).await
    }

    /// The volume names of these claims, as in [`TestNode::volumes`].
    pub(crate) fn volume_ids(&self, claims: &[&PersistentVolumeClaim]) -> Vec<String> {
        let mut ids: Vec<_> = claims.iter().map(|claim| id(claim).to_string()).collect();
        ids.sort();
        ids
    }
}

/// A running provisioner, and its directories.
pub(crate) struct TestNode {
    pub(crate) name: String,
    pub(crate) base: tempfile::TempDir,
    pub(crate) quota: Arc<MemQuota>,
    pub(crate) store: Arc<DirStore>,
    pub(crate) counts: Arc<AttemptCounts>,
    steps: Arc<Mutex<Vec<VolumeStep>>>,
    running: RunningProvisioner,
}

impl TestNode {
    async fn start(
        cluster: &TestCluster,
        name: &str,
        finalizer: Option<String>,
        base: tempfile::TempDir,
    ) -> Self {
        let quota = Arc::new(MemQuota::new());
        let dir = Dir::open(base.path()).expect("the base");
        let mut options = DirStoreOptions::default();
        // The host's file system may not be able to share blocks.
        options.cloner = Arc::new(DataCloner);
        let store = DirStore::with_options(dir, Arc::clone(&quota) as _, options).expect("a store");
        let store = Arc::new(store);
        let node = NodeName::try_new(name).expect("a node name");
        let (counts, steps) = (Arc::<AttemptCounts>::default(), Arc::<Mutex<Vec<VolumeStep>>>::default());
        let started = Arc::clone(&steps);
        let config = ProvisionerConfig::new(ProvisionerIdentity {
            driver: cluster.driver.clone(),
            node,
            finalizer,
            store: None,
        });
        let deps = Deps {
            client: cluster.account.clone(),
            store: Arc::clone(&store) as _,
            metrics: Arc::clone(&counts) as _,
            registered: None,
            snapshots: Some(Arc::clone(&store) as _),
            guard: None,
            hook: Some(Arc::new(move |step: VolumeStep, moment: StepMoment| {
                if moment == StepMoment::Before {
                    started.lock().unwrap_or_else(PoisonError::into_inner).push(step);
                }
            })),
        };
        let (is_ready, ready) = oneshot::channel();
        let running = RunningProvisioner::spawn(Provisioner::new(config, deps), || {
            is_ready.send(()).expect("the receiver waits");
        });
        tokio::time::timeout(WAIT_TIMEOUT, ready).await.expect("within the timeout").expect("ready");
        Self { name: name.to_owned(), base, quota, store, counts, steps, running }
    }

    /// How often a step was started: each is one request, if it is one.
    pub(crate) fn step_count(&self, step: VolumeStep) -> usize {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.iter().filter(|started| **started == step).count()
    }

    /// The names of the volumes' directories.
    pub(crate) fn volumes(&self) -> Vec<String> {
        names(&self.base.path().join("volumes"))
    }

    /// Asserts that no directory and no project is left.
    pub(crate) async fn assert_empty(&self) {
        self.store.wait_until_erased().await;
        for place in ["volumes", ".new", ".trash"] {
            assert_eq!(names(&self.base.path().join(place)), Vec::<String>::new(), "{place}");
        }
        assert_eq!(self.quota.list_projects(), [], "no project is left");
    }

    /// Stops it, asserts that it was running, and returns its directory.
    pub(crate) async fn stop(self) -> tempfile::TempDir {
        let ended = self.running.stop().await;
        assert!(matches!(ended, RunError::Canceled), "{ended:?}");
        drop(self.store);
        // A check of the store may still be in progress on another thread.
        while DirStore::is_in_use(&Dir::open(self.base.path()).expect("the base")).expect("inspect") {
            tokio::task::yield_now().await;
        }
        self.base
    }
}

/// Waits until a condition holds for an object; `None` is a missing one. Survives restarts of the API server.
pub(crate) async fn wait_for_object<K>(
    api: &Api<K>,
    name: &str,
    is_so: impl Fn(Option<&K>) -> bool,
) -> Option<K>
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
        panic!("the watch has ended")
    };
    let found = tokio::time::timeout(WAIT_TIMEOUT, wait).await;
    found.unwrap_or_else(|_| panic!("timed out waiting for {name}: {last:?}"))
}

pub(crate) fn phase(claim: &PersistentVolumeClaim) -> &str {
    claim.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

/// The id of a claim's volume.
pub(crate) fn id(claim: &PersistentVolumeClaim) -> VolumeId {
    VolumeId::from_uid(claim.metadata.uid.as_deref().expect("a UID")).expect("a UUID")
}
