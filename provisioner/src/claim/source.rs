//! Plans the source of a claim's volume: nothing, a snapshot, or another claim's volume.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimSpec};
use nodekeel_fsquota::Bytes;

use crate::claim::spec::{ClaimRejection, VolumeSpec};
use crate::id::VolumeId;
use crate::identity::{HOSTNAME, ProvisionerIdentity};
use crate::image::MAX_ROUNDING;
use crate::image::VolumeKind;
use crate::name::StoreName;
use crate::objects::{attributed_kind, class_name, store_name};
use crate::quantity;
use crate::snapshot::{
    SNAPSHOT_GROUP, SnapshotId, StoredId, VolumeSnapshot, VolumeSnapshotContent, recorded_store,
};

/// The data source of a claim: an object in its namespace, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature: what a store keeps")]
pub enum DataSource {
    /// A VolumeSnapshot: its snapshot is restored.
    Snapshot(String),
    /// A PersistentVolumeClaim: its volume is cloned.
    Claim(String),
}

/// The action for a claim that has a data source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SourceAction {
    /// Create its volume from this one.
    Copy(StoredId),
    /// Let this node do that, which has the source.
    HandOver(String),
    /// Try again later: the source does not exist yet, or is not ready.
    Wait(String),
    /// Emit an event with the reason, and wait until the claim changes.
    Reject(ClaimRejection),
}

/// The data source that a claim names, if it is one that can be copied.
pub(crate) fn requested_source(
    request: &PersistentVolumeClaimSpec,
) -> Result<Option<DataSource>, ClaimRejection> {
    let reject =
        |field, value: &str, hint| Err(ClaimRejection::Unsupported { field, value: value.to_owned(), hint });
    let (field, group, kind, name) = match (&request.data_source_ref, &request.data_source) {
        // The API server gives both fields the same value where the older `dataSource` can express it.
        (Some(source), _) => {
            // A source in another namespace needs a ReferenceGrant, which this driver does not check.
            if let Some(namespace) = source.namespace.as_deref().filter(|namespace| !namespace.is_empty()) {
                return reject(
                    "spec.dataSourceRef.namespace",
                    namespace,
                    ": use a source in the claim's namespace",
                );
            }
            ("spec.dataSourceRef.kind", &source.api_group, &source.kind, &source.name)
        }
        (None, Some(source)) => ("spec.dataSource.kind", &source.api_group, &source.kind, &source.name),
        (None, None) => return Ok(None),
    };
    match (group.as_deref().unwrap_or_default(), kind.as_str()) {
        (SNAPSHOT_GROUP, "VolumeSnapshot") => Ok(Some(DataSource::Snapshot(name.clone()))),
        ("", "PersistentVolumeClaim") => Ok(Some(DataSource::Claim(name.clone()))),
        _ => reject(field, kind, ": use VolumeSnapshot or PersistentVolumeClaim"),
    }
}

/// Plans the restore of a snapshot. `content` is the one that the VolumeSnapshot names.
pub(crate) fn plan_restore(
    identity: &ProvisionerIdentity,
    spec: &VolumeSpec,
    name: &str,
    snapshot: Option<&VolumeSnapshot>,
    content: Option<&VolumeSnapshotContent>,
) -> SourceAction {
    let wait = |why: &str| SourceAction::Wait(format!("VolumeSnapshot {name} {why}"));
    let Some(snapshot) = snapshot else { return wait("does not exist") };
    let Some(content) = content else { return wait("has no VolumeSnapshotContent yet") };
    // The two must name each other: a status alone could name the content of another namespace.
    let bound = &content.spec.volume_snapshot_ref;
    if bound.uid.is_none() || bound.uid != snapshot.metadata.uid {
        return wait("is not bound to its VolumeSnapshotContent");
    }
    if content.spec.driver != identity.driver.as_str() {
        let driver = content.spec.driver.clone();
        return SourceAction::Reject(ClaimRejection::ForeignSource { source_name: name.to_owned(), driver });
    }
    let mode = content.spec.source_volume_mode.as_deref();
    // The mode never changes, so a wrong one is rejected at once, before the snapshot is ready.
    if let Some(rejection) = check_mode(spec, "the snapshot's sourceVolumeMode", mode) {
        return SourceAction::Reject(rejection);
    }
    if !content.is_ready() || snapshot.metadata.deletion_timestamp.is_some() {
        return wait("is not ready to use");
    }
    // Recorded before it is ready; the store without a name records nothing.
    if let Some(rejection) = check_store(identity, name, recorded_store(identity, content)) {
        return SourceAction::Reject(rejection);
    }
    let size = content.status.as_ref().and_then(|status| status.restore_size).unwrap_or_default();
    if let Some(rejection) = check_size(spec, name, u64::try_from(size).unwrap_or_default()) {
        return SourceAction::Reject(rejection);
    }
    let handle = content.snapshot_handle().unwrap_or_default();
    match (content.node(), handle.parse::<SnapshotId>()) {
        // Only that node has the data of the source.
        (Some(node), _) if node != identity.node.as_str() => SourceAction::HandOver(node.to_owned()),
        (Some(_), Ok(id)) => SourceAction::Copy(id.into()),
        (Some(_), Err(error)) => wait(&format!("can't be restored: {error}")),
        (None, _) => wait(
            "is on an unknown node: run the snapshot-controller with --enable-distributed-snapshotting, or label \
             its VolumeSnapshotContent with its node",
        ),
    }
}

/// Plans the clone of another claim's volume.
pub(crate) fn plan_clone(
    identity: &ProvisionerIdentity,
    spec: &VolumeSpec,
    name: &str,
    claim: Option<&PersistentVolumeClaim>,
    volume: Option<&PersistentVolume>,
) -> SourceAction {
    let wait = |why: &str| SourceAction::Wait(format!("PersistentVolumeClaim {name} {why}"));
    let Some(claim) = claim else { return wait("does not exist") };
    if claim.metadata.deletion_timestamp.is_some() {
        return wait("is being deleted");
    }
    let store = volume.and_then(store_name);
    let volume = volume.and_then(|volume| volume.spec.as_ref());
    // The two must name each other: a claim may name a volume that is bound to another claim.
    let Some(volume) = volume.filter(|volume| {
        volume.claim_ref.as_ref().is_some_and(|bound| bound.uid.is_some() && bound.uid == claim.metadata.uid)
    }) else {
        return wait("is not bound to a volume yet");
    };
    let Some(csi) = volume.csi.as_ref().filter(|csi| csi.driver == identity.driver.as_str()) else {
        let driver = volume.csi.as_ref().map_or("another driver", |csi| &csi.driver).to_owned();
        return SourceAction::Reject(ClaimRejection::ForeignSource { source_name: name.to_owned(), driver });
    };
    if let Some(rejection) = check_store(identity, name, store) {
        return SourceAction::Reject(rejection);
    }
    let mode = Some(volume.volume_mode.as_deref().unwrap_or("Filesystem"));
    if let Some(rejection) = check_mode(spec, "the source's volumeMode", mode) {
        return SourceAction::Reject(rejection);
    }
    match attributed_kind(csi).map(|kind| check_source_kind(spec, name, kind)) {
        Ok(None) => {}
        Ok(Some(rejection)) => return SourceAction::Reject(rejection),
        Err(error) => return wait(&format!("can't be cloned: {error}")),
    }
    let capacity = volume.capacity.as_ref().and_then(|capacity| capacity.get("storage"));
    let capacity = capacity.and_then(|capacity| quantity::parse_quantity(&capacity.0).ok());
    if let Some(rejection) = check_size(spec, name, capacity.unwrap_or_default()) {
        return SourceAction::Reject(rejection);
    }
    let required = volume.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    let terms = required.map(|required| required.node_selector_terms.as_slice()).unwrap_or_default();
    // Several terms are alternatives, and do not tell which node has the data.
    let [term] = terms else { return wait("has a volume on an unknown node") };
    let is_node = |key: &str| key == HOSTNAME || key == identity.driver.topology_key();
    let mut labels = term.match_expressions.iter().flatten().filter(|label| is_node(&label.key));
    let node = labels.find_map(|label| label.values.as_ref()?.first());
    match (node, csi.volume_handle.parse::<VolumeId>()) {
        (Some(node), _) if node != identity.node.as_str() => SourceAction::HandOver(node.clone()),
        (Some(_), Ok(id)) => SourceAction::Copy(id.into()),
        (Some(_), Err(error)) => wait(&format!("can't be cloned: {error}")),
        (None, _) => wait("has a volume on an unknown node"),
    }
}

/// Rejects a source in another store, by its name: blocks are shared within one file system only.
fn check_store(
    identity: &ProvisionerIdentity,
    source_name: &str,
    store: Option<&str>,
) -> Option<ClaimRejection> {
    let (source_name, named) = (source_name.to_owned(), store.map(str::to_owned));
    let is_here = store == identity.store.as_ref().map(StoreName::as_str);
    (!is_here).then_some(ClaimRejection::SourceInOtherStore { source_name, store: named })
}

/// Rejects a source of another volumeMode. `field` is the one that has the mode.
fn check_mode(spec: &VolumeSpec, field: &'static str, mode: Option<&str>) -> Option<ClaimRejection> {
    let wanted = spec.kind.volume_mode();
    let hint = match wanted {
        "Block" => ": a block volume is copied from a block volume; request volumeMode Filesystem",
        _ => ": a file system is copied from a file system; request volumeMode Block",
    };
    let value = mode.filter(|mode| !mode.is_empty() && *mode != wanted)?.to_owned();
    Some(ClaimRejection::Unsupported { field, value, hint })
}

/// Rejects a source of another kind.
pub(crate) fn check_source_kind(spec: &VolumeSpec, name: &str, found: VolumeKind) -> Option<ClaimRejection> {
    let wanted = spec.kind;
    let source_name = name.to_owned();
    (found != wanted).then_some(ClaimRejection::OtherSourceKind { source_name, found, wanted })
}

/// Rejects a volume that is smaller than its source, whose size may be the limit in force.
fn check_size(spec: &VolumeSpec, name: &str, size: u64) -> Option<ClaimRejection> {
    // A claim with the request of its source must fit, although the file system has rounded the source's limit up.
    let rounded = spec.capacity.0.div_ceil(MAX_ROUNDING).saturating_mul(MAX_ROUNDING);
    (rounded < size).then(|| ClaimRejection::SmallerThanSource {
        source_name: name.to_owned(),
        size: Bytes(size),
        capacity: spec.capacity,
    })
}

/// Returns whether a claim waits for a snapshot, so that it is planned again when one is ready.
pub(crate) fn waits_for_snapshot(claim: &PersistentVolumeClaim) -> bool {
    let source = claim.spec.as_ref().map(requested_source);
    class_name(claim).is_some() && matches!(source, Some(Ok(Some(DataSource::Snapshot(_)))))
}

#[cfg(test)]
#[path = "source_test.rs"]
mod tests;
