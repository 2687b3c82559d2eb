//! Nodes over an API server in memory, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_provisioner::testing::objects::{sample_class, sample_identity, sample_node, sample_uid};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind};
use nodekeel_provisioner::{Deps, Provisioner, ProvisionerConfig, RunError, VolumeId, VolumeMetrics};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// A running provisioner.
pub(crate) struct TestNode {
    pub(crate) store: MemStore,
    token: CancellationToken,
    run: tokio::task::JoinHandle<Result<std::convert::Infallible, RunError>>,
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
        let (token, (is_ready, ready)) = (CancellationToken::new(), oneshot::channel());
        let (provisioner, canceled) = (Provisioner::new(config, deps), token.clone());
        let run = tokio::spawn(async move {
            provisioner.run_until(canceled, || is_ready.send(()).expect("the receiver waits")).await
        });
        ready.await.expect("ready");
        Self { store, token, run }
    }

    /// Stops it as a supervisor does.
    pub(crate) async fn stop(self) -> Option<RunError> {
        self.token.cancel();
        self.run.await.expect("no panic").err()
    }

    /// Stops it as a crash does.
    pub(crate) async fn crash(self) {
        self.run.abort();
        let _ = self.run.await;
    }
}

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
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
