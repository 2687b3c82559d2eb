//! Expansion of volumes, and their VolumeAttributesClasses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, QuotaUsage};
use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_claim, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, ProvisionerConfig, StepMoment, VolumeMetrics, VolumeStep, VolumeStore as _,
};
use serde_json::{Value, json};

use super::harness::{
    ApiFixture as _, TestNode, advance_time, id, test_api, test_deps, wait_bound, wait_for_event, wait_until,
};

const CLAIM: &str = "claim-1";
const MIB: u64 = 1 << 20;

fn request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

fn attributes(name: &str) -> Value {
    json!({ "spec": { "volumeAttributesClassName": name } })
}

async fn bind_claim(api: &FakeApi, patch: Value) {
    api.create_claim(1, patch);
    wait_bound(api, CLAIM).await;
}

fn claim_status(api: &FakeApi) -> Value {
    api.get_object(ObjectKind::Claim, CLAIM).expect("the claim")["status"].clone()
}

fn resize_state(api: &FakeApi) -> Value {
    claim_status(api)["allocatedResourceStatuses"]["storage"].clone()
}

async fn wait_capacity(api: &FakeApi, size: &str) {
    wait_until(api, |api| claim_status(api)["capacity"]["storage"] == size).await;
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("the volume");
    assert_eq!(volume["spec"]["capacity"]["storage"], size);
    let status = claim_status(api);
    assert_eq!(
        (&status["allocatedResourceStatuses"]["storage"], &status["conditions"]),
        (&Value::Null, &Value::Null)
    );
}

async fn byte_limit(store: &MemStore) -> u64 {
    store.usage(&id(1)).await.expect("usage").limits.bytes.expect("a limit").0
}

async fn inode_limit(store: &MemStore) -> u64 {
    store.usage(&id(1)).await.expect("usage").limits.inodes.expect("a limit").0
}

fn create_attributes_class(api: &FakeApi, name: &str, inodes: &str) {
    let class =
        json!({ "metadata": { "name": name }, "driverName": DRIVER, "parameters": { "inodes": inodes } });
    api.create_object(ObjectKind::AttributesClass, class);
}

fn reasons(api: &FakeApi) -> Vec<String> {
    api.event_counts(CLAIM).into_iter().map(|(reason, _)| reason).collect()
}

/// Counts resizes and modifications: succeeded and failed.
#[derive(Debug, Default)]
struct ResizeCounts(Mutex<[usize; 4]>);

impl VolumeMetrics for ResizeCounts {
    fn record_provision(&self, _: &str, _: Duration, _: bool) {}

    fn record_delete(&self, _: &str, _: Duration, _: bool) {}

    fn record_resize(&self, class: &str, _: Duration, succeeded: bool) {
        assert_eq!(class, "local");
        self.0.lock().expect("not poisoned")[usize::from(!succeeded)] += 1;
    }

    fn record_modification(&self, class: &str, _: Duration, succeeded: bool) {
        assert_eq!(class, "local");
        self.0.lock().expect("not poisoned")[2 + usize::from(!succeeded)] += 1;
    }
}

#[tokio::test(start_paused = true)]
async fn a_larger_request_expands_the_volume_with_three_patches() {
    let api = test_api();
    let counts = Arc::<ResizeCounts>::default();
    let deps = Deps { metrics: counts.clone(), ..test_deps(&api, &MemStore::default()) };
    let node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, None).await;
    bind_claim(&api, json!({})).await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    wait_capacity(&api, "100Mi").await;
    wait_for_event(&api, CLAIM, "VolumeResizeSuccessful").await;
    assert_eq!(byte_limit(&node.store).await, 100 * MIB);
    assert_eq!(inode_limit(&node.store).await, 100 * MIB / 2048);
    assert_eq!(reasons(&api), ["ProvisioningSucceeded", "Resizing", "VolumeResizeSuccessful"]);
    advance_time(3600).await;
    let patches =
        [ObjectKind::Claim, ObjectKind::Volume].map(|kind| api.request_count(RequestVerb::Patch, kind));
    assert_eq!(patches, [2, 1]);
    assert_eq!(*counts.0.lock().expect("not poisoned"), [1, 0, 0, 0]);
    assert_eq!(claim_status(&api)["allocatedResources"]["storage"], "100Mi");
}

#[tokio::test(start_paused = true)]
async fn an_expansion_without_room_is_infeasible_until_the_request_is_lowered() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(150 * MIB)));
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Ti"));
    wait_for_event(&api, CLAIM, "VolumeResizeFailed").await;
    assert_eq!(resize_state(&api), "ControllerResizeInfeasible");
    let status = claim_status(&api);
    assert_eq!(status["conditions"][0]["type"], "ControllerResizeError");
    let message = status["conditions"][0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("never fits on this node"), "{message}");
    // Other causes, and remedies that can't help, are not named.
    assert!(!message.contains("project ID") && !message.contains("free some"), "{message}");
    assert_eq!((byte_limit(&store).await, &status["capacity"]["storage"]), (50 * MIB, &json!("50Mi")));
    let patches = api.request_count(RequestVerb::Patch, ObjectKind::Claim);
    advance_time(7200).await;
    assert_eq!(api.request_count(RequestVerb::Patch, ObjectKind::Claim), patches, "the status says so once");
    api.patch_object(ObjectKind::Claim, CLAIM, request("60Mi"));
    wait_capacity(&api, "60Mi").await;
    assert_eq!(byte_limit(&store).await, 60 * MIB);
    assert_eq!(claim_status(&api)["allocatedResources"]["storage"], "60Mi");
}

#[tokio::test(start_paused = true)]
async fn an_infeasible_expansion_succeeds_at_once_when_another_volume_is_deleted() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(150 * MIB)));
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("120Mi"));
    wait_for_event(&api, CLAIM, "VolumeResizeFailed").await;
    // The delay until the next attempt is five minutes by now.
    advance_time(7200).await;
    let freed = tokio::time::Instant::now();
    api.delete_claim(2);
    wait_capacity(&api, "120Mi").await;
    assert!(freed.elapsed() < Duration::from_secs(10), "{:?}", freed.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_expansion_resumes_after_a_crash_at_each_request() {
    for (verb, kind) in [
        (RequestVerb::Patch, ObjectKind::Claim),
        (RequestVerb::Patch, ObjectKind::Volume),
        (RequestVerb::Get, ObjectKind::Claim),
        (RequestVerb::Get, ObjectKind::Volume),
    ] {
        for fault in [RequestFault::NoResponse, RequestFault::ResponseLost, RequestFault::Status(500)] {
            let (api, store) = (test_api(), MemStore::default());
            let node = TestNode::start_with_store(&api, &store).await;
            bind_claim(&api, json!({})).await;
            let before = api.request_count(verb, kind);
            api.fail_next(verb, kind, fault);
            api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
            wait_until(&api, |api| api.request_count(verb, kind) > before).await;
            node.crash().await;
            let _node = TestNode::start_with_store(&api, &store).await;
            wait_capacity(&api, "100Mi").await;
            assert_eq!(byte_limit(&store).await, 100 * MIB, "{verb:?} {kind:?} {fault:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_lowered_before_the_watch_reports_it_is_read_again() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    api.fail_next(RequestVerb::Get, ObjectKind::Claim, RequestFault::Status(500));
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    wait_until(&api, |api| api.request_count(RequestVerb::Get, ObjectKind::Claim) == 2).await;
    api.pause_watches(ObjectKind::Claim);
    api.patch_object(ObjectKind::Claim, CLAIM, request("60Mi"));
    wait_capacity(&api, "60Mi").await;
    assert_eq!(byte_limit(&store).await, 60 * MIB);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_only_a_later_list_shows_is_expanded() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.pause_watches(ObjectKind::Volume);
    bind_claim(&api, json!({})).await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    advance_time(60).await;
    assert_eq!(byte_limit(&node.store).await, 50 * MIB, "its PersistentVolume is not known yet");
    // All watches list again, that of the volumes after that of the claims.
    for _ in 0..3 {
        api.fail_next(RequestVerb::List, ObjectKind::Volume, RequestFault::Unreachable);
    }
    api.reset_watches();
    api.resume_watches(ObjectKind::Volume);
    wait_capacity(&api, "100Mi").await;
    assert_eq!(byte_limit(&node.store).await, 100 * MIB);
}

#[tokio::test(start_paused = true)]
async fn the_claim_that_a_retained_volume_was_bound_to_later_expands_it() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), retain);
    api.delete_object(ObjectKind::Claim, CLAIM);
    let second = sample_claim(
        2,
        json!({
            "metadata": { "annotations": null },
            "spec": { "volumeName": id(1).as_str() },
        }),
    );
    let uid = second.metadata.uid.clone();
    api.create_object(ObjectKind::Claim, second);
    let reference = json!({ "namespace": "default", "name": "claim-2", "uid": uid });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), json!({ "spec": { "claimRef": reference } }));
    wait_bound(&api, "claim-2").await;
    api.patch_object(ObjectKind::Claim, "claim-2", request("100Mi"));
    wait_until(&api, |api| {
        let claim = api.get_object(ObjectKind::Claim, "claim-2").expect("the claim");
        claim["status"]["capacity"]["storage"] == "100Mi"
    })
    .await;
    assert_eq!(byte_limit(&store).await, 100 * MIB);
}

#[tokio::test(start_paused = true)]
async fn the_claims_of_other_nodes_and_drivers_are_left_alone() {
    let api = test_api();
    let foreign = TestNode::start(&api, "node-b").await;
    let annotations =
        json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "node-b" } } });
    bind_claim(&api, annotations).await;
    foreign.stop().await;
    let _node = TestNode::start(&api, NODE).await;
    // It may be this node's: only the PersistentVolume says whose it is.
    for selected in [json!(NODE), Value::Null] {
        let annotations = json!({ "volume.kubernetes.io/selected-node": selected });
        api.patch_object(ObjectKind::Claim, CLAIM, json!({ "metadata": { "annotations": annotations } }));
        api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
        advance_time(600).await;
    }
    assert_eq!(api.request_count(RequestVerb::Patch, ObjectKind::Claim), 0);
    assert_eq!(claim_status(&api)["capacity"]["storage"], "50Mi");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_names_another_node_than_its_volume_is_expanded() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    // As after its disk was moved here from that node.
    let selected =
        json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": "node-b" } } });
    api.patch_object(ObjectKind::Claim, CLAIM, selected);
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    wait_capacity(&api, "100Mi").await;
    assert_eq!(byte_limit(&store).await, 100 * MIB);
}

#[tokio::test(start_paused = true)]
async fn limits_in_force_are_made_durable_before_the_volume_is_said_to_have_them() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    create_attributes_class(&api, "few", "123");
    let patches = |api: &FakeApi| api.request_count(RequestVerb::Patch, ObjectKind::Volume);
    // Attempts that end after they have set the limits; after the last one, only the backoff leads to the next.
    let change_with_failures = async |change: Value| {
        let before = patches(&api);
        for _ in 0..3 {
            api.fail_next(RequestVerb::Patch, ObjectKind::Volume, RequestFault::Status(500));
        }
        api.patch_object(ObjectKind::Claim, CLAIM, change);
        wait_until(&api, |api| patches(api) == before + 3).await;
        store.fail_next("they are not durable");
    };
    change_with_failures(request("100Mi")).await;
    assert_eq!(byte_limit(&store).await, 100 * MIB);
    wait_capacity(&api, "100Mi").await;
    assert!(reasons(&api).iter().any(|reason| reason == "VolumeResizeFailed"), "{:?}", reasons(&api));
    change_with_failures(attributes("few")).await;
    assert_eq!(inode_limit(&store).await, 123);
    wait_until(&api, |api| claim_status(api)["currentVolumeAttributesClassName"] == "few").await;
    assert!(reasons(&api).iter().any(|reason| reason == "VolumeModifyFailed"), "{:?}", reasons(&api));
}

#[tokio::test(start_paused = true)]
async fn a_volume_is_created_with_the_limit_of_its_attributes_class() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    api.create_claim(1, attributes("few"));
    wait_for_event(&api, CLAIM, "ProvisioningFailed").await;
    assert!(api.event_notes(CLAIM)[0].contains("\"few\" does not exist: create it"));
    create_attributes_class(&api, "few", "123");
    wait_bound(&api, CLAIM).await;
    assert_eq!(inode_limit(&store).await, 123);
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("the volume");
    assert_eq!(volume["spec"]["volumeAttributesClassName"], "few");
    assert_eq!(claim_status(&api)["currentVolumeAttributesClassName"], "few");
    advance_time(600).await;
    assert_eq!(claim_status(&api)["modifyVolumeStatus"], Value::Null);
}

#[tokio::test(start_paused = true)]
async fn a_bound_claim_gets_another_attributes_class_once_it_exists_and_fits() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    bind_claim(&api, json!({})).await;
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(0), inodes: Inodes(500) });
    api.patch_object(ObjectKind::Claim, CLAIM, attributes("few"));
    wait_until(&api, |api| claim_status(api)["modifyVolumeStatus"]["status"] == "Pending").await;
    create_attributes_class(&api, "few", "123");
    wait_until(&api, |api| claim_status(api)["modifyVolumeStatus"]["status"] == "Infeasible").await;
    wait_for_event(&api, CLAIM, "VolumeModifyFailed").await;
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(0), inodes: Inodes(123) });
    wait_until(&api, |api| claim_status(api)["currentVolumeAttributesClassName"] == "few").await;
    assert_eq!((inode_limit(&store).await, byte_limit(&store).await), (123, 50 * MIB));
    let status = claim_status(&api);
    assert_eq!((&status["modifyVolumeStatus"], &status["conditions"]), (&Value::Null, &Value::Null));
    let volume = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("the volume");
    assert_eq!(volume["spec"]["volumeAttributesClassName"], "few");
    wait_for_event(&api, CLAIM, "VolumeModifySuccessful").await;
    // The limit of the class stays when the volume grows.
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    wait_capacity(&api, "100Mi").await;
    assert_eq!(inode_limit(&store).await, 123);
}

#[tokio::test(start_paused = true)]
async fn a_class_that_is_too_small_is_reported_once_while_a_pod_writes() {
    let (api, store) = (test_api(), MemStore::default());
    let (written, writes) = (store.clone(), AtomicU64::new(0));
    // Whenever the provisioner looks at it after a change, the volume has more files.
    let hook = move |_: VolumeStep, _: StepMoment| {
        let inodes = Inodes(500 + writes.fetch_add(1, Ordering::Relaxed).min(200));
        written.set_usage(&id(1), QuotaUsage { bytes: Bytes(0), inodes });
    };
    let deps = Deps { hook: Some(Arc::new(hook)), ..test_deps(&api, &store) };
    let _node = TestNode::start_with(ProvisionerConfig::new(sample_identity(NODE)), deps, Some(&store)).await;
    create_attributes_class(&api, "few", "123");
    bind_claim(&api, json!({})).await;
    wait_for_event(&api, CLAIM, "ProvisioningSucceeded").await;
    let writes = || {
        api.request_count(RequestVerb::Patch, ObjectKind::Claim)
            + api.request_count(RequestVerb::Create, ObjectKind::Event)
    };
    let before = writes();
    api.patch_object(ObjectKind::Claim, CLAIM, attributes("few"));
    advance_time(600).await;
    assert_eq!(claim_status(&api)["modifyVolumeStatus"]["status"], "Infeasible");
    assert_eq!(writes() - before, 2, "one patch and one event");
}

#[tokio::test(start_paused = true)]
async fn a_failing_modification_does_not_delay_an_expansion() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    bind_claim(&api, json!({})).await;
    api.patch_object(ObjectKind::Claim, CLAIM, attributes("missing"));
    wait_for_event(&api, CLAIM, "VolumeModifyFailed").await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("100Mi"));
    wait_until(&api, |api| claim_status(api)["capacity"]["storage"] == "100Mi").await;
    assert_eq!(byte_limit(&node.store).await, 100 * MIB);
    assert_eq!(claim_status(&api)["modifyVolumeStatus"]["status"], "Pending");
}
