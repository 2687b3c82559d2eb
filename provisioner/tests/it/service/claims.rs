//! Provisioning of claims.

use std::time::Duration;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::testing::objects::{
    DRIVER, NODE, sample_class, sample_identity, sample_uid, sample_volume,
};
use nodekeel_provisioner::testing::{MemStore, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{ProvisionerConfig, RunError, SELECTED_NODE, VolumeStore as _};
use serde_json::{Value, json};

use super::harness::{
    ApiFixture as _, TestNode, advance_time, id, phase, test_api, test_deps, wait_bound, wait_for_event,
    wait_until,
};

#[tokio::test(start_paused = true)]
async fn each_claim_is_bound_to_a_volume_with_its_limits_by_one_post_and_one_event() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    for number in 0..300 {
        api.create_claim(number, json!({}));
    }
    wait_until(&api, |api| api.request_count(RequestVerb::Create, ObjectKind::Event) == 300).await;
    advance_time(1).await;
    let limits = QuotaLimits { bytes: Some(Bytes(50 << 20)), inodes: Some(Inodes((50 << 20) / 2048)) };
    for number in 0..300 {
        let claim = format!("claim-{number}");
        assert_eq!(phase(&api, ObjectKind::Claim, &claim), "Bound");
        assert_eq!(api.event_counts(&claim), [("ProvisioningSucceeded".to_owned(), 1)]);
        assert_eq!(node.store.usage(&id(number)).await.expect("a volume").limits, limits);
    }
    let writes = |kind| api.request_counts(kind, [RequestVerb::Create, RequestVerb::Patch]);
    assert_eq!(writes(ObjectKind::Volume), [300, 0]);
    assert_eq!(writes(ObjectKind::Claim), [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_store_failure_gets_an_event_and_is_retried() {
    let (api, store) = (test_api(), MemStore::default());
    let _node = TestNode::start_with_store(&api, &store).await;
    for _ in 0..3 {
        store.fail_next("the disk is gone");
    }
    api.create_claim(1, json!({}));
    wait_for_event(&api, "claim-1", "ProvisioningSucceeded").await;
    let events = api.event_counts("claim-1");
    assert!(events.contains(&("ProvisioningFailed".to_owned(), 3)), "one event, counted: {events:?}");
    assert!(api.event_notes("claim-1").iter().any(|note| note.contains("the disk is gone")));
}

#[tokio::test(start_paused = true)]
async fn a_node_that_the_author_of_a_claim_has_selected_is_refused_where_the_class_does_not_allow_it() {
    let (api, zone) = (test_api(), "topology.kubernetes.io/zone");
    let node = TestNode::start(&api, NODE).await;
    let label = json!({ "key": zone, "values": ["east"] });
    let topologies = json!([{ "matchLabelExpressions": [label] }]);
    api.create_object(
        ObjectKind::Class,
        sample_class(json!({ "metadata": { "name": "east" }, "allowedTopologies": topologies })),
    );
    api.create_claim(1, json!({ "spec": { "storageClassName": "east" } }));
    advance_time(3600).await;
    assert_eq!(phase(&api, ObjectKind::Claim, "claim-1"), "Pending");
    assert_eq!(api.event_counts("claim-1"), [("ProvisioningFailed".to_owned(), 1)]);
    assert!(api.event_notes("claim-1")[0].contains("allowedTopologies"), "{:?}", api.event_notes("claim-1"));
    // It is in that zone now.
    api.patch_object(ObjectKind::Node, NODE, json!({ "metadata": { "labels": { zone: "east" } } }));
    wait_bound(&api, "claim-1").await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_claim_gets_one_event_and_no_retry() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    let rejected = [
        json!({ "accessModes": ["ReadWriteMany"] }),
        json!({ "volumeMode": "Unheard" }),
        json!({ "dataSource": { "kind": "VolumeSnapshot", "name": "backup" } }),
        json!({ "selector": {} }),
        json!({ "storageClassName": null }),
        json!({ "resources": { "requests": { "storage": "9223372036854775808" } } }),
        json!({ "resources": { "requests": { "storage": "0" } } }),
    ];
    for (number, spec) in (1..).zip(&rejected) {
        api.create_claim(number, json!({ "spec": spec }));
        wait_for_event(&api, &format!("claim-{number}"), "ProvisioningFailed").await;
    }
    advance_time(3600).await;
    for number in 1..=rejected.len() {
        let name = format!("claim-{number}");
        assert_eq!(
            api.event_counts(&name),
            [("ProvisioningFailed".to_owned(), 1)],
            "{:?}",
            api.event_notes(&name)
        );
        assert_eq!(phase(&api, ObjectKind::Claim, &name), "Pending");
    }
    assert_eq!(
        (api.list_objects(ObjectKind::Volume).len(), node.store.list().await.expect("list")),
        (0, Vec::new())
    );
    assert_eq!(api.request_count(RequestVerb::Get, ObjectKind::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_class_is_created_later_gets_an_event_and_is_bound() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.delete_object(ObjectKind::Class, "local");
    // The watches of classes and claims are separate.
    advance_time(1).await;
    api.create_claim(1, json!({}));
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    assert!(api.event_notes("claim-1")[0].contains("storage class \"local\" does not exist"));
    assert_eq!(node.store.create_count(&id(1)), 0);
    api.create_object(ObjectKind::Class, sample_class(json!({})));
    wait_bound(&api, "claim-1").await;
    assert_eq!(node.store.create_count(&id(1)), 1);
    // Once the claim is bound, its class may be deleted for good.
    api.delete_object(ObjectKind::Class, "local");
    api.delete_claim(1);
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_rejected_for_its_class_is_bound_once_the_class_is_fixed() {
    let api = test_api();
    let _node = TestNode::start(&api, NODE).await;
    api.patch_object(ObjectKind::Class, "local", json!({ "parameters": { "inodes": "none" } }));
    // The watches of classes and claims are separate.
    advance_time(1).await;
    api.create_claim(1, json!({}));
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    api.patch_object(ObjectKind::Class, "local", json!({ "parameters": { "inodes": "5k" } }));
    wait_bound(&api, "claim-1").await;
}

#[tokio::test(start_paused = true)]
async fn a_node_without_free_space_deselects_itself() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(1 << 20)));
    let _node = TestNode::start_with_store(&api, &store).await;
    api.create_claim(1, json!({}));
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    wait_until(&api, |api| {
        let claim = api.get_object(ObjectKind::Claim, "claim-1").expect("the claim");
        claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"].is_null()
    })
    .await;
    assert!(api.event_notes("claim-1")[0].contains("no room for volume"));
    assert_eq!((api.list_objects(ObjectKind::Volume).len(), store.create_count(&id(1))), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fits_nowhere_is_rescheduled_with_backoff() {
    let (api, store) = (test_api(), MemStore::with_capacity(Bytes(1 << 20)));
    let _node = TestNode::start_with_store(&api, &store).await;
    api.create_claim(1, json!({}));
    let selected = |node: Value| json!({ "metadata": { "annotations": { SELECTED_NODE: node } } });
    // A scheduler that knows no other node.
    let scheduler = async {
        loop {
            api.wait_until(|api| {
                let claim = api.get_object(ObjectKind::Claim, "claim-1").expect("the claim");
                claim["metadata"]["annotations"][SELECTED_NODE].is_null()
            })
            .await;
            api.patch_object(ObjectKind::Claim, "claim-1", selected(json!(NODE)));
        }
    };
    let hour = Duration::from_secs(3600);
    tokio::time::timeout(hour, scheduler).await.expect_err("it never fits");
    // After 1, 2, 4 … 256 s, and then twelve times per hour.
    let patches = api.request_count(RequestVerb::Patch, ObjectKind::Claim);
    assert!((10..=30).contains(&patches), "{patches} patches in an hour");
}

#[tokio::test(start_paused = true)]
async fn a_success_event_is_not_repeated_while_the_volume_is_not_in_the_cache() {
    let api = test_api();
    let _node = TestNode::start(&api, NODE).await;
    api.pause_watches(ObjectKind::Volume);
    // The claim is not bound, because the volume names another one; each change reconciles it again.
    api.create_claim(1, json!({ "metadata": { "namespace": "unbound" } }));
    wait_for_event(&api, "claim-1", "ProvisioningSucceeded").await;
    for round in 0..5 {
        api.patch_object(
            ObjectKind::Claim,
            "claim-1",
            json!({
                "metadata": { "labels": { "round": round.to_string() } },
                "spec": { "volumeName": null },
                "status": { "phase": "Pending" },
            }),
        );
        advance_time(10).await;
    }
    assert_eq!(api.event_counts("claim-1"), [("ProvisioningSucceeded".to_owned(), 1)]);
}

#[tokio::test(start_paused = true)]
async fn an_immediate_claim_is_provisioned_once_among_several_nodes() {
    // Without a delay, all nodes select themselves at once.
    for delay in [None, Some(Duration::ZERO)] {
        let api = test_api();
        api.patch_object(ObjectKind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
        let mut nodes = Vec::new();
        for name in ["node-a", "node-b", "node-c", "node-d", "node-e"] {
            let mut config = ProvisionerConfig::new(sample_identity(name));
            config.node_selection_delay = delay.unwrap_or(config.node_selection_delay);
            nodes.push(TestNode::start_with(config, test_deps(&api, &MemStore::default()), None).await);
        }
        for number in 0..50 {
            api.create_claim(number, json!({ "metadata": { "annotations": { SELECTED_NODE: null } } }));
        }
        wait_until(&api, |api| api.list_objects(ObjectKind::Event).len() >= 50).await;
        advance_time(60).await;
        for number in 0..50 {
            let created: u32 = nodes.iter().map(|node| node.store.create_count(&id(number))).sum();
            assert_eq!(created, 1, "claim {number}, delay {delay:?}");
        }
        assert_eq!(api.request_count(RequestVerb::Create, ObjectKind::Volume), 50);
        let has_any = |node: &&TestNode| (0..50).any(|number| node.store.create_count(&id(number)) == 1);
        let used = nodes.iter().filter(has_any).count();
        assert!(used > 1 || delay.is_some(), "random delays spread them");
    }
}

#[tokio::test(start_paused = true)]
async fn of_nodes_that_know_each_other_one_asks_for_an_immediate_claim() {
    let api = test_api();
    api.patch_object(ObjectKind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let mut nodes = Vec::new();
    for name in ["node-a", "node-b", "node-c", "node-d", "node-e"] {
        let drivers = json!([{ "name": DRIVER, "nodeID": name, "topologyKeys": [] }]);
        let csi_node = json!({ "metadata": { "name": name }, "spec": { "drivers": drivers } });
        api.create_object(ObjectKind::CsiNode, csi_node);
        nodes.push(TestNode::start(&api, name).await);
    }
    // One of them is dead.
    nodes.pop().expect("a node").crash().await;
    for number in 0..50 {
        api.create_claim(number, json!({ "metadata": { "annotations": { SELECTED_NODE: null } } }));
    }
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).len() == 50).await;
    advance_time(60).await;
    assert_eq!(api.request_count(RequestVerb::Patch, ObjectKind::Claim), 50);
    let has_any = |node: &&TestNode| (0..50).any(|number| node.store.create_count(&id(number)) == 1);
    assert_eq!(nodes.iter().filter(has_any).count(), 4, "they share the claims");
    // No class needs it any more.
    let lists = || api.request_count(RequestVerb::List, ObjectKind::CsiNode);
    let before = lists();
    api.delete_object(ObjectKind::Class, "local");
    advance_time(1).await;
    api.reset_watches();
    advance_time(60).await;
    assert_eq!(lists(), before);
}

#[tokio::test(start_paused = true)]
async fn an_unschedulable_node_takes_no_immediate_claim_until_it_is_schedulable() {
    let tainted =
        json!({ "taints": [{ "key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule" }] });
    for spec in [json!({ "unschedulable": true }), tainted] {
        let api = test_api();
        api.patch_object(ObjectKind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
        api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": spec }));
        let (a, b) = (TestNode::start(&api, "node-a").await, TestNode::start(&api, "node-b").await);
        let unselected =
            json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": null } } });
        for number in 0..20 {
            api.create_claim(number, unselected.clone());
        }
        wait_until(&api, |api| api.list_objects(ObjectKind::Volume).len() == 20).await;
        advance_time(60).await;
        assert_eq!(a.store.list().await.expect("list"), [], "{spec}");
        assert_eq!(b.store.list().await.expect("list").len(), 20);

        // Alone, it takes the claim once it is schedulable again.
        b.stop().await;
        api.create_claim(20, unselected);
        advance_time(600).await;
        assert_eq!(phase(&api, ObjectKind::Claim, "claim-20"), "Pending");
        api.patch_object(ObjectKind::Node, "node-a", json!({ "spec": null }));
        wait_bound(&api, "claim-20").await;
        assert_eq!(a.store.create_count(&id(20)), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stale_claim_is_not_provisioned_again_after_its_volume_was_deleted() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.pause_watches(ObjectKind::Claim);
    api.create_claim(1, json!({}));
    // The node sees the pending claim once, and no later change.
    api.resume_watches(ObjectKind::Claim);
    wait_until(&api, |api| api.request_count(RequestVerb::Get, ObjectKind::Claim) > 0).await;
    api.pause_watches(ObjectKind::Claim);
    wait_bound(&api, "claim-1").await;
    api.delete_claim(1);
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).is_empty()).await;
    advance_time(600).await;
    assert_eq!((node.store.create_count(&id(1)), node.store.remove_count(&id(1))), (1, 1));
    api.resume_watches(ObjectKind::Claim);
    advance_time(600).await;
    assert_eq!(node.store.create_count(&id(1)), 1);
    assert_eq!(api.request_count(RequestVerb::Create, ObjectKind::Volume), 1);
}

#[tokio::test(start_paused = true)]
async fn a_volume_name_conflict_gets_an_event_and_overwrites_nothing() {
    let api = test_api();
    let _node = TestNode::start(&api, NODE).await;
    let other =
        json!({ "spec": { "claimRef": { "uid": sample_uid(2) }, "csi": { "driver": "other.example" } } });
    let before = api.create_object(ObjectKind::Volume, sample_volume(1, other));
    api.create_claim(1, json!({}));
    wait_for_event(&api, "claim-1", "ProvisioningFailed").await;
    assert!(api.event_notes("claim-1")[0].contains("already exists"));
    advance_time(3600).await;
    assert_eq!(api.event_counts("claim-1"), [("ProvisioningFailed".to_owned(), 1)]);
    let after = api.get_object(ObjectKind::Volume, id(1).as_str()).expect("still exists");
    assert_eq!(before["spec"], after["spec"]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_response_creates_no_second_volume_and_no_failure() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::ResponseLost);
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    advance_time(60).await;
    assert_eq!(node.store.create_count(&id(1)), 1);
    assert_eq!(
        (api.list_objects(ObjectKind::Volume).len(), api.list_objects(ObjectKind::Event).len()),
        (1, 0),
        "{:?}",
        api.event_notes("claim-1")
    );
}

#[tokio::test(start_paused = true)]
async fn unanswered_requests_time_out_and_block_nothing() {
    let api = test_api();
    let node = TestNode::start(&api, NODE).await;
    // As many as are reconciled concurrently.
    for _ in 0..16 {
        api.fail_next(RequestVerb::Get, ObjectKind::Claim, RequestFault::NoResponse);
    }
    for _ in 0..16 {
        api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::NoResponse);
        api.fail_next(RequestVerb::Create, ObjectKind::Event, RequestFault::NoResponse);
    }
    for number in 0..32 {
        api.create_claim(number, json!({}));
    }
    wait_until(&api, |api| api.list_objects(ObjectKind::Volume).len() == 32).await;
    assert!(matches!(node.stop().await, RunError::Canceled));
}

#[tokio::test(start_paused = true)]
async fn a_forbidden_request_gets_an_event_and_an_unreachable_server_none() {
    let api = test_api();
    let _node = TestNode::start(&api, NODE).await;
    for fault in [RequestFault::Unreachable, RequestFault::Status(500), RequestFault::Status(409)] {
        api.fail_next(RequestVerb::Create, ObjectKind::Volume, fault);
    }
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;
    wait_for_event(&api, "claim-1", "ProvisioningSucceeded").await;
    assert_eq!(api.event_counts("claim-1").len(), 1);
    api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::Status(403));
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    assert!(
        api.event_notes("claim-2").iter().any(|note| note.contains("forbidden: grant")),
        "{:?}",
        api.event_notes("claim-2")
    );
    assert!(api.event_notes("claim-2").iter().all(|note| !note.contains("Status {") && note.len() < 200));
}
