//! The store of another node's volumes.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use nodekeel_fsquota::QuotaLimits;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{sample_identity, sample_uid, sample_volume};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestVerb};
use nodekeel_provisioner::{
    Deps, DirStore, Provisioner, ProvisionerConfig, RunError, STORE_ATTRIBUTE, StoreIdentity, StoreRejection,
    StoreStatus, VolumeId, VolumeStore, VolumeStoreError, VolumeUsage,
};
use serde_json::json;

use super::dir_node::{DirNode, store_id, used_store};
use super::harness::{RunningProvisioner, advance_time, id, test_api, test_deps};

/// A provisioner of node-b with a store in this directory.
fn start_on_other_node(api: &FakeApi, base: &Path) -> (Provisioner, RunningProvisioner) {
    let dir = Dir::open(base).expect("the base");
    let store = Arc::new(DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"));
    let deps = Deps { store, ..test_deps(api, &MemStore::default()) };
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity("node-b")), deps);
    (provisioner.clone(), RunningProvisioner::spawn(provisioner, || {}))
}

#[tokio::test(start_paused = true)]
async fn a_disk_of_another_node_is_rejected_with_the_name_of_that_node() {
    let api = test_api();
    let base = used_store(&api).await;
    // A deleted volume, and an incomplete copy.
    let left = [format!(".trash/{}.0.0/volume/file", id(8)), format!(".new/{}/file", id(9))];
    let left = left.map(|name| base.path().join(name));
    for file in &left {
        fs::create_dir_all(file.parent().expect("a directory")).expect("created");
        fs::write(file, "data").expect("a file");
    }
    let error = start_on_other_node(&api, base.path()).1.wait_failed().await;
    assert!(error.to_string().contains("of node node-a"), "{error}");
    let RunError::StoreRejected(StoreRejection::Moved { volume, .. }) = error else { panic!("{error:?}") };
    assert_eq!(volume, id(1).as_str());
    let volumes = fs::read_dir(base.path().join("volumes")).expect("a directory").count();
    assert_eq!(volumes, 1, "nothing is swept");
    assert!(left.iter().all(|file| file.exists()), "nothing is erased");
    let dir = Dir::open(base.path()).expect("the base");
    assert!(!DirStore::is_in_use(&dir).expect("inspect"), "its disk can be unmounted");

    let node = DirNode::start(&api, base.path());
    let started = std::time::Instant::now();
    while left.iter().any(|file| file.exists()) {
        assert!(started.elapsed().as_secs() < 60, "its own node erases them");
        tokio::task::yield_now().await;
    }
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_empty_volume_of_another_node_in_the_served_store_is_kept() {
    let api = test_api();
    let base = used_store(&api).await;
    let volume = base.path().join("volumes").join(id(1).as_str());
    fs::remove_file(volume.join("file")).expect("empty");
    // One volume of the moved disk was adopted here, so that the disk is served.
    let here = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let affinity = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [here] }] } });
    let named = json!({ "volumeAttributes": { STORE_ATTRIBUTE: store_id(base.path()) } });
    let adopted =
        json!({ "nodeAffinity": affinity, "csi": named, "persistentVolumeReclaimPolicy": "Retain" });
    api.create_object(ObjectKind::Volume, sample_volume(2, json!({ "spec": adopted })));
    let (served, running) = start_on_other_node(&api, base.path());
    advance_time(3600).await;
    assert!(matches!(served.store_status(), StoreStatus::Served(_)), "{:?}", served.store_status());
    assert!(volume.exists(), "node-a has its PersistentVolume");
    running.stop().await;
}

/// A store of another node, whose file system is mounted and unmounted again and again.
#[derive(Debug)]
struct BusyStore {
    inner: MemStore,
    reopened: AtomicUsize,
}

#[async_trait]
impl VolumeStore for BusyStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        self.inner.create(id, limits).await
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        self.inner.resize(id, limits).await
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        self.inner.usage(id).await
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.inner.remove(id).await
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        self.inner.list().await
    }

    async fn identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        Ok(StoreIdentity::Present(sample_uid(9).parse().expect("a UUID")))
    }

    fn watch_changes(&self) -> Option<BoxFuture<'static, Result<(), VolumeStoreError>>> {
        let change = tokio::time::sleep(Duration::from_millis(10));
        Some(Box::pin(async {
            change.await;
            Ok(())
        }))
    }

    async fn reopen(&self) -> Result<(), VolumeStoreError> {
        self.reopened.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn mounts_that_change_all_the_time_cause_few_looks_for_a_store() {
    let api = test_api();
    let of_other = json!({ "spec": { "csi": { "volumeAttributes": { STORE_ATTRIBUTE: sample_uid(9) } } } });
    api.create_object(ObjectKind::Volume, sample_volume(1, of_other));
    let store = Arc::new(BusyStore { inner: MemStore::default(), reopened: AtomicUsize::new(0) });
    let deps = Deps { store: store.clone(), ..test_deps(&api, &MemStore::default()) };
    let config = ProvisionerConfig::new(sample_identity("node-b"));
    let running = RunningProvisioner::spawn(Provisioner::new(config, deps), || {});
    advance_time(60).await;
    let (looks, lists) =
        (store.reopened.load(Ordering::Relaxed), api.request_count(RequestVerb::List, ObjectKind::Volume));
    assert!((5..30).contains(&looks), "{looks} looks in a minute");
    // One is of the watch.
    assert!(lists <= 6, "{lists} lists in a minute");
    running.stop().await;
}
