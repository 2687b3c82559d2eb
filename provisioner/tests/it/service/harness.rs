//! Nodes over an API server in memory, in virtual time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_provisioner::testing::objects::{
    NODE, sample_claim, sample_class, sample_identity, sample_node,
};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestVerb};
use nodekeel_provisioner::{Deps, Provisioner, ProvisionerConfig, RunError, VolumeMetrics};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use crate::fixture::id;

/// A provisioner that runs until it is stopped.
pub(crate) struct RunningProvisioner {
    token: CancellationToken,
    run: JoinHandle<Result<Infallible, RunError>>,
}

impl RunningProvisioner {
    /// Runs a provisioner of the sample node.
    pub(crate) fn start(deps: Deps) -> Self {
        Self::spawn(Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps), || {})
    }

    pub(crate) fn spawn(provisioner: Provisioner, on_ready: impl FnOnce() + Send + 'static) -> Self {
        let token = CancellationToken::new();
        let canceled = token.clone();
        Self { token, run: tokio::spawn(async move { provisioner.run_until(canceled, on_ready).await }) }
    }

    /// Stops it as a supervisor does.
    pub(crate) async fn stop(self) -> RunError {
        self.token.cancel();
        self.wait_failed().await
    }

    /// Stops it as a crash does.
    pub(crate) async fn crash(self) {
        self.run.abort();
        let _ = self.run.await;
    }

    /// Waits until the run ends by itself.
    pub(crate) async fn wait_failed(self) -> RunError {
        let Err(error) = self.run.await.expect("no panic");
        error
    }
}

/// A running provisioner with a store in memory.
pub(crate) struct TestNode {
    pub(crate) store: MemStore,
    running: RunningProvisioner,
}

/// Counts successes and failures.
#[derive(Debug, Default)]
pub(crate) struct AttemptCounts(std::sync::Mutex<[usize; 4]>);

impl AttemptCounts {
    fn add(&self, at: usize) {
        self.0.lock().expect("not poisoned")[at] += 1;
    }

    /// Provisioned, not provisioned, deleted, not deleted.
    pub(crate) fn get(&self) -> [usize; 4] {
        *self.0.lock().expect("not poisoned")
    }
}

impl VolumeMetrics for AttemptCounts {
    fn record_provision(&self, _: &str, _: Duration, succeeded: bool) {
        self.add(usize::from(!succeeded));
    }

    fn record_delete(&self, _: &str, _: Duration, succeeded: bool) {
        self.add(2 + usize::from(!succeeded));
    }
}

pub(crate) fn test_deps(api: &FakeApi, store: &MemStore) -> Deps {
    Deps {
        client: api.client(),
        store: Arc::new(store.clone()),
        metrics: Arc::new(()),
        guard: None,
        registered: None,
        snapshots: Some(Arc::new(store.clone())),
        hook: None,
    }
}

impl TestNode {
    pub(crate) async fn start(api: &FakeApi, name: &str) -> Self {
        Self::start_with(
            ProvisionerConfig::new(sample_identity(name)),
            test_deps(api, &MemStore::default()),
            None,
        )
        .await
    }

    pub(crate) async fn start_with_store(api: &FakeApi, store: &MemStore) -> Self {
        Self::start_with(
            ProvisionerConfig::new(sample_identity("node-a")),
            test_deps(api, store),
            Some(store),
        )
        .await
    }

    pub(crate) async fn start_with(
        config: ProvisionerConfig,
        mut deps: Deps,
        store: Option<&MemStore>,
    ) -> Self {
        let store = store.cloned().unwrap_or_default();
        deps.store = Arc::new(store.clone());
        deps.snapshots = Some(Arc::new(store.clone()));
        let (is_ready, ready) = oneshot::channel();
        let running = RunningProvisioner::spawn(Provisioner::new(config, deps), || {
            is_ready.send(()).expect("the receiver waits");
        });
        ready.await.expect("ready");
        Self { store, running }
    }

    /// Stops it as a supervisor does.
    pub(crate) async fn stop(self) -> RunError {
        self.running.stop().await
    }

    /// Stops it as a crash does.
    pub(crate) async fn crash(self) {
        self.running.crash().await;
    }
}

/// Frequent requests of tests to an API server in memory.
pub(crate) trait ApiFixture {
    /// Creates the sample claim with this number, changed by a patch.
    fn create_claim(&self, number: u32, patch: Value);

    fn delete_claim(&self, number: u32);

    /// The phase of the volume of the claim with this number.
    fn volume_phase(&self, number: u32) -> Value;

    /// How many requests of each verb were made for a kind of objects.
    fn request_counts<const N: usize>(&self, kind: ObjectKind, verbs: [RequestVerb; N]) -> [usize; N];
}

impl ApiFixture for FakeApi {
    fn create_claim(&self, number: u32, patch: Value) {
        self.create_object(ObjectKind::Claim, sample_claim(number, patch));
    }

    fn delete_claim(&self, number: u32) {
        self.delete_object(ObjectKind::Claim, &format!("claim-{number}"));
    }

    fn volume_phase(&self, number: u32) -> Value {
        phase(self, ObjectKind::Volume, id(number).as_str())
    }

    fn request_counts<const N: usize>(&self, kind: ObjectKind, verbs: [RequestVerb; N]) -> [usize; N] {
        verbs.map(|verb| self.request_count(verb, kind))
    }
}

/// An API server with the sample class and nodes.
pub(crate) fn test_api() -> FakeApi {
    let api = FakeApi::default();
    for node in ["node-a", "node-b", "node-c", "node-d", "node-e"] {
        api.create_object(ObjectKind::Node, sample_node(node, json!({})));
    }
    api.create_object(ObjectKind::Class, sample_class(json!({})));
    api
}

/// Waits until a condition holds, for at most one hour of virtual time.
pub(crate) async fn wait_until(api: &FakeApi, holds: impl FnMut(&FakeApi) -> bool) {
    tokio::time::timeout(Duration::from_secs(3600), api.wait_until(holds))
        .await
        .expect("condition within the timeout");
}

/// Advances the virtual time.
pub(crate) async fn advance_time(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

pub(crate) fn phase(api: &FakeApi, kind: ObjectKind, name: &str) -> Value {
    api.get_object(kind, name).map_or(Value::Null, |object| object["status"]["phase"].clone())
}

pub(crate) async fn wait_bound(api: &FakeApi, name: &str) {
    wait_until(api, |api| phase(api, ObjectKind::Claim, name) == "Bound").await;
}

pub(crate) async fn wait_for_event(api: &FakeApi, about: &str, reason: &str) {
    wait_until(api, |api| api.event_counts(about).iter().any(|(found, _)| found == reason)).await;
}

pub(crate) async fn wait_no_volumes(api: &FakeApi) {
    wait_until(api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
}
