//! Deletion of volumes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_provisioner::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, FINALIZER, GuardError, PROVISIONED_BY, ProvisionerConfig, ProvisionerIdentity, VolumeGuard,
    VolumeId, VolumeReservation, VolumeStore as _,
};
use serde_json::{Value, json};

use super::harness::{
    ApiFixture as _, AttemptCounts, TestNode, advance_time, id, test_api, test_deps, wait_for_event,
    wait_no_volumes, wait_until,
};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

async fn provision(api: &FakeApi, number: u32) {
    api.create_claim(number, json!({}));
    wait_for_event(api, &format!("claim-{number}"), "ProvisioningSucceeded").await;
}

async fn start_counted(api: &FakeApi) -> (TestNode, Arc<AttemptCounts>) {
    let counts = Arc::<AttemptCounts>::default();
    let deps = Deps { metrics: counts.clone(), ..test_deps(api, &MemStore::default()) };
    (TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, None).await, counts)
}

#[tokio::test(start_paused = true)]
async fn each_deletion_is_counted_once_although_the_volume_changes_meanwhile() {
    let api = test_api();
    let (_node, counts) = start_counted(&api).await;
    for number in 0..50 {
        provision(&api, number).await;
    }
    for number in 0..50 {
        api.delete_claim(number);
    }
    wait_no_volumes(&api).await;
    advance_time(600).await;
    assert_eq!(counts.get(), [50, 0, 50, 0]);
    let requests = api.request_counts(ObjectKind::Volume, [RequestVerb::Delete, RequestVerb::Patch]);
    assert_eq!(requests, [50, 50]);
    assert_eq!(api.event_counts(id(1).as_str()), [], "no failure");
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_counted_wherever_it_happens() {
    let api = test_api();
    let (_node, counts) = start_counted(&api).await;
    api.create_claim(1, json!({ "spec": { "volumeMode": "Unheard" } }));
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    assert_eq!(counts.get(), [0, 1, 0, 0], "a rejected claim");
    api.fail_next(RequestVerb::Get, ObjectKind::Claim, RequestFault::Status(401));
    provision(&api, 2).await;
    assert_eq!(counts.get(), [1, 2, 0, 0], "a claim that could not be read");
    api.fail_next(RequestVerb::Get, ObjectKind::Volume, RequestFault::Status(401));
    api.delete_claim(2);
    wait_no_volumes(&api).await;
    assert_eq!(counts.get(), [1, 2, 1, 1], "a volume that could not be read");
}

#[tokio::test(start_paused = true)]
async fn without_a_finalizer_a_deleted_claim_costs_one_delete() {
    let api = test_api();
    let config = ProvisionerConfig::new(ProvisionerIdentity { finalizer: None, ..sample_identity(NODE) });
    let node = TestNode::start_with(config, test_deps(&api, &MemStore::default()), None).await;
    provision(&api, 1).await;
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a volume");
    assert_eq!(volume["metadata"]["finalizers"], json!(["kubernetes.io/pv-protection"]));
    api.delete_claim(1);
    wait_no_volumes(&api).await;
    assert_eq!(node.store.remove_count(&id(1)), 1);
    assert_eq!(api.request_counts(ObjectKind::Volume, [RequestVerb::Delete, RequestVerb::Patch]), [1, 0]);
    // Nothing keeps the object once its claim is deleted: its data then need an administrator.
    provision(&api, 2).await;
    node.store.set_usage(&id(2), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    api.delete_object(ObjectKind::Volume, id(2).as_str());
    api.delete_claim(2);
    wait_no_volumes(&api).await;
    advance_time(600).await;
    assert_eq!(node.store.list().await.expect("list"), [id(2)]);
}

#[tokio::test(start_paused = true)]
async fn a_changed_reclaim_policy_changes_the_finalizer() {
    let api = test_api();
    let _node = TestNode::start(&api, NODE).await;
    provision(&api, 1).await;
    let finalizers = |api: &FakeApi| {
        let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("a volume");
        let finalizers = volume["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
        finalizers.iter().filter(|finalizer| **finalizer == FINALIZER).count()
    };
    let policy = |policy: &str| json!({ "spec": { "persistentVolumeReclaimPolicy": policy } });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), policy("Retain"));
    wait_until(&api, |api| finalizers(api) == 0).await;
    api.patch_object(ObjectKind::Volume, id(1).as_str(), policy("Delete"));
    wait_until(&api, |api| finalizers(api) == 1).await;
    let stripped = json!({ "metadata": { "finalizers": [] } });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), stripped);
    wait_until(&api, |api| finalizers(api) == 1).await;
}

async fn sweep_hostile_volume(patch: Value) -> (FakeApi, TestNode) {
    let (api, store) = (test_api(), MemStore::default());
    for number in [1, 2] {
        store.create(&id(number), LIMITS).await.expect("create");
        store.set_usage(&id(number), QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    let node = TestNode::start_with_store(&api, &store).await;
    api.create_object(ObjectKind::Volume, sample_volume(1, patch));
    advance_time(3600).await;
    (api, node)
}

#[tokio::test(start_paused = true)]
async fn a_hostile_volume_deletes_nothing_and_gets_one_event() {
    let other = format!("pvc-{}", sample_uid(2));
    let of_claim = |claim: Value| json!({ "spec": { "claimRef": claim } });
    for (what, patch, hint) in [
        ("a path", json!({ "spec": { "csi": { "volumeHandle": "../x" } } }), "nothing was deleted"),
        ("another handle", json!({ "spec": { "csi": { "volumeHandle": other } } }), "nothing was deleted"),
        ("another claim", of_claim(json!({ "uid": sample_uid(9) })), "nothing was deleted"),
        ("no name", of_claim(json!({ "name": "" })), "finalizer"),
        ("no namespace", of_claim(json!({ "namespace": "" })), "finalizer"),
        ("no UID", of_claim(json!({ "uid": null })), "finalizer"),
        (
            "no mark",
            json!({ "metadata": { "annotations": { PROVISIONED_BY: null } } }),
            "nothing was deleted",
        ),
    ] {
        let (api, node) = sweep_hostile_volume(patch).await;
        let notes = api.event_notes(id(1).as_str());
        assert_eq!(api.event_counts(id(1).as_str()), [("VolumeFailedDelete".to_owned(), 1)], "{what}");
        assert!(notes[0].contains(hint), "{what}: {notes:?}");
        assert_eq!(api.volume_phase(1), "Released", "{what}");
        assert_eq!(node.store.list().await.expect("list"), [id(1), id(2)], "{what}");
        let writes = api.request_counts(ObjectKind::Volume, [RequestVerb::Delete, RequestVerb::Patch]);
        assert_eq!(writes, [0, 0], "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_claim_exists_is_not_deleted_in_any_phase() {
    let here = id(1).to_string();
    for volume_name in ["", here.as_str()] {
        let (api, store) = (test_api(), MemStore::default());
        store.create(&id(1), LIMITS).await.expect("create");
        api.create_claim(1, json!({ "spec": { "volumeName": volume_name } }));
        api.create_object(
            ObjectKind::Volume,
            sample_volume(1, json!({ "spec": { "claimRef": { "name": "another" } } })),
        );
        let _node = TestNode::start_with_store(&api, &store).await;
        wait_for_event(&api, id(1).as_str(), "VolumeFailedDelete").await;
        advance_time(3600).await;
        assert_eq!(store.remove_count(&id(1)), 0);
        let notes = api.event_notes(id(1).as_str());
        assert!(notes[0].contains("claim-1 still exists"), "{notes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_pointed_at_another_claim_is_not_deleted_while_its_original_claim_exists() {
    for patch in [json!({ "name": "another" }), json!({ "namespace": "another" })] {
        let api = test_api();
        let node = TestNode::start(&api, NODE).await;
        provision(&api, 1).await;
        api.patch_object(ObjectKind::Volume, id(1).as_str(), json!({ "spec": { "claimRef": patch } }));
        wait_until(&api, |api| api.volume_phase(1) == "Released").await;
        advance_time(3600).await;
        assert_eq!(node.store.remove_count(&id(1)), 0);
        assert_eq!(api.event_counts(id(1).as_str())[0].0, "VolumeFailedDelete");
        api.delete_claim(1);
        wait_no_volumes(&api).await;
        assert_eq!(node.store.remove_count(&id(1)), 1, "deleted once the claim is deleted");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_claim_is_bound_elsewhere_is_deleted() {
    let (api, store) = (test_api(), MemStore::default());
    store.create(&id(1), LIMITS).await.expect("create");
    api.create_claim(1, json!({ "spec": { "volumeName": "elsewhere" } }));
    let _node = TestNode::start_with_store(&api, &store).await;
    api.create_object(ObjectKind::Volume, sample_volume(1, json!({})));
    wait_no_volumes(&api).await;
    assert_eq!(store.remove_count(&id(1)), 1);
}

/// Reports volumes as in use until its flag is set.
#[derive(Debug, Default)]
struct InUseGuard(AtomicBool);

impl VolumeGuard for InUseGuard {
    fn reserve(&self, id: &VolumeId) -> Result<VolumeReservation, GuardError> {
        if self.0.load(Ordering::Relaxed) {
            return Ok(VolumeReservation::new(()));
        }
        Err(GuardError::InUse { id: id.clone(), by: "a pod that was deleted by force".to_owned() })
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_in_use_is_deleted_once_it_is_free() {
    let (api, guard) = (test_api(), Arc::new(InUseGuard::default()));
    let store = MemStore::default();
    let deps = Deps { guard: Some(guard.clone()), ..test_deps(&api, &store) };
    let node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, Some(&store)).await;
    provision(&api, 1).await;
    api.delete_claim(1);
    wait_for_event(&api, id(1).as_str(), "VolumeFailedDelete").await;
    advance_time(3600).await;
    assert_eq!(
        (node.store.remove_count(&id(1)), api.request_count(RequestVerb::Delete, ObjectKind::Volume)),
        (0, 0)
    );
    let notes = api.event_notes(id(1).as_str());
    assert!(notes[0].contains("in use on this node (a pod that was deleted by force)"), "{notes:?}");
    guard.0.store(true, Ordering::Relaxed);
    wait_no_volumes(&api).await;
    assert_eq!(node.store.remove_count(&id(1)), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_removal_gets_an_event_and_is_retried() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    provision(&api, 1).await;
    store.fail_next("busy");
    store.fail_next("busy");
    api.delete_claim(1);
    wait_no_volumes(&api).await;
    assert_eq!(api.event_counts(id(1).as_str()), [("VolumeFailedDelete".to_owned(), 2)]);
    assert_eq!(store.remove_count(&id(1)), 1);
}

#[tokio::test(start_paused = true)]
async fn lost_answers_and_conflicts_end_in_the_same_state() {
    let faults = [
        (RequestVerb::Delete, RequestFault::ResponseLost),
        (RequestVerb::Delete, RequestFault::Unreachable),
        (RequestVerb::Patch, RequestFault::ResponseLost),
        (RequestVerb::Patch, RequestFault::Status(409)),
        (RequestVerb::Get, RequestFault::Status(500)),
        (RequestVerb::Get, RequestFault::NoResponse),
        (RequestVerb::Delete, RequestFault::NoResponse),
        (RequestVerb::Patch, RequestFault::NoResponse),
    ];
    for (verb, fault) in faults {
        let api = test_api();
        let node = TestNode::start(&api, NODE).await;
        provision(&api, 1).await;
        api.fail_next(verb, ObjectKind::Volume, fault);
        api.delete_claim(1);
        wait_no_volumes(&api).await;
        assert_eq!(node.store.remove_count(&id(1)), 1, "{verb:?} {fault:?}");
    }
}
