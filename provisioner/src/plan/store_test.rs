//! The decision table for stores.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::json;

use super::*;
use crate::store_id::{StoreId, StoreIdentity};
use crate::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};

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
    plan_store(&sample_identity(NODE), (found, &present), objects)
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

#[test]
fn a_rejection_says_what_to_do() {
    let (volume, store, found) = (volume_id(1), store_id(1), store_id(2));
    for rejection in [
        StoreRejection::Absent { volume: volume.clone(), store: store.clone() },
        StoreRejection::WithoutVolumes { volume: volume.clone(), count: 1 },
        StoreRejection::Other { found, volume, store },
    ] {
        let text = rejection.to_string();
        assert!(text.contains("mount the"), "{text}");
        assert!(text.ends_with("delete the PersistentVolumes of this node and their finalizers"), "{text}");
    }
}
