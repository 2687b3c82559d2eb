//! The identity of a store: an absent store is not an empty one.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use nodekeel_fsquota::QuotaLimits;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{
    NODE, sample_claim, sample_identity, sample_uid, sample_volume,
};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreOptions, Provisioner, ProvisionerConfig, RunError, STORE_ATTRIBUTE,
    StoreIdentity, StoreRejection, StoreStatus, VolumeId, VolumeRecovery, VolumeStore, VolumeStoreError,
    VolumeUsage,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::harness::{
    advance_time, id, phase, test_api, test_deps, wait_bound, wait_for_event, wait_no_volumes, wait_until,
};

/// A provisioner with a store in a directory.
struct DirNode {
    base: PathBuf,
    store: Arc<DirStore>,
    token: CancellationToken,
    run: JoinHandle<Result<std::convert::Infallible, RunError>>,
}

impl DirNode {
    fn start(api: &FakeApi, base: &Path) -> Self {
        let dir = Dir::open(base).expect("the base");
        Self::start_store(api, base, DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"))
    }

    fn start_store(api: &FakeApi, base: &Path, store: DirStore) -> Self {
        let store = Arc::new(store);
        let deps = Deps { store: store.clone(), ..test_deps(api, &MemStore::default()) };
        let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps);
        let token = CancellationToken::new();
        let canceled = token.clone();
        let run = tokio::spawn(async move { provisioner.run_until(canceled, || {}).await });
        Self { base: base.to_owned(), store, token, run }
    }

    async fn stop(self) {
        let Self { base, store, token, run } = self;
        token.cancel();
        assert!(matches!(run.await.expect("no panic"), Err(RunError::Canceled)));
        drop(store);
        // A check of the store may still be in progress on another thread.
        while DirStore::is_in_use(&Dir::open(&base).expect("the base")).expect("inspect") {
            std::thread::yield_now();
        }
    }

    /// Waits until the run ends by itself.
    async fn wait_failed(self) -> RunError {
        match self.run.await.expect("no panic") {
            Err(error) => error,
        }
    }
}

/// A directory with a provisioned volume that holds a file.
async fn used_store(api: &FakeApi) -> TempDir {
    let base = tempfile::tempdir().expect("a directory");
    let node = DirNode::start(api, base.path());
    api.create_object(ObjectKind::Claim, sample_claim(1, json!({})));
    wait_bound(api, "claim-1").await;
    fs::write(base.path().join("volumes").join(id(1).as_str()).join("file"), "data").expect("a file");
    node.stop().await;
    base
}

fn store_id(base: &Path) -> String {
    fs::read_to_string(base.join("store-id")).expect("an identity").trim_end().to_owned()
}

fn named_store(api: &FakeApi) -> Value {
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a volume");
    volume["spec"]["csi"]["volumeAttributes"][STORE_ATTRIBUTE].clone()
}

#[tokio::test(start_paused = true)]
async fn a_new_store_gets_an_identity_that_its_volumes_name() {
    let api = test_api();
    let base = used_store(&api).await;
    let first = store_id(base.path());
    assert_eq!(named_store(&api), first);
    let node = DirNode::start(&api, base.path());
    advance_time(60).await;
    node.stop().await;
    assert_eq!(store_id(base.path()), first, "a restart keeps it");
}

#[tokio::test(start_paused = true)]
async fn a_directory_whose_disk_is_not_mounted_is_rejected_and_keeps_every_object() {
    let api = test_api();
    let disk = used_store(&api).await;
    let below = tempfile::tempdir().expect("the directory below the mount point");
    // The deletion that would lose the data, and a claim that would be created on the wrong disk.
    api.delete_object(ObjectKind::Claim, "claim-1");
    api.create_object(ObjectKind::Claim, sample_claim(2, json!({})));
    let error = DirNode::start(&api, below.path()).wait_failed().await;
    let RunError::StoreRejected(StoreRejection::Absent { volume, store }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((volume, store.to_string()), (id(1), store_id(disk.path())));
    assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Released");
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-2"), "Pending");
    let names = fs::read_dir(below.path()).expect("a directory").count();
    assert_eq!(names, 0, "nothing is left below the mount point");

    // Mounted again, both are done.
    let node = DirNode::start(&api, disk.path());
    wait_bound(&api, "claim-2").await;
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    assert_eq!(node.store.list().await.expect("list"), [id(2)]);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_lost_is_no_longer_served_after_the_next_call() {
    for lose in [
        |base: &Path| fs::remove_file(base.join("store-id")),
        |base: &Path| fs::rename(base.join("volumes"), base.join("moved")),
        |base: &Path| fs::write(base.join("store-id"), sample_uid(9)),
        |base: &Path| {
            fs::rename(base, base.with_extension("moved"))?;
            fs::create_dir(base)
        },
    ] {
        let api = test_api();
        let base = used_store(&api).await;
        let node = DirNode::start(&api, base.path());
        advance_time(60).await;
        lose(base.path()).expect("lost");
        let lost = Instant::now();
        // Deleted while the store is lost: its missing directory is no proof that it was removed.
        api.delete_object(ObjectKind::Claim, "claim-1");
        let error = node.wait_failed().await;
        assert!(matches!(error, RunError::StoreLost(_)), "{error:?}");
        assert!(lost.elapsed().as_secs() <= 5, "{:?}", lost.elapsed());
        assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Released");
        let _ = fs::remove_dir_all(base.path().with_extension("moved"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_delete_killed_before_the_finalizer_ends_in_the_store_that_its_object_names() {
    let api = test_api();
    let base = used_store(&api).await;
    fs::remove_dir_all(base.path().join("volumes").join(id(1).as_str())).expect("removed before the kill");
    api.delete_object(ObjectKind::Claim, "claim-1");
    let node = DirNode::start(&api, base.path());
    wait_no_volumes(&api).await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_directory_of_another_store_does_not_count_as_removed() {
    let api = test_api();
    let base = used_store(&api).await;
    let elsewhere = json!({ "spec": { "csi": { "volumeAttributes": { STORE_ATTRIBUTE: sample_uid(9) } } } });
    api.create_object(ObjectKind::Volume, sample_volume(2, elsewhere));
    let node = DirNode::start(&api, base.path());
    wait_for_event(&api, id(2).as_str(), "VolumeFailedDelete").await;
    let notes = api.event_notes(id(2).as_str());
    assert!(notes[0].contains("mount its disk; nothing was deleted"), "{notes:?}");
    advance_time(3600).await;
    assert_eq!(phase(&api, ObjectKind::Volume, id(2).as_str()), "Released");
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_of_a_release_without_identities_is_adopted_by_its_volumes() {
    let api = test_api();
    let base = used_store(&api).await;
    // As release 0.1.0 left both.
    fs::remove_file(base.path().join("store-id")).expect("an identity");
    let old = json!({ "spec": { "csi": { "volumeAttributes": null } } });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), old);
    let empty = tempfile::tempdir().expect("a directory");
    let error = DirNode::start(&api, empty.path()).wait_failed().await;
    assert!(matches!(error, RunError::StoreRejected(StoreRejection::WithoutVolumes { .. })), "{error:?}");
    let node = DirNode::start(&api, base.path());
    api.delete_object(ObjectKind::Claim, "claim-1");
    wait_no_volumes(&api).await;
    node.stop().await;
    assert_eq!(store_id(base.path()).len(), 36);
}

impl DirNode {
    /// A provisioner whose store opens its directory again after it was lost.
    fn start_reopening(api: &FakeApi, base: &Path) -> Self {
        let path = base.to_owned();
        let mut options = DirStoreOptions::default();
        options.opener = Some(Arc::new(move || Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _))));
        let dir = Dir::open(base).expect("the base");
        let store = DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store");
        Self::start_store(api, base, store)
    }
}

/// Moves a directory away, and puts an empty one in its place, as an unmounted disk leaves it.
fn unmount(base: &Path) {
    fs::rename(base, base.with_extension("moved")).expect("moved away");
    fs::create_dir(base).expect("an empty directory");
}

/// Puts the directory back.
fn mount(base: &Path) {
    fs::remove_dir_all(base).expect("removed");
    fs::rename(base.with_extension("moved"), base).expect("moved back");
}

/// How often the condition of an object was reported: abnormal, and normal again.
fn condition_counts(api: &FakeApi, about: &str) -> [usize; 2] {
    let all = api.event_counts(about);
    ["VolumeConditionAbnormal", "VolumeConditionNormal"]
        .map(|reason| all.iter().filter(|(found, _)| found == reason).count())
}

#[tokio::test(start_paused = true)]
async fn a_lost_store_is_reported_on_volume_and_claim_and_served_again_when_it_is_back() {
    let api = test_api();
    let base = used_store(&api).await;
    let node = DirNode::start_reopening(&api, base.path());
    api.create_object(ObjectKind::Claim, sample_claim(2, json!({})));
    wait_bound(&api, "claim-2").await;
    unmount(base.path());
    // Each call finds out that the store is lost.
    api.create_object(ObjectKind::Claim, sample_claim(3, json!({})));
    for about in [id(1).as_str(), id(2).as_str(), "claim-1", "claim-2"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    // What happens meanwhile waits: nothing is deleted, and nothing is created on the disk below.
    api.delete_object(ObjectKind::Claim, "claim-1");
    advance_time(3600).await;
    assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Released");
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-3"), "Pending");
    assert!(!base.path().join("store-id").exists());
    let note = api.event_notes(id(2).as_str());
    assert!(note.iter().any(|note| note.contains("mount")), "{note:?}");
    assert_eq!(condition_counts(&api, id(2).as_str()), [1, 0], "once, whatever is found below");

    mount(base.path());
    wait_bound(&api, "claim-3").await;
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    for about in [id(2).as_str(), "claim-2"] {
        wait_for_event(&api, about, "VolumeConditionNormal").await;
    }
    advance_time(3600).await;
    assert_eq!(condition_counts(&api, id(2).as_str()), [1, 1]);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_event_that_the_api_server_did_not_accept_is_written_again() {
    let api = test_api();
    let base = used_store(&api).await;
    unmount(base.path());
    for _ in 0..4 {
        api.fail_next(RequestVerb::Create, ObjectKind::Event, RequestFault::Status(500));
    }
    let node = DirNode::start_reopening(&api, base.path());
    for about in [id(1).as_str(), "claim-1"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    mount(base.path());
    wait_for_event(&api, "claim-1", "VolumeConditionNormal").await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_disk_is_served_once_the_old_one_is_declared_lost() {
    let api = test_api();
    let base = used_store(&api).await;
    let old = store_id(base.path());
    unmount(base.path());
    let node = DirNode::start_reopening(&api, base.path());
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    let recovery = VolumeRecovery::new(api.client(), sample_identity(NODE), None);
    let unknown =
        recovery.declare_lost(&sample_uid(9).parse().expect("a UUID")).await.expect("no volume names it");
    assert_eq!(unknown, Vec::<String>::new());
    for _ in 0..2 {
        let lost = recovery.declare_lost(&old.parse().expect("a UUID")).await.expect("declared");
        assert_eq!(lost, [id(1).to_string()], "also if it is repeated");
    }
    // The volume is not deleted before its claim is, and then with nothing on the new disk.
    api.create_object(ObjectKind::Claim, sample_claim(2, json!({})));
    wait_bound(&api, "claim-2").await;
    assert_ne!(store_id(base.path()), old);
    assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Bound");
    assert_eq!(condition_counts(&api, "claim-1"), [2, 0], "its cause has changed");
    api.delete_object(ObjectKind::Claim, "claim-1");
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    assert_eq!(node.store.list().await.expect("list"), [id(2)]);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_declared_lost_and_is_here_is_not_lost() {
    let api = test_api();
    let base = used_store(&api).await;
    let store = store_id(base.path()).parse().expect("a UUID");
    let recovery = VolumeRecovery::new(api.client(), sample_identity(NODE), None);
    recovery.declare_lost(&store).await.expect("declared");
    let is_marked = |api: &FakeApi| {
        let annotation = sample_identity(NODE).driver.lost_annotation();
        let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a volume");
        !volume["metadata"]["annotations"][annotation].is_null()
    };
    assert!(is_marked(&api));
    api.fail_next(RequestVerb::Patch, ObjectKind::Volume, RequestFault::Status(500));
    let node = DirNode::start(&api, base.path());
    wait_until(&api, |api| !is_marked(api)).await;
    assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Bound");
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_backup_that_lacks_a_volume_is_not_reported_as_complete() {
    let api = test_api();
    let base = used_store(&api).await;
    let node = DirNode::start_reopening(&api, base.path());
    api.create_object(ObjectKind::Claim, sample_claim(2, json!({})));
    wait_bound(&api, "claim-2").await;
    advance_time(60).await;
    unmount(base.path());
    api.create_object(ObjectKind::Claim, sample_claim(3, json!({})));
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    let volume = base.path().with_extension("moved").join("volumes").join(id(1).as_str());
    fs::remove_dir_all(volume).expect("a backup lacks it");
    // The sweeper has something else to do first.
    let free = json!({ "metadata": { "finalizers": null } });
    api.patch_object(ObjectKind::Volume, id(2).as_str(), free);
    api.delete_object(ObjectKind::Volume, id(2).as_str());
    advance_time(1).await;
    mount(base.path());
    wait_until(&api, |api| condition_counts(api, "claim-1")[0] == 2).await;
    advance_time(3600).await;
    assert_eq!(condition_counts(&api, "claim-1"), [2, 0]);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_a_backup_lacks_is_reported_and_never_deleted() {
    let api = test_api();
    let base = used_store(&api).await;
    let (volume, kept) = (base.path().join("volumes").join(id(1).as_str()), base.path().join("kept"));
    fs::rename(&volume, &kept).expect("missing");
    let node = DirNode::start_reopening(&api, base.path());
    for about in [id(1).as_str(), "claim-1"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    let note = api.event_notes("claim-1");
    assert!(note.iter().any(|note| note.contains("restore it from a backup")), "{note:?}");
    advance_time(3600).await;
    assert_eq!(phase(&api, ObjectKind::Volume, id(1).as_str()), "Bound");
    fs::rename(&kept, &volume).expect("restored");
    for about in [id(1).as_str(), "claim-1"] {
        wait_for_event(&api, about, "VolumeConditionNormal").await;
    }
    assert_eq!(condition_counts(&api, "claim-1"), [1, 1]);
    node.stop().await;
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
    let dir = Dir::open(base.path()).expect("the base");
    let store = Arc::new(DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"));
    let deps = Deps { store, ..test_deps(&api, &MemStore::default()) };
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity("node-b")), deps);
    let Err(error) = provisioner.run_until(CancellationToken::new(), || {}).await;
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
    let dir = Dir::open(base.path()).expect("the base");
    let store = Arc::new(DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store"));
    let deps = Deps { store, ..test_deps(&api, &MemStore::default()) };
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity("node-b")), deps);
    let token = CancellationToken::new();
    let canceled = token.clone();
    let served = provisioner.clone();
    let run = tokio::spawn(async move { provisioner.run_until(canceled, || {}).await });
    advance_time(3600).await;
    assert!(matches!(served.store_status(), StoreStatus::Served(_)), "{:?}", served.store_status());
    assert!(volume.exists(), "node-a has its PersistentVolume");
    token.cancel();
    run.await.expect("no panic").expect_err("canceled");
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
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity("node-b")), deps);
    let token = CancellationToken::new();
    let canceled = token.clone();
    let run = tokio::spawn(async move { provisioner.run_until(canceled, || {}).await });
    advance_time(60).await;
    let (looks, lists) =
        (store.reopened.load(Ordering::Relaxed), api.request_count(RequestVerb::List, ObjectKind::Volume));
    assert!((5..30).contains(&looks), "{looks} looks in a minute");
    // One is of the watch.
    assert!(lists <= 6, "{lists} lists in a minute");
    token.cancel();
    run.await.expect("no panic").expect_err("canceled");
}
