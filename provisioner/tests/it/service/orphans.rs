//! Volumes without a PersistentVolume: only empty ones are removed.

use std::fs;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{
    Bytes, Error as QuotaError, Inodes, ProjectId, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
    QuotaUsage,
};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};
use nodekeel_provisioner::testing::{MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, DirStore, ProvisionerConfig, VolumeId, VolumeMetrics, VolumeStore, VolumeStoreError, VolumeUsage,
};
use serde_json::json;

use super::harness::{
    ApiFixture as _, RunningProvisioner, TestNode, advance_time, id, test_api, test_deps, wait_bound,
    wait_no_volumes, wait_until,
};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// A quota that reports every directory as empty.
#[derive(Debug, Default)]
struct ZeroUsageQuota(MemQuota);

fn without_usage(status: QuotaStatus) -> QuotaStatus {
    QuotaStatus { usage: QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) }, ..status }
}

impl QuotaSetter for ZeroUsageQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, QuotaError> {
        self.0.set_limits(dir, change).map(without_usage)
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, QuotaError> {
        Ok(self.0.read_status(dir)?.map(without_usage))
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), QuotaError> {
        self.0.clear_limits(dir)
    }

    fn release_project(&self, project: ProjectId) -> Result<(), QuotaError> {
        self.0.release_project(project)
    }
}

#[tokio::test(start_paused = true)]
async fn a_retained_volume_with_data_stays_whatever_the_quota_counts() {
    let (api, base) = (test_api(), tempfile::tempdir().expect("a directory"));
    let dir = Dir::open(base.path()).expect("the base");
    let store = Arc::new(DirStore::new(dir, Arc::new(ZeroUsageQuota::default())).expect("a store"));
    let running =
        RunningProvisioner::start(Deps { store: store.clone(), ..test_deps(&api, &MemStore::default()) });
    api.patch_object(ObjectKind::Class, "local", json!({ "reclaimPolicy": "Retain" }));
    for number in [1, 2] {
        api.create_claim(number, json!({}));
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    let file = base.path().join("volumes").join(id(1).as_str()).join("data");
    fs::write(&file, "kept").expect("a file");
    for number in [1, 2] {
        api.delete_claim(number);
        api.delete_object(ObjectKind::Volume, id(number).as_str());
    }
    wait_no_volumes(&api).await;
    advance_time(3600).await;
    assert_eq!(fs::read_to_string(file).expect("still exists"), "kept");
    assert_eq!(store.list().await.expect("list"), [id(1)], "the empty volume was never used");
    running.stop().await;
}

/// A store that cannot read the usage of one of its volumes.
#[derive(Debug)]
struct UnreadableVolumeStore(MemStore, VolumeId);

#[async_trait]
impl VolumeStore for UnreadableVolumeStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        self.0.create(id, limits).await
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        self.0.resize(id, limits).await
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        if *id == self.1 {
            Err(VolumeStoreError::Usage { id: id.clone(), source: "it has no limits".into() })
        } else {
            self.0.usage(id).await
        }
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.0.remove(id).await
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        if *id == self.1 {
            Err(VolumeStoreError::Remove { id: id.clone(), source: "it has no limits".into() })
        } else {
            self.0.remove_empty(id).await
        }
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        self.0.list().await
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_volume_blocks_no_other() {
    let (api, store) = (test_api(), MemStore::default());
    for number in 1..=3 {
        store.create(&id(number), LIMITS).await.expect("create");
    }
    let unreadable = Arc::new(UnreadableVolumeStore(store.clone(), id(1)));
    let running = RunningProvisioner::start(Deps { store: unreadable, ..test_deps(&api, &store) });
    advance_time(3600).await;
    assert_eq!(store.list().await.expect("list"), [id(1)]);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_provisioned_by_another_node_leaves_no_empty_one_here() {
    let (api, store) = (test_api(), MemStore::default());
    let there = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let elsewhere = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [there] }] } });
    for number in [1, 2] {
        store.create(&id(number), LIMITS).await.expect("create");
        api.create_claim(number, json!({ "spec": { "volumeName": id(number).as_str() } }));
        api.create_object(
            ObjectKind::Volume,
            sample_volume(number, json!({ "spec": { "nodeAffinity": elsewhere } })),
        );
    }
    store.set_usage(&id(2), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    let _node = TestNode::start_with_store(&api, &store).await;
    advance_time(60).await;
    assert_eq!(store.list().await.expect("list"), [id(2)], "the volume with data stays");
    assert_eq!(api.list_objects(ObjectKind::Volume).len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_race_lost_to_another_node_emits_no_success_and_leaves_nothing() {
    let (api, store) = (test_api(), MemStore::default());
    let node = TestNode::start_with_store(&api, &store).await;
    api.pause_watches(ObjectKind::Volume);
    let there = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let elsewhere = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [there] }] } });
    // The claim is not bound yet in this node's cache.
    let spec = json!({ "spec": { "nodeAffinity": elsewhere, "claimRef": { "name": "not-yet" } } });
    api.create_object(ObjectKind::Volume, sample_volume(1, spec));
    api.create_claim(1, json!({}));
    wait_until(&api, |api| api.request_count(RequestVerb::Create, ObjectKind::Volume) > 0).await;
    advance_time(60).await;
    assert_eq!(api.event_counts("claim-1"), []);
    assert_eq!((node.store.create_count(&id(1)), node.store.remove_count(&id(1))), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn orphans_are_found_by_one_list_of_claims() {
    let (api, store) = (test_api(), MemStore::default());
    for number in 1..=50 {
        store.create(&id(number), LIMITS).await.expect("create");
        store.set_usage(&id(number), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    let _node = TestNode::start_with_store(&api, &store).await;
    advance_time(60).await;
    // One is the list of the watch.
    let lists = api.request_count(RequestVerb::List, ObjectKind::Claim);
    assert!(lists <= 3, "{lists} lists for 50 orphans");
    assert_eq!(store.list().await.expect("list").len(), 50);
}

/// Records the last counts.
#[derive(Debug, Default)]
struct LastCount(Mutex<(usize, usize)>);

impl VolumeMetrics for LastCount {
    fn record_provision(&self, _: &str, _: Duration, _: bool) {}

    fn record_delete(&self, _: &str, _: Duration, _: bool) {}

    fn set_orphans(&self, volumes: usize, objects: usize) {
        *self.0.lock().expect("not poisoned") = (volumes, objects);
    }
}

#[tokio::test(start_paused = true)]
async fn orphaned_volumes_and_objects_are_counted_until_they_are_gone() {
    let (api, store, meter) = (test_api(), MemStore::default(), Arc::<LastCount>::default());
    let counted = || *meter.0.lock().expect("not poisoned");
    // A volume with data whose claim has another volume; an object in use without a volume; and a complete
    // pair.
    for number in [1, 3] {
        store.create(&id(number), LIMITS).await.expect("create");
        store.set_usage(&id(number), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    for number in [2, 3] {
        api.create_claim(number, json!({ "spec": { "volumeName": id(number).as_str() } }));
        api.create_object(
            ObjectKind::Volume,
            sample_volume(number, json!({ "status": { "phase": "Bound" } })),
        );
    }
    let deps = Deps { metrics: meter.clone(), ..test_deps(&api, &store) };
    let _node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, Some(&store)).await;
    advance_time(60).await;
    assert_eq!(counted(), (1, 1));
    store.remove(&id(1)).await.expect("remove");
    api.delete_claim(2);
    api.delete_object(ObjectKind::Volume, id(2).as_str());
    advance_time(60).await;
    assert_eq!(counted(), (0, 0), "{:?}", api.list_objects(ObjectKind::Volume));
}

#[tokio::test(start_paused = true)]
async fn a_failed_sweep_is_repeated_also_while_others_follow() {
    let (api, store) = (test_api(), MemStore::default());
    // A PersistentVolume in use without a volume, which is looked for all the time.
    let in_use = json!({ "spec": { "volumeName": id(2).as_str() } });
    api.create_claim(2, in_use);
    let bound = json!({ "status": { "phase": "Bound" } });
    api.create_object(ObjectKind::Volume, sample_volume(2, bound));
    let _node = TestNode::start_with_store(&api, &store).await;
    advance_time(3600).await;
    let delete_object_of = |number: u32| {
        let spec = json!({ "persistentVolumeReclaimPolicy": "Retain" });
        let plain = json!({ "metadata": { "finalizers": null }, "spec": spec });
        api.create_object(ObjectKind::Volume, sample_volume(number, plain));
        api.delete_object(ObjectKind::Volume, id(number).as_str());
    };
    store.create(&id(1), LIMITS).await.expect("create");
    for _ in 0..3 {
        api.fail_next(RequestVerb::List, ObjectKind::Claim, RequestFault::Status(500));
    }
    delete_object_of(1);
    for number in 100..220 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        delete_object_of(number);
    }
    assert_eq!(store.list().await.expect("list"), [], "it is swept within a minute");
}

#[tokio::test(start_paused = true)]
async fn events_of_foreign_volumes_cause_no_requests() {
    let (api, store) = (test_api(), MemStore::default());
    // Also a volume of ours without an object, so that a query would find something.
    store.create(&id(1), LIMITS).await.expect("create");
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    let _node = TestNode::start_with_store(&api, &store).await;
    advance_time(60).await;
    let asked = [
        api.request_count(RequestVerb::Get, ObjectKind::Volume),
        api.request_count(RequestVerb::List, ObjectKind::Claim),
    ];
    let foreign =
        json!({ "spec": { "csi": { "driver": "other.example" }, "claimRef": { "uid": sample_uid(9) } } });
    api.create_object(ObjectKind::Volume, sample_volume(1, foreign));
    for round in 0..20 {
        api.patch_object(
            ObjectKind::Volume,
            id(1).as_str(),
            json!({ "metadata": { "labels": { "round": round.to_string() } } }),
        );
    }
    advance_time(60).await;
    assert_eq!(
        [
            api.request_count(RequestVerb::Get, ObjectKind::Volume),
            api.request_count(RequestVerb::List, ObjectKind::Claim)
        ],
        asked
    );
    assert_eq!(api.request_count(RequestVerb::Get, ObjectKind::Claim), 0);
}
