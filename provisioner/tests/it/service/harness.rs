//! Nodes over an API server in memory, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_provisioner::testing::objects::{class, identity, uid};
use nodekeel_provisioner::testing::{FakeApi, Kind, MemStore};
use nodekeel_provisioner::{Config, Deps, Provisioner, RunError, VolumeId};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// A provisioner that runs.
pub(crate) struct Node {
    pub(crate) store: MemStore,
    token: CancellationToken,
    run: tokio::task::JoinHandle<Result<std::convert::Infallible, RunError>>,
}

pub(crate) fn deps(api: &FakeApi, store: &MemStore) -> Deps {
    Deps {
        client: api.client(),
        store: Arc::new(store.clone()),
        meter: Arc::new(()),
        guard: None,
        registered: None,
        hook: None,
    }
}

impl Node {
    pub(crate) async fn start(api: &FakeApi, name: &str) -> Self {
        Self::with(Config::new(identity(name)), deps(api, &MemStore::default()), None).await
    }

    pub(crate) async fn over(api: &FakeApi, store: &MemStore) -> Self {
        Self::with(Config::new(identity("node-a")), deps(api, store), Some(store)).await
    }

    pub(crate) async fn with(config: Config, mut deps: Deps, store: Option<&MemStore>) -> Self {
        let store = store.cloned().unwrap_or_default();
        deps.store = Arc::new(store.clone());
        let (token, (is_ready, ready)) = (CancellationToken::new(), oneshot::channel());
        let (provisioner, cancelled) = (Provisioner::new(config, deps), token.clone());
        let run = tokio::spawn(async move {
            provisioner.run_until(cancelled, || is_ready.send(()).expect("somebody waits")).await
        });
        ready.await.expect("it gets ready");
        Self { store, token, run }
    }

    /// Ends it as a supervisor does.
    pub(crate) async fn stop(self) -> Option<RunError> {
        self.token.cancel();
        self.run.await.expect("no panic").err()
    }

    /// Ends it as a crash does.
    pub(crate) async fn crash(self) {
        self.run.abort();
        let _ = self.run.await;
    }
}

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&uid(number)).expect("a UUID")
}

/// An API server with the usual class.
pub(crate) fn api() -> FakeApi {
    let api = FakeApi::default();
    api.create(Kind::Class, class(json!({})));
    api
}

/// Waits until something holds, for an hour of virtual time at most.
pub(crate) async fn until(api: &FakeApi, holds: impl FnMut(&FakeApi) -> bool) {
    tokio::time::timeout(Duration::from_secs(3600), api.until(holds)).await.expect("it comes to hold");
}

/// Lets so much virtual time pass.
pub(crate) async fn pass(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}

pub(crate) fn phase(api: &FakeApi, kind: Kind, name: &str) -> Value {
    api.get(kind, name).map_or(Value::Null, |object| object["status"]["phase"].clone())
}

pub(crate) async fn bound(api: &FakeApi, name: &str) {
    until(api, |api| phase(api, Kind::Claim, name) == "Bound").await;
}

pub(crate) async fn told(api: &FakeApi, about: &str, reason: &str) {
    until(api, |api| api.events(about).iter().any(|(told, _)| told == reason)).await;
}

pub(crate) async fn no_volumes(api: &FakeApi) {
    until(api, |api| api.list(Kind::Volume).is_empty()).await;
}
