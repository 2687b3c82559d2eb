//! The CSIStorageCapacity objects of nodes, and what they are for.

use nodekeel_fsquota::Bytes;
use nodekeel_provisioner::testing::objects::{NODE, sample_class, sample_identity, sample_node};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{ProvisionerConfig, SELECTED_NODE};
use serde_json::{Value, json};

use super::dir_node::{DirNode, mount, unmount, used_store};
use super::harness::{ApiFixture as _, TestNode, advance_time, test_api, test_deps, wait_bound, wait_until};

const MIB: u64 = 1 << 20;

fn store_of(mebibytes: u64) -> MemStore {
    MemStore::with_capacity(Bytes(mebibytes * MIB))
}

/// The published capacity of each class, sorted by its name.
fn published(api: &FakeApi) -> Vec<(String, String)> {
    let objects = api.list_objects(ObjectKind::StorageCapacity);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut found: Vec<_> =
        objects.iter().map(|it| (text(&it["storageClassName"]), text(&it["capacity"]))).collect();
    found.sort();
    found
}

async fn wait_published(api: &FakeApi, expected: &[(&str, &str)]) {
    let expected: Vec<_> = expected.iter().map(|(class, size)| ((*class).into(), (*size).into())).collect();
    wait_until(api, |api| published(api) == expected).await;
}

fn is_deselected(api: &FakeApi, claim: &str) -> bool {
    let claim = api.get_object(ObjectKind::Claim, claim).expect("a claim");
    claim["metadata"]["annotations"][SELECTED_NODE].is_null()
}

async fn start_on(api: &FakeApi, node: &str, store: &MemStore) -> TestNode {
    let mut config = ProvisionerConfig::new(sample_identity(node));
    config.node_selection_delay = std::time::Duration::ZERO;
    TestNode::start_with(config, test_deps(api, store), Some(store)).await
}

#[tokio::test(start_paused = true)]
async fn the_free_capacity_follows_claims_and_classes() {
    let (api, store) = (test_api(), store_of(100));
    let node = TestNode::start_with_store(&api, &store).await;
    wait_published(&api, &[("local", "100Mi")]).await;
    api.create_claim(1, json!({}));
    wait_published(&api, &[("local", "50Mi")]).await;
    let second = sample_class(json!({ "metadata": { "name": "second" } }));
    api.create_object(ObjectKind::Class, second);
    wait_published(&api, &[("local", "50Mi"), ("second", "50Mi")]).await;
    api.delete_claim(1);
    wait_published(&api, &[("local", "100Mi"), ("second", "100Mi")]).await;
    api.delete_object(ObjectKind::Class, "second");
    wait_published(&api, &[("local", "100Mi")]).await;
    let writes = |verb| api.request_count(verb, ObjectKind::StorageCapacity);
    let before = [RequestVerb::Create, RequestVerb::Patch, RequestVerb::Delete].map(writes);
    advance_time(2 * 3600).await;
    assert_eq!([RequestVerb::Create, RequestVerb::Patch, RequestVerb::Delete].map(writes), before, "idle");
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_claims_is_published_with_few_writes() {
    let (api, store) = (test_api(), store_of(100_000));
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_published(&api, &[("local", "100000Mi")]).await;
    for number in 0..300 {
        api.create_claim(number, json!({}));
    }
    wait_published(&api, &[("local", "85000Mi")]).await;
    let writes = api.request_count(RequestVerb::Patch, ObjectKind::StorageCapacity);
    assert!(writes <= 4, "{writes}");
}

#[tokio::test(start_paused = true)]
async fn a_restart_adopts_the_objects_and_removes_those_of_classes_that_are_gone() {
    let (api, store) = (test_api(), store_of(100));
    api.create_object(ObjectKind::Class, sample_class(json!({ "metadata": { "name": "second" } })));
    let node = TestNode::start_with_store(&api, &store).await;
    wait_published(&api, &[("local", "100Mi"), ("second", "100Mi")]).await;
    let uid = |api: &FakeApi| api.list_objects(ObjectKind::StorageCapacity)[0]["metadata"]["uid"].clone();
    node.crash().await;
    api.delete_object(ObjectKind::Class, "second");
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_published(&api, &[("local", "100Mi")]).await;
    assert_eq!(
        api.request_count(RequestVerb::Create, ObjectKind::StorageCapacity),
        2,
        "adopted: {}",
        uid(&api)
    );
}

#[tokio::test(start_paused = true)]
async fn objects_that_another_client_deletes_or_changes_are_repaired() {
    let (api, store) = (test_api(), store_of(100));
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_published(&api, &[("local", "100Mi")]).await;
    let name = || {
        let objects = api.list_objects(ObjectKind::StorageCapacity);
        objects[0]["metadata"]["name"].as_str().expect("a name").to_owned()
    };
    api.patch_object(ObjectKind::StorageCapacity, &name(), json!({ "capacity": "1Ti" }));
    wait_published(&api, &[("local", "100Mi")]).await;
    api.delete_object(ObjectKind::StorageCapacity, &name());
    wait_published(&api, &[("local", "100Mi")]).await;
    // A lost answer, and a conflict.
    api.fail_next(RequestVerb::Patch, ObjectKind::StorageCapacity, RequestFault::ResponseLost);
    api.fail_next(RequestVerb::Patch, ObjectKind::StorageCapacity, RequestFault::Status(409));
    api.create_claim(1, json!({}));
    wait_published(&api, &[("local", "50Mi")]).await;
}

async fn wait_deselected_after_publication(api: &FakeApi) {
    wait_until(api, |api| {
        let is_known = published(api) == [("local".to_owned(), "10Mi".to_owned())];
        assert!(is_known || !is_deselected(api, "claim-1"), "deselected before the capacity is known");
        is_deselected(api, "claim-1")
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_does_not_fit_waits_for_the_list_of_published_capacities() {
    let (api, store) = (test_api(), store_of(10));
    api.create_claim(1, json!({}));
    for _ in 0..2 {
        api.fail_next(RequestVerb::List, ObjectKind::StorageCapacity, RequestFault::Status(500));
    }
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_deselected_after_publication(&api).await;
}

#[tokio::test(start_paused = true)]
async fn the_capacity_is_acknowledged_before_the_node_is_deselected() {
    let (api, store) = (test_api(), store_of(10));
    // The first publication fails, so that the scheduler knows nothing when it selects the node; and so does that
    // before the deselection.
    for _ in 0..2 {
        api.fail_next(RequestVerb::Create, ObjectKind::StorageCapacity, RequestFault::Status(500));
    }
    let _node = TestNode::start_with_store(&api, &store).await;
    // Before it has listed the objects, it publishes none.
    wait_until(&api, |api| api.request_count(RequestVerb::Create, ObjectKind::StorageCapacity) > 0).await;
    api.create_claim(1, json!({}));
    wait_deselected_after_publication(&api).await;
    let notes = api.event_notes("claim-1");
    assert!(notes.iter().any(|note| note.contains("50Mi never fits on this node")), "{notes:?}");
}

#[tokio::test(start_paused = true)]
async fn without_the_right_to_publish_a_node_is_deselected_all_the_same() {
    // 422 is the denial of an admission policy.
    for code in [403, 422] {
        let (api, store) = (test_api(), store_of(10));
        for _ in 0..20 {
            api.fail_next(RequestVerb::Create, ObjectKind::StorageCapacity, RequestFault::Status(code));
        }
        api.create_claim(1, json!({}));
        let _node = TestNode::start_with_store(&api, &store).await;
        wait_until(&api, |api| is_deselected(api, "claim-1")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_rejected_object_does_not_keep_those_of_other_classes_from_being_published() {
    let (api, store) = (test_api(), store_of(100));
    api.create_object(ObjectKind::Class, sample_class(json!({ "metadata": { "name": "second" } })));
    api.fail_next(RequestVerb::Create, ObjectKind::StorageCapacity, RequestFault::Status(422));
    let _node = TestNode::start_with_store(&api, &store).await;
    wait_until(&api, |api| api.request_count(RequestVerb::Create, ObjectKind::StorageCapacity) > 0).await;
    let start = tokio::time::Instant::now();
    wait_until(&api, |api| published(api).len() == 1).await;
    assert!(start.elapsed().as_secs() < 1, "{:?}", start.elapsed());
    // The rejected one is tried again.
    wait_published(&api, &[("local", "100Mi"), ("second", "100Mi")]).await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_with_immediate_binding_goes_to_a_node_with_space() {
    let api = test_api();
    api.patch_object(ObjectKind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let (full, free) = (store_of(10), store_of(1000));
    let _full = start_on(&api, "node-a", &full).await;
    let _free = start_on(&api, "node-b", &free).await;
    for number in 1..=10 {
        let unselected = json!({ "metadata": { "annotations": { SELECTED_NODE: null } } });
        api.create_claim(number, unselected);
    }
    for number in 1..=10 {
        wait_bound(&api, &format!("claim-{number}")).await;
        let claim = api.get_object(ObjectKind::Claim, &format!("claim-{number}")).expect("a claim");
        assert_eq!(claim["metadata"]["annotations"][SELECTED_NODE], "node-b");
    }
    assert_eq!(
        api.request_count(RequestVerb::Patch, ObjectKind::Claim),
        10,
        "the full node selects itself for none"
    );
}

#[tokio::test(start_paused = true)]
async fn a_waiting_claim_is_bound_once_a_volume_is_removed() {
    let (api, store) = (test_api(), store_of(60));
    api.patch_object(ObjectKind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let _node = start_on(&api, NODE, &store).await;
    let unselected = || json!({ "metadata": { "annotations": { SELECTED_NODE: null } } });
    api.create_claim(1, unselected());
    wait_bound(&api, "claim-1").await;
    api.create_claim(2, unselected());
    advance_time(2 * 3600).await;
    assert!(is_deselected(&api, "claim-2"));
    let start = tokio::time::Instant::now();
    api.delete_claim(1);
    wait_bound(&api, "claim-2").await;
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_refused_between_two_publications_is_bound_once_a_volume_is_removed() {
    let (api, store) = (test_api(), store_of(100));
    let _node = start_on(&api, NODE, &store).await;
    wait_published(&api, &[("local", "100Mi")]).await;
    let immediate = json!({ "metadata": { "name": "immediate" }, "volumeBindingMode": "Immediate" });
    api.create_object(ObjectKind::Class, sample_class(immediate));
    let claim = |number: u32, size: &str| {
        let patch = json!({
            "metadata": { "annotations": { SELECTED_NODE: null } },
            "spec": {
                "storageClassName": "immediate", "resources": { "requests": { "storage": size } },
            },
        });
        api.create_claim(number, patch);
    };
    claim(1, "60Mi");
    wait_bound(&api, "claim-1").await;
    // The next publication is due five seconds after the first: it finds as much as that did.
    claim(2, "50Mi");
    advance_time(1).await;
    assert!(is_deselected(&api, "claim-2"), "refused");
    let start = tokio::time::Instant::now();
    api.delete_claim(1);
    wait_bound(&api, "claim-2").await;
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_store_is_lost_offers_nothing_until_it_is_back() {
    let api = test_api();
    let base = used_store(&api).await;
    let node = DirNode::start_reopening(&api, base.path());
    wait_until(&api, |api| !published(api).is_empty()).await;
    unmount(base.path());
    // The attempt to create its volume finds out that the store is lost.
    api.create_claim(2, json!({}));
    wait_published(&api, &[]).await;
    // Nor does a new process.
    node.stop().await;
    let node = DirNode::start_reopening(&api, base.path());
    advance_time(60).await;
    assert!(published(&api).is_empty());
    mount(base.path());
    wait_until(&api, |api| !published(api).is_empty()).await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_published_for_a_node_without_an_object_until_it_is_created() {
    let (api, store) = (test_api(), store_of(100));
    api.delete_object(ObjectKind::Node, NODE);
    let _node = TestNode::start_with_store(&api, &store).await;
    advance_time(60).await;
    assert!(published(&api).is_empty());
    let node = sample_node(NODE, json!({ "metadata": { "uid": "00000000-0000-4000-8000-00000000beef" } }));
    api.create_object(ObjectKind::Node, node);
    wait_published(&api, &[("local", "100Mi")]).await;
    let owner = &api.list_objects(ObjectKind::StorageCapacity)[0]["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"]),
        (&json!("Node"), &json!("00000000-0000-4000-8000-00000000beef"))
    );
}
