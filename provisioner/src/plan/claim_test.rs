//! The table of decisions on claims.

use proptest::prelude::*;
use serde_json::{Value, json};

use k8s_openapi::api::core::v1::PersistentVolume;

use super::*;
use crate::testing::objects::{CLASS, DRIVER, NODE, claim, class, identity, uid, volume};

fn plan(claim_patch: Value, class_patch: Value) -> ClaimAction {
    let (claim, class) = (claim(1, claim_patch), class(class_patch));
    plan_claim(&identity(NODE), SeenClaim { claim: &claim, class: Some(&class), volume: None })
}

fn annotations(provisioner: Value, selected: Value) -> Value {
    json!({ "metadata": { "annotations": {
        "volume.kubernetes.io/storage-provisioner": provisioner,
        "volume.kubernetes.io/selected-node": selected,
    } } })
}

fn spec(patch: Value) -> ClaimAction {
    plan(json!({ "spec": patch }), json!({}))
}

fn provisioned(action: ClaimAction) -> VolumeSpec {
    match action {
        ClaimAction::Provision(spec) => *spec,
        other => panic!("not provisioned: {other:?}"),
    }
}

fn refused(action: ClaimAction) -> String {
    match action {
        ClaimAction::Refuse(refusal) => refusal.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

fn ignored(action: ClaimAction) -> ClaimIgnored {
    match action {
        ClaimAction::Ignore(why) => why,
        other => panic!("not ignored: {other:?}"),
    }
}

#[test]
fn our_claim_for_our_node_is_provisioned() {
    let spec = provisioned(plan(json!({}), json!({})));
    assert_eq!(spec.id.as_str(), format!("pvc-{}", uid(1)));
    assert_eq!(spec.capacity, Bytes(50 << 20));
    assert_eq!(spec.claim.uid, Some(uid(1)));
    assert_eq!(spec.claim.resource_version.as_deref(), Some("7"));
    assert_eq!((spec.class.as_str(), spec.reclaim), (CLASS, Reclaim::Delete));
}

#[test]
fn a_claim_of_another_driver_or_of_none_is_ignored() {
    for provisioner in [json!("other.example"), json!(""), Value::Null] {
        let action = plan(annotations(provisioner, json!(NODE)), json!({}));
        assert_eq!(ignored(action), ClaimIgnored::OtherDriver);
    }
    assert_eq!(ignored(plan(json!({}), json!({ "provisioner": "other" }))), ClaimIgnored::OtherDriver);
}

#[test]
fn the_stable_annotation_wins_over_the_beta_one_which_counts_alone() {
    let beta = |value| json!({ "volume.beta.kubernetes.io/storage-provisioner": value });
    let both = json!({ "metadata": { "annotations": beta("other.example") } });
    provisioned(plan(both, json!({})));
    let mut alone = annotations(Value::Null, json!(NODE));
    crate::testing::objects::merge(&mut alone["metadata"]["annotations"], beta(DRIVER));
    // A merge patch of a merge patch drops its nulls.
    alone["metadata"]["annotations"]["volume.kubernetes.io/storage-provisioner"] = Value::Null;
    provisioned(plan(alone, json!({})));
    let other = json!({ "metadata": { "annotations": {
        "volume.kubernetes.io/storage-provisioner": "other.example",
        "volume.beta.kubernetes.io/storage-provisioner": DRIVER,
    } } });
    assert_eq!(ignored(plan(other, json!({}))), ClaimIgnored::OtherDriver);
}

#[test]
fn a_claim_for_another_node_is_ignored() {
    assert_eq!(
        ignored(plan(annotations(json!(DRIVER), json!("node-b")), json!({}))),
        ClaimIgnored::OtherNode
    );
}

#[test]
fn without_a_selected_node_it_waits_for_its_consumer_or_is_taken() {
    for missing in [Value::Null, json!("")] {
        let unselected = annotations(json!(DRIVER), missing);
        assert_eq!(ignored(plan(unselected.clone(), json!({}))), ClaimIgnored::AwaitsNode);
        for mode in [json!("Immediate"), Value::Null] {
            let action = plan(unselected.clone(), json!({ "volumeBindingMode": mode }));
            assert_eq!(action, ClaimAction::TakeNode);
        }
    }
}

#[test]
fn an_immediate_claim_is_taken_only_where_its_class_allows() {
    let unselected = annotations(json!(DRIVER), Value::Null);
    let on = |values: Value| {
        let term =
            json!({ "matchLabelExpressions": [{ "key": "kubernetes.io/hostname", "values": values }] });
        plan(unselected.clone(), json!({ "volumeBindingMode": "Immediate", "allowedTopologies": [term] }))
    };
    assert_eq!(on(json!(["node-b", NODE])), ClaimAction::TakeNode);
    assert_eq!(ignored(on(json!(["node-b"]))), ClaimIgnored::OtherNode);
}

#[test]
fn a_claim_with_a_volume_is_ignored_in_every_phase() {
    for phase in ["Pending", "Bound", "Lost"] {
        let action = plan(json!({ "spec": { "volumeName": "x" }, "status": { "phase": phase } }), json!({}));
        assert_eq!(ignored(action), ClaimIgnored::HasVolume, "{phase}");
    }
}

#[test]
fn only_a_pending_claim_that_stays_is_provisioned() {
    provisioned(plan(json!({ "status": Value::Null }), json!({})));
    for phase in ["Lost", "Bound", "Unheard"] {
        assert_eq!(
            ignored(plan(json!({ "status": { "phase": phase } }), json!({}))),
            ClaimIgnored::NotPending
        );
    }
    let deleted = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
    assert_eq!(ignored(plan(deleted, json!({}))), ClaimIgnored::Deleted);
}

#[test]
fn a_claim_without_a_class_is_refused_and_one_with_an_unknown_class_waits() {
    for class in [Value::Null, json!("")] {
        assert!(refused(spec(json!({ "storageClassName": class }))).contains("names no storage class"));
    }
    let claim = claim(1, json!({}));
    let action = plan_claim(&identity(NODE), SeenClaim { claim: &claim, class: None, volume: None });
    assert_eq!(action, ClaimAction::Wait(ClaimRefusal::UnknownClass { class: CLASS.to_owned() }));
}

#[test]
fn missing_modes_and_policies_have_their_defaults() {
    provisioned(spec(json!({ "volumeMode": Value::Null })));
    let spec = provisioned(plan(
        json!({}),
        json!({ "reclaimPolicy": Value::Null, "volumeBindingMode": Value::Null }),
    ));
    assert_eq!(spec.reclaim, Reclaim::Delete);
    assert_eq!(provisioned(plan(json!({}), json!({ "reclaimPolicy": "Retain" }))).reclaim, Reclaim::Retain);
    assert!(refused(plan(json!({}), json!({ "reclaimPolicy": "Recycle" }))).contains("Recycle"));
}

#[test]
fn access_modes_of_one_node_are_copied_and_others_refused() {
    for modes in [json!(["ReadWriteOnce"]), json!(["ReadWriteOncePod"]), json!(["ReadOnlyMany"])] {
        assert_eq!(json!(provisioned(spec(json!({ "accessModes": modes }))).access_modes), modes);
    }
    let both = provisioned(spec(json!({ "accessModes": ["ReadOnlyMany", "ReadWriteOnce"] })));
    assert_eq!(both.access_modes, ["ReadWriteOnce", "ReadOnlyMany"], "the one that may write comes first");
    for modes in
        [json!(["ReadWriteMany"]), json!(["ReadWriteOnce", "ReadWriteMany"]), json!([]), json!(["x"])]
    {
        assert!(refused(spec(json!({ "accessModes": modes }))).contains("spec.accessModes"), "{modes}");
    }
}

#[test]
fn what_is_more_than_an_empty_directory_is_refused() {
    let source = json!({ "kind": "VolumeSnapshot", "name": "backup" });
    for (field, value) in [
        ("volumeMode", json!("Block")),
        ("volumeMode", json!("Unheard")),
        ("dataSource", source.clone()),
        ("dataSourceRef", source),
        ("selector", json!({ "matchLabels": { "a": "b" } })),
        ("volumeAttributesClassName", json!("gold")),
    ] {
        assert!(refused(spec(json!({ field: value }))).contains(field), "{field}");
    }
}

#[test]
fn a_size_is_exact_or_refused() {
    let sized = |storage: &str| spec(json!({ "resources": { "requests": { "storage": storage } } }));
    for (storage, bytes) in [("1", 1), ("0.5", 1), ("1500m", 2), ("1Gi", 1 << 30), ("1e3", 1000)] {
        assert_eq!(provisioned(sized(storage)).capacity, Bytes(bytes), "{storage}");
    }
    for storage in ["0", "-1", "9223372036854775808", "9223372036854775807", "8Ei", "many", ""] {
        assert!(refused(sized(storage)).contains("requested storage"), "{storage}");
    }
    assert!(refused(spec(json!({ "resources": Value::Null }))).contains("missing"));
}

#[test]
fn inodes_come_from_the_class_or_the_size() {
    let inodes = |storage: &str, parameters: Value| {
        let claim = json!({ "spec": { "resources": { "requests": { "storage": storage } } } });
        provisioned(plan(claim, json!({ "parameters": parameters }))).limits.inodes.map(|inodes| inodes.0)
    };
    assert_eq!(inodes("1Gi", Value::Null), Some((1 << 30) / 2048));
    assert_eq!(inodes("1", Value::Null), Some(1024));
    assert_eq!(inodes("1Gi", json!({ "inodes": "100k" })), Some(100_000));
    assert_eq!(inodes("1Gi", json!({ "inodes": "7", "csi.storage.k8s.io/fstype": "xfs" })), Some(7));
    for parameters in [
        json!({ "inodes": "0" }),
        json!({ "inodes": "-1" }),
        json!({ "inodes": "all" }),
        json!({ "inode": "7" }),
    ] {
        assert!(
            refused(plan(json!({}), json!({ "parameters": parameters }))).contains("parameter"),
            "{parameters}"
        );
    }
}

#[test]
fn a_claim_whose_uid_is_no_uuid_is_refused() {
    for uid in ["", "..", "../x", "1", "9F0E5D3C-1B2A-4C5D-8E6F-000000000001"] {
        assert!(refused(plan(json!({ "metadata": { "uid": uid } }), json!({}))).contains("UUID"), "{uid}");
    }
}

#[test]
fn what_is_beside_a_volume_of_its_name_is_done_or_refused() {
    let (claim, class) = (claim(1, json!({})), class(json!({})));
    let beside = |volume: &PersistentVolume| {
        plan_claim(&identity(NODE), SeenClaim { claim: &claim, class: Some(&class), volume: Some(volume) })
    };
    assert_eq!(ignored(beside(&volume(1, json!({})))), ClaimIgnored::HasVolume);
    for claim_ref in [json!({ "claimRef": { "uid": uid(2) } }), json!({ "claimRef": Value::Null })] {
        assert!(refused(beside(&volume(1, json!({ "spec": claim_ref })))).contains("exists already"));
    }
}

proptest! {
    #[test]
    fn no_claim_makes_it_panic_and_none_of_another_node_is_touched(
        node in "(node-[ab])?", phase in "(Pending|Bound|Lost)?", storage in ".{0,12}", mode in ".{0,12}", uid in ".{0,40}",
    ) {
        let claim = claim(1, json!({
            "metadata": { "uid": uid, "annotations": { "volume.kubernetes.io/selected-node": node } },
            "spec": { "volumeMode": mode, "resources": { "requests": { "storage": storage } } },
            "status": { "phase": phase },
        }));
        let class = class(json!({}));
        let action = plan_claim(&identity(NODE), SeenClaim { claim: &claim, class: Some(&class), volume: None });
        prop_assert!(node != "node-b" || matches!(action, ClaimAction::Ignore(ClaimIgnored::OtherNode)));
        if let ClaimAction::Provision(spec) = action {
            prop_assert!(spec.capacity.0 > 0 && spec.limits.bytes == Some(spec.capacity));
        }
    }
}
