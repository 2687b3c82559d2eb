//! A store that is lost while it is served, and comes back, whole or not, or is replaced.

use std::fs;

use nodekeel_provisioner::testing::objects::{NODE, sample_identity, sample_uid};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{VolumeRecovery, VolumeStore as _};
use serde_json::json;

use super::ability::select;
use super::dir_node::{DirNode, mount, store_id, unmount, used_store};
use super::harness::{
    ApiFixture as _, advance_time, id, phase, test_api, wait_bound, wait_for_event, wait_until,
};

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
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    unmount(base.path());
    // Each call finds out that the store is lost.
    api.create_claim(3, json!({}));
    for about in [id(1).as_str(), id(2).as_str(), "claim-1", "claim-2"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    // Until it is back, nothing is done: nothing is deleted, and nothing is created on the disk below.
    api.delete_claim(1);
    advance_time(3600).await;
    assert_eq!(api.volume_phase(1), "Released");
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-3"), "Pending");
    assert!(!base.path().join("store-id").exists());
    let note = api.event_notes(id(2).as_str());
    assert!(note.iter().any(|note| note.contains("mount")), "{note:?}");
    assert_eq!(condition_counts(&api, id(2).as_str()), [1, 0], "once, whatever is found below");

    mount(base.path());
    wait_until(&api, |api| api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()).await;
    // It was given up, for a node that can serve it.
    select(&api, "claim-3");
    wait_bound(&api, "claim-3").await;
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

/// True if the PersistentVolume of the first claim is marked as reported abnormal.
fn is_marked_abnormal(api: &FakeApi) -> bool {
    let annotation = sample_identity(NODE).driver.condition_annotation();
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a volume");
    !volume["metadata"]["annotations"][annotation].is_null()
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_back_before_the_next_process_is_reported_as_normal_once() {
    let api = test_api();
    let base = used_store(&api).await;
    assert!(!is_marked_abnormal(&api));
    unmount(base.path());
    let node = DirNode::start_reopening(&api, base.path());
    for about in [id(1).as_str(), "claim-1"] {
        wait_for_event(&api, about, "VolumeConditionAbnormal").await;
    }
    node.stop().await;
    mount(base.path());
    api.fail_next(RequestVerb::Patch, ObjectKind::Volume, RequestFault::Status(500));
    for _ in 0..2 {
        let node = DirNode::start(&api, base.path());
        wait_until(&api, |api| !is_marked_abnormal(api)).await;
        advance_time(3600).await;
        for about in [id(1).as_str(), "claim-1"] {
            assert_eq!(condition_counts(&api, about), [1, 1]);
        }
        node.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_mark_that_the_api_server_did_not_accept_is_written_again() {
    let api = test_api();
    let base = used_store(&api).await;
    unmount(base.path());
    api.fail_next(RequestVerb::Patch, ObjectKind::Volume, RequestFault::Status(500));
    let node = DirNode::start_reopening(&api, base.path());
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    wait_until(&api, is_marked_abnormal).await;
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
    advance_time(60).await;
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    assert_ne!(store_id(base.path()), old);
    assert_eq!(api.volume_phase(1), "Bound");
    assert_eq!(condition_counts(&api, "claim-1"), [2, 0], "its cause has changed");
    api.delete_claim(1);
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
    assert_eq!(api.volume_phase(1), "Bound");
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_backup_that_lacks_a_volume_is_not_reported_as_complete() {
    let api = test_api();
    let base = used_store(&api).await;
    let node = DirNode::start_reopening(&api, base.path());
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    advance_time(60).await;
    unmount(base.path());
    api.create_claim(3, json!({}));
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
    assert_eq!(api.volume_phase(1), "Bound");
    fs::rename(&kept, &volume).expect("restored");
    for about in [id(1).as_str(), "claim-1"] {
        wait_for_event(&api, about, "VolumeConditionNormal").await;
    }
    assert_eq!(condition_counts(&api, "claim-1"), [1, 1]);
    node.stop().await;
}
