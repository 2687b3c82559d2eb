//! A node whose store is the right one and can't be used: it offers nothing, gives its claims up, and serves again at once
//! when the store is repaired.

use std::io;
use std::time::Duration;

use nodekeel_fsquota::{Bytes, Error as QuotaError};
use nodekeel_provisioner::testing::objects::{CLASS, NODE, sample_class, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestVerb};
use nodekeel_provisioner::{
    Ability, ErrorSource, ImageFormat, InabilityCause, Provisioner, ProvisionerConfig, SELECTED_NODE,
};
use rustix::io::Errno;
use serde_json::json;
use tokio::time::{Instant, timeout};

use super::harness::{
    ApiFixture as _, RunningProvisioner, advance_time, id, phase, test_api, test_deps, wait_bound, wait_until,
};

const MIB: u64 = 1 << 20;

/// The time within which a repaired node serves everything.
const REPAIRED_WITHIN: Duration = Duration::from_secs(5);

/// What a store can fail with, and the cause that is told.
const FAULTS: [(fn() -> ErrorSource, InabilityCause); 5] = [
    (|| io::Error::from(Errno::ROFS).into(), InabilityCause::ReadOnly),
    (|| io::Error::from(Errno::IO).into(), InabilityCause::Failing),
    (|| io::Error::from(Errno::DQUOT).into(), InabilityCause::NoLimits),
    (|| io::Error::from(Errno::NFILE).into(), InabilityCause::NoResources),
    (|| QuotaError::EnforcementOff.into(), InabilityCause::NoLimits),
];

/// A running provisioner, and its handle.
struct ProbedNode {
    store: MemStore,
    provisioner: Provisioner,
    running: RunningProvisioner,
}

impl ProbedNode {
    fn start(api: &FakeApi, store: MemStore) -> Self {
        let mut config = ProvisionerConfig::new(sample_identity(NODE));
        config.node_selection_delay = Duration::ZERO;
        let provisioner = Provisioner::new(config, test_deps(api, &store));
        let running = RunningProvisioner::spawn(provisioner.clone(), || {});
        Self { store, provisioner, running }
    }

    fn cause(&self) -> Option<InabilityCause> {
        match self.provisioner.ability() {
            Ability::Unable { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// The capacity that the node has published for the sample class.
fn published(api: &FakeApi) -> Vec<String> {
    let objects = api.list_objects(ObjectKind::StorageCapacity);
    objects.iter().map(|it| it["capacity"].as_str().unwrap_or_default().to_owned()).collect()
}

fn is_deselected(api: &FakeApi, claim: &str) -> bool {
    let claim = api.get_object(ObjectKind::Claim, claim).expect("a claim");
    claim["metadata"]["annotations"][SELECTED_NODE].is_null()
}

/// Selects the node for a claim, as the scheduler does.
pub(super) fn select(api: &FakeApi, claim: &str) {
    let patch = json!({ "metadata": { "annotations": { SELECTED_NODE: NODE } } });
    api.patch_object(ObjectKind::Claim, claim, patch);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_can_not_create_volumes_gives_its_claims_up_and_serves_again_at_its_repair() {
    for (fault, cause) in FAULTS {
        let (api, store) = (test_api(), MemStore::with_capacity(Bytes(200 * MIB)));
        let node = ProbedNode::start(&api, store);
        api.create_claim(1, json!({}));
        wait_bound(&api, "claim-1").await;
        node.store.set_fault(Some(fault));
        let broken = Instant::now();
        api.create_claim(2, json!({}));
        wait_until(&api, |api| {
            assert!(
                !is_deselected(api, "claim-2") || published(api) == ["0"],
                "{cause:?}: deselected before the capacity is known: {:?}",
                published(api)
            );
            is_deselected(api, "claim-2")
        })
        .await;
        assert!(broken.elapsed() < Duration::from_secs(10), "{cause:?}: {:?}", broken.elapsed());
        assert_eq!(node.cause(), Some(cause));
        let notes = api.event_notes("claim-2");
        assert!(notes.iter().any(|note| note.contains("can't create volumes")), "{cause:?}: {notes:?}");
        // Selected again and again, it is given up with a growing delay; what exists is served and not reported.
        for _ in 0..3 {
            select(&api, "claim-2");
            wait_until(&api, |api| is_deselected(api, "claim-2")).await;
        }
        select(&api, "claim-2");
        advance_time(1).await;
        assert_eq!(phase(&api, ObjectKind::Claim, "claim-1"), "Bound");
        let events = api.event_counts("claim-1");
        assert!(events.iter().all(|(reason, _)| reason != "VolumeConditionAbnormal"), "{events:?}");

        node.store.set_fault(None);
        let repaired = timeout(REPAIRED_WITHIN, async {
            if is_deselected(&api, "claim-2") {
                wait_until(&api, |api| published(api) != ["0"]).await;
                select(&api, "claim-2");
            }
            wait_bound(&api, "claim-2").await;
        });
        repaired.await.unwrap_or_else(|_| panic!("{cause:?}: {:?}", node.provisioner.ability()));
        assert_eq!(node.provisioner.ability(), Ability::Able);
        node.running.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_waits_in_backoff_is_done_within_seconds_of_the_repair() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(200 * MIB)));
    let node = ProbedNode::start(&api, store);
    for number in 1..=2 {
        api.create_claim(number, json!({}));
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    node.store.set_fault(Some(FAULTS[0].0));
    // A deletion and an expansion that fail, each with a delay of minutes by now.
    api.delete_claim(1);
    let larger = json!({ "spec": { "resources": { "requests": { "storage": "60Mi" } } } });
    api.patch_object(ObjectKind::Claim, "claim-2", larger);
    advance_time(3600).await;
    assert_eq!((api.volume_phase(1), node.cause()), (json!("Released"), Some(InabilityCause::ReadOnly)));
    node.store.set_fault(None);
    let done = wait_until(&api, |api| {
        let grown = api.get_object(ObjectKind::Claim, "claim-2").expect("a claim");
        api.get_object(ObjectKind::Volume, id(1).as_str()).is_none()
            && grown["status"]["capacity"]["storage"] == "60Mi"
    });
    timeout(REPAIRED_WITHIN, done).await.expect("both are retried at the repair");
    node.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_failures_is_one_probe_and_an_idle_node_probes_once_a_minute() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(100_000 * MIB)));
    let node = ProbedNode::start(&api, store);
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    let before = node.store.probe_count();
    advance_time(600).await;
    let idle = node.store.probe_count() - before;
    assert!((9..=10).contains(&idle), "{idle}");
    let before = node.store.probe_count();
    for number in 2..102 {
        node.store.fail_next("a failure of this call alone");
        api.create_claim(number, json!({}));
    }
    for number in 2..102 {
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    let probes = node.store.probe_count() - before;
    assert!((1..=20).contains(&probes), "{probes}");
    assert_eq!(node.provisioner.ability(), Ability::Able, "the store can be used");
    node.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_missing_mkfs_is_an_inability_for_the_classes_that_need_it_alone() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(200 * MIB)));
    store.set_missing_format(Some(ImageFormat::Ext4));
    let strict = json!({ "metadata": { "name": "strict" }, "parameters": { "strict": "true" } });
    api.create_object(ObjectKind::Class, sample_class(strict));
    let node = ProbedNode::start(&api, store);
    wait_until(&api, |api| published(api).contains(&"0".to_owned())).await;
    let capacity = |class: &str| {
        let objects = api.list_objects(ObjectKind::StorageCapacity);
        let found = objects.iter().find(|object| object["storageClassName"] == class);
        found.map(|object| object["capacity"].clone())
    };
    assert_eq!(capacity("strict"), Some(json!("0")));
    assert_ne!(capacity(CLASS), Some(json!("0")));
    let of_class = |mode: &str| json!({ "spec": { "storageClassName": "strict", "volumeMode": mode } });
    api.create_claim(1, of_class("Filesystem"));
    wait_until(&api, |api| is_deselected(api, "claim-1")).await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("mkfs.ext4 is missing")), "{notes:?}");
    // All others are served, and the node is ready for them.
    api.create_claim(2, json!({}));
    api.create_claim(3, of_class("Block"));
    wait_bound(&api, "claim-2").await;
    wait_bound(&api, "claim-3").await;
    assert_eq!((node.provisioner.ability(), node.provisioner.missing_formats().len()), (Ability::Able, 1));

    node.store.set_missing_format(None);
    advance_time(61).await;
    assert!(node.provisioner.missing_formats().is_empty());
    assert_ne!(capacity("strict"), Some(json!("0")));
    select(&api, "claim-1");
    wait_bound(&api, "claim-1").await;
    node.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_a_pod_is_left_to_other_nodes_until_the_repair() {
    let (api, store) = (test_api(), MemStore::default());
    store.set_fault(Some(FAULTS[1].0));
    api.create_object(
        ObjectKind::Class,
        sample_class(json!({ "metadata": { "name": "immediate" }, "volumeBindingMode": "Immediate" })),
    );
    let node = ProbedNode::start(&api, store);
    let claim = json!({
        "metadata": { "annotations": { SELECTED_NODE: null } },
        "spec": { "storageClassName": "immediate" },
    });
    api.create_claim(1, claim);
    advance_time(600).await;
    assert!(is_deselected(&api, "claim-1"));
    assert_eq!(api.request_counts(ObjectKind::Claim, [RequestVerb::Patch]), [0]);
    node.store.set_fault(None);
    timeout(REPAIRED_WITHIN, wait_bound(&api, "claim-1")).await.expect("it is selected at the repair");
    node.running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_makes_the_node_unable_and_its_answer_able_again() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(200 * MIB)));
    store.set_hung(true);
    let node = ProbedNode::start(&api, store);
    api.create_claim(1, json!({}));
    wait_until(&api, |api| is_deselected(api, "claim-1")).await;
    assert_eq!(node.cause(), Some(InabilityCause::Hung));
    node.store.set_hung(false);
    wait_until(&api, |api| published(api) == ["200Mi"]).await;
    select(&api, "claim-1");
    wait_bound(&api, "claim-1").await;
    node.running.stop().await;
}
