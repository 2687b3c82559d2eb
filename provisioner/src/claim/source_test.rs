use serde_json::{Value, json};

use super::*;
use crate::claim::decide::{ClaimAction, ObservedClaim, plan_claim};
use crate::image::ImageFormat;
use crate::testing::objects::{
    NODE, patched, sample_claim, sample_class, sample_identity, sample_snapshot_content, sample_uid,
    sample_volume,
};

/// The plan of a claim of 50 MiB with changes of its spec.
fn plan(spec: Value) -> ClaimAction {
    let claim = sample_claim(2, json!({ "spec": spec }));
    let class = sample_class(json!({}));
    plan_claim(
        &sample_identity(NODE),
        ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: None },
    )
}

fn spec_of(source: &Value) -> VolumeSpec {
    match plan(json!({ "dataSource": source, "dataSourceRef": source })) {
        ClaimAction::Provision(spec) => *spec,
        other => panic!("{other:?}"),
    }
}

/// The same claim, for a volume of this kind.
fn as_kind(spec: VolumeSpec, kind: VolumeKind) -> VolumeSpec {
    VolumeSpec { kind, ..spec }
}

fn restore() -> VolumeSpec {
    spec_of(&json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "backup" }))
}

fn clone() -> VolumeSpec {
    spec_of(&json!({ "kind": "PersistentVolumeClaim", "name": "claim-1" }))
}

fn snapshot(uid: &str) -> VolumeSnapshot {
    serde_json::from_value(json!({ "metadata": { "name": "backup", "uid": uid } })).expect("an object")
}

/// The plan of a restore from a ready snapshot of 50 MiB, with a change of its content.
fn plan_from(content: Value) -> SourceAction {
    let ready = json!({ "status": {
        "readyToUse": true,
        "snapshotHandle": format!("snap-{}", sample_uid(1)),
        "restoreSize": 50 << 20,
    } });
    let content = patched(&sample_snapshot_content(1, ready), content);
    let snapshot = snapshot(&sample_uid(1));
    plan_restore(&sample_identity(NODE), &restore(), "backup", Some(&snapshot), Some(&content))
}

/// The plan of a clone of the bound volume of claim 1, with a change of the volume.
fn plan_of(volume: Value) -> SourceAction {
    let (claim, volume) = (sample_claim(1, json!({})), sample_volume(1, volume));
    plan_clone(&sample_identity(NODE), &clone(), "claim-1", Some(&claim), Some(&volume))
}

fn expect_wait(action: SourceAction, why: &str) {
    match action {
        SourceAction::Wait(reason) => assert!(reason.contains(why), "{reason}"),
        other => panic!("{other:?}: {why}"),
    }
}

fn expect_rejection(action: SourceAction, why: &str) {
    match action {
        SourceAction::Reject(rejection) => assert!(rejection.to_string().contains(why), "{rejection}"),
        other => panic!("{other:?}: {why}"),
    }
}

#[test]
fn a_claim_names_its_source() {
    assert_eq!(restore().source, Some(DataSource::Snapshot("backup".to_owned())));
    assert_eq!(clone().source, Some(DataSource::Claim("claim-1".to_owned())));
}

#[test]
fn other_sources_are_rejected_and_never_give_an_empty_volume() {
    let group = "snapshot.storage.k8s.io";
    for (spec, names) in [
        (json!({ "dataSource": { "kind": "VolumeSnapshot", "name": "a" } }), "spec.dataSource.kind"),
        (
            json!({ "dataSourceRef": { "apiGroup": "x.example", "kind": "Book", "name": "a" } }),
            "spec.dataSourceRef.kind",
        ),
        (
            json!({ "dataSourceRef": { "apiGroup": group, "kind": "PersistentVolumeClaim", "name": "a" } }),
            "spec.dataSourceRef.kind",
        ),
        (
            json!({ "dataSourceRef": { "apiGroup": group, "kind": "VolumeSnapshot", "name": "a", "namespace": "other" } }),
            "namespace \"other\"",
        ),
    ] {
        match plan(spec.clone()) {
            ClaimAction::Reject(rejection) => assert!(rejection.to_string().contains(names), "{rejection}"),
            other => panic!("{spec}: {other:?}"),
        }
    }
}

#[test]
fn a_ready_snapshot_of_this_node_is_restored() {
    let id = SnapshotId::from_uid(&sample_uid(1)).expect("a UUID");
    assert_eq!(plan_from(json!({})), SourceAction::Copy(id.into()));
}

#[test]
fn a_source_on_another_node_is_left_to_that_node() {
    let label = crate::snapshot::MANAGED_BY_LABEL;
    let other = SourceAction::HandOver("node-b".to_owned());
    assert_eq!(plan_from(json!({ "metadata": { "labels": { label: "node-b" } } })), other);
    let term = |key: &str, values: Value| {
        let label = json!({ "key": key, "operator": "In", "values": values });
        json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [label] }] } } } })
    };
    assert_eq!(plan_of(term("kubernetes.io/hostname", json!(["node-b"]))), other);
    expect_wait(plan_of(term("zone", json!(["node-b"]))), "unknown node");
    expect_wait(plan_from(json!({ "metadata": { "labels": null } })), "--enable-distributed-snapshotting");
}

#[test]
fn a_snapshot_that_is_not_ready_is_waited_for() {
    let (identity, spec) = (sample_identity(NODE), restore());
    let plan = |snapshot: Option<&VolumeSnapshot>| plan_restore(&identity, &spec, "backup", snapshot, None);
    expect_wait(plan(None), "does not exist");
    expect_wait(plan(Some(&snapshot(&sample_uid(1)))), "no VolumeSnapshotContent");
    expect_wait(plan_from(json!({ "status": { "readyToUse": false } })), "not ready");
    expect_wait(plan_from(json!({ "status": { "snapshotHandle": "../x" } })), "invalid snapshot id");
    for uid in [json!(null), json!(sample_uid(7))] {
        expect_wait(plan_from(json!({ "spec": { "volumeSnapshotRef": { "uid": uid } } })), "not bound");
    }
}

#[test]
fn a_source_that_does_not_fit_is_rejected() {
    expect_rejection(plan_from(json!({ "status": { "restoreSize": (50 << 20) + 1 } })), "needs 52428801");
    expect_rejection(plan_from(json!({ "spec": { "driver": "other.example" } })), "other.example");
    expect_rejection(plan_from(json!({ "spec": { "sourceVolumeMode": "Block" } })), "sourceVolumeMode");
    expect_rejection(plan_of(json!({ "spec": { "capacity": { "storage": "51Mi" } } })), "needs 53477376");
    expect_rejection(plan_of(json!({ "spec": { "csi": { "driver": "other.example" } } })), "other.example");
    expect_rejection(plan_of(json!({ "spec": { "volumeMode": "Block" } })), "volumeMode");
}

#[test]
fn a_volume_is_copied_only_into_one_of_its_kind() {
    let attributes = |kind: VolumeKind| match kind.image_format() {
        Some(format) => json!({ "kind": format.as_str() }),
        None => json!({}),
    };
    for found in VolumeKind::ALL {
        let csi = json!({ "volumeAttributes": attributes(found) });
        let patch = json!({ "spec": { "volumeMode": found.volume_mode(), "csi": csi } });
        let (claim, volume) = (sample_claim(1, json!({})), sample_volume(1, patch));
        for wanted in VolumeKind::ALL {
            let spec = as_kind(clone(), wanted);
            match plan_clone(&sample_identity(NODE), &spec, "claim-1", Some(&claim), Some(&volume)) {
                SourceAction::Copy(_) => assert_eq!(found, wanted),
                SourceAction::Reject(rejection) => {
                    assert_ne!(found, wanted);
                    let text = rejection.to_string();
                    let (mode, kind) = (found.volume_mode(), found.as_str());
                    assert!(text.contains(mode) || text.contains(&format!("claim-1 is {kind}")), "{text}");
                }
                other => panic!("{found} into {wanted}: {other:?}"),
            }
        }
    }
    let unknown = json!({ "spec": { "csi": { "volumeAttributes": { "kind": "zfs" } } } });
    expect_wait(plan_of(unknown), "unknown kind of volume");
}

#[test]
fn a_snapshot_is_restored_only_into_its_volume_mode_and_kind() {
    let plan = |mode: Value, kind: VolumeKind| {
        let ready = json!({
            "spec": { "sourceVolumeMode": mode },
            "status": {
                "readyToUse": true,
                "snapshotHandle": format!("snap-{}", sample_uid(1)),
                "restoreSize": 50 << 20,
            },
        });
        let (snapshot, content) = (snapshot(&sample_uid(1)), sample_snapshot_content(1, ready));
        let spec = as_kind(restore(), kind);
        plan_restore(&sample_identity(NODE), &spec, "backup", Some(&snapshot), Some(&content))
    };
    let [block, ext4] = [ImageFormat::Block, ImageFormat::Ext4].map(VolumeKind::Image);
    for (mode, kind) in [("Block", block), ("Filesystem", ext4), ("Filesystem", VolumeKind::Directory)] {
        assert!(matches!(plan(json!(mode), kind), SourceAction::Copy(_)), "{mode}, {kind}");
        assert!(matches!(plan(Value::Null, kind), SourceAction::Copy(_)), "{kind}: the content does not say");
    }
    expect_rejection(plan(json!("Block"), ext4), "request volumeMode Block");
    expect_rejection(plan(json!("Filesystem"), block), "request volumeMode Filesystem");
    assert_eq!(check_source_kind(&as_kind(restore(), ext4), "backup", ext4), None);
    let rejection = check_source_kind(&as_kind(restore(), ext4), "backup", block).expect("rejected");
    assert!(
        rejection.to_string().contains("backup is block, and that of the claim's volume ext4"),
        "{rejection}"
    );
}

#[test]
fn a_claim_of_the_size_of_the_source_is_restored_although_the_file_system_has_rounded_its_limit() {
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "backup" });
    let requests = json!({ "requests": { "storage": "1G" } });
    let spec = match plan(json!({ "dataSource": source, "resources": requests })) {
        ClaimAction::Provision(spec) => *spec,
        other => panic!("{other:?}"),
    };
    let plan = |size: u64| {
        let status = json!({ "status": {
            "readyToUse": true,
            "snapshotHandle": format!("snap-{}", sample_uid(1)),
            "restoreSize": size,
        } });
        let (snapshot, content) = (snapshot(&sample_uid(1)), sample_snapshot_content(1, status));
        plan_restore(&sample_identity(NODE), &spec, "backup", Some(&snapshot), Some(&content))
    };
    assert!(matches!(plan(1_000_001_536), SourceAction::Copy(_)));
    expect_rejection(plan(1_000_100_000), "needs 1000100000");
}

#[test]
fn the_bound_volume_of_a_claim_is_cloned() {
    let id: VolumeId = format!("pvc-{}", sample_uid(1)).parse().expect("an id");
    assert_eq!(plan_of(json!({})), SourceAction::Copy(id.into()));
    expect_wait(plan_of(json!({ "spec": { "claimRef": { "uid": sample_uid(9) } } })), "not bound");
    expect_wait(plan_of(json!({ "spec": { "csi": { "volumeHandle": "../x" } } })), "invalid volume id");
    let (identity, spec) = (sample_identity(NODE), clone());
    expect_wait(plan_clone(&identity, &spec, "claim-1", None, None), "does not exist");
    let going = sample_claim(1, json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
    expect_wait(plan_clone(&identity, &spec, "claim-1", Some(&going), None), "being deleted");
}
