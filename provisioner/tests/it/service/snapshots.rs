//! Snapshots, restores and clones.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_provisioner::testing::objects::{NODE, sample_identity, sample_snapshot_content, sample_uid};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    BEING_DELETED, CONTENT_FINALIZER, Deps, ProvisionerConfig, RunError, SELECTED_NODE, SnapshotStore as _,
    StepMoment, VolumeKind, VolumeMetrics, VolumeStep, VolumeStore as _, adopted_snapshot,
};
use serde_json::{Value, json};

use super::harness::{
    ApiFixture as _, TestNode, advance_time, id, phase, test_api, test_deps, wait_bound, wait_for_event,
    wait_until,
};
use crate::fixture::snapshot_id;

const USAGE: QuotaUsage = QuotaUsage { bytes: Bytes(4096), inodes: Inodes(7) };

fn content_name(number: u32) -> String {
    format!("snapcontent-{}", sample_uid(number))
}

fn content(api: &FakeApi, number: u32) -> Value {
    api.get_object(ObjectKind::SnapshotContent, &content_name(number)).unwrap_or_default()
}

/// Provisions claim 1 on a node, and writes into its volume.
async fn start_with_volume(api: &FakeApi) -> TestNode {
    let node = TestNode::start(api, NODE).await;
    api.create_claim(1, json!({}));
    wait_bound(api, "claim-1").await;
    node.store.set_usage(&id(1), USAGE);
    node
}

/// Creates a VolumeSnapshot of claim 1 and its content, as the snapshot-controller does.
fn create_snapshot(api: &FakeApi, content: Value) {
    let snapshot = json!({
        "metadata": { "namespace": "default", "name": "snapshot-1", "uid": sample_uid(1) },
        "status": { "boundVolumeSnapshotContentName": content_name(1) },
    });
    api.create_object(ObjectKind::Snapshot, snapshot);
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(1, content));
}

/// Deletes both, as the snapshot-controller does.
fn delete_snapshot(api: &FakeApi) {
    api.delete_object(ObjectKind::Snapshot, "snapshot-1");
    let mark = json!({ "metadata": { "annotations": { BEING_DELETED: "yes" } } });
    api.patch_object(ObjectKind::SnapshotContent, &content_name(1), mark);
    api.delete_object(ObjectKind::SnapshotContent, &content_name(1));
}

async fn wait_ready(api: &FakeApi) {
    wait_until(api, |api| content(api, 1)["status"]["readyToUse"] == true).await;
}

async fn wait_content_gone(api: &FakeApi) {
    wait_until(api, |api| content(api, 1).is_null()).await;
}

fn restore_of(snapshot: &str) -> Value {
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot });
    json!({ "spec": { "dataSource": source, "dataSourceRef": source } })
}

fn selected_node(api: &FakeApi, claim: &str) -> Value {
    let claim = api.get_object(ObjectKind::Claim, claim).expect("a claim");
    claim["metadata"]["annotations"][SELECTED_NODE].clone()
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_taken_reported_restored_and_deleted() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    create_snapshot(&api, json!({}));
    wait_ready(&api).await;
    let status = content(&api, 1)["status"].clone();
    assert_eq!(status["snapshotHandle"], snapshot_id(1).as_str());
    assert_eq!((&status["restoreSize"], &status["error"]), (&json!(50 << 20), &Value::Null));
    assert!(status["creationTime"].as_i64().is_some_and(|time| time > 0), "{status}");

    api.create_claim(2, restore_of("snapshot-1"));
    wait_bound(&api, "claim-2").await;
    assert_eq!(node.store.usage(&id(2)).await.expect("a volume").usage, USAGE, "it has the data");

    delete_snapshot(&api);
    wait_content_gone(&api).await;
    assert_eq!(node.store.list_snapshots().await.expect("a list"), []);
    assert_eq!(node.store.usage(&id(2)).await.expect("a volume").usage, USAGE, "it survives the snapshot");
    let patches = api.request_count(RequestVerb::Patch, ObjectKind::SnapshotContent);
    assert_eq!(patches, 3, "one for its status, two for its deletion");
}

/// Records the last number of orphaned snapshots.
#[derive(Debug, Default)]
struct OrphanedSnapshots(AtomicUsize);

impl VolumeMetrics for OrphanedSnapshots {
    fn record_provision(&self, _: &str, _: Duration, _: bool) {}

    fn record_delete(&self, _: &str, _: Duration, _: bool) {}

    fn set_orphaned_snapshots(&self, snapshots: usize) {
        self.0.store(snapshots, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_no_content_names_is_counted_until_it_is_adopted_or_removed() {
    let (api, store, meter) = (test_api(), MemStore::default(), Arc::<OrphanedSnapshots>::default());
    let deps = Deps { metrics: meter.clone(), ..test_deps(&api, &store) };
    let _node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, Some(&store)).await;
    let counted = async || {
        advance_time(600).await;
        meter.0.load(Ordering::SeqCst)
    };
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    create_snapshot(&api, json!({ "spec": { "deletionPolicy": "Retain" } }));
    wait_ready(&api).await;
    assert_eq!(counted().await, 0);
    delete_snapshot(&api);
    wait_content_gone(&api).await;
    assert_eq!(counted().await, 1, "its content is deleted and its data are not");
    assert_eq!(store.list_snapshots().await.expect("a list"), [snapshot_id(1)], "nothing removes it");

    let [content, _] =
        adopted_snapshot(&sample_identity(NODE), &snapshot_id(1), VolumeKind::Directory, "default");
    let name = content["metadata"]["name"].as_str().expect("a name").to_owned();
    api.create_object(ObjectKind::SnapshotContent, content);
    let adopted = || api.get_object(ObjectKind::SnapshotContent, &name).unwrap_or_default();
    wait_until(&api, |_| adopted()["status"]["readyToUse"] == true).await;
    assert_eq!(counted().await, 0, "it is adopted");
    api.delete_object(ObjectKind::SnapshotContent, &name);
    assert_eq!(counted().await, 1, "no deletion of an adopted content removes it");
    store.remove_snapshot(&snapshot_id(1)).await.expect("removed");
    assert_eq!(counted().await, 0, "an operator has removed it");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_no_orphan_while_the_snapshot_api_is_away() {
    let (api, store, meter) = (test_api(), MemStore::default(), Arc::<OrphanedSnapshots>::default());
    let start = || {
        let deps = Deps { metrics: meter.clone(), ..test_deps(&api, &store) };
        TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, Some(&store))
    };
    let node = start().await;
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    create_snapshot(&api, json!({}));
    wait_ready(&api).await;
    node.crash().await;
    for _ in 0..1000 {
        api.fail_next(RequestVerb::List, ObjectKind::SnapshotContent, RequestFault::Status(404));
    }
    // A start looks for the owners of all snapshots.
    let _node = start().await;
    advance_time(60).await;
    assert_eq!(meter.0.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_cloned_and_never_waits_empty() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    let source = json!({ "kind": "PersistentVolumeClaim", "name": "claim-1" });
    api.create_claim(2, json!({ "spec": { "dataSource": source } }));
    wait_bound(&api, "claim-2").await;
    assert_eq!(node.store.usage(&id(2)).await.expect("a volume").usage, USAGE);

    let missing = json!({ "kind": "PersistentVolumeClaim", "name": "claim-9" });
    api.create_claim(3, json!({ "spec": { "dataSource": missing } }));
    wait_for_event(&api, "claim-3", "ProvisioningFailed").await;
    assert!(
        api.event_notes("claim-3")[0].contains("claim-9 does not exist"),
        "{:?}",
        api.event_notes("claim-3")
    );
    advance_time(600).await;
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-3"), "Pending");
    assert_eq!(node.store.create_count(&id(3)), 0);
    // Once the source exists, the claim is provisioned.
    api.create_claim(9, json!({}));
    wait_bound(&api, "claim-3").await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_created_before_its_snapshot_is_ready_is_restored_at_once() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    api.create_claim(2, restore_of("snapshot-1"));
    wait_for_event(&api, "claim-2", "ProvisioningFailed").await;
    advance_time(250).await;
    let started = tokio::time::Instant::now();
    create_snapshot(&api, json!({}));
    wait_bound(&api, "claim-2").await;
    assert!(
        started.elapsed().as_secs() < 5,
        "the snapshot wakes it, not the backoff: {:?}",
        started.elapsed()
    );
    assert_eq!(node.store.usage(&id(2)).await.expect("a volume").usage, USAGE);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_became_ready_while_the_watch_was_disconnected_is_restored_at_once() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    api.create_claim(2, restore_of("snapshot-1"));
    wait_for_event(&api, "claim-2", "ProvisioningFailed").await;
    // The delay until the next attempt is minutes by now.
    advance_time(250).await;
    for _ in 0..3 {
        api.fail_next(RequestVerb::List, ObjectKind::SnapshotContent, RequestFault::Unreachable);
    }
    api.reset_watches();
    advance_time(1).await;
    let started = tokio::time::Instant::now();
    node.store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    let ready = json!({ "readyToUse": true, "snapshotHandle": snapshot_id(1).as_str() });
    create_snapshot(&api, json!({ "status": ready }));
    wait_bound(&api, "claim-2").await;
    assert!(started.elapsed().as_secs() < 60, "the list wakes it, not the backoff: {:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_panic_while_a_snapshot_is_reported_does_not_end_the_provisioner() {
    let api = test_api();
    let panicked = AtomicBool::new(false);
    let hook = move |step: VolumeStep, _: StepMoment| {
        let is_status = step == VolumeStep::UpdateSnapshotStatus;
        assert!(!is_status || panicked.swap(true, Ordering::Relaxed), "a defect, once");
    };
    let deps = Deps { hook: Some(Arc::new(hook)), ..test_deps(&api, &MemStore::default()) };
    let node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, None).await;
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    create_snapshot(&api, json!({}));
    wait_ready(&api).await;
    assert!(matches!(node.stop().await, RunError::Canceled));
}

#[tokio::test(start_paused = true)]
async fn a_restore_selected_for_another_node_is_handed_over_to_the_node_of_its_snapshot() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    let other = TestNode::start(&api, "node-b").await;
    create_snapshot(&api, json!({}));
    wait_ready(&api).await;
    let mut claim = restore_of("snapshot-1");
    claim["metadata"] = json!({ "annotations": { SELECTED_NODE: "node-b" } });
    api.create_claim(2, claim);
    wait_bound(&api, "claim-2").await;
    assert_eq!(selected_node(&api, "claim-2"), NODE);
    let notes = api.event_notes("claim-2");
    assert!(notes.iter().any(|note| note.contains("on node node-a")), "{notes:?}");
    assert_eq!(node.store.usage(&id(2)).await.expect("a volume").usage, USAGE);
    assert_eq!(other.store.list().await.expect("a list"), []);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_can_not_be_taken_says_why_and_is_retried() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    node.store.fail_next("the disk is on fire");
    create_snapshot(&api, json!({}));
    wait_until(&api, |api| content(api, 1)["status"]["error"]["message"].is_string()).await;
    let status = content(&api, 1)["status"].clone();
    assert_eq!(status["readyToUse"], false);
    assert!(status["error"]["message"].to_string().contains("on fire"), "{status}");
    assert!(status["error"]["time"].is_string(), "{status}");
    wait_for_event(&api, &content_name(1), "SnapshotCreationFailed").await;
    wait_ready(&api).await;
    assert_eq!(content(&api, 1)["status"]["error"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn each_failure_of_a_snapshot_waits_for_the_backoff_although_its_status_changes() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    for number in 0..100 {
        node.store.fail_next(format!("error {number}"));
    }
    create_snapshot(&api, json!({}));
    advance_time(30).await;
    let patches = || api.request_count(RequestVerb::Patch, ObjectKind::SnapshotContent);
    assert!((2..=6).contains(&patches()), "{}", patches());
}

#[tokio::test(start_paused = true)]
async fn a_long_reason_is_truncated_in_the_status() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    // A pod chooses the paths of its files.
    node.store.fail_next("x".repeat(1 << 20));
    create_snapshot(&api, json!({}));
    let message = |api: &FakeApi| content(api, 1)["status"]["error"]["message"].clone();
    wait_until(&api, |api| message(api).is_string()).await;
    assert!(message(&api).as_str().is_some_and(|message| message.len() <= 1024));
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_lost_between_its_creation_and_its_status_is_found_again_or_deleted() {
    for is_deleted in [false, true] {
        let api = test_api();
        let node = start_with_volume(&api).await;
        let store: MemStore = node.store.clone();
        // As if the process was killed after it has taken the snapshot.
        node.crash().await;
        store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
        create_snapshot(&api, json!({}));
        if is_deleted {
            delete_snapshot(&api);
        }
        let _node = TestNode::start_with_store(&api, &store).await;
        if is_deleted {
            wait_content_gone(&api).await
        } else {
            wait_ready(&api).await
        }
        let left = store.list_snapshots().await.expect("a list").len();
        assert_eq!(left, usize::from(!is_deleted));
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_whose_disk_is_not_mounted_is_not_deleted() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    let ready = json!({ "readyToUse": true, "snapshotHandle": snapshot_id(1).as_str() });
    create_snapshot(&api, json!({ "status": ready }));
    delete_snapshot(&api);
    wait_for_event(&api, &content_name(1), "SnapshotDeleteError").await;
    let notes = api.event_notes(&content_name(1));
    assert!(notes[0].contains("mount its disk"), "{notes:?}");
    advance_time(600).await;
    assert_eq!(content(&api, 1)["metadata"]["finalizers"], json!([CONTENT_FINALIZER]));
    // As if it is mounted again.
    let limits = QuotaLimits { bytes: Some(Bytes(50 << 20)), inodes: None };
    node.store.create(&id(1), limits).await.expect("a volume");
    node.store.create_snapshot(&snapshot_id(1), &id(1)).await.expect("a snapshot");
    wait_content_gone(&api).await;
    assert_eq!(node.store.list_snapshots().await.expect("a list"), []);
}

#[tokio::test(start_paused = true)]
async fn a_deletion_killed_after_the_snapshot_was_removed_is_completed() {
    let api = test_api();
    let removed = json!({ "readyToUse": false, "snapshotHandle": snapshot_id(1).as_str() });
    create_snapshot(&api, json!({ "status": removed }));
    delete_snapshot(&api);
    let _node = TestNode::start(&api, NODE).await;
    wait_content_gone(&api).await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_response_to_the_status_does_no_harm() {
    for (verb, fault) in [
        (RequestVerb::Patch, RequestFault::ResponseLost),
        (RequestVerb::Patch, RequestFault::Unreachable),
        (RequestVerb::Patch, RequestFault::Status(409)),
    ] {
        let api = test_api();
        let node = start_with_volume(&api).await;
        api.fail_next(verb, ObjectKind::SnapshotContent, fault);
        create_snapshot(&api, json!({}));
        if fault == RequestFault::Status(409) {
            // The object has changed, so the watch reports it.
            let change = json!({ "metadata": { "annotations": { "a": "b" } } });
            wait_until(&api, |api| api.request_count(verb, ObjectKind::SnapshotContent) > 0).await;
            api.patch_object(ObjectKind::SnapshotContent, &content_name(1), change);
        }
        wait_ready(&api).await;
        delete_snapshot(&api);
        wait_content_gone(&api).await;
        assert_eq!(node.store.list_snapshots().await.expect("a list"), [], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_snapshot_api_all_else_works_and_it_starts_when_installed() {
    let api = test_api();
    for _ in 0..3 {
        api.fail_next(RequestVerb::List, ObjectKind::SnapshotContent, RequestFault::Status(404));
    }
    let node = start_with_volume(&api).await;
    wait_until(&api, |api| api.request_count(RequestVerb::List, ObjectKind::SnapshotContent) > 3).await;
    create_snapshot(&api, json!({}));
    wait_ready(&api).await;
    assert_eq!(node.store.list_snapshots().await.expect("a list"), [snapshot_id(1)]);
}

#[tokio::test(start_paused = true)]
async fn a_copy_whose_claim_was_deleted_before_it_was_published_is_swept() {
    let api = test_api();
    let node = start_with_volume(&api).await;
    let store = node.store.clone();
    node.crash().await;
    // As if the process was killed after it has created the volume, and the claim was deleted since.
    let limits = store.usage(&id(1)).await.expect("a volume").limits;
    store.create_volume_from(&id(2), &id(1).into(), limits).await.expect("a copy");
    store.create_volume_from(&id(3), &id(1).into(), limits).await.expect("a copy");
    store.mark_published(&id(3)).await.expect("marked");
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_until(&api, |_| store.remove_count(&id(2)) == 1).await;
    advance_time(600).await;
    assert_eq!(store.list().await.expect("a list"), [id(1), id(3)], "one that was published may hold data");
}
