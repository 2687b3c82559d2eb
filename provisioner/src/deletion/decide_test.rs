//! The decision table for volumes.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::testing::objects::{DRIVER, NODE, sample_identity, sample_uid, sample_volume};
use crate::*;

const DELETED: &str = "2026-01-01T00:00:00Z";

fn plan_patched(patch: Value) -> VolumeAction {
    plan_volume(&sample_identity(NODE), &sample_volume(1, patch))
}

fn affinity(expressions: Value) -> Value {
    json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": expressions }] } } } })
}

fn hostname(values: Value) -> Value {
    json!([{ "key": "kubernetes.io/hostname", "operator": "In", "values": values }])
}

fn state(phase: &str, policy: &str, deleted: bool, finalizers: Value) -> Value {
    json!({
        "metadata": { "deletionTimestamp": deleted.then_some(DELETED), "finalizers": finalizers },
        "spec": { "persistentVolumeReclaimPolicy": policy },
        "status": { "phase": phase },
    })
}

fn id() -> VolumeId {
    VolumeId::from_uid(&sample_uid(1)).expect("a UUID")
}

#[test]
fn a_released_volume_is_deleted_and_a_retained_one_is_kept() {
    let ours = json!([FINALIZER]);
    let none = json!([]);
    let ignore = VolumeAction::Ignore;
    let table = [
        (state("Released", "Delete", false, ours.clone()), VolumeAction::Delete(id())),
        (state("Released", "Delete", false, none.clone()), VolumeAction::Delete(id())),
        (state("Released", "Delete", true, ours.clone()), VolumeAction::Delete(id())),
        (state("Released", "Delete", true, none.clone()), ignore(VolumeIgnoreReason::FinalizerRemoved)),
        (state("Bound", "Delete", false, ours.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Bound", "Delete", true, ours.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Bound", "Delete", false, none.clone()), VolumeAction::AddFinalizer),
        (state("Bound", "Delete", true, none.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Available", "Delete", false, ours.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Failed", "Delete", false, ours.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Available", "Delete", true, ours.clone()), VolumeAction::Delete(id())),
        (state("Failed", "Delete", true, ours.clone()), VolumeAction::Delete(id())),
        (state("", "Delete", false, ours.clone()), ignore(VolumeIgnoreReason::InUse)),
        (state("Released", "Retain", false, none.clone()), ignore(VolumeIgnoreReason::Retained)),
        (state("Released", "Retain", true, none.clone()), ignore(VolumeIgnoreReason::Retained)),
        (state("Released", "Retain", true, ours.clone()), VolumeAction::RemoveFinalizer),
        (state("Released", "Recycle", false, none.clone()), ignore(VolumeIgnoreReason::Retained)),
        (state("Bound", "Retain", false, ours), VolumeAction::RemoveFinalizer),
    ];
    for (patch, action) in table {
        assert_eq!(plan_patched(patch.clone()), action, "{patch}");
    }
}

#[test]
fn without_finalizers_a_released_volume_is_deleted_even_while_its_object_is_deleting() {
    let identity = ProvisionerIdentity { finalizer: None, ..sample_identity(NODE) };
    for deleted in [false, true] {
        let volume = sample_volume(1, state("Released", "Delete", deleted, json!([])));
        assert_eq!(plan_volume(&identity, &volume), VolumeAction::Delete(id()));
    }
    let bound = sample_volume(1, state("Bound", "Delete", false, json!([])));
    assert_eq!(plan_volume(&identity, &bound), VolumeAction::Ignore(VolumeIgnoreReason::InUse));
}

#[test]
fn a_volume_is_ours_by_the_drivers_label_or_by_the_hostname_of_the_first_release() {
    for key in ["topology.volumes.nodekeel.example/node", "kubernetes.io/hostname"] {
        let expression = |node: &str| json!([{ "key": key, "operator": "In", "values": [node] }]);
        assert_eq!(plan_patched(affinity(expression(NODE))), VolumeAction::Delete(id()), "{key}");
        let other = plan_patched(affinity(expression("node-b")));
        assert_eq!(other, VolumeAction::Ignore(VolumeIgnoreReason::OtherNode), "{key}");
    }
    let other_driver = json!([{ "key": "topology.other.example/node", "operator": "In", "values": [NODE] }]);
    assert_eq!(plan_patched(affinity(other_driver)), VolumeAction::Ignore(VolumeIgnoreReason::OtherNode));
}

#[test]
fn a_volume_bound_to_another_claim_is_recorded_and_deleted_after_that_claim() {
    let rebound = |phase: &str, policy: &str, recorded: Value| {
        let mut patch = state(phase, policy, false, json!([FINALIZER]));
        patch["spec"]["claimRef"] = json!({ "name": "claim-2", "uid": sample_uid(2) });
        patch["metadata"]["annotations"] = json!({ "volumes.nodekeel.example/claim-uid": recorded });
        plan_patched(patch)
    };
    for policy in ["Delete", "Retain"] {
        let record = VolumeAction::RecordClaim { uid: sample_uid(2) };
        assert_eq!(rebound("Bound", policy, Value::Null), record);
        assert_eq!(rebound("Bound", policy, json!(sample_uid(3))), record);
        assert_ne!(rebound("Bound", policy, json!(sample_uid(2))), record);
    }
    let released = |recorded| rebound("Released", "Delete", recorded);
    assert_eq!(released(json!(sample_uid(2))), VolumeAction::Delete(id()));
    for other in [Value::Null, json!(sample_uid(3))] {
        let action = released(other);
        let VolumeAction::Reject(rejection) = action else { panic!("{action:?}") };
        assert!(rejection.to_string().contains("volumes.nodekeel.example/claim-uid="), "{rejection}");
    }
    let retained = rebound("Released", "Retain", json!(sample_uid(2)));
    assert_eq!(retained, VolumeAction::RemoveFinalizer);
}

#[test]
fn another_drivers_volume_is_ignored() {
    for csi in [Value::Null, json!({ "driver": "other.example" })] {
        assert_eq!(
            plan_patched(json!({ "spec": { "csi": csi } })),
            VolumeAction::Ignore(VolumeIgnoreReason::OtherDriver)
        );
    }
    assert_eq!(
        plan_volume(&sample_identity(NODE), &Default::default()),
        VolumeAction::Ignore(VolumeIgnoreReason::OtherDriver)
    );
}

#[test]
fn a_volume_that_is_not_on_this_node_alone_is_ignored() {
    let other_operator = json!([{ "key": "kubernetes.io/hostname", "operator": "NotIn", "values": [NODE] }]);
    let other_key = json!([{ "key": "zone", "operator": "In", "values": [NODE] }]);
    let missing_values = json!([{ "key": "kubernetes.io/hostname", "operator": "In" }]);
    let two_terms = json!([{ "matchExpressions": hostname(json!([NODE])) }, { "matchExpressions": [] }]);
    let patches = [
        json!({ "spec": { "nodeAffinity": Value::Null } }),
        json!({ "spec": { "nodeAffinity": { "required": Value::Null } } }),
        json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [] } } } }),
        json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": two_terms } } } }),
        affinity(json!([])),
        affinity(hostname(json!([]))),
        affinity(hostname(json!(["node-b"]))),
        affinity(hostname(json!([NODE, "node-b"]))),
        affinity(other_operator),
        affinity(other_key),
        affinity(missing_values),
    ];
    for patch in patches {
        assert_eq!(
            plan_patched(patch.clone()),
            VolumeAction::Ignore(VolumeIgnoreReason::OtherNode),
            "{patch}"
        );
    }
}

#[test]
fn a_handle_that_is_not_the_name_of_our_volume_is_rejected() {
    let long = "x".repeat(4096);
    let handles = ["", ".", "..", "../x", "/", "/etc", "a\0b", "pvc-1", long.as_str(), "PVC-9f0e5d3c"];
    for handle in handles {
        let action = plan_patched(json!({ "spec": { "csi": { "volumeHandle": handle } } }));
        let VolumeAction::Reject(VolumeRejection::InvalidHandle { handle: shown }) = action else {
            panic!("{handle:?}: {action:?}")
        };
        assert!(shown.len() <= 64 * 4);
    }
    let other = json!({ "spec": { "csi": { "volumeHandle": format!("pvc-{}", sample_uid(2)) } } });
    assert!(matches!(plan_patched(other), VolumeAction::Reject(VolumeRejection::HandleMismatch { .. })));
}

#[test]
fn a_volume_that_was_not_created_by_us_or_for_this_claim_is_rejected() {
    for by in [Value::Null, json!("other.example")] {
        let patch = json!({ "metadata": { "annotations": { "pv.kubernetes.io/provisioned-by": by } } });
        assert_eq!(plan_patched(patch), VolumeAction::Reject(VolumeRejection::NotProvisioned));
    }
    let other = json!({ "spec": { "claimRef": { "uid": sample_uid(2) } } });
    assert!(matches!(plan_patched(other), VolumeAction::Reject(VolumeRejection::ClaimMismatch { .. })));
    let incomplete = [
        Value::Null,
        json!({ "uid": Value::Null }),
        json!({ "name": "" }),
        json!({ "namespace": Value::Null }),
    ];
    for claim in incomplete {
        let mut patch = state("Available", "Delete", true, json!([FINALIZER]));
        patch["spec"]["claimRef"] = claim;
        assert_eq!(plan_patched(patch), VolumeAction::Reject(VolumeRejection::NoClaim { handle: id() }));
    }
}

#[test]
fn a_foreign_volume_keeps_its_finalizers() {
    let foreign = json!({ "driver": DRIVER, "volumeHandle": ".." });
    for policy in ["Delete", "Retain"] {
        for finalizers in [json!([]), json!([FINALIZER])] {
            let mut patch = state("Bound", policy, false, finalizers);
            patch["spec"]["csi"] = foreign.clone();
            assert!(matches!(plan_patched(patch), VolumeAction::Ignore(_)));
        }
    }
}

proptest! {
    #[test]
    fn planning_a_volume_never_panics_and_deletes_only_the_volume_of_its_name(
        handle in ".{0,50}", name in ".{0,50}", phase in "(Released|Bound|Failed|Available)?", policy in "(Delete|Retain)?",
    ) {
        let action = plan_patched(json!({
            "metadata": { "name": name },
            "spec": { "csi": { "volumeHandle": handle }, "persistentVolumeReclaimPolicy": policy },
            "status": { "phase": phase },
        }));
        if let VolumeAction::Delete(id) = action {
            prop_assert_eq!((id.as_str(), id.as_str()), (handle.as_str(), name.as_str()));
        }
    }
}
