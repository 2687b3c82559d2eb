//! Claims in.

use nodekeel_fsquota::{Bytes, Inodes, Limits};
use nodekeel_provisioner::testing::objects::{NODE, claim, class, identity, uid, volume};
use nodekeel_provisioner::testing::{Fault, Kind, MemStore, Verb};
use nodekeel_provisioner::{Config, RunError, VolumeStore as _};
use serde_json::json;

use super::harness::{Node, api, bound, deps, id, pass, phase, told, until};

#[tokio::test(start_paused = true)]
async fn a_claim_is_bound_to_a_volume_with_its_limits_by_one_post_and_one_event() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    api.create(Kind::Claim, claim(1, json!({})));
    bound(&api, "claim-1").await;
    told(&api, "claim-1", "ProvisioningSucceeded").await;
    let limits = Limits { bytes: Some(Bytes(50 << 20)), inodes: Some(Inodes((50 << 20) / 2048)) };
    assert_eq!(node.store.usage(&id(1)).await.expect("a volume").limits, limits);
    assert_eq!(api.events("claim-1"), [("ProvisioningSucceeded".to_owned(), 1)]);
    let writes = [
        (Verb::Create, Kind::Volume),
        (Verb::Create, Kind::Event),
        (Verb::Patch, Kind::Claim),
        (Verb::Patch, Kind::Volume),
    ];
    assert_eq!(writes.map(|(verb, kind)| api.requests(verb, kind)), [1, 1, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_claims_takes_one_post_and_one_event_each() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    for number in 0..300 {
        api.create(Kind::Claim, claim(number, json!({})));
    }
    until(&api, |api| api.requests(Verb::Create, Kind::Event) == 300).await;
    pass(1).await;
    assert_eq!(api.list(Kind::Event).len(), 300);
    assert_eq!(node.store.list().await.expect("list").len(), 300);
    assert_eq!(
        [api.requests(Verb::Create, Kind::Volume), api.requests(Verb::Create, Kind::Event)],
        [300, 300]
    );
}

#[tokio::test(start_paused = true)]
async fn a_refused_claim_is_told_once_and_not_tried_again() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    let refused = [
        json!({ "accessModes": ["ReadWriteMany"] }),
        json!({ "volumeMode": "Block" }),
        json!({ "dataSource": { "kind": "VolumeSnapshot", "name": "backup" } }),
        json!({ "selector": {} }),
        json!({ "storageClassName": null }),
        json!({ "resources": { "requests": { "storage": "9223372036854775808" } } }),
        json!({ "resources": { "requests": { "storage": "0" } } }),
    ];
    for (number, spec) in (1..).zip(&refused) {
        api.create(Kind::Claim, claim(number, json!({ "spec": spec })));
        told(&api, &format!("claim-{number}"), "ProvisioningFailed").await;
    }
    pass(3600).await;
    for number in 1..=refused.len() {
        let name = format!("claim-{number}");
        assert_eq!(api.events(&name), [("ProvisioningFailed".to_owned(), 1)], "{:?}", api.notes(&name));
        assert_eq!(phase(&api, Kind::Claim, &name), "Pending");
    }
    assert_eq!((api.list(Kind::Volume).len(), node.store.list().await.expect("list")), (0, Vec::new()));
    assert_eq!(api.requests(Verb::Get, Kind::Claim), 0);
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_class_comes_later_is_told_and_then_bound() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    api.delete(Kind::Class, "local");
    api.create(Kind::Claim, claim(1, json!({})));
    told(&api, "claim-1", "ProvisioningFailed").await;
    assert!(api.notes("claim-1")[0].contains("storage class \"local\" does not exist"));
    assert_eq!(node.store.births(&id(1)), 0);
    api.create(Kind::Class, class(json!({})));
    bound(&api, "claim-1").await;
    assert_eq!(node.store.births(&id(1)), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_refused_for_its_class_is_bound_once_the_class_is_right() {
    let api = api();
    let _node = Node::start(&api, NODE).await;
    api.patch(Kind::Class, "local", json!({ "parameters": { "inodes": "none" } }));
    api.create(Kind::Claim, claim(1, json!({})));
    told(&api, "claim-1", "ProvisioningFailed").await;
    api.patch(Kind::Class, "local", json!({ "parameters": { "inodes": "5k" } }));
    bound(&api, "claim-1").await;
}

#[tokio::test(start_paused = true)]
async fn what_the_store_cannot_do_is_told_and_tried_again() {
    let (api, store) = (api(), MemStore::default());
    let _node = Node::over(&api, &store).await;
    for _ in 0..3 {
        store.fail_next("the disk is gone");
    }
    api.create(Kind::Claim, claim(1, json!({})));
    bound(&api, "claim-1").await;
    told(&api, "claim-1", "ProvisioningSucceeded").await;
    let events = api.events("claim-1");
    assert!(events.contains(&("ProvisioningFailed".to_owned(), 3)), "one event, counted up: {events:?}");
    assert!(api.notes("claim-1").iter().any(|note| note.contains("the disk is gone")));
}

#[tokio::test(start_paused = true)]
async fn a_node_without_room_gives_the_claim_up() {
    let (api, store) = (api(), MemStore::with_capacity(Bytes(1 << 20)));
    let _node = Node::over(&api, &store).await;
    api.create(Kind::Claim, claim(1, json!({})));
    told(&api, "claim-1", "ProvisioningFailed").await;
    until(&api, |api| {
        let claim = api.get(Kind::Claim, "claim-1").expect("the claim");
        claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"].is_null()
    })
    .await;
    assert!(api.notes("claim-1")[0].contains("no room"));
    assert_eq!((api.list(Kind::Volume).len(), store.births(&id(1))), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_fits_nowhere_is_taken_and_given_up_ever_more_slowly() {
    let (api, store) = (api(), MemStore::with_capacity(Bytes(1 << 20)));
    api.patch(Kind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let _node = Node::over(&api, &store).await;
    let unselected = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": null } } });
    api.create(Kind::Claim, claim(1, unselected));
    pass(3600).await;
    // 1, 2, 4 … 256 s and then twelve times in an hour, by two patches each.
    let patches = api.requests(Verb::Patch, Kind::Claim);
    assert!((20..=50).contains(&patches), "{patches} patches in an hour");
}

#[tokio::test(start_paused = true)]
async fn what_was_told_is_not_told_again_while_the_volume_has_not_been_heard_of() {
    let api = api();
    let _node = Node::start(&api, NODE).await;
    api.hold(Kind::Volume);
    // The claim isn't bound, because the volume names another; it is looked at again and again.
    api.create(Kind::Claim, claim(1, json!({ "metadata": { "namespace": "unbound" } })));
    told(&api, "claim-1", "ProvisioningSucceeded").await;
    for round in 0..5 {
        api.patch(
            Kind::Claim,
            "claim-1",
            json!({
                "metadata": { "labels": { "round": round.to_string() } },
                "spec": { "volumeName": null },
                "status": { "phase": "Pending" },
            }),
        );
        pass(10).await;
    }
    assert_eq!(api.events("claim-1"), [("ProvisioningSucceeded".to_owned(), 1)]);
}

#[tokio::test(start_paused = true)]
async fn an_immediate_claim_is_provisioned_once_among_several_nodes() {
    let api = api();
    api.patch(Kind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let mut nodes = Vec::new();
    for name in ["node-a", "node-b", "node-c", "node-d", "node-e"] {
        nodes.push(Node::start(&api, name).await);
    }
    let unselected = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": null } } });
    for number in 0..50 {
        api.create(Kind::Claim, claim(number, unselected.clone()));
    }
    until(&api, |api| api.list(Kind::Event).len() == 50).await;
    pass(60).await;
    for number in 0..50 {
        let births: u32 = nodes.iter().map(|node| node.store.births(&id(number))).sum();
        assert_eq!(births, 1, "claim {number}");
    }
    assert_eq!(api.requests(Verb::Create, Kind::Volume), 50);
    let used = nodes.iter().filter(|node| (0..50).any(|number| node.store.births(&id(number)) == 1)).count();
    assert!(used > 1, "chance spreads them");
}

#[tokio::test(start_paused = true)]
async fn nodes_that_take_a_claim_at_the_same_moment_do_not_share_it() {
    let api = api();
    api.patch(Kind::Class, "local", json!({ "volumeBindingMode": "Immediate" }));
    let mut nodes = Vec::new();
    for name in ["node-a", "node-b", "node-c"] {
        let mut config = Config::new(identity(name));
        config.take_within = std::time::Duration::ZERO;
        nodes.push(Node::with(config, deps(&api, &MemStore::default()), None).await);
    }
    let unselected = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": null } } });
    api.create(Kind::Claim, claim(1, unselected));
    bound(&api, "claim-1").await;
    pass(60).await;
    assert_eq!(nodes.iter().map(|node| node.store.births(&id(1))).sum::<u32>(), 1);
    assert_eq!(api.requests(Verb::Create, Kind::Volume), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_seen_as_it_was_before_its_volume_died_is_not_provisioned_again() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    api.hold(Kind::Claim);
    api.create(Kind::Claim, claim(1, json!({})));
    // The node sees it once, pending, and nothing of it afterwards.
    api.release(Kind::Claim);
    until(&api, |api| api.requests(Verb::Get, Kind::Claim) > 0).await;
    api.hold(Kind::Claim);
    bound(&api, "claim-1").await;
    api.delete(Kind::Claim, "claim-1");
    until(&api, |api| api.list(Kind::Volume).is_empty()).await;
    pass(600).await;
    assert_eq!((node.store.births(&id(1)), node.store.deaths(&id(1))), (1, 1));
    api.release(Kind::Claim);
    pass(600).await;
    assert_eq!(node.store.births(&id(1)), 1);
    assert_eq!(api.requests(Verb::Create, Kind::Volume), 1);
}

#[tokio::test(start_paused = true)]
async fn a_volumes_name_that_is_taken_is_told_and_nothing_overwritten() {
    let api = api();
    let _node = Node::start(&api, NODE).await;
    let other = json!({ "spec": { "claimRef": { "uid": uid(2) }, "csi": { "driver": "other.example" } } });
    let before = api.create(Kind::Volume, volume(1, other));
    api.create(Kind::Claim, claim(1, json!({})));
    told(&api, "claim-1", "ProvisioningFailed").await;
    assert!(api.notes("claim-1")[0].contains("exists already"));
    pass(3600).await;
    assert_eq!(api.events("claim-1"), [("ProvisioningFailed".to_owned(), 1)]);
    let after = api.get(Kind::Volume, id(1).as_str()).expect("it is still there");
    assert_eq!(before["spec"], after["spec"]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_lost_makes_no_second_volume_and_no_failure() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    api.fail_next(Verb::Create, Kind::Volume, Fault::Lost);
    api.create(Kind::Claim, claim(1, json!({})));
    bound(&api, "claim-1").await;
    pass(60).await;
    assert_eq!(node.store.births(&id(1)), 1);
    assert_eq!(
        (api.list(Kind::Volume).len(), api.list(Kind::Event).len()),
        (1, 0),
        "{:?}",
        api.notes("claim-1")
    );
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_never_answered_hold_nothing_up_for_ever() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    // As many as are worked on at the same time.
    for _ in 0..16 {
        api.fail_next(Verb::Get, Kind::Claim, Fault::Silent);
    }
    for _ in 0..16 {
        api.fail_next(Verb::Create, Kind::Volume, Fault::Silent);
        api.fail_next(Verb::Create, Kind::Event, Fault::Silent);
    }
    for number in 0..32 {
        api.create(Kind::Claim, claim(number, json!({})));
    }
    until(&api, |api| api.list(Kind::Volume).len() == 32).await;
    assert!(matches!(node.stop().await, Some(RunError::Cancelled)));
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_forbids_is_told_and_one_that_is_away_is_not() {
    let api = api();
    let _node = Node::start(&api, NODE).await;
    for fault in [Fault::Unreachable, Fault::Status(500), Fault::Status(409)] {
        api.fail_next(Verb::Create, Kind::Volume, fault);
    }
    api.create(Kind::Claim, claim(1, json!({})));
    bound(&api, "claim-1").await;
    told(&api, "claim-1", "ProvisioningSucceeded").await;
    assert_eq!(api.events("claim-1").len(), 1);
    api.fail_next(Verb::Create, Kind::Volume, Fault::Status(403));
    api.create(Kind::Claim, claim(2, json!({})));
    bound(&api, "claim-2").await;
    assert!(
        api.notes("claim-2").iter().any(|note| note.contains("forbidden: grant")),
        "{:?}",
        api.notes("claim-2")
    );
}
