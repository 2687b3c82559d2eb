//! A node with several stores: each class has its volumes in the one that it names, and what befalls one of them is nothing to
//! the others.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{
    NODE, sample_class, sample_identity, sample_snapshot_content, sample_uid,
};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestVerb};
use nodekeel_provisioner::{
    Ability, DirStore, DirStoreOptions, NamedStore, Provisioner, ProvisionerConfig, SELECTED_NODE, StoreName,
    StoreStatus, VolumeKind, VolumeStore as _, adopted_snapshot,
};
use rustix::io::Errno;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::ability::select;
use super::dir_node::{deps_of, mount, unmount};
use super::harness::{
    ApiFixture as _, RunningProvisioner, advance_time, id, phase, test_api, test_deps, wait_bound,
    wait_for_event, wait_until,
};
use crate::fixture::snapshot_id;

const MIB: u64 = 1 << 20;

fn fast() -> StoreName {
    StoreName::try_new("fast").expect("a name")
}

/// An API server with the sample class, and the class `fast` of the store of this name.
fn api_with_classes() -> FakeApi {
    let api = test_api();
    let class = json!({ "metadata": { "name": "fast" }, "parameters": { "store": "fast" } });
    api.create_object(ObjectKind::Class, sample_class(class));
    api
}

fn create_fast_claim(api: &FakeApi, number: u32) {
    api.create_claim(number, json!({ "spec": { "storageClassName": "fast" } }));
}

/// A provisioner with these two stores in memory.
fn provisioner(api: &FakeApi, store: &MemStore, fast_store: Option<&MemStore>) -> Provisioner {
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), test_deps(api, store));
    let Some(store) = fast_store else { return provisioner };
    let store = Arc::new(store.clone());
    let added =
        NamedStore { store: store.clone(), snapshots: Some(store), metrics: Arc::new(()), guard: None };
    provisioner.with_store(fast(), added)
}

/// The published capacity of the sample class and of the class `fast`.
fn published(api: &FakeApi) -> [Option<String>; 2] {
    let objects = api.list_objects(ObjectKind::StorageCapacity);
    ["local", "fast"].map(|class| {
        let object = objects.iter().find(|object| object["storageClassName"] == class)?;
        object["capacity"].as_str().map(str::to_owned)
    })
}

fn amounts(local: &str, fast: &str) -> [Option<String>; 2] {
    [local, fast].map(|amount| Some(amount.to_owned()))
}

fn is_deselected(api: &FakeApi, claim: &str) -> bool {
    let claim = api.get_object(ObjectKind::Claim, claim).expect("a claim");
    claim["metadata"]["annotations"][SELECTED_NODE].is_null()
}

fn attributes(api: &FakeApi, number: u32) -> Value {
    let volume = api.get_object(ObjectKind::Volume, id(number).as_str()).expect("a PersistentVolume");
    volume["spec"]["csi"]["volumeAttributes"].clone()
}

#[tokio::test(start_paused = true)]
async fn each_class_has_its_volumes_and_its_capacity_in_the_store_that_it_names() {
    let api = api_with_classes();
    let stores = [900, 300].map(|size| MemStore::with_capacity(Bytes(size * MIB)));
    let running = RunningProvisioner::spawn(provisioner(&api, &stores[0], Some(&stores[1])), || {});
    api.create_claim(1, json!({}));
    create_fast_claim(&api, 2);
    wait_bound(&api, "claim-1").await;
    wait_bound(&api, "claim-2").await;
    assert_eq!(stores[0].list().await.expect("listed"), [id(1)]);
    assert_eq!(stores[1].list().await.expect("listed"), [id(2)]);
    assert_eq!((attributes(&api, 1), &attributes(&api, 2)["storeName"]), (Value::Null, &json!("fast")));
    wait_until(&api, |api| published(api) == amounts("850Mi", "250Mi")).await;

    // A larger request, and a deletion, reach the store of the volume.
    let patch = json!({ "spec": { "resources": { "requests": { "storage": "60Mi" } } } });
    api.patch_object(ObjectKind::Claim, "claim-2", patch);
    wait_until(&api, |api| published(api) == amounts("850Mi", "240Mi")).await;
    api.delete_claim(2);
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(2).as_str()).is_none()).await;
    assert!(stores[1].list().await.expect("listed").is_empty());
    wait_until(&api, |api| published(api) == amounts("850Mi", "300Mi")).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_or_hangs_gives_its_claims_up_and_takes_none_of_the_other() {
    let faults: [fn(&MemStore, bool); 2] = [
        |store, on| {
            let fault = || io::Error::from(Errno::ROFS).into();
            store.set_fault(on.then_some(fault));
        },
        MemStore::set_hung,
    ];
    for set_fault in faults {
        // Each of the two stores once.
        for broken in [1, 0] {
            let api = api_with_classes();
            let stores = [900, 300].map(|size| MemStore::with_capacity(Bytes(size * MIB)));
            let provisioner = provisioner(&api, &stores[0], Some(&stores[1]));
            let running = RunningProvisioner::spawn(provisioner.clone(), || {});
            wait_until(&api, |api| published(api) == amounts("900Mi", "300Mi")).await;
            set_fault(&stores[broken], true);
            // The next probe finds it, without a claim.
            let none = |at: usize, amount: &str| if at == broken { "0" } else { amount }.to_owned();
            let wanted = [Some(none(0, "900Mi")), Some(none(1, "300Mi"))];
            wait_until(&api, |api| published(api) == wanted).await;
            let health = provisioner.stores();
            assert_eq!([None, Some(fast())], [health[0].name.clone(), health[1].name.clone()]);
            for (at, store) in health.iter().enumerate() {
                assert_eq!(store.ability.inability().is_some(), at == broken, "{store:?}");
                assert!(matches!(store.status, StoreStatus::Served(_)), "{store:?}");
            }
            api.create_claim(1, json!({}));
            create_fast_claim(&api, 2);
            let [given_up, served] =
                if broken == 0 { ["claim-1", "claim-2"] } else { ["claim-2", "claim-1"] };
            wait_bound(&api, served).await;
            wait_until(&api, |api| is_deselected(api, given_up)).await;
            wait_for_event(&api, given_up, "ProvisioningFailed").await;

            set_fault(&stores[broken], false);
            wait_until(&api, |api| published(api).iter().flatten().all(|amount| amount != "0")).await;
            select(&api, given_up);
            wait_bound(&api, given_up).await;
            running.stop().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_without_the_store_of_a_class_offers_nothing_and_gives_the_claim_up() {
    let api = api_with_classes();
    let store = MemStore::with_capacity(Bytes(900 * MIB));
    let running = RunningProvisioner::spawn(provisioner(&api, &store, None), || {});
    wait_until(&api, |api| published(api)[0].is_some()).await;
    assert_eq!(published(&api), [Some("900Mi".to_owned()), None]);
    create_fast_claim(&api, 1);
    wait_until(&api, |api| is_deselected(api, "claim-1")).await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("store fast, which the node does not have")), "{notes:?}");
    // A scheduler that selects it again and again does not make it busy.
    let patches = api.request_count(RequestVerb::Patch, ObjectKind::Claim);
    for _ in 0..60 {
        if is_deselected(&api, "claim-1") {
            select(&api, "claim-1");
        }
        advance_time(1).await;
    }
    let patches = api.request_count(RequestVerb::Patch, ObjectKind::Claim) - patches;
    assert!(patches <= 8, "{patches}");
    // The other class is served.
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    running.stop().await;

    // Once the node has the store, the claim is served, and what was published follows.
    let fast_store = MemStore::with_capacity(Bytes(300 * MIB));
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    select(&api, "claim-1");
    wait_bound(&api, "claim-1").await;
    wait_until(&api, |api| published(api) == amounts("850Mi", "250Mi")).await;
    running.stop().await;

    // And again without: its volume is neither deleted nor forgotten, and its class is offered nothing.
    let running = RunningProvisioner::spawn(provisioner(&api, &store, None), || {});
    wait_for_event(&api, id(1).as_str(), "VolumeConditionAbnormal").await;
    api.delete_claim(1);
    wait_until(&api, |api| published(api)[1].is_none()).await;
    advance_time(3600).await;
    assert_eq!(api.volume_phase(1), "Released");
    running.stop().await;
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_taken_and_removed_in_the_store_of_its_volume() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    create_fast_claim(&api, 1);
    wait_bound(&api, "claim-1").await;
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(1, json!({})));
    let name = sample_snapshot_content(1, json!({})).metadata.name.expect("a name");
    let is_ready = |api: &FakeApi| {
        let content = api.get_object(ObjectKind::SnapshotContent, &name);
        content.is_some_and(|content| content["status"]["readyToUse"] == true)
    };
    wait_until(&api, is_ready).await;
    assert_eq!(snapshots(&fast_store).await, [snapshot_id(1).to_string()]);
    assert!(snapshots(&store).await.is_empty());
    let annotation = json!({ "metadata": { "annotations": { "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes" } } });
    api.patch_object(ObjectKind::SnapshotContent, &name, annotation);
    api.delete_object(ObjectKind::SnapshotContent, &name);
    wait_until(&api, |api| api.get_object(ObjectKind::SnapshotContent, &name).is_none()).await;
    assert!(snapshots(&fast_store).await.is_empty());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_copy_of_a_snapshot_in_another_store_is_an_orphan_there_and_stays_when_the_snapshot_is_deleted() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let counts = [Arc::new(SnapshotOrphans::default()), Arc::new(SnapshotOrphans::default())];
    let start = || {
        let deps = nodekeel_provisioner::Deps { metrics: counts[0].clone(), ..test_deps(&api, &store) };
        let fast_arc = Arc::new(fast_store.clone());
        let (metrics, snapshots) = (counts[1].clone(), Some(fast_arc.clone() as _));
        let added = NamedStore { store: fast_arc, snapshots, metrics, guard: None };
        let config = ProvisionerConfig::new(sample_identity(NODE));
        RunningProvisioner::spawn(Provisioner::new(config, deps).with_store(fast(), added), || {})
    };
    let running = start();
    api.create_claim(1, json!({}));
    create_fast_claim(&api, 2);
    for number in [1, 2] {
        wait_bound(&api, &format!("claim-{number}")).await;
        api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(number, json!({})));
        wait_until(&api, |api| is_content_ready(api, number)).await;
    }
    running.stop().await;
    // As `cp -a` makes them: each store has the other one's, too.
    {
        use nodekeel_provisioner::SnapshotStore as _;
        for (store, number) in [(&fast_store, 1), (&store, 2)] {
            let limits = QuotaLimits { bytes: Some(Bytes(MIB)), inodes: None };
            store.create(&id(number), limits).await.expect("created");
            store.create_snapshot(&snapshot_id(number), &id(number)).await.expect("copied");
            store.remove(&id(number)).await.expect("removed");
        }
    }
    let running = start();
    advance_time(60).await;
    assert_eq!(counts.each_ref().map(|count| count.get()), [1, 1]);
    let deleted = json!({ "metadata": { "annotations": { "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes" } } });
    for number in [1, 2] {
        api.patch_object(ObjectKind::SnapshotContent, &content_name(number), deleted.clone());
        api.delete_object(ObjectKind::SnapshotContent, &content_name(number));
        let is_gone =
            |api: &FakeApi| api.get_object(ObjectKind::SnapshotContent, &content_name(number)).is_none();
        wait_until(&api, is_gone).await;
    }
    assert_eq!(snapshots(&store).await, [snapshot_id(2).to_string()], "the copy stays");
    assert_eq!(snapshots(&fast_store).await, [snapshot_id(1).to_string()], "the copy stays");
    running.stop().await;
}

/// The number of orphaned snapshots that a store has reported last.
#[derive(Debug, Default)]
struct SnapshotOrphans(std::sync::atomic::AtomicUsize);

impl SnapshotOrphans {
    fn get(&self) -> usize {
        self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

impl nodekeel_provisioner::VolumeMetrics for SnapshotOrphans {
    fn record_provision(&self, _: &str, _: Duration, _: bool) {}

    fn record_delete(&self, _: &str, _: Duration, _: bool) {}

    fn set_orphaned_snapshots(&self, count: usize) {
        self.0.store(count, std::sync::atomic::Ordering::Relaxed);
    }
}

async fn snapshots(store: &MemStore) -> Vec<String> {
    use nodekeel_provisioner::SnapshotStore as _;
    store.list_snapshots().await.expect("listed").iter().map(ToString::to_string).collect()
}

/// The directories of two stores.
fn two_disks() -> (TempDir, [PathBuf; 2]) {
    let scratch = tempfile::tempdir().expect("a directory");
    let bases = ["local", "fast"].map(|name| scratch.path().join(name));
    for base in &bases {
        fs::create_dir(base).expect("a directory");
    }
    (scratch, bases)
}

/// A store that opens this directory again after it was lost, closed at first if it is absent.
fn open_store(base: &Path) -> Arc<DirStore> {
    let path = base.to_owned();
    let mut options = DirStoreOptions::default();
    options.cloner = Arc::new(nodekeel_localstorage::testing::DataCloner);
    options.opener = Some(Arc::new(move || Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _))));
    Arc::new(match Dir::open(base) {
        Ok(dir) => DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store"),
        Err(_) => DirStore::closed(base, options),
    })
}

/// A provisioner with its stores in these directories.
fn start_in(api: &FakeApi, bases: [&Path; 2]) -> (Provisioner, RunningProvisioner) {
    start_stores(api, bases.map(open_store))
}

fn start_stores(api: &FakeApi, [store, fast_store]: [Arc<DirStore>; 2]) -> (Provisioner, RunningProvisioner) {
    let config = ProvisionerConfig::new(sample_identity(NODE));
    let provisioner = Provisioner::new(config, deps_of(api, &store));
    let added = NamedStore {
        store: fast_store.clone(),
        snapshots: Some(fast_store),
        metrics: Arc::new(()),
        guard: None,
    };
    let provisioner = provisioner.with_store(fast(), added);
    (provisioner.clone(), RunningProvisioner::spawn(provisioner, || {}))
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_at_the_start_takes_none_of_the_other_and_is_served_once_it_answers() {
    let api = api_with_classes();
    let (_scratch, [local_base, fast_base]) = two_disks();
    let (provisioner, running) = start_in(&api, [&local_base, &fast_base]);
    create_fast_claim(&api, 1);
    wait_bound(&api, "claim-1").await;
    running.stop().await;
    drop(provisioner);
    let (release, hung) = std::sync::mpsc::channel::<()>();
    let (hung, path) = (std::sync::Mutex::new(hung), fast_base.clone());
    let mut options = DirStoreOptions::default();
    options.opener = Some(Arc::new(move || {
        // Answers once its sender is dropped, also by a test that fails.
        let _ = hung.lock().expect("not poisoned").recv();
        Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _))
    }));
    let fast_store = Arc::new(DirStore::closed(&fast_base, options));
    let (provisioner, running) = start_stores(&api, [open_store(&local_base), fast_store]);
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    assert!(api.event_counts("claim-1").iter().all(|(reason, _)| reason != "VolumeConditionAbnormal"));
    // Time stands still while a thread is blocked.
    tokio::time::advance(Duration::from_secs(30)).await;
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    assert!(provisioner.stores()[1].ability.inability().is_some());
    drop(release);
    wait_for_event(&api, "claim-1", "VolumeConditionNormal").await;
    running.stop().await;
}

/// The faults and inabilities of both stores, for a wait.
fn is_served(provisioner: &Provisioner) -> [bool; 2] {
    let health = provisioner.stores();
    [0, 1].map(|at| health[at].ability == Ability::Able)
}

#[tokio::test(start_paused = true)]
async fn the_volumes_of_an_absent_disk_are_not_gone_and_those_of_the_other_are_served() {
    let api = api_with_classes();
    let (_scratch, [local_base, fast_base]) = two_disks();
    let (provisioner, running) = start_in(&api, [&local_base, &fast_base]);
    for number in [1, 3] {
        api.create_claim(number, json!({}));
        create_fast_claim(&api, number + 1);
    }
    for claim in ["claim-1", "claim-2", "claim-3", "claim-4"] {
        wait_bound(&api, claim).await;
    }
    assert!(local_base.join("volumes").join(id(1).as_str()).exists());
    assert!(fast_base.join("volumes").join(id(2).as_str()).exists());

    unmount(&fast_base);
    for about in [id(2).as_str(), "claim-2"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    assert_eq!(is_served(&provisioner), [true, false]);
    api.delete_claim(1);
    api.delete_claim(2);
    api.create_claim(5, json!({}));
    create_fast_claim(&api, 6);
    wait_bound(&api, "claim-5").await;
    wait_until(&api, |api| is_deselected(api, "claim-6")).await;
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    advance_time(3600).await;
    assert_eq!(api.volume_phase(2), "Released", "it is on a disk that is absent");
    let events = api.event_counts("claim-3");
    assert!(events.iter().all(|(reason, _)| reason != "VolumeConditionAbnormal"), "{events:?}");
    assert_eq!(fs::read_dir(&fast_base).expect("a directory").count(), 0, "nothing is created below");

    mount(&fast_base);
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(2).as_str()).is_none()).await;
    wait_for_event(&api, "claim-4", "VolumeConditionNormal").await;
    select(&api, "claim-6");
    wait_bound(&api, "claim-6").await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn directories_of_two_stores_that_were_exchanged_are_not_served() {
    let api = api_with_classes();
    let (_scratch, [local_base, fast_base]) = two_disks();
    let (_, running) = start_in(&api, [&local_base, &fast_base]);
    // The other store has no volume that tells it from a new one.
    create_fast_claim(&api, 1);
    wait_bound(&api, "claim-1").await;
    running.stop().await;
    // The directory of the volume is empty, and no PersistentVolume of the other store has its name.
    let (provisioner, running) = start_in(&api, [&fast_base, &local_base]);
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    advance_time(3600).await;
    let why: Vec<_> = provisioner
        .stores()
        .iter()
        .filter_map(|store| store.ability.inability().map(str::to_owned))
        .collect();
    assert!(why.len() == 2 && why[0].contains("by the name \"fast\""), "{why:?}");
    assert!(fast_base.join("volumes").join(id(1).as_str()).exists());
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-1"), "Bound");
    running.stop().await;
}

fn content_name(number: u32) -> String {
    sample_snapshot_content(number, json!({})).metadata.name.expect("a name")
}

fn is_content_ready(api: &FakeApi, number: u32) -> bool {
    let content = api.get_object(ObjectKind::SnapshotContent, &content_name(number));
    content.is_some_and(|content| content["status"]["readyToUse"] == true)
}

#[tokio::test(start_paused = true)]
async fn snapshots_of_an_absent_disk_do_not_keep_those_of_the_other_waiting() {
    let api = api_with_classes();
    let (_scratch, [local_base, fast_base]) = two_disks();
    let (_, running) = start_in(&api, [&local_base, &fast_base]);
    api.create_claim(9, json!({}));
    wait_bound(&api, "claim-9").await;
    for number in 1..=4 {
        create_fast_claim(&api, number);
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    unmount(&fast_base);
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    for number in 1..=4 {
        api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(number, json!({})));
    }
    advance_time(1).await;
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(9, json!({})));
    for _ in 0..600 {
        advance_time(1).await;
        if is_content_ready(&api, 9) {
            running.stop().await;
            return;
        }
    }
    panic!("the healthy store has not taken its snapshot in 10 minutes");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_whose_removal_had_begun_is_not_gone_once_its_store_is_not_configured() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    create_fast_claim(&api, 1);
    wait_bound(&api, "claim-1").await;
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(1, json!({})));
    wait_until(&api, |api| is_content_ready(api, 1)).await;
    running.stop().await;
    // As a kill between the two steps of a removal leaves it.
    api.patch_object(
        ObjectKind::SnapshotContent,
        &content_name(1),
        json!({ "status": { "readyToUse": false } }),
    );
    let annotation = json!({ "metadata": { "annotations": { "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes" } } });
    api.patch_object(ObjectKind::SnapshotContent, &content_name(1), annotation);
    api.delete_object(ObjectKind::SnapshotContent, &content_name(1));
    let running = RunningProvisioner::spawn(provisioner(&api, &store, None), || {});
    advance_time(600).await;
    let is_there = api.get_object(ObjectKind::SnapshotContent, &content_name(1)).is_some();
    assert!(is_there, "its data stay: {:?}", snapshots(&fast_store).await);
    running.stop().await;
}

/// The snapshots of a disk that hangs while this is true; unlike those of [`MemStore`], of which only the probe does.
#[derive(Debug)]
struct HungSnapshots(MemStore, tokio::sync::watch::Sender<bool>);

impl HungSnapshots {
    async fn wait(&self) {
        let _ = self.1.subscribe().wait_for(|is_hung| !is_hung).await;
    }
}

#[async_trait::async_trait]
impl nodekeel_provisioner::SnapshotStore for HungSnapshots {
    async fn create_snapshot(
        &self,
        id: &nodekeel_provisioner::SnapshotId,
        volume: &nodekeel_provisioner::VolumeId,
    ) -> Result<nodekeel_provisioner::SnapshotInfo, nodekeel_provisioner::SnapshotStoreError> {
        self.wait().await;
        self.0.create_snapshot(id, volume).await
    }
    async fn find_snapshot(
        &self,
        id: &nodekeel_provisioner::SnapshotId,
    ) -> Result<Option<nodekeel_provisioner::SnapshotInfo>, nodekeel_provisioner::SnapshotStoreError> {
        self.wait().await;
        self.0.find_snapshot(id).await
    }
    async fn remove_snapshot(
        &self,
        id: &nodekeel_provisioner::SnapshotId,
    ) -> Result<(), nodekeel_provisioner::SnapshotStoreError> {
        self.wait().await;
        self.0.remove_snapshot(id).await
    }
    async fn list_snapshots(
        &self,
    ) -> Result<Vec<nodekeel_provisioner::SnapshotId>, nodekeel_provisioner::SnapshotStoreError> {
        self.wait().await;
        self.0.list_snapshots().await
    }
    async fn create_volume_from(
        &self,
        id: &nodekeel_provisioner::VolumeId,
        source: &nodekeel_provisioner::StoredId,
        limits: nodekeel_fsquota::QuotaLimits,
    ) -> Result<(), nodekeel_provisioner::VolumeStoreError> {
        self.wait().await;
        self.0.create_volume_from(id, source, limits).await
    }
    async fn mark_published(
        &self,
        id: &nodekeel_provisioner::VolumeId,
    ) -> Result<(), nodekeel_provisioner::VolumeStoreError> {
        self.0.mark_published(id).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_deleted_while_another_disk_hangs() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let hung = Arc::new(HungSnapshots(store.clone(), tokio::sync::watch::Sender::new(false)));
    let deps = nodekeel_provisioner::Deps { snapshots: Some(hung.clone()), ..test_deps(&api, &store) };
    let fast_arc = Arc::new(fast_store.clone());
    let added =
        NamedStore { store: fast_arc.clone(), snapshots: Some(fast_arc), metrics: Arc::new(()), guard: None };
    let provisioner =
        Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps).with_store(fast(), added);
    let running = RunningProvisioner::spawn(provisioner, || {});
    create_fast_claim(&api, 2);
    wait_bound(&api, "claim-2").await;
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(2, json!({})));
    wait_until(&api, |api| is_content_ready(api, 2)).await;
    // Of a content that names no store, and was not reported.
    hung.1.send_replace(true);
    let unnamed = json!({
        "metadata": { "annotations": { "volumes.nodekeel.example/store": null } }, "status": null,
    });
    api.patch_object(ObjectKind::SnapshotContent, &content_name(2), unnamed);
    let annotation = json!({ "metadata": { "annotations": { "snapshot.storage.kubernetes.io/volumesnapshot-being-deleted": "yes" } } });
    api.patch_object(ObjectKind::SnapshotContent, &content_name(2), annotation);
    api.delete_object(ObjectKind::SnapshotContent, &content_name(2));
    for _ in 0..600 {
        advance_time(1).await;
        if api.get_object(ObjectKind::SnapshotContent, &content_name(2)).is_none() {
            hung.1.send_replace(false);
            running.stop().await;
            return;
        }
    }
    panic!("the snapshot of the healthy store is not deleted in 10 minutes");
}

/// Creates the VolumeSnapshot of a content, which it is bound to.
fn create_snapshot(api: &FakeApi, number: u32) {
    let snapshot = json!({
        "metadata": { "namespace": "default", "name": format!("snapshot-{number}"), "uid": sample_uid(number) },
        "status": { "boundVolumeSnapshotContentName": content_name(number) },
    });
    api.create_object(ObjectKind::Snapshot, snapshot);
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(number, json!({})));
}

fn restore_of(number: u32, class: &str) -> Value {
    let name = format!("snapshot-{number}");
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name });
    json!({ "spec": { "dataSource": source, "dataSourceRef": source, "storageClassName": class } })
}

#[tokio::test(start_paused = true)]
async fn a_restore_into_another_store_is_rejected_with_the_class_that_it_needs() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    api.create_claim(1, json!({}));
    create_fast_claim(&api, 2);
    for number in [1, 2] {
        wait_bound(&api, &format!("claim-{number}")).await;
        create_snapshot(&api, number);
        wait_until(&api, |api| is_content_ready(api, number)).await;
    }
    for (claim, source, class, remedy) in [
        (3, 2, "local", "a class with the parameter `store: fast`"),
        (4, 1, "fast", "a class without the parameter `store`"),
    ] {
        api.create_claim(claim, restore_of(source, class));
        let name = format!("claim-{claim}");
        wait_for_event(&api, &name, "ProvisioningFailed").await;
        let notes = api.event_notes(&name);
        assert!(notes.iter().any(|note| note.contains(remedy)), "{notes:?}");
        advance_time(600).await;
        assert_eq!(api.event_notes(&name).len(), 1, "it is told once");
    }
    api.create_claim(5, restore_of(1, "local"));
    api.create_claim(6, restore_of(2, "fast"));
    for claim in ["claim-5", "claim-6"] {
        wait_bound(&api, claim).await;
    }
    assert_eq!(store.list().await.expect("listed"), [id(1), id(5)]);
    assert_eq!(fast_store.list().await.expect("listed"), [id(2), id(6)]);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_existing_snapshot_of_a_named_store_is_recorded_there_and_restored() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    create_fast_claim(&api, 1);
    wait_bound(&api, "claim-1").await;
    {
        use nodekeel_provisioner::SnapshotStore as _;
        fast_store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("taken");
    }
    // As an administrator creates it, who names no store.
    let [mut content, mut snapshot] =
        adopted_snapshot(&sample_identity(NODE), &snapshot_id(1), VolumeKind::Directory, "default");
    let name = content["metadata"]["name"].as_str().expect("a name").to_owned();
    snapshot["metadata"]["name"] = json!("snapshot-1");
    snapshot["metadata"]["uid"] = json!(sample_uid(1));
    snapshot["status"] = json!({ "boundVolumeSnapshotContentName": name });
    content["spec"]["volumeSnapshotRef"]["uid"] = json!(sample_uid(1));
    api.create_object(ObjectKind::SnapshotContent, content);
    api.create_object(ObjectKind::Snapshot, snapshot);
    let store_of = |api: &FakeApi| {
        let content = api.get_object(ObjectKind::SnapshotContent, &name).expect("a content");
        content["metadata"]["annotations"]["volumes.nodekeel.example/store"].clone()
    };
    wait_until(&api, |api| store_of(api) == "fast").await;
    api.create_claim(2, restore_of(1, "fast"));
    wait_bound(&api, "claim-2").await;
    running.stop().await;
    // A content that the command prints names the store already.
    let mut identity = sample_identity(NODE);
    identity.store = Some(fast());
    let [content, _] = adopted_snapshot(&identity, &snapshot_id(1), VolumeKind::Directory, "default");
    assert_eq!(content["metadata"]["annotations"]["volumes.nodekeel.example/store"], "fast");
}

#[tokio::test(start_paused = true)]
async fn what_a_crash_left_in_one_store_of_a_claim_of_another_is_removed_only_if_it_is_empty() {
    let api = api_with_classes();
    let [store, fast_store] = [MemStore::default(), MemStore::default()];
    let limits = QuotaLimits { bytes: Some(Bytes(MIB)), inodes: None };
    // Created for claims of a class that names another store since.
    for number in 1..=4 {
        store.create(&id(number), limits).await.expect("created");
    }
    for number in [2, 4] {
        store.set_usage(&id(number), QuotaUsage { bytes: Bytes(4096), inodes: Inodes(3) });
    }
    create_fast_claim(&api, 1);
    create_fast_claim(&api, 2);
    // These wait for their pods.
    for number in [3, 4] {
        let annotations = json!({ "annotations": { SELECTED_NODE: null } });
        api.create_claim(number, json!({ "metadata": annotations, "spec": { "storageClassName": "fast" } }));
    }
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    for claim in ["claim-1", "claim-2"] {
        wait_bound(&api, claim).await;
    }
    advance_time(600).await;
    assert_eq!(fast_store.list().await.expect("listed"), [id(1), id(2)]);
    assert_eq!(store.list().await.expect("listed"), [id(2), id(4)], "it may be needed");
    running.stop().await;
    // After a restart, too, when the PersistentVolumes exist from the start.
    store.create(&id(1), limits).await.expect("created");
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    advance_time(600).await;
    assert_eq!(store.list().await.expect("listed"), [id(2), id(4)]);
    assert_eq!(fast_store.list().await.expect("listed"), [id(1), id(2)], "they have PersistentVolumes");
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_store_does_not_wait_for_the_snapshots_of_an_absent_one() {
    let api = api_with_classes();
    let (_scratch, [local_base, fast_base]) = two_disks();
    // A snapshot that was kept when its volume was deleted is all that the cluster knows of the disk.
    let kept = sample_snapshot_content(
        1,
        json!({
            "metadata": { "annotations": { "volumes.nodekeel.example/store": "fast" } },
            "status": { "snapshotHandle": snapshot_id(1).as_str(), "readyToUse": true },
        }),
    );
    api.create_object(ObjectKind::SnapshotContent, kept);
    unmount(&fast_base);
    let (provisioner, running) = start_in(&api, [&local_base, &fast_base]);
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    advance_time(60).await;
    assert_eq!(is_served(&provisioner), [true, false], "the other may be an absent disk");
    mount(&fast_base);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_lease_of_a_node_names_the_stores_that_it_has_and_no_others() {
    let (api, [store, fast_store]) = (api_with_classes(), [MemStore::default(), MemStore::default()]);
    let running = RunningProvisioner::spawn(provisioner(&api, &store, Some(&fast_store)), || {});
    let stores = |api: &FakeApi| {
        let lease = api.list_objects(ObjectKind::Lease).pop()?;
        let labels = lease["metadata"]["labels"].as_object()?.clone();
        let prefix = "stores.volumes.nodekeel.example/";
        Some(labels.keys().filter_map(|label| label.strip_prefix(prefix)).collect::<Vec<_>>().join(","))
    };
    let is_fast = |api: &FakeApi| stores(api).as_deref() == Some("fast");
    wait_until(&api, is_fast).await;
    // As a release with another store has left it.
    let label = json!({ "metadata": { "labels": { "stores.volumes.nodekeel.example/gone": "" } } });
    api.patch_object(ObjectKind::Lease, &format!("volumes.nodekeel.example-{NODE}"), label);
    assert!(!is_fast(&api));
    wait_until(&api, is_fast).await;
    running.stop().await;
}
