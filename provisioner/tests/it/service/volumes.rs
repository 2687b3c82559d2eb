//! Volumes out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_fsquota::{Bytes, Inodes, Limits, Usage};
use nodekeel_provisioner::testing::objects::{NODE, claim, identity, uid, volume};
use nodekeel_provisioner::testing::{FakeApi, Fault, Kind, MemStore, Verb};
use nodekeel_provisioner::{
    Config, Deps, GuardError, Identity, Reservation, VolumeGuard, VolumeId, VolumeStore as _,
};
use serde_json::{Value, json};

use super::harness::{Node, api, deps, id, no_volumes, pass, phase, told, until};

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

async fn provisioned(api: &FakeApi, number: u32) {
    api.create(Kind::Claim, claim(number, json!({})));
    told(api, &format!("claim-{number}"), "ProvisioningSucceeded").await;
}

#[tokio::test(start_paused = true)]
async fn a_deleted_claim_takes_its_volume_along_by_one_delete_and_one_patch() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    provisioned(&api, 1).await;
    api.delete(Kind::Claim, "claim-1");
    no_volumes(&api).await;
    pass(60).await;
    assert_eq!((node.store.births(&id(1)), node.store.deaths(&id(1))), (1, 1));
    assert_eq!([api.requests(Verb::Delete, Kind::Volume), api.requests(Verb::Patch, Kind::Volume)], [1, 1]);
    assert_eq!(api.events(id(1).as_str()), []);
}

#[tokio::test(start_paused = true)]
async fn without_the_finalizer_there_is_none_and_one_delete() {
    let api = api();
    let config = Config::new(Identity { finalizer: None, ..identity(NODE) });
    let node = Node::with(config, deps(&api, &MemStore::default()), None).await;
    provisioned(&api, 1).await;
    let made = api.get(Kind::Volume, id(1).as_str()).expect("a volume");
    assert!(made["metadata"]["finalizers"].is_null());
    api.delete(Kind::Claim, "claim-1");
    no_volumes(&api).await;
    assert_eq!(node.store.deaths(&id(1)), 1);
    assert_eq!([api.requests(Verb::Delete, Kind::Volume), api.requests(Verb::Patch, Kind::Volume)], [1, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_volume_deleted_while_bound_stays_until_its_claim_goes() {
    let api = api();
    let node = Node::start(&api, NODE).await;
    provisioned(&api, 1).await;
    api.delete(Kind::Volume, id(1).as_str());
    pass(600).await;
    assert_eq!(phase(&api, Kind::Volume, id(1).as_str()), "Bound");
    assert_eq!(node.store.deaths(&id(1)), 0);
    api.delete(Kind::Claim, "claim-1");
    no_volumes(&api).await;
    assert_eq!(node.store.deaths(&id(1)), 1);
    assert_eq!(api.requests(Verb::Delete, Kind::Volume), 0);
}

#[tokio::test(start_paused = true)]
async fn a_kept_volume_is_kept_and_its_object_can_go() {
    let api = api();
    api.patch(Kind::Class, "local", json!({ "reclaimPolicy": "Retain" }));
    let node = Node::start(&api, NODE).await;
    provisioned(&api, 1).await;
    node.store.fill(&id(1), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    api.delete(Kind::Claim, "claim-1");
    pass(600).await;
    assert_eq!(phase(&api, Kind::Volume, id(1).as_str()), "Released");
    api.delete(Kind::Volume, id(1).as_str());
    no_volumes(&api).await;
    pass(600).await;
    assert_eq!(node.store.deaths(&id(1)), 0);
}

#[tokio::test(start_paused = true)]
async fn a_changed_reclaim_policy_changes_the_finalizer() {
    let api = api();
    let _node = Node::start(&api, NODE).await;
    provisioned(&api, 1).await;
    let finalizers = |api: &FakeApi| {
        let volume = api.get(Kind::Volume, id(1).as_str()).expect("a volume");
        volume["metadata"]["finalizers"].as_array().map_or(0, Vec::len)
    };
    let policy = |policy: &str| json!({ "spec": { "persistentVolumeReclaimPolicy": policy } });
    api.patch(Kind::Volume, id(1).as_str(), policy("Retain"));
    until(&api, |api| finalizers(api) == 0).await;
    api.patch(Kind::Volume, id(1).as_str(), policy("Delete"));
    until(&api, |api| finalizers(api) == 1).await;
}

async fn hostile(patch: Value) -> (FakeApi, Node) {
    let (api, store) = (api(), MemStore::default());
    for number in [1, 2] {
        store.create(&id(number), LIMITS).await.expect("create");
        store.fill(&id(number), Usage { bytes: Bytes(1 << 20), inodes: Inodes(7) });
    }
    let node = Node::over(&api, &store).await;
    api.create(Kind::Volume, volume(1, patch));
    pass(3600).await;
    (api, node)
}

#[tokio::test(start_paused = true)]
async fn a_hostile_handle_deletes_nothing_and_is_told_once() {
    let long = "x".repeat(4096);
    let other = format!("pvc-{}", uid(2));
    for handle in ["", ".", "..", "../x", "/", "/etc", "a\0b", long.as_str(), other.as_str()] {
        let (api, node) = hostile(json!({ "spec": { "csi": { "volumeHandle": handle } } })).await;
        assert_eq!(api.events(id(1).as_str()), [("VolumeFailedDelete".to_owned(), 1)], "{handle:?}");
        assert_eq!(phase(&api, Kind::Volume, id(1).as_str()), "Released");
        assert_eq!(node.store.list().await.expect("list"), [id(1), id(2)]);
        assert_eq!(
            [api.requests(Verb::Delete, Kind::Volume), api.requests(Verb::Patch, Kind::Volume)],
            [0, 0]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_another_claim_or_without_our_mark_deletes_nothing_and_is_told_once() {
    let unmarked = json!({ "metadata": { "annotations": { "pv.kubernetes.io/provisioned-by": null } } });
    for patch in [json!({ "spec": { "claimRef": { "uid": uid(9) } } }), unmarked] {
        let (api, node) = hostile(patch).await;
        assert_eq!(api.events(id(1).as_str()), [("VolumeFailedDelete".to_owned(), 1)]);
        assert_eq!(node.store.list().await.expect("list"), [id(1), id(2)]);
    }
}

#[tokio::test(start_paused = true)]
async fn another_nodes_volume_and_a_malformed_one_are_let_be_without_a_word() {
    let elsewhere = json!([{ "matchExpressions": [{ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] }] }]);
    for affinity in [Value::Null, json!({}), json!({ "required": { "nodeSelectorTerms": elsewhere } })] {
        let (api, node) = hostile(json!({ "spec": { "nodeAffinity": null } })).await;
        api.patch(Kind::Volume, id(1).as_str(), json!({ "spec": { "nodeAffinity": affinity } }));
        pass(60).await;
        assert_eq!(api.events(id(1).as_str()), []);
        assert_eq!(node.store.list().await.expect("list"), [id(1), id(2)]);
    }
    let (api, node) = hostile(json!({ "spec": { "csi": null } })).await;
    assert_eq!((api.events(id(1).as_str()), node.store.list().await.expect("list").len()), (Vec::new(), 2));
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_claim_lives_is_not_deleted_whatever_its_phase_says() {
    let here = id(1).to_string();
    for volume_name in ["", here.as_str()] {
        let (api, store) = (api(), MemStore::default());
        store.create(&id(1), LIMITS).await.expect("create");
        api.create(Kind::Claim, claim(1, json!({ "spec": { "volumeName": volume_name } })));
        api.create(Kind::Volume, volume(1, json!({ "spec": { "claimRef": { "name": "another" } } })));
        let _node = Node::over(&api, &store).await;
        told(&api, id(1).as_str(), "VolumeFailedDelete").await;
        pass(3600).await;
        assert_eq!(store.deaths(&id(1)), 0);
        let notes = api.notes(id(1).as_str());
        assert!(notes[0].contains("claim-1 still exists"), "{notes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_is_pointed_at_another_claim_is_not_deleted_while_its_own_lives() {
    for patch in [json!({ "name": "another" }), json!({ "namespace": "another" })] {
        let api = api();
        let node = Node::start(&api, NODE).await;
        provisioned(&api, 1).await;
        api.patch(Kind::Volume, id(1).as_str(), json!({ "spec": { "claimRef": patch } }));
        until(&api, |api| phase(api, Kind::Volume, id(1).as_str()) == "Released").await;
        pass(3600).await;
        assert_eq!(node.store.deaths(&id(1)), 0);
        assert_eq!(api.events(id(1).as_str())[0].0, "VolumeFailedDelete");
        api.delete(Kind::Claim, "claim-1");
        no_volumes(&api).await;
        assert_eq!(node.store.deaths(&id(1)), 1, "and it goes once the claim has gone");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_claim_has_no_place_is_refused_with_the_way_out() {
    for claim in [json!({ "namespace": "" }), json!({ "name": "" }), json!({ "uid": null })] {
        let (api, node) =
            hostile(json!({ "spec": { "claimRef": claim }, "status": { "phase": "Released" } })).await;
        assert_eq!(node.store.list().await.expect("list"), [id(1), id(2)]);
        let notes = api.notes(id(1).as_str());
        assert!(notes[0].contains("finalizer"), "{notes:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_whose_claim_is_bound_elsewhere_is_deleted() {
    let (api, store) = (api(), MemStore::default());
    store.create(&id(1), LIMITS).await.expect("create");
    api.create(Kind::Claim, claim(1, json!({ "spec": { "volumeName": "elsewhere" } })));
    let _node = Node::over(&api, &store).await;
    api.create(Kind::Volume, volume(1, json!({})));
    no_volumes(&api).await;
    assert_eq!(store.deaths(&id(1)), 1);
}

/// Says that volumes are in use until it is told otherwise.
#[derive(Debug, Default)]
struct InUse(AtomicBool);

impl VolumeGuard for InUse {
    fn reserve(&self, id: &VolumeId) -> Result<Reservation, GuardError> {
        match self.0.load(Ordering::Relaxed) {
            true => Ok(Reservation::new(())),
            false => {
                Err(GuardError::InUse { id: id.clone(), by: "a pod that was deleted by force".to_owned() })
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_in_use_is_not_deleted_and_goes_once_it_is_free() {
    let (api, guard) = (api(), Arc::new(InUse::default()));
    let store = MemStore::default();
    let deps = Deps { guard: Some(guard.clone()), ..deps(&api, &store) };
    let node = Node::with(Config::new(identity(NODE)), deps, Some(&store)).await;
    provisioned(&api, 1).await;
    api.delete(Kind::Claim, "claim-1");
    told(&api, id(1).as_str(), "VolumeFailedDelete").await;
    pass(3600).await;
    assert_eq!((node.store.deaths(&id(1)), api.requests(Verb::Delete, Kind::Volume)), (0, 0));
    let notes = api.notes(id(1).as_str());
    assert!(notes[0].contains("in use on this node (a pod that was deleted by force)"), "{notes:?}");
    guard.0.store(true, Ordering::Relaxed);
    no_volumes(&api).await;
    assert_eq!(node.store.deaths(&id(1)), 1);
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_cannot_be_removed_is_told_and_tried_again() {
    let (api, store) = (api(), MemStore::default());
    let _node = Node::over(&api, &store).await;
    provisioned(&api, 1).await;
    store.fail_next("busy");
    store.fail_next("busy");
    api.delete(Kind::Claim, "claim-1");
    no_volumes(&api).await;
    assert_eq!(api.events(id(1).as_str()), [("VolumeFailedDelete".to_owned(), 2)]);
    assert_eq!(store.deaths(&id(1)), 1);
}

#[tokio::test(start_paused = true)]
async fn lost_answers_and_conflicts_end_in_the_same_state() {
    let faults = [
        (Verb::Delete, Fault::Lost),
        (Verb::Delete, Fault::Unreachable),
        (Verb::Patch, Fault::Lost),
        (Verb::Patch, Fault::Status(409)),
        (Verb::Get, Fault::Status(500)),
        (Verb::Get, Fault::Silent),
        (Verb::Delete, Fault::Silent),
        (Verb::Patch, Fault::Silent),
    ];
    for (verb, fault) in faults {
        let api = api();
        let node = Node::start(&api, NODE).await;
        provisioned(&api, 1).await;
        api.fail_next(verb, Kind::Volume, fault);
        api.delete(Kind::Claim, "claim-1");
        no_volumes(&api).await;
        assert_eq!(node.store.deaths(&id(1)), 1, "{verb:?} {fault:?}");
    }
}
