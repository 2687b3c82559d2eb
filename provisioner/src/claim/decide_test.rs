//! The decision table for claims.

use std::collections::BTreeMap;

use nodekeel_fsquota::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::claim::decide::{ClaimAction, ClaimIgnoreReason, ObservedClaim, plan_claim};
use crate::claim::spec::{ClaimRejection, ReclaimPolicy, VolumeSpec};
use crate::image::{ImageFormat, VolumeKind};
use crate::testing::objects::{
    CLASS, DRIVER, NODE, sample_claim, sample_class, sample_identity, sample_uid, sample_volume,
};

fn plan(claim_patch: Value, class_patch: Value) -> ClaimAction {
    let (claim, class) = (sample_claim(1, claim_patch), sample_class(class_patch));
    plan_claim(
        &sample_identity(NODE),
        ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: None },
    )
}

fn expect_provision(action: ClaimAction) -> VolumeSpec {
    match action {
        ClaimAction::Provision(spec) => *spec,
        other => panic!("not provisioned: {other:?}"),
    }
}

fn annotations(provisioner: Value, selected: Value) -> Value {
    json!({ "metadata": { "annotations": {
        "volume.kubernetes.io/storage-provisioner": provisioner,
        "volume.kubernetes.io/selected-node": selected,
    } } })
}

/// A claim without a selected node.
fn unselected() -> Value {
    annotations(json!(DRIVER), Value::Null)
}

fn spec(field: &str, value: Value) -> Value {
    json!({ "spec": { field: value } })
}

fn sized(storage: &str) -> Value {
    spec("resources", json!({ "requests": { "storage": storage } }))
}

/// A class with immediate binding and a topology of this label.
fn on_nodes(key: &str, nodes: &[&str]) -> Value {
    let label = json!({ "key": key, "values": nodes });
    json!({ "volumeBindingMode": "Immediate", "allowedTopologies": [{ "matchLabelExpressions": [label] }] })
}

#[test]
fn our_claim_for_our_node_is_provisioned() {
    let spec = expect_provision(plan(json!({}), json!({})));
    assert_eq!(spec.id.as_str(), format!("pvc-{}", sample_uid(1)));
    assert_eq!(spec.capacity, Bytes(50 << 20));
    assert_eq!(spec.claim_ref.uid, Some(sample_uid(1)));
    assert_eq!(spec.claim_ref.resource_version.as_deref(), Some("7"));
    assert_eq!((spec.storage_class.as_str(), spec.reclaim_policy), (CLASS, ReclaimPolicy::Delete));
}

#[test]
fn a_claim_that_is_served_or_that_others_serve_is_ignored() {
    let beta = |stable: Value, beta: Value| {
        json!({ "metadata": { "annotations": {
            "volume.kubernetes.io/storage-provisioner": stable,
            "volume.beta.kubernetes.io/storage-provisioner": beta,
        } } })
    };
    let with_volume = |phase: &str| json!({ "spec": { "volumeName": "x" }, "status": { "phase": phase } });
    let in_phase = |phase: &str| json!({ "status": { "phase": phase } });
    let deleting = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
    let topology = "topology.volumes.nodekeel.example/node";
    use ClaimIgnoreReason::*;
    for (case, claim, class, reason) in [
        ("of another driver", annotations(json!("other.example"), json!(NODE)), json!({}), OtherDriver),
        ("of an empty driver", annotations(json!(""), json!(NODE)), json!({}), OtherDriver),
        ("of no driver yet", annotations(Value::Null, json!(NODE)), json!({}), OtherDriver),
        ("with another driver's class", json!({}), json!({ "provisioner": "other" }), OtherDriver),
        ("the stable annotation wins", beta(json!("other.example"), json!(DRIVER)), json!({}), OtherDriver),
        ("for another node", annotations(json!(DRIVER), json!("node-b")), json!({}), OtherNode),
        ("by the driver's label", unselected(), on_nodes(topology, &["node-b"]), OtherNode),
        ("by the hostname", unselected(), on_nodes("kubernetes.io/hostname", &["node-b"]), OtherNode),
        ("without a pod", unselected(), json!({}), WaitsForConsumer),
        ("with an empty selected node", annotations(json!(DRIVER), json!("")), json!({}), WaitsForConsumer),
        ("about to be bound", with_volume("Pending"), json!({}), HasVolume),
        ("bound", with_volume("Bound"), json!({}), HasVolume),
        ("lost, with a volume's name", with_volume("Lost"), json!({}), HasVolume),
        ("lost", in_phase("Lost"), json!({}), NotPending),
        ("bound, without a name", in_phase("Bound"), json!({}), NotPending),
        ("in an unknown phase", in_phase("Unheard"), json!({}), NotPending),
        ("being deleted", deleting, json!({}), Deleting),
    ] {
        assert_eq!(plan(claim, class), ClaimAction::Ignore(reason), "{case}");
    }
    for (case, claim) in [
        ("the beta annotation loses", beta(json!(DRIVER), json!("other.example"))),
        ("the beta annotation counts alone", beta(Value::Null, json!(DRIVER))),
        ("without a status", json!({ "status": Value::Null })),
    ] {
        assert!(matches!(plan(claim, json!({})), ClaimAction::Provision(_)), "{case}");
    }
}

#[test]
fn an_immediate_claim_selects_a_node_that_its_class_allows() {
    let (topology, hostname) = ("topology.volumes.nodekeel.example/node", "kubernetes.io/hostname");
    for class in [
        json!({ "volumeBindingMode": "Immediate" }),
        json!({ "volumeBindingMode": Value::Null }),
        on_nodes(topology, &[NODE]),
        on_nodes(hostname, &[NODE]),
        on_nodes(hostname, &["node-b", NODE]),
    ] {
        for selected in [Value::Null, json!("")] {
            let claim = annotations(json!(DRIVER), selected);
            assert_eq!(plan(claim, class.clone()), ClaimAction::SelectNode, "{class}");
        }
    }
}

#[test]
fn the_classs_topologies_bind_whoever_has_selected_the_node() {
    let (topology, zone) = ("topology.volumes.nodekeel.example/node", "topology.kubernetes.io/zone");
    let labels = |zone_of: &str| BTreeMap::from([(zone.to_owned(), zone_of.to_owned())]);
    let (east, renamed) =
        (labels("east"), BTreeMap::from([("kubernetes.io/hostname".to_owned(), "ip-1".to_owned())]));
    let delayed = |key: &str, values: &[&str]| {
        let mut class = on_nodes(key, values);
        class["volumeBindingMode"] = json!("WaitForFirstConsumer");
        class
    };
    for (class, labels, is_allowed) in [
        (delayed(topology, &[NODE, "zz"]), Some(&east), true),
        (delayed(topology, &["zz"]), Some(&east), false),
        (on_nodes(topology, &["zz"]), Some(&east), false),
        // As the scheduler, which compares any label of the Node.
        (delayed(zone, &["east"]), Some(&east), true),
        (delayed(zone, &["west"]), Some(&east), false),
        (delayed("kubernetes.io/hostname", &["ip-1"]), Some(&renamed), true),
        (delayed("kubernetes.io/hostname", &[NODE]), Some(&renamed), false),
        (json!({ "allowedTopologies": [] }), None, true),
        (delayed(topology, &[NODE]), None, true),
    ] {
        let (claim, class) = (sample_claim(1, json!({})), sample_class(class));
        let observed =
            ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: labels };
        match plan_claim(&sample_identity(NODE), observed) {
            ClaimAction::Provision(_) => assert!(is_allowed, "{class:?}"),
            ClaimAction::Reject(rejection @ ClaimRejection::NodeNotAllowed { .. }) => {
                assert!(!is_allowed && rejection.to_string().contains("volume.kubernetes.io/selected-node"));
            }
            other => panic!("{other:?}"),
        }
    }
    // The Node may be seen soon.
    let action = plan(json!({}), delayed(zone, &["east"]));
    assert!(matches!(action, ClaimAction::Wait(ClaimRejection::NodeNotAllowed { .. })), "{action:?}");
}

#[test]
fn a_claim_with_an_unknown_class_waits() {
    let claim = sample_claim(1, json!({}));
    let action = plan_claim(
        &sample_identity(NODE),
        ObservedClaim { claim: &claim, class: None, volume: None, node_labels: None },
    );
    assert_eq!(action, ClaimAction::Wait(ClaimRejection::UnknownClass { class: CLASS.to_owned() }));
}

#[test]
fn an_invalid_claim_or_class_is_rejected_with_what_is_valid() {
    let class = |field: &str, value: Value| json!({ field: value });
    let parameters = |value: Value| class("parameters", value);
    let options = |value: Value| class("mountOptions", value);
    let uid = |uid: &str| json!({ "metadata": { "uid": uid } });
    let strict_dev = json!({ "parameters": { "strict": "true" }, "mountOptions": ["nodev,dev"] });
    let xfs = json!({ "strict": "true", "csi.storage.k8s.io/fstype": "xfs" });
    let (any, size) = (|| json!({}), "invalid storage request");
    for (claim, class, parts) in [
        (spec("storageClassName", Value::Null), any(), ["has no storage class", ""]),
        (spec("storageClassName", json!("")), any(), ["has no storage class", ""]),
        (spec("volumeMode", json!("Unheard")), any(), ["volumeMode", "use Filesystem or Block"]),
        (spec("selector", json!({ "matchLabels": { "a": "b" } })), any(), ["selector", "pre-provisioned"]),
        (spec("accessModes", json!(["ReadWriteMany"])), any(), ["spec.accessModes", "use ReadWriteOnce"]),
        (spec("accessModes", json!(["ReadWriteOnce", "ReadWriteMany"])), any(), ["spec.accessModes", ""]),
        (spec("accessModes", json!([])), any(), ["spec.accessModes", ""]),
        (spec("accessModes", json!(["x"])), any(), ["spec.accessModes", ""]),
        (spec("resources", Value::Null), any(), [size, "missing"]),
        (sized("0"), any(), [size, "zero"]),
        (sized("-1"), any(), [size, ""]),
        (sized("9223372036854775808"), any(), [size, ""]),
        (sized("9223372036854775807"), any(), [size, ""]),
        (sized("8Ei"), any(), [size, ""]),
        (sized("many"), any(), [size, ""]),
        (sized(""), any(), [size, ""]),
        (uid(""), any(), ["UUID", "create the claim again"]),
        (uid(".."), any(), ["UUID", ""]),
        (uid("../x"), any(), ["UUID", ""]),
        (uid("1"), any(), ["UUID", ""]),
        (uid("9F0E5D3C-1B2A-4C5D-8E6F-000000000001"), any(), ["UUID", ""]),
        (any(), class("reclaimPolicy", json!("Recycle")), ["Recycle", "use Delete or Retain"]),
        (any(), options(json!(["noatime"])), ["mountOptions \"noatime\"", "noexec"]),
        (any(), options(json!(["noexec,noatime"])), ["mountOptions \"noatime\"", "noexec"]),
        (any(), options(json!(["nodev", "noatime"])), ["mountOptions \"noatime\"", "noexec"]),
        (any(), strict_dev, ["mountOptions \"dev\" is not supported by strict volumes", ""]),
        (any(), parameters(json!({ "inodes": "0" })), ["parameter \"inodes\"", "above 0"]),
        (any(), parameters(json!({ "inodes": "-1" })), ["parameter \"inodes\"", "above 0"]),
        (any(), parameters(json!({ "inodes": "all" })), ["parameter \"inodes\"", "above 0"]),
        (any(), parameters(json!({ "inode": "7" })), ["parameter \"inode\"", "known: inodes, store, strict"]),
        (any(), parameters(json!({ "stict": "true" })), ["\"stict\"", "known: inodes, store, strict"]),
        (any(), parameters(json!({ "store": "../x" })), ["\"store\"", "name of a store"]),
        (any(), parameters(json!({ "strict": "yes" })), ["\"strict\"", "\"true\" or \"false\""]),
        // The volume would be mounted without the Secret.
        (
            any(),
            parameters(json!({ "csi.storage.k8s.io/node-publish-secret-name": "key" })),
            [
                "node-publish-secret-name\" = \"key\"",
                "known: inodes, store, strict, csi.storage.k8s.io/fstype",
            ],
        ),
        (any(), parameters(json!({ "csi.storage.k8s.io/pv/name": "a" })), ["pv/name\"", "unknown parameter"]),
        (
            any(),
            parameters(json!({ "csi.storage.k8s.io/fstype": "ext4" })),
            ["fstype\"", "set strict: \"true\""],
        ),
        (
            any(),
            parameters(json!({ "strict": "false", "csi.storage.k8s.io/fstype": "xfs" })),
            ["fstype\"", "set strict"],
        ),
        (
            any(),
            parameters(json!({ "strict": "true", "csi.storage.k8s.io/fstype": "btrfs" })),
            ["\"btrfs\"", "use ext4 or xfs"],
        ),
        (
            any(),
            parameters(json!({ "strict": "true", "csi.storage.k8s.io/fstype": "block" })),
            ["\"block\"", "use ext4 or xfs"],
        ),
        (any(), parameters(json!({ "strict": "true", "inodes": "7" })), ["\"inodes\"", "no inode limit"]),
        (sized("299Mi"), parameters(xfs), ["at least 314572800", ""]),
        (sized("8388607"), parameters(json!({ "strict": "true" })), ["at least 8388608", ""]),
    ] {
        let case = format!("{claim} of {class}");
        let ClaimAction::Reject(rejection) = plan(claim, class) else { panic!("not rejected: {case}") };
        let text = rejection.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{case}: {text}");
    }
}

#[test]
fn missing_modes_and_policies_get_their_defaults() {
    let reclaimed =
        |class: Value| expect_provision(plan(spec("volumeMode", Value::Null), class)).reclaim_policy;
    let missing = json!({ "reclaimPolicy": Value::Null, "volumeBindingMode": Value::Null });
    assert_eq!(reclaimed(missing), ReclaimPolicy::Delete);
    assert_eq!(reclaimed(json!({ "reclaimPolicy": "Retain" })), ReclaimPolicy::Retain);
}

#[test]
fn access_modes_are_copied_and_the_one_that_permits_writing_comes_first() {
    for (given, expected) in [
        (json!(["ReadWriteOnce"]), json!(["ReadWriteOnce"])),
        (json!(["ReadWriteOncePod"]), json!(["ReadWriteOncePod"])),
        (json!(["ReadOnlyMany"]), json!(["ReadOnlyMany"])),
        (json!(["ReadOnlyMany", "ReadWriteOnce"]), json!(["ReadWriteOnce", "ReadOnlyMany"])),
    ] {
        let spec = expect_provision(plan(spec("accessModes", given), json!({})));
        assert_eq!(json!(spec.access_modes), expected);
    }
}

#[test]
fn known_mount_options_are_accepted_and_devices_except_by_strict_volumes() {
    for options in
        [json!([]), json!(["noexec", "nodev"]), json!(["ro,suid", ""]), json!(["dev"]), Value::Null]
    {
        expect_provision(plan(json!({}), json!({ "mountOptions": options })));
    }
    let strict = json!({ "parameters": { "strict": "true" }, "mountOptions": ["dev,nodev"] });
    expect_provision(plan(json!({}), strict));
}

#[test]
fn a_size_is_exact() {
    for (storage, bytes) in [("1", 1), ("0.5", 1), ("1500m", 2), ("1Gi", 1 << 30), ("1e3", 1000)] {
        assert_eq!(expect_provision(plan(sized(storage), json!({}))).capacity, Bytes(bytes), "{storage}");
    }
}

#[test]
fn inodes_come_from_the_class_or_the_size() {
    for (storage, parameters, inodes) in [
        ("1Gi", Value::Null, (1 << 30) / 2048),
        ("1", Value::Null, 1024),
        ("1Gi", json!({ "inodes": "100k" }), 100_000),
        ("1Gi", json!({ "inodes": "7", "strict": "false" }), 7),
    ] {
        let spec = expect_provision(plan(sized(storage), json!({ "parameters": parameters })));
        assert_eq!(spec.limits.inodes.map(|inodes| inodes.0), Some(inodes), "{storage}, {parameters}");
    }
}

#[test]
fn the_claim_and_its_class_decide_the_kind_of_a_volume() {
    let fs_type = |name: &str| json!({ "strict": "true", "csi.storage.k8s.io/fstype": name });
    for (mode, storage, parameters, kind) in [
        ("Filesystem", "1Gi", json!({}), VolumeKind::Directory),
        ("", "1Gi", json!({ "strict": "false" }), VolumeKind::Directory),
        ("Filesystem", "8Mi", json!({ "strict": "true" }), VolumeKind::Image(ImageFormat::Ext4)),
        ("Filesystem", "1Gi", fs_type(""), VolumeKind::Image(ImageFormat::Ext4)),
        ("Filesystem", "1Gi", fs_type("ext4"), VolumeKind::Image(ImageFormat::Ext4)),
        ("", "300Mi", fs_type("xfs"), VolumeKind::Image(ImageFormat::Xfs)),
        ("Block", "1Gi", json!({}), VolumeKind::Image(ImageFormat::Block)),
        ("Block", "1Gi", fs_type("xfs"), VolumeKind::Image(ImageFormat::Block)),
        ("Block", "1Gi", json!({ "inodes": "7" }), VolumeKind::Image(ImageFormat::Block)),
        (
            "Block",
            "1Gi",
            json!({ "csi.storage.k8s.io/fstype": "btrfs" }),
            VolumeKind::Image(ImageFormat::Block),
        ),
    ] {
        let case = format!("{mode}, {parameters}");
        let claim =
            json!({ "spec": { "volumeMode": mode, "resources": { "requests": { "storage": storage } } } });
        let class = json!({ "parameters": parameters, "mountOptions": ["noexec"] });
        let spec = expect_provision(plan(claim, class));
        assert_eq!(spec.kind, kind, "{case}");
        assert_eq!(spec.limits.bytes, Some(spec.capacity), "{case}");
        assert_eq!(spec.limits.inodes.is_some(), kind == VolumeKind::Directory, "{case}");
        assert_eq!(spec.mount_options.is_empty(), mode == "Block", "{case}: a device is not mounted");
    }
}

#[test]
fn a_claim_whose_volume_name_exists_is_done_or_rejected() {
    let (claim, class) = (sample_claim(1, json!({})), sample_class(json!({})));
    let plan_with = |patch: Value| {
        let volume = sample_volume(1, patch);
        let observed =
            ObservedClaim { claim: &claim, class: Some(&class), volume: Some(&volume), node_labels: None };
        plan_claim(&sample_identity(NODE), observed)
    };
    assert_eq!(plan_with(json!({})), ClaimAction::Ignore(ClaimIgnoreReason::HasVolume));
    for claim_ref in [json!({ "uid": sample_uid(2) }), Value::Null] {
        let action = plan_with(spec("claimRef", claim_ref));
        assert!(matches!(action, ClaimAction::Reject(ClaimRejection::NameConflict { .. })), "{action:?}");
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
        let observed = ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: None };
        let action = plan_claim(&sample_identity(NODE), observed);
        prop_assert!(node != "node-b" || matches!(action, ClaimAction::Ignore(ClaimIgnoreReason::OtherNode)));
        if let ClaimAction::Provision(spec) = action {
            prop_assert!(spec.capacity.0 > 0 && spec.limits.bytes == Some(spec.capacity));
            prop_assert_eq!(spec.kind.volume_mode() == "Block", mode == "Block");
            prop_assert_eq!(spec.limits.inodes.is_some(), spec.kind == VolumeKind::Directory);
        }
    }
}
