use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::snapshot::MANAGED_BY_LABEL;
use crate::testing::objects::{
    NODE, merge_patch, patched, sample_identity, sample_snapshot_content, sample_uid,
};

fn plan(patch: Value) -> SnapshotAction {
    plan_snapshot(&sample_identity(NODE), &sample_snapshot_content(1, patch))
}

fn id() -> SnapshotId {
    SnapshotId::from_uid(&sample_uid(1)).expect("a UUID")
}

/// A content that is deleted together with its VolumeSnapshot.
fn deleted(patch: Value) -> SnapshotAction {
    let going = json!({ "metadata": {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "annotations": { BEING_DELETED: "yes" },
    } });
    plan_snapshot(&sample_identity(NODE), &patched(&sample_snapshot_content(1, going), patch))
}

#[test]
fn a_snapshot_of_this_node_is_taken_once() {
    let volume = format!("pvc-{}", sample_uid(1)).parse().expect("an id");
    assert_eq!(plan(json!({})), SnapshotAction::Create { id: id(), volume });
    let ready = json!({ "status": { "readyToUse": true, "snapshotHandle": id().as_str() } });
    assert_eq!(plan(ready), SnapshotAction::Ignore);
    let failed = json!({ "status": { "readyToUse": false, "error": { "message": "disk full" } } });
    assert!(matches!(plan(failed), SnapshotAction::Create { .. }), "a failure is retried");
}

#[test]
fn snapshots_of_others_are_ignored() {
    for patch in [
        json!({ "spec": { "driver": "other.example" } }),
        json!({ "metadata": { "labels": { MANAGED_BY_LABEL: "node-b" } } }),
        json!({ "metadata": { "labels": null } }),
    ] {
        assert_eq!(plan(patch.clone()), SnapshotAction::Ignore, "{patch}");
        assert_eq!(deleted(patch.clone()), SnapshotAction::Ignore, "{patch}");
    }
}

#[test]
fn a_pre_provisioned_snapshot_is_reported_and_never_taken() {
    let of =
        |handle: &str| json!({ "spec": { "source": { "volumeHandle": null, "snapshotHandle": handle } } });
    assert_eq!(plan(of(id().as_str())), SnapshotAction::Report(id()));
    for handle in ["", "../x", "snap-", &format!("pvc-{}", sample_uid(1))] {
        assert!(
            matches!(plan(of(handle)), SnapshotAction::Reject(SnapshotRejection::InvalidSnapshot { .. })),
            "{handle}"
        );
        assert_eq!(deleted(of(handle)), SnapshotAction::Release, "nothing is known of {handle}");
    }
}

#[test]
fn a_volume_of_another_driver_is_rejected() {
    let volume = json!({ "spec": { "source": { "volumeHandle": "../etc" } } });
    assert!(matches!(plan(volume), SnapshotAction::Reject(SnapshotRejection::InvalidVolume { .. })));
    let uid = json!({ "spec": { "volumeSnapshotRef": { "uid": "1" } } });
    assert!(matches!(plan(uid), SnapshotAction::Reject(SnapshotRejection::InvalidUid { .. })));
}

#[test]
fn a_snapshot_is_deleted_with_its_volume_snapshot_and_by_its_policy() {
    let ready = || json!({ "status": { "readyToUse": true, "snapshotHandle": id().as_str() } });
    assert_eq!(deleted(ready()), SnapshotAction::Delete(id()));
    assert_eq!(deleted(json!({})), SnapshotAction::Delete(id()), "it may have been taken and not reported");
    let mut kept = ready();
    kept["spec"] = json!({ "deletionPolicy": "Retain" });
    assert_eq!(deleted(kept), SnapshotAction::Release);
    let unreported = json!({ "spec": { "deletionPolicy": "Retain" } });
    assert_eq!(deleted(unreported), SnapshotAction::Delete(id()), "nobody knows of it");
    let mut odd = ready();
    odd["status"]["snapshotHandle"] = json!("../x");
    assert!(matches!(deleted(odd), SnapshotAction::Reject(SnapshotRejection::InvalidSnapshot { .. })));
    let mut gone = ready();
    gone["metadata"] = json!({ "finalizers": [] });
    assert_eq!(deleted(gone), SnapshotAction::Ignore, "only its own finalizer is waited for");
}

#[test]
fn a_content_deleted_by_itself_keeps_its_snapshot() {
    let patch = json!({
        "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" },
        "status": { "readyToUse": true, "snapshotHandle": id().as_str() },
    });
    assert_eq!(plan(patch), SnapshotAction::Ignore);
}

proptest! {
    #[test]
    fn no_handle_deletes_anything_but_a_snapshot(handle in "(snap-|pvc-)?[0-9a-f-]{30,40}|.{0,80}") {
        match deleted(json!({ "status": { "snapshotHandle": handle } })) {
            SnapshotAction::Delete(id) => prop_assert_eq!(id.as_str(), handle.as_str()),
            SnapshotAction::Reject(SnapshotRejection::InvalidSnapshot { .. }) => {
                prop_assert!(handle.parse::<SnapshotId>().is_err());
            }
            action => prop_assert!(false, "{:?}", action),
        }
    }
}

#[test]
fn a_snapshot_counts_while_it_is_ready_on_this_node() {
    let ready = |patch: Value| {
        let status = json!({ "readyToUse": true, "snapshotHandle": SnapshotId::from_uid(&sample_uid(1)).expect("a UUID").as_str() });
        let mut all = json!({ "status": status });
        merge_patch(&mut all, patch);
        ready_snapshot(&sample_identity(NODE), &sample_snapshot_content(1, all))
    };
    assert_eq!(ready(json!({})), Some(SnapshotId::from_uid(&sample_uid(1)).expect("a UUID")));
    for other in [
        json!({ "status": { "readyToUse": false } }),
        json!({ "status": { "snapshotHandle": "other" } }),
        json!({ "status": null }),
        json!({ "spec": { "driver": "other.example" } }),
        json!({ "metadata": { "labels": { MANAGED_BY_LABEL: "node-b" } } }),
    ] {
        assert_eq!(ready(other.clone()), None, "{other}");
    }
}
