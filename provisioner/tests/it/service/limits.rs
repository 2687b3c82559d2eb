//! Limits that are not those of the PersistentVolume: they are set again, or reported.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, DirStore, LimitAudit, Provisioner, ProvisionerConfig, PublishAttempts, VolumeStore as _,
};
use serde_json::json;
use tokio::time::Instant;

use super::dir_node::deps_of;
use super::harness::{
    ApiFixture as _, RunningProvisioner, advance_time, id, test_api, test_deps, wait_bound, wait_for_event,
    wait_until,
};

const MIB: u64 = 1 << 20;

/// The limits of the sample claim's volume: 50 MiB, and an inode for each 2 KiB.
const PROMISED: QuotaLimits =
    QuotaLimits { bytes: Some(Bytes(50 * MIB)), inodes: Some(Inodes(50 * MIB / 2048)) };

/// A provisioner that audits each minute.
fn start(deps: Deps) -> RunningProvisioner {
    let mut config = ProvisionerConfig::new(sample_identity(NODE));
    config.audit_interval = Duration::from_secs(60);
    RunningProvisioner::spawn(Provisioner::new(config, deps), || {})
}

async fn limits(store: &MemStore) -> QuotaLimits {
    store.usage(&id(1)).await.expect("usage").limits
}

/// How often the volume was reported as abnormal, and as normal again.
fn conditions(api: &FakeApi) -> [u64; 2] {
    let all = api.event_counts("claim-1");
    ["VolumeConditionAbnormal", "VolumeConditionNormal"]
        .map(|reason| all.iter().filter(|(found, _)| found == reason).map(|(_, count)| *count).sum())
}

#[tokio::test(start_paused = true)]
async fn lost_and_changed_limits_are_set_again_by_the_next_audit() {
    let (api, store) = (test_api(), MemStore::default());
    let running = start(test_deps(&api, &store));
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    let bytes = |mebibytes: u64| QuotaLimits { bytes: Some(Bytes(mebibytes * MIB)), ..PROMISED };
    for changed in [QuotaLimits::default(), bytes(1), bytes(999), QuotaLimits { inodes: None, ..PROMISED }] {
        store.set_limits(&id(1), changed);
        advance_time(61).await;
        assert_eq!(limits(&store).await, PROMISED, "{changed:?}");
    }
    assert_eq!(conditions(&api), [0, 0]);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn limits_that_can_not_be_set_are_a_condition_until_they_are() {
    let (api, store) = (test_api(), MemStore::default());
    let running = start(test_deps(&api, &store));
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    store.set_limits(&id(1), QuotaLimits::default());
    store.fail_next("no quota");
    wait_for_event(&api, "claim-1", "VolumeConditionAbnormal").await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("no quota") && note.contains("dirquota")), "{notes:?}");
    wait_for_event(&api, "claim-1", "VolumeConditionNormal").await;
    assert_eq!((limits(&store).await, conditions(&api)), (PROMISED, [1, 1]));

    // A limit is not lowered below what a pod uses.
    let large = QuotaLimits { bytes: Some(Bytes(999 * MIB)), ..PROMISED };
    store.set_limits(&id(1), large);
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(60 * MIB), inodes: Inodes(9) });
    advance_time(61).await;
    assert_eq!((limits(&store).await, conditions(&api)), (large, [2, 1]));
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(40 * MIB), inodes: Inodes(9) });
    advance_time(61).await;
    assert_eq!((limits(&store).await, conditions(&api)), (PROMISED, [2, 2]));
    running.stop().await;
}

/// A pod gets the volume, and then the limits are compared: the next audit is hours away.
fn publish(store: &MemStore) {
    store.set_publishes(PublishAttempts { volumes: [id(1)].into(), ..PublishAttempts::default() });
}

#[tokio::test(start_paused = true)]
async fn limits_are_compared_at_a_publish_and_an_expansion_and_retried_without_an_audit() {
    let (api, store, start) = (test_api(), MemStore::default(), Instant::now());
    let running = RunningProvisioner::start(test_deps(&api, &store));
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    store.set_limits(&id(1), QuotaLimits::default());
    publish(&store);
    advance_time(1).await;
    assert_eq!((limits(&store).await, conditions(&api)), (PROMISED, [0, 0]));

    store.set_limits(&id(1), QuotaLimits::default());
    store.fail_next("no quota");
    store.fail_next("no quota");
    publish(&store);
    wait_until(&api, |api| conditions(api) == [1, 1]).await;
    assert_eq!(limits(&store).await, PROMISED);

    let large = QuotaLimits { bytes: Some(Bytes(999 * MIB)), ..PROMISED };
    store.set_limits(&id(1), large);
    store.set_usage(&id(1), QuotaUsage { bytes: Bytes(60 * MIB), inodes: Inodes(9) });
    publish(&store);
    wait_until(&api, |api| conditions(api) == [2, 1]).await;
    let request = json!({ "spec": { "resources": { "requests": { "storage": "100Mi" } } } });
    api.patch_object(ObjectKind::Claim, "claim-1", request);
    wait_until(&api, |api| conditions(api) == [2, 2]).await;
    assert_eq!(limits(&store).await.bytes, Some(Bytes(100 * MIB)));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_does_not_answer_makes_no_limits_wrong() {
    let (api, store, start) = (test_api(), MemStore::default(), Instant::now());
    let class =
        json!({ "metadata": { "name": "few" }, "driverName": DRIVER, "parameters": { "inodes": "123" } });
    api.create_object(ObjectKind::AttributesClass, class);
    let running = RunningProvisioner::start(test_deps(&api, &store));
    api.create_claim(1, json!({ "spec": { "volumeAttributesClassName": "few" } }));
    wait_bound(&api, "claim-1").await;
    store.set_limits(&id(1), QuotaLimits::default());
    for fault in [RequestFault::Status(500), RequestFault::Unreachable] {
        api.fail_next(RequestVerb::Get, ObjectKind::AttributesClass, fault);
    }
    publish(&store);
    wait_until(&api, |_| store.limits_of(&id(1)).is_some_and(|limits| limits.inodes == Some(Inodes(123))))
        .await;
    assert_eq!(limits(&store).await.bytes, PROMISED.bytes);
    assert_eq!(conditions(&api), [0, 0]);
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn files_that_do_not_count_and_a_capacity_that_is_none_are_conditions_until_the_next_audit() {
    let (api, store) = (test_api(), MemStore::default());
    let running = start(test_deps(&api, &store));
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    let uncounted = |count| LimitAudit { uncounted: [(id(1), count)].into(), ..LimitAudit::default() };
    store.set_audit(uncounted(3));
    wait_until(&api, |api| conditions(api) == [1, 0]).await;
    let notes = api.event_notes("claim-1");
    assert!(
        notes.iter().any(|note| note.contains("3 files and directories") && note.contains("--repair")),
        "{notes:?}"
    );
    store.set_audit(LimitAudit::default());
    wait_until(&api, |api| conditions(api) == [1, 1]).await;

    // The limits were set again for a pod, and not for all that is in the volume.
    let restored = [(id(1), 2)].into();
    store.set_publishes(PublishAttempts { volumes: [id(1)].into(), restored, has_failed: false });
    wait_until(&api, |api| conditions(api) == [2, 1]).await;
    wait_until(&api, |api| conditions(api) == [2, 2]).await;

    let capacity = |size: &str| json!({ "spec": { "capacity": { "storage": size } } });
    api.patch_object(ObjectKind::Volume, id(1).as_str(), capacity("much"));
    wait_until(&api, |api| conditions(api) == [3, 2]).await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("kubectl edit pv")), "{notes:?}");
    api.patch_object(ObjectKind::Volume, id(1).as_str(), capacity("50Mi"));
    wait_until(&api, |api| conditions(api) == [3, 3]).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_publish_has_the_store_probed() {
    let (api, store) = (test_api(), MemStore::default());
    let running = RunningProvisioner::start(test_deps(&api, &store));
    wait_until(&api, |_| store.probe_count() == 1).await;
    advance_time(1).await;
    store.set_publishes(PublishAttempts { has_failed: true, ..PublishAttempts::default() });
    advance_time(1).await;
    assert_eq!(store.probe_count(), 2);
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_restored_without_its_project_is_promised_and_limited_from_the_start_of_serving() {
    let (api, base) = (test_api(), tempfile::tempdir().expect("a directory"));
    let open = |quota: &Arc<MemQuota>| {
        let dir = Dir::open(base.path()).expect("the base");
        Arc::new(DirStore::new(dir, Arc::clone(quota) as _).expect("a store"))
    };
    let store = open(&Arc::new(MemQuota::new()));
    let running = start(deps_of(&api, &store));
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    running.stop().await;
    let volume = base.path().join("volumes").join(id(1).as_str());
    fs::write(volume.join("file"), "data").expect("written");
    drop(store);
    while DirStore::is_in_use(&Dir::open(base.path()).expect("the base")).expect("inspect") {
        std::thread::yield_now();
    }

    // Another quota knows nothing of the volume, as after `cp -a`.
    let quota = Arc::new(MemQuota::new());
    let store = open(&quota);
    assert!(quota.list_projects().is_empty());
    let running = start(deps_of(&api, &store));
    let limited = async {
        while !store.usage(&id(1)).await.is_ok_and(|usage| usage.limits == PROMISED) {
            advance_time(1).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), limited).await.expect("limited");
    let capacity = store.capacity().await.expect("a capacity").expect("it is limited");
    assert_eq!(capacity.promised, Bytes(50 * MIB));
    assert_eq!(fs::read_to_string(volume.join("file")).expect("read"), "data");
    running.stop().await;
}
