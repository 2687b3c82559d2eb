//! Volumes without an object: only what is empty by every sign goes.

use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{
    Bytes, Change, Error as QuotaError, Inodes, Limits, ProjectId, QuotaSetter, Status, Usage,
};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, claim, identity, uid, volume};
use nodekeel_provisioner::testing::{Kind, MemStore, Verb};
use nodekeel_provisioner::{
    Config, Deps, DirStore, Meter, Provisioner, StoreError, VolumeId, VolumeStore, VolumeUsage,
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::harness::{Node, api, bound, deps, id, no_volumes, pass, until};

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// A quota that can't count: whatever a directory holds, it says that it is empty.
#[derive(Debug, Default)]
struct Blind(MemQuota);

fn blind(status: Status) -> Status {
    Status { usage: Usage { bytes: Bytes(0), inodes: Inodes(1) }, ..status }
}

impl QuotaSetter for Blind {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, QuotaError> {
        self.0.set(dir, change).map(blind)
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, QuotaError> {
        Ok(self.0.status(dir)?.map(blind))
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), QuotaError> {
        self.0.clear(dir)
    }

    fn release(&self, project: ProjectId) -> Result<(), QuotaError> {
        self.0.release(project)
    }
}

/// Starts a node over any store.
fn start(deps: Deps) -> CancellationToken {
    let token = CancellationToken::new();
    let (provisioner, cancelled) = (Provisioner::new(Config::new(identity(NODE)), deps), token.clone());
    tokio::spawn(async move { provisioner.run_until(cancelled, || {}).await });
    token
}

#[tokio::test(start_paused = true)]
async fn what_a_kept_volume_holds_stays_whatever_the_quota_counts() {
    let (api, base) = (api(), tempfile::tempdir().expect("a directory"));
    let dir = Dir::open(base.path()).expect("the base");
    let store = Arc::new(DirStore::new(dir, Arc::new(Blind::default())).expect("a store"));
    let token = start(Deps { store: store.clone(), ..deps(&api, &MemStore::default()) });
    api.patch(Kind::Class, "local", json!({ "reclaimPolicy": "Retain" }));
    for number in [1, 2] {
        api.create(Kind::Claim, claim(number, json!({})));
        bound(&api, &format!("claim-{number}")).await;
    }
    let file = base.path().join("volumes").join(id(1).as_str()).join("data");
    fs::write(&file, "kept").expect("a file");
    for number in [1, 2] {
        api.delete(Kind::Claim, &format!("claim-{number}"));
        api.delete(Kind::Volume, id(number).as_str());
    }
    no_volumes(&api).await;
    pass(3600).await;
    assert_eq!(fs::read_to_string(file).expect("it is still there"), "kept");
    assert_eq!(store.list().await.expect("list"), [id(1)], "the empty one was never used");
    token.cancel();
}

/// A store that can't tell the usage of one of its volumes.
#[derive(Debug)]
struct Unreadable(MemStore, VolumeId);

#[async_trait]
impl VolumeStore for Unreadable {
    async fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        self.0.create(id, limits).await
    }

    async fn resize(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        self.0.resize(id, limits).await
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, StoreError> {
        match *id == self.1 {
            true => Err(StoreError::Usage { id: id.clone(), source: "it has no limits".into() }),
            false => self.0.usage(id).await,
        }
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), StoreError> {
        self.0.remove(id).await
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, StoreError> {
        match *id == self.1 {
            true => Err(StoreError::Remove { id: id.clone(), source: "it has no limits".into() }),
            false => self.0.remove_empty(id).await,
        }
    }

    async fn list(&self) -> Result<Vec<VolumeId>, StoreError> {
        self.0.list().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_cannot_be_looked_at_holds_up_no_other() {
    let (api, store) = (api(), MemStore::default());
    for number in 1..=3 {
        store.create(&id(number), LIMITS).await.expect("create");
    }
    let unreadable = Arc::new(Unreadable(store.clone(), id(1)));
    let token = start(Deps { store: unreadable, ..deps(&api, &store) });
    pass(3600).await;
    assert_eq!(store.list().await.expect("list"), [id(1)]);
    token.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_another_node_has_made_leaves_no_empty_one_here() {
    let (api, store) = (api(), MemStore::default());
    let there = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let elsewhere = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [there] }] } });
    for number in [1, 2] {
        store.create(&id(number), LIMITS).await.expect("create");
        api.create(Kind::Claim, claim(number, json!({ "spec": { "volumeName": id(number).as_str() } })));
        api.create(Kind::Volume, volume(number, json!({ "spec": { "nodeAffinity": elsewhere } })));
    }
    store.fill(&id(2), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    let _node = Node::over(&api, &store).await;
    pass(60).await;
    assert_eq!(store.list().await.expect("list"), [id(2)], "and what holds data stays");
    assert_eq!(api.list(Kind::Volume).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_race_lost_to_another_node_is_no_success_and_leaves_nothing() {
    let (api, store) = (api(), MemStore::default());
    let node = Node::over(&api, &store).await;
    api.hold(Kind::Volume);
    let there = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let elsewhere = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [there] }] } });
    // The claim isn't bound yet, as far as this node can see.
    let spec = json!({ "spec": { "nodeAffinity": elsewhere, "claimRef": { "name": "not-yet" } } });
    api.create(Kind::Volume, volume(1, spec));
    api.create(Kind::Claim, claim(1, json!({})));
    until(&api, |api| api.requests(Verb::Create, Kind::Volume) > 0).await;
    pass(60).await;
    assert_eq!(api.events("claim-1"), []);
    assert_eq!((node.store.births(&id(1)), node.store.deaths(&id(1))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn orphans_are_looked_for_by_one_list_of_claims() {
    let (api, store) = (api(), MemStore::default());
    for number in 1..=50 {
        store.create(&id(number), LIMITS).await.expect("create");
        store.fill(&id(number), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    let _node = Node::over(&api, &store).await;
    pass(60).await;
    // One is the watch's own.
    let lists = api.requests(Verb::List, Kind::Claim);
    assert!(lists <= 3, "{lists} lists for 50 orphans");
    assert_eq!(store.list().await.expect("list").len(), 50);
}

/// Remembers what was counted last.
#[derive(Debug, Default)]
struct LastCount(Mutex<(usize, usize)>);

impl Meter for LastCount {
    fn provisioned(&self, _: &str, _: Duration, _: bool) {}

    fn deleted(&self, _: &str, _: Duration, _: bool) {}

    fn orphans(&self, volumes: usize, objects: usize) {
        *self.0.lock().expect("nobody panics with it") = (volumes, objects);
    }
}

#[tokio::test(start_paused = true)]
async fn what_lacks_the_other_is_counted_until_it_is_gone_too() {
    let (api, store, meter) = (api(), MemStore::default(), Arc::<LastCount>::default());
    let counted = || *meter.0.lock().expect("nobody panics with it");
    // One volume with data and a claim that has its volume elsewhere; one object in use, without a volume; and one of each.
    for number in [1, 3] {
        store.create(&id(number), LIMITS).await.expect("create");
        store.fill(&id(number), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    for number in [2, 3] {
        api.create(Kind::Claim, claim(number, json!({ "spec": { "volumeName": id(number).as_str() } })));
        api.create(Kind::Volume, volume(number, json!({ "status": { "phase": "Bound" } })));
    }
    let deps = Deps { meter: meter.clone(), ..deps(&api, &store) };
    let _node = Node::with(Config::new(identity(NODE)), deps, Some(&store)).await;
    pass(60).await;
    assert_eq!(counted(), (1, 1));
    store.remove(&id(1)).await.expect("remove");
    api.delete(Kind::Claim, "claim-2");
    api.delete(Kind::Volume, id(2).as_str());
    pass(60).await;
    assert_eq!(counted(), (0, 0), "{:?}", api.list(Kind::Volume));
}

#[tokio::test(start_paused = true)]
async fn what_becomes_of_other_nodes_volumes_asks_nothing_of_the_store() {
    let (api, store) = (api(), MemStore::default());
    // Beside it, a volume of ours without an object, so that a question would have an answer.
    store.create(&id(1), LIMITS).await.expect("create");
    store.fill(&id(1), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    let _node = Node::over(&api, &store).await;
    pass(60).await;
    let asked = [api.requests(Verb::Get, Kind::Volume), api.requests(Verb::List, Kind::Claim)];
    let foreign = json!({ "spec": { "csi": { "driver": "other.example" }, "claimRef": { "uid": uid(9) } } });
    api.create(Kind::Volume, volume(1, foreign));
    for round in 0..20 {
        api.patch(
            Kind::Volume,
            id(1).as_str(),
            json!({ "metadata": { "labels": { "round": round.to_string() } } }),
        );
    }
    pass(60).await;
    assert_eq!([api.requests(Verb::Get, Kind::Volume), api.requests(Verb::List, Kind::Claim)], asked);
    assert_eq!(api.requests(Verb::Get, Kind::Claim), 0);
}
