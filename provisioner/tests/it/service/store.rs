//! The identity of a store: an absent store is not an empty one.

use std::fs;
use std::path::Path;

use nodekeel_provisioner::testing::FakeApi;
use nodekeel_provisioner::testing::ObjectKind;
use nodekeel_provisioner::testing::objects::{sample_uid, sample_volume};
use nodekeel_provisioner::{RunError, STORE_ATTRIBUTE, StoreRejection, VolumeStore as _};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::dir_node::{DirNode, store_id, used_store};
use super::harness::{
    ApiFixture as _, advance_time, id, phase, test_api, wait_bound, wait_for_event, wait_no_volumes,
    wait_until,
};

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
    api.delete_claim(1);
    api.create_claim(2, json!({}));
    let error = DirNode::start(&api, below.path()).wait_failed().await;
    let RunError::StoreRejected(StoreRejection::Absent { volume, store }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((volume, store.to_string()), (id(1), store_id(disk.path())));
    assert_eq!(api.volume_phase(1), "Released");
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
        api.delete_claim(1);
        let error = node.wait_failed().await;
        assert!(matches!(error, RunError::StoreLost(_)), "{error:?}");
        assert!(lost.elapsed().as_secs() <= 5, "{:?}", lost.elapsed());
        assert_eq!(api.volume_phase(1), "Released");
        let _ = fs::remove_dir_all(base.path().with_extension("moved"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_delete_killed_before_the_finalizer_ends_in_the_store_that_its_object_names() {
    let api = test_api();
    let base = used_store(&api).await;
    fs::remove_dir_all(base.path().join("volumes").join(id(1).as_str())).expect("removed before the kill");
    api.delete_claim(1);
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
    assert_eq!(api.volume_phase(2), "Released");
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
    api.delete_claim(1);
    wait_no_volumes(&api).await;
    node.stop().await;
    assert_eq!(store_id(base.path()).len(), 36);
}
