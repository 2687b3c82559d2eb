//! Decides whether a store without an identity is a new one, on a node that has snapshots and no volumes.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::deletion::decide::ownership_mismatch;
use crate::loss::store::{StoreAction, StoreRejection};
use crate::plan::ProvisionerIdentity;
use crate::snapshot::{SnapshotId, VolumeSnapshotContent};

/// Decides whether a store that [`plan_store`](crate::plan_store) found to be new is one, although the node has ready
/// snapshots: without any of them, it may be a directory whose disk isn't mounted.
///
/// Snapshots name no store. So they count only where no PersistentVolume of the node says which store is the right one,
/// or which one was declared lost.
pub fn plan_new_store<'a>(
    identity: &ProvisionerIdentity,
    (present, ready): (&BTreeSet<SnapshotId>, &BTreeSet<SnapshotId>),
    volumes: impl IntoIterator<Item = &'a PersistentVolume>,
) -> StoreAction {
    let is_here = |volume: &PersistentVolume| {
        volume.spec.as_ref().is_some_and(|spec| ownership_mismatch(identity, spec).is_none())
    };
    match ready.first() {
        Some(snapshot) if present.is_disjoint(ready) && !volumes.into_iter().any(is_here) => {
            let (snapshot, count) = (snapshot.clone(), ready.len());
            StoreAction::Reject(StoreRejection::WithoutSnapshots { snapshot, count })
        }
        _ => StoreAction::CreateIdentity,
    }
}

/// The snapshot of a content of this driver and node, from when it was reported until its removal begins.
pub(crate) fn ready_snapshot(
    identity: &ProvisionerIdentity,
    content: &VolumeSnapshotContent,
) -> Option<SnapshotId> {
    let is_ours =
        content.spec.driver == identity.driver.as_str() && content.node() == Some(identity.node.as_str());
    (is_ours && content.is_ready()).then(|| content.snapshot_handle()?.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::snapshot::MANAGED_BY_LABEL;
    use crate::testing::objects::{
        NODE, merge_patch, sample_identity, sample_snapshot_content, sample_uid, sample_volume,
    };

    fn snapshot_id(number: u32) -> SnapshotId {
        SnapshotId::from_uid(&sample_uid(number)).expect("a UUID")
    }

    fn plan(present: &[u32], ready: &[u32], volumes: &[PersistentVolume]) -> StoreAction {
        let [present, ready] =
            [present, ready].map(|ids| ids.iter().map(|number| snapshot_id(*number)).collect());
        plan_new_store(&sample_identity(NODE), (&present, &ready), volumes)
    }

    #[test]
    fn a_directory_without_the_snapshots_of_a_node_without_volumes_is_not_a_new_store() {
        let rejected = StoreRejection::WithoutSnapshots { snapshot: snapshot_id(1), count: 2 };
        for present in [&[][..], &[3]] {
            assert_eq!(plan(present, &[1, 2], &[]), StoreAction::Reject(rejected.clone()));
        }
        assert_eq!(plan(&[2], &[1, 2], &[]), StoreAction::CreateIdentity, "it has one of them");
        assert_eq!(plan(&[], &[], &[]), StoreAction::CreateIdentity);
        let text = rejected.to_string();
        assert!(text.contains("mount their disk") && text.ends_with("and their finalizers"), "{text}");
    }

    #[test]
    fn volumes_of_the_node_decide_before_its_snapshots() {
        // Otherwise they would have been rejected before: they are present, or declared lost.
        let ours = sample_volume(1, json!({}));
        assert_eq!(plan(&[], &[1], &[ours]), StoreAction::CreateIdentity);
        let foreign = sample_volume(1, json!({ "spec": { "csi": { "driver": "other.example" } } }));
        assert!(matches!(plan(&[], &[1], &[foreign]), StoreAction::Reject(_)));
    }

    #[test]
    fn a_snapshot_counts_while_it_is_ready_on_this_node() {
        let ready = |patch: Value| {
            let status = json!({ "readyToUse": true, "snapshotHandle": snapshot_id(1).as_str() });
            let mut all = json!({ "status": status });
            merge_patch(&mut all, patch);
            ready_snapshot(&sample_identity(NODE), &sample_snapshot_content(1, all))
        };
        assert_eq!(ready(json!({})), Some(snapshot_id(1)));
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
}
