//! Orphans are adopted and removed by their PersistentVolumes.

use std::fs;
use std::path::Path;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    DirStore, OrphanVolume, RecoveryError, StoreId, StoredId, VolumeKind, VolumeRecovery, VolumeStore as _,
    VolumeUsage,
};
use serde_json::{Value, json};

use super::harness::{ApiFixture as _, TestNode, advance_time, id, test_api, wait_bound, wait_until};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(8 << 20)), inodes: Some(Inodes(1024)) };

fn store_id() -> StoreId {
    "9f0e5d3c-1b2a-4c5d-8e6f-00000000abcd".parse().expect("a UUID")
}

fn orphan(usage: VolumeUsage) -> OrphanVolume {
    OrphanVolume { store: store_id(), id: id(1), kind: VolumeKind::Directory, usage }
}

/// A node with a volume that holds data and has no PersistentVolume.
async fn orphan_node(api: &FakeApi) -> (TestNode, VolumeRecovery, VolumeUsage) {
    let store = MemStore::default();
    store.create(&id(1), LIMITS).await.expect("create");
    let mut usage = store.usage(&id(1)).await.expect("it exists");
    (usage.usage.bytes, usage.usage.inodes) = (Bytes(4096), Inodes(2));
    store.set_usage(&id(1), usage.usage);
    let node = TestNode::start_with_store(api, &store).await;
    (node, VolumeRecovery::new(api.client(), sample_identity(NODE), None), usage)
}

fn volume_spec(api: &FakeApi) -> Value {
    api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a PersistentVolume")["spec"].clone()
}

#[tokio::test(start_paused = true)]
async fn a_removed_orphan_is_deleted_like_a_released_volume() {
    let api = test_api();
    let (node, recovery, usage) = orphan_node(&api).await;
    recovery.remove_volume(&orphan(usage)).await.expect("requested");
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
    assert_eq!(node.store.remove_count(&id(1)), 1);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_removal_killed_around_its_step_is_repeated() {
    for fault in [RequestFault::Unreachable, RequestFault::ResponseLost] {
        let api = test_api();
        let (node, recovery, usage) = orphan_node(&api).await;
        api.fail_next(RequestVerb::Create, ObjectKind::Volume, fault);
        recovery.remove_volume(&orphan(usage)).await.expect_err("no answer");
        // It was requested, or is requested again, or has been removed by then.
        let _ = recovery.remove_volume(&orphan(usage)).await;
        wait_until(&api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
        wait_until(&api, |_| node.store.remove_count(&id(1)) == 1).await;
        node.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_is_repeated_while_the_first_one_is_in_progress() {
    let api = test_api();
    let store = MemStore::default();
    store.create(&id(1), LIMITS).await.expect("create");
    let usage = store.usage(&id(1)).await.expect("it exists");
    let recovery = VolumeRecovery::new(api.client(), sample_identity(NODE), None);
    for _ in 0..2 {
        recovery.remove_volume(&orphan(usage)).await.expect("requested");
    }
    assert_eq!(api.request_count(RequestVerb::Create, ObjectKind::Volume), 1);
}

#[tokio::test(start_paused = true)]
async fn an_orphan_whose_claim_exists_is_not_removed_but_adopted_for_it() {
    let api = test_api();
    // The claim was bound to the volume, whose PersistentVolume an administrator has deleted.
    let lost = json!({ "spec": { "volumeName": id(1).as_str() }, "status": { "phase": "Lost" } });
    api.create_claim(1, lost);
    let (node, recovery, usage) = orphan_node(&api).await;
    let error = recovery.remove_volume(&orphan(usage)).await.expect_err("it is needed");
    assert!(matches!(error, RecoveryError::Unsuitable { .. }), "{error:?}");
    assert!(error.to_string().contains("default/claim-1"), "{error}");
    for _ in 0..2 {
        recovery.adopt_volume(&orphan(usage), None).await.expect("adopted, also again");
    }
    wait_bound(&api, "claim-1").await;
    assert_eq!(volume_spec(&api)["persistentVolumeReclaimPolicy"], "Retain");
    advance_time(3600).await;
    assert_eq!(api.volume_phase(1), "Bound");
    assert_eq!(node.store.remove_count(&id(1)), 0);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_orphan_without_a_claim_is_adopted_for_any_claim_of_a_class() {
    let api = test_api();
    let (node, recovery, usage) = orphan_node(&api).await;
    recovery.adopt_volume(&orphan(usage), Some("local")).await.expect("adopted");
    let spec = volume_spec(&api);
    assert_eq!((&spec["storageClassName"], &spec["claimRef"]), (&json!("local"), &Value::Null));
    assert_eq!(spec["capacity"]["storage"], "8Mi");
    advance_time(3600).await;
    assert_eq!(node.store.remove_count(&id(1)), 0);
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_being_provisioned_is_not_an_orphan() {
    let api = test_api();
    let (node, recovery, usage) = orphan_node(&api).await;
    api.pause_watches(ObjectKind::Claim);
    api.create_claim(1, json!({}));
    for error in
        [recovery.remove_volume(&orphan(usage)).await, recovery.adopt_volume(&orphan(usage), None).await]
    {
        let error = error.expect_err("it is no orphan");
        assert!(error.to_string().contains("is being provisioned"), "{error}");
    }
    node.stop().await;
}

#[test]
fn the_volumes_of_a_directory_are_listed_beside_the_store_that_serves_it() {
    let base = tempfile::tempdir().expect("a directory");
    let quota = std::sync::Arc::new(MemQuota::new());
    let open = || Dir::open(Path::new(base.path())).expect("the base");
    assert!(DirStore::list_stored(&open(), &*quota).expect("list").is_empty(), "nothing was opened yet");
    let _store = DirStore::new(open(), quota.clone()).expect("a store");
    fs::create_dir(base.path().join("volumes").join(id(1).as_str())).expect("a volume");
    fs::write(base.path().join("volumes/other"), "").expect("another file");
    let listed = DirStore::list_stored(&open(), &*quota).expect("list");
    assert_eq!(listed.iter().map(|volume| &volume.id).collect::<Vec<_>>(), [&StoredId::from(id(1))]);
}
