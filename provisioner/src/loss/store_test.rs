//! The decision table for stores.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::json;

use crate::store_id::{StoreId, StoreIdentity};
use crate::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};
use crate::*;

fn store_id(number: u32) -> StoreId {
    sample_uid(number).parse().expect("a UUID")
}

fn volume_id(number: u32) -> VolumeId {
    VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
}

/// A volume that names a store, or none.
fn volume(number: u32, store: Option<u32>) -> PersistentVolume {
    let attributes = store.map(|store| json!({ STORE_ATTRIBUTE: store_id(store).as_str() }));
    sample_volume(number, json!({ "spec": { "csi": { "volumeAttributes": attributes } } }))
}

fn with_phase(mut volume: PersistentVolume, phase: &str) -> PersistentVolume {
    volume.status.get_or_insert_default().phase = Some(phase.to_owned());
    volume
}

fn plan(found: &StoreIdentity, present: &[u32], objects: &[PersistentVolume]) -> StoreAction {
    let present: BTreeSet<_> = present.iter().map(|number| volume_id(*number)).collect();
    plan_store(&sample_identity(NODE), found, &present, objects)
}

#[test]
fn a_store_gets_an_identity_only_where_no_volume_of_the_node_names_one() {
    let absent = StoreIdentity::Absent;
    assert_eq!(plan(&absent, &[], &[]), StoreAction::CreateIdentity);
    assert_eq!(plan(&absent, &[7], &[]), StoreAction::CreateIdentity);
    let rejected = StoreRejection::Absent { volume: volume_id(1), store: store_id(1) };
    for present in [&[][..], &[1]] {
        let action = plan(&absent, present, &[volume(1, Some(1))]);
        assert_eq!(action, StoreAction::Reject(rejected.clone()));
    }
}

#[test]
fn volumes_of_a_release_without_identities_show_which_directory_is_their_store() {
    let old = [volume(1, None), volume(2, None)];
    assert_eq!(plan(&StoreIdentity::Absent, &[2, 3], &old), StoreAction::CreateIdentity);
    let rejected = StoreRejection::WithoutVolumes { volume: volume_id(1), count: 2 };
    assert_eq!(plan(&StoreIdentity::Absent, &[3], &old), StoreAction::Reject(rejected));
    let other = StoreIdentity::Present(store_id(1));
    assert_eq!(plan(&other, &[], &old), StoreAction::Serve, "both may have been removed");
    let bound = [volume(1, None), with_phase(volume(2, None), "Bound")];
    assert_eq!(plan(&other, &[2], &bound), StoreAction::Serve);
    let rejected = StoreRejection::WithoutVolumes { volume: volume_id(2), count: 2 };
    assert_eq!(plan(&other, &[3], &bound), StoreAction::Reject(rejected));
}

#[test]
fn a_store_is_served_unless_the_volumes_of_the_node_name_only_others() {
    let found = StoreIdentity::Present(store_id(1));
    assert_eq!(plan(&found, &[], &[]), StoreAction::Serve);
    assert_eq!(plan(&found, &[], &[volume(1, Some(1))]), StoreAction::Serve);
    assert_eq!(plan(&found, &[], &[volume(2, Some(2)), volume(1, Some(1))]), StoreAction::Serve);
    let rejected = StoreRejection::Other { found: store_id(1), volume: volume_id(2), store: store_id(2) };
    assert_eq!(plan(&found, &[1], &[volume(2, Some(2))]), StoreAction::Reject(rejected));
    assert_eq!(plan(&StoreIdentity::Unsupported, &[], &[volume(2, Some(2))]), StoreAction::Serve);
}

#[test]
fn volumes_of_other_nodes_and_drivers_do_not_count() {
    let hostname = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"] });
    let elsewhere = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [hostname] }] } });
    let named = json!({ "volumeAttributes": { STORE_ATTRIBUTE: store_id(1).as_str() } });
    let foreign = [
        json!({ "spec": { "nodeAffinity": elsewhere, "csi": named } }),
        json!({ "spec": { "csi": { "driver": "other.example" } } }),
        json!({ "spec": { "csi": { "volumeHandle": "not a volume" } } }),
        json!({ "metadata": { "name": "another" } }),
    ];
    let foreign = foreign.map(|patch| sample_volume(1, patch));
    assert_eq!(plan(&StoreIdentity::Absent, &[], &foreign), StoreAction::CreateIdentity);
}

/// A volume of another node that names a store.
fn foreign_volume(number: u32, store: u32) -> PersistentVolume {
    let key = sample_identity(NODE).driver.topology_key();
    let expression = json!({ "key": key, "operator": "In", "values": ["node-b"] });
    let affinity = json!({ "required": { "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } });
    let attributes = json!({ STORE_ATTRIBUTE: store_id(store).as_str() });
    sample_volume(
        number,
        json!({ "spec": { "nodeAffinity": affinity, "csi": { "volumeAttributes": attributes } } }),
    )
}

#[test]
fn the_store_of_another_nodes_volumes_is_rejected_by_the_name_of_that_node() {
    let found = StoreIdentity::Present(store_id(1));
    let node = "node-b".to_owned();
    let moved = StoreRejection::Moved { store: store_id(1), node, volume: volume_id(9).to_string() };
    for ours in [vec![], vec![volume(1, Some(2))], vec![volume(1, None)]] {
        let objects: Vec<_> = ours.into_iter().chain([foreign_volume(9, 1)]).collect();
        assert_eq!(plan(&found, &[1], &objects), StoreAction::Reject(moved.clone()), "{objects:?}");
    }
    let both = [volume(1, Some(1)), foreign_volume(9, 1)];
    assert_eq!(plan(&found, &[], &both), StoreAction::Serve, "this node has volumes in it");
    assert_eq!(plan(&found, &[], &[foreign_volume(9, 2)]), StoreAction::Serve, "it is in another store");
    assert_eq!(plan(&StoreIdentity::Absent, &[], &[foreign_volume(9, 1)]), StoreAction::CreateIdentity);
}

#[test]
fn a_volume_declared_lost_keeps_no_new_disk_from_being_served() {
    let lost = |number, store: u32, declared: u32| {
        let mut volume = volume(number, Some(store));
        let annotation = sample_identity(NODE).driver.lost_annotation();
        let annotations = volume.metadata.annotations.get_or_insert_default();
        annotations.insert(annotation, store_id(declared).to_string());
        volume
    };
    let absent = StoreIdentity::Absent;
    assert_eq!(plan(&absent, &[], &[lost(1, 1, 1)]), StoreAction::CreateIdentity);
    assert_eq!(plan(&StoreIdentity::Present(store_id(2)), &[], &[lost(1, 1, 1)]), StoreAction::Serve);
    // Another disk was declared lost, or not all of them.
    for objects in [vec![lost(1, 1, 2)], vec![lost(1, 1, 1), volume(2, Some(1))]] {
        assert!(matches!(plan(&absent, &[], &objects), StoreAction::Reject(StoreRejection::Absent { .. })));
    }
}

#[test]
fn a_rejection_says_what_to_do() {
    let (volume, store, found) = (volume_id(1), store_id(1), store_id(2));
    let replace = format!("run `provisionerd store replace --lost {store}` on this node");
    let delete = "delete the PersistentVolumes of this node and their finalizers".to_owned();
    for (rejection, end) in [
        (StoreRejection::Absent { volume: volume.clone(), store: store.clone() }, &replace),
        (StoreRejection::WithoutVolumes { volume: volume.clone(), count: 1 }, &delete),
        (StoreRejection::Other { found, volume, store }, &replace),
    ] {
        let text = rejection.to_string();
        assert!(text.contains("mount the") || text.contains("mount their"), "{text}");
        assert!(text.ends_with(end), "{text}");
    }
}

fn snapshot_id(number: u32) -> SnapshotId {
    SnapshotId::from_uid(&sample_uid(number)).expect("a UUID")
}

fn plan_new(present: &[u32], ready: &[u32], volumes: &[PersistentVolume]) -> StoreAction {
    let [present, ready] =
        [present, ready].map(|ids| ids.iter().map(|number| snapshot_id(*number)).collect());
    plan_new_store(&sample_identity(NODE), &present, &ready, volumes)
}

#[test]
fn a_directory_without_the_snapshots_of_a_node_without_volumes_is_not_a_new_store() {
    let rejected = StoreRejection::WithoutSnapshots { snapshot: snapshot_id(1), count: 2 };
    for present in [&[][..], &[3]] {
        assert_eq!(plan_new(present, &[1, 2], &[]), StoreAction::Reject(rejected.clone()));
    }
    assert_eq!(plan_new(&[2], &[1, 2], &[]), StoreAction::CreateIdentity, "it has one of them");
    assert_eq!(plan_new(&[], &[], &[]), StoreAction::CreateIdentity);
    let text = rejected.to_string();
    assert!(text.contains("mount their disk") && text.ends_with("and their finalizers"), "{text}");
}

#[test]
fn volumes_of_the_node_decide_before_its_snapshots() {
    // Otherwise they would have been rejected before: they are present, or declared lost.
    let ours = sample_volume(1, json!({}));
    assert_eq!(plan_new(&[], &[1], &[ours]), StoreAction::CreateIdentity);
    let foreign = sample_volume(1, json!({ "spec": { "csi": { "driver": "other.example" } } }));
    assert!(matches!(plan_new(&[], &[1], &[foreign]), StoreAction::Reject(_)));
}
