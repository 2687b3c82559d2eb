//! The decision table for claims.

use proptest::prelude::*;
use serde_json::{Value, json};

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::testing::objects::{
    CLASS, DRIVER, NODE, sample_claim, sample_class, sample_identity, sample_uid, sample_volume,
};
use crate::*;
use nodekeel_fsquota::Bytes;

fn plan_patched(claim_patch: Value, class_patch: Value) -> ClaimAction {
    let (claim, class) = (sample_claim(1, claim_patch), sample_class(class_patch));
    plan_claim(&sample_identity(NODE), ObservedClaim { claim: &claim, class: Some(&class), volume: None })
}

fn annotations(provisioner: Value, selected: Value) -> Value {
    json!({ "metadata": { "annotations": {
        "volume.kubernetes.io/storage-provisioner": provisioner,
        "volume.kubernetes.io/selected-node": selected,
    } } })
}

fn plan_claim_spec(patch: Value) -> ClaimAction {
    plan_patched(json!({ "spec": patch }), json!({}))
}

fn expect_provision(action: ClaimAction) -> VolumeSpec {
    match action {
        ClaimAction::Provision(spec) => *spec,
        other => panic!("not provisioned: {other:?}"),
    }
}

fn expect_rejection(action: ClaimAction) -> String {
    match action {
        ClaimAction::Reject(rejection) => rejection.to_string(),
        other => panic!("not rejected: {other:?}"),
    }
}

fn expect_ignored(action: ClaimAction) -> ClaimIgnoreReason {
    match action {
        ClaimAction::Ignore(why) => why,
        other => panic!("not ignored: {other:?}"),
    }
}

#[test]
fn our_claim_for_our_node_is_provisioned() {
    let spec = expect_provision(plan_patched(json!({}), json!({})));
    assert_eq!(spec.id.as_str(), format!("pvc-{}", sample_uid(1)));
    assert_eq!(spec.capacity, Bytes(50 << 20));
    assert_eq!(spec.claim_ref.uid, Some(sample_uid(1)));
    assert_eq!(spec.claim_ref.resource_version.as_deref(), Some("7"));
    assert_eq!((spec.storage_class.as_str(), spec.reclaim_policy), (CLASS, ReclaimPolicy::Delete));
}

#[test]
fn a_claim_of_another_driver_or_of_none_is_ignored() {
    for provisioner in [json!("other.example"), json!(""), Value::Null] {
        let action = plan_patched(annotations(provisioner, json!(NODE)), json!({}));
        assert_eq!(expect_ignored(action), ClaimIgnoreReason::OtherDriver);
    }
    assert_eq!(
        expect_ignored(plan_patched(json!({}), json!({ "provisioner": "other" }))),
        ClaimIgnoreReason::OtherDriver
    );
}

#[test]
fn the_stable_annotation_wins_over_the_beta_one_which_counts_alone() {
    let beta = |value| json!({ "volume.beta.kubernetes.io/storage-provisioner": value });
    let both = json!({ "metadata": { "annotations": beta("other.example") } });
    expect_provision(plan_patched(both, json!({})));
    let mut alone = annotations(Value::Null, json!(NODE));
    crate::testing::objects::merge_patch(&mut alone["metadata"]["annotations"], beta(DRIVER));
    // A merge patch of a merge patch drops its nulls.
    alone["metadata"]["annotations"]["volume.kubernetes.io/storage-provisioner"] = Value::Null;
    expect_provision(plan_patched(alone, json!({})));
    let other = json!({ "metadata": { "annotations": {
        "volume.kubernetes.io/storage-provisioner": "other.example",
        "volume.beta.kubernetes.io/storage-provisioner": DRIVER,
    } } });
    assert_eq!(expect_ignored(plan_patched(other, json!({}))), ClaimIgnoreReason::OtherDriver);
}

#[test]
fn a_class_with_an_unknown_mount_option_is_rejected_at_the_claim() {
    for known in [json!([]), json!(["noexec", "nodev"]), json!(["ro,suid", ""]), Value::Null] {
        expect_provision(plan_patched(json!({}), json!({ "mountOptions": known })));
    }
    for unknown in [json!(["noatime"]), json!(["noexec,noatime"]), json!(["nodev", "noatime"])] {
        let text = expect_rejection(plan_patched(json!({}), json!({ "mountOptions": unknown })));
        assert!(text.contains("mountOptions \"noatime\"") && text.contains("noexec"), "{text}");
    }
}

#[test]
fn a_class_may_name_the_node_by_the_drivers_label_or_its_hostname() {
    let topologies = |key: &str, node: &str| {
        let label = json!({ "key": key, "values": [node] });
        json!({ "volumeBindingMode": "Immediate", "allowedTopologies": [{ "matchLabelExpressions": [label] }] })
    };
    let unselected = annotations(json!(DRIVER), Value::Null);
    for key in ["topology.volumes.nodekeel.example/node", "kubernetes.io/hostname"] {
        assert_eq!(plan_patched(unselected.clone(), topologies(key, NODE)), ClaimAction::SelectNode);
        let other = plan_patched(unselected.clone(), topologies(key, "node-b"));
        assert_eq!(expect_ignored(other), ClaimIgnoreReason::OtherNode);
    }
}

#[test]
fn a_claim_for_another_node_is_ignored() {
    assert_eq!(
        expect_ignored(plan_patched(annotations(json!(DRIVER), json!("node-b")), json!({}))),
        ClaimIgnoreReason::OtherNode
    );
}

#[test]
fn a_claim_without_a_selected_node_waits_for_its_consumer_or_selects_this_node() {
    for missing in [Value::Null, json!("")] {
        let unselected = annotations(json!(DRIVER), missing);
        assert_eq!(
            expect_ignored(plan_patched(unselected.clone(), json!({}))),
            ClaimIgnoreReason::WaitsForConsumer
        );
        for mode in [json!("Immediate"), Value::Null] {
            let action = plan_patched(unselected.clone(), json!({ "volumeBindingMode": mode }));
            assert_eq!(action, ClaimAction::SelectNode);
        }
    }
}

#[test]
fn an_immediate_claim_selects_only_nodes_that_its_class_allows() {
    let unselected = annotations(json!(DRIVER), Value::Null);
    let on = |values: Value| {
        let term =
            json!({ "matchLabelExpressions": [{ "key": "kubernetes.io/hostname", "values": values }] });
        plan_patched(
            unselected.clone(),
            json!({ "volumeBindingMode": "Immediate", "allowedTopologies": [term] }),
        )
    };
    assert_eq!(on(json!(["node-b", NODE])), ClaimAction::SelectNode);
    assert_eq!(expect_ignored(on(json!(["node-b"]))), ClaimIgnoreReason::OtherNode);
}

#[test]
fn a_claim_with_a_volume_is_ignored_in_every_phase() {
    for phase in ["Pending", "Bound", "Lost"] {
        let action =
            plan_patched(json!({ "spec": { "volumeName": "x" }, "status": { "phase": phase } }), json!({}));
        assert_eq!(expect_ignored(action), ClaimIgnoreReason::HasVolume, "{phase}");
    }
}

#[test]
fn only_a_pending_claim_that_stays_is_provisioned() {
    expect_provision(plan_patched(json!({ "status": Value::Null }), json!({})));
    for phase in ["Lost", "Bound", "Unheard"] {
        assert_eq!(
            expect_ignored(plan_patched(json!({ "status": { "phase": phase } }), json!({}))),
            ClaimIgnoreReason::NotPending
        );
    }
    let deleted = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
    assert_eq!(expect_ignored(plan_patched(deleted, json!({}))), ClaimIgnoreReason::Deleting);
}

#[test]
fn a_claim_without_a_class_is_rejected_and_one_with_an_unknown_class_waits() {
    for class in [Value::Null, json!("")] {
        assert!(
            expect_rejection(plan_claim_spec(json!({ "storageClassName": class })))
                .contains("has no storage class")
        );
    }
    let claim = sample_claim(1, json!({}));
    let action =
        plan_claim(&sample_identity(NODE), ObservedClaim { claim: &claim, class: None, volume: None });
    assert_eq!(action, ClaimAction::Wait(ClaimRejection::UnknownClass { class: CLASS.to_owned() }));
}

#[test]
fn missing_modes_and_policies_get_their_defaults() {
    expect_provision(plan_claim_spec(json!({ "volumeMode": Value::Null })));
    let spec = expect_provision(plan_patched(
        json!({}),
        json!({ "reclaimPolicy": Value::Null, "volumeBindingMode": Value::Null }),
    ));
    assert_eq!(spec.reclaim_policy, ReclaimPolicy::Delete);
    assert_eq!(
        expect_provision(plan_patched(json!({}), json!({ "reclaimPolicy": "Retain" }))).reclaim_policy,
        ReclaimPolicy::Retain
    );
    assert!(
        expect_rejection(plan_patched(json!({}), json!({ "reclaimPolicy": "Recycle" }))).contains("Recycle")
    );
}

#[test]
fn access_modes_of_one_node_are_copied_and_others_rejected() {
    for modes in [json!(["ReadWriteOnce"]), json!(["ReadWriteOncePod"]), json!(["ReadOnlyMany"])] {
        assert_eq!(
            json!(expect_provision(plan_claim_spec(json!({ "accessModes": modes }))).access_modes),
            modes
        );
    }
    let both = expect_provision(plan_claim_spec(json!({ "accessModes": ["ReadOnlyMany", "ReadWriteOnce"] })));
    assert_eq!(
        both.access_modes,
        ["ReadWriteOnce", "ReadOnlyMany"],
        "the mode that permits writing comes first"
    );
    for modes in
        [json!(["ReadWriteMany"]), json!(["ReadWriteOnce", "ReadWriteMany"]), json!([]), json!(["x"])]
    {
        assert!(
            expect_rejection(plan_claim_spec(json!({ "accessModes": modes }))).contains("spec.accessModes"),
            "{modes}"
        );
    }
}

#[test]
fn claims_for_unknown_or_existing_volumes_are_rejected() {
    for (field, value) in
        [("volumeMode", json!("Unheard")), ("selector", json!({ "matchLabels": { "a": "b" } }))]
    {
        assert!(expect_rejection(plan_claim_spec(json!({ field: value }))).contains(field), "{field}");
    }
}

#[test]
fn a_size_is_exact_or_rejected() {
    let sized =
        |storage: &str| plan_claim_spec(json!({ "resources": { "requests": { "storage": storage } } }));
    for (storage, bytes) in [("1", 1), ("0.5", 1), ("1500m", 2), ("1Gi", 1 << 30), ("1e3", 1000)] {
        assert_eq!(expect_provision(sized(storage)).capacity, Bytes(bytes), "{storage}");
    }
    for storage in ["0", "-1", "9223372036854775808", "9223372036854775807", "8Ei", "many", ""] {
        assert!(expect_rejection(sized(storage)).contains("invalid storage request"), "{storage}");
    }
    assert!(expect_rejection(plan_claim_spec(json!({ "resources": Value::Null }))).contains("missing"));
}

#[test]
fn inodes_come_from_the_class_or_the_size() {
    let inodes = |storage: &str, parameters: Value| {
        let claim = json!({ "spec": { "resources": { "requests": { "storage": storage } } } });
        expect_provision(plan_patched(claim, json!({ "parameters": parameters })))
            .limits
            .inodes
            .map(|inodes| inodes.0)
    };
    assert_eq!(inodes("1Gi", Value::Null), Some((1 << 30) / 2048));
    assert_eq!(inodes("1", Value::Null), Some(1024));
    assert_eq!(inodes("1Gi", json!({ "inodes": "100k" })), Some(100_000));
    assert_eq!(inodes("1Gi", json!({ "inodes": "7", "csi.storage.k8s.io/pv/name": "a" })), Some(7));
    assert_eq!(inodes("1Gi", json!({ "inodes": "7", "strict": "false" })), Some(7));
    for parameters in [
        json!({ "inodes": "0" }),
        json!({ "inodes": "-1" }),
        json!({ "inodes": "all" }),
        json!({ "inode": "7" }),
    ] {
        assert!(
            expect_rejection(plan_patched(json!({}), json!({ "parameters": parameters })))
                .contains("parameter"),
            "{parameters}"
        );
    }
}

#[test]
fn a_strict_class_with_devices_is_rejected_at_the_claim() {
    let strict = |options| json!({ "parameters": { "strict": "true" }, "mountOptions": [options] });
    let text = expect_rejection(plan_patched(json!({}), strict("nodev,dev")));
    assert!(text.contains("mountOptions \"dev\" is not supported by strict volumes"), "{text}");
    expect_provision(plan_patched(json!({}), strict("dev,nodev")));
    expect_provision(plan_patched(json!({}), json!({ "mountOptions": ["dev"] })));
}

/// The class of volumes of this kind, and the claim's volumeMode.
fn expect_kind(mode: &str, parameters: Value) -> VolumeSpec {
    let claim = json!({ "spec": { "volumeMode": mode, "resources": { "requests": { "storage": "1Gi" } } } });
    expect_provision(plan_patched(claim, json!({ "parameters": parameters, "mountOptions": ["noexec"] })))
}

#[test]
fn the_claim_and_its_class_say_what_a_volume_is() {
    let fs_type = |name: &str| json!({ "strict": "true", "csi.storage.k8s.io/fstype": name });
    for (mode, parameters, kind) in [
        ("Filesystem", json!({}), VolumeKind::Directory),
        ("", json!({ "strict": "false" }), VolumeKind::Directory),
        ("Filesystem", json!({ "strict": "true" }), VolumeKind::Image(ImageFormat::Ext4)),
        ("Filesystem", fs_type(""), VolumeKind::Image(ImageFormat::Ext4)),
        ("Filesystem", fs_type("ext4"), VolumeKind::Image(ImageFormat::Ext4)),
        ("", fs_type("xfs"), VolumeKind::Image(ImageFormat::Xfs)),
        ("Block", json!({}), VolumeKind::Image(ImageFormat::Block)),
        ("Block", fs_type("xfs"), VolumeKind::Image(ImageFormat::Block)),
        ("Block", json!({ "inodes": "7" }), VolumeKind::Image(ImageFormat::Block)),
        ("Block", json!({ "csi.storage.k8s.io/fstype": "btrfs" }), VolumeKind::Image(ImageFormat::Block)),
    ] {
        let spec = expect_kind(mode, parameters.clone());
        assert_eq!(spec.kind, kind, "{mode}, {parameters}");
        assert_eq!(spec.limits.bytes, Some(Bytes(1 << 30)));
        assert_eq!(spec.limits.inodes.is_some(), kind == VolumeKind::Directory, "{mode}, {parameters}");
        assert_eq!(spec.mount_options.is_empty(), mode == "Block", "a device is not mounted");
    }
}

#[test]
fn a_class_whose_parameters_contradict_each_other_is_rejected_by_name() {
    for (parameters, named, advice) in [
        (json!({ "strict": "yes" }), "\"strict\"", "\"true\" or \"false\""),
        (json!({ "csi.storage.k8s.io/fstype": "ext4" }), "fstype\"", "set strict: \"true\""),
        (json!({ "strict": "false", "csi.storage.k8s.io/fstype": "xfs" }), "fstype\"", "set strict"),
        (json!({ "strict": "true", "csi.storage.k8s.io/fstype": "btrfs" }), "\"btrfs\"", "use ext4 or xfs"),
        (json!({ "strict": "true", "csi.storage.k8s.io/fstype": "block" }), "\"block\"", "use ext4 or xfs"),
        (json!({ "strict": "true", "inodes": "7" }), "\"inodes\"", "no inode limit"),
        (json!({ "stict": "true" }), "\"stict\"", "known: inodes, strict"),
    ] {
        let text = expect_rejection(plan_patched(json!({}), json!({ "parameters": parameters })));
        assert!(text.contains(named) && text.contains(advice), "{text}");
    }
}

#[test]
fn a_strict_volume_has_space_for_its_file_system() {
    let plan = |storage: &str, parameters: Value| {
        let claim = json!({ "spec": { "resources": { "requests": { "storage": storage } } } });
        plan_patched(claim, json!({ "parameters": parameters }))
    };
    let xfs = json!({ "strict": "true", "csi.storage.k8s.io/fstype": "xfs" });
    let ext4 = json!({ "strict": "true" });
    for (storage, parameters, min) in [("299Mi", &xfs, "314572800"), ("8388607", &ext4, "8388608")] {
        let text = expect_rejection(plan(storage, parameters.clone()));
        assert!(text.contains(min), "{text}");
    }
    expect_provision(plan("300Mi", xfs));
    expect_provision(plan("8Mi", ext4));
}

#[test]
fn a_claim_whose_uid_is_not_a_uuid_is_rejected() {
    for uid in ["", "..", "../x", "1", "9F0E5D3C-1B2A-4C5D-8E6F-000000000001"] {
        assert!(
            expect_rejection(plan_patched(json!({ "metadata": { "uid": uid } }), json!({}))).contains("UUID"),
            "{uid}"
        );
    }
}

#[test]
fn a_claim_whose_volume_name_exists_is_done_or_rejected() {
    let (claim, class) = (sample_claim(1, json!({})), sample_class(json!({})));
    let beside = |volume: &PersistentVolume| {
        plan_claim(
            &sample_identity(NODE),
            ObservedClaim { claim: &claim, class: Some(&class), volume: Some(volume) },
        )
    };
    assert_eq!(expect_ignored(beside(&sample_volume(1, json!({})))), ClaimIgnoreReason::HasVolume);
    for claim_ref in [json!({ "claimRef": { "uid": sample_uid(2) } }), json!({ "claimRef": Value::Null })] {
        assert!(
            expect_rejection(beside(&sample_volume(1, json!({ "spec": claim_ref }))))
                .contains("already exists")
        );
    }
}

proptest! {
    #[test]
    fn planning_a_claim_never_panics_and_skips_claims_of_other_nodes(
        node in "(node-[ab])?", phase in "(Pending|Bound|Lost)?", storage in ".{0,12}",
        mode in "Block|Filesystem|.{0,12}", strict in "true|false|.{0,8}", fs_type in "ext4|xfs|block|.{0,8}",
        uid in ".{0,40}",
    ) {
        let claim = sample_claim(1, json!({
            "metadata": { "uid": uid, "annotations": { "volume.kubernetes.io/selected-node": node } },
            "spec": { "volumeMode": mode, "resources": { "requests": { "storage": storage } } },
            "status": { "phase": phase },
        }));
        let parameters = json!({ "strict": strict, "csi.storage.k8s.io/fstype": fs_type });
        let class = sample_class(json!({ "parameters": parameters }));
        let observed = ObservedClaim { claim: &claim, class: Some(&class), volume: None };
        let action = plan_claim(&sample_identity(NODE), observed);
        prop_assert!(node != "node-b" || matches!(action, ClaimAction::Ignore(ClaimIgnoreReason::OtherNode)));
        if let ClaimAction::Provision(spec) = action {
            prop_assert!(spec.capacity.0 > 0 && spec.limits.bytes == Some(spec.capacity));
            prop_assert_eq!(spec.kind.volume_mode() == "Block", mode == "Block");
            prop_assert_eq!(spec.limits.inodes.is_some(), spec.kind == VolumeKind::Directory);
        }
    }
}
