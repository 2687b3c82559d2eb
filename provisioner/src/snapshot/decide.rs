//! Plans the action for a VolumeSnapshotContent.

use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::snapshot::{BEING_DELETED, CONTENT_FINALIZER, SnapshotId, VolumeSnapshotContent};

/// Maximum characters of a handle in a rejection.
const SHOWN_CHARS: usize = 64;

/// The action for a VolumeSnapshotContent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotAction {
    /// Nothing: it belongs to another driver or node, it is ready, or only finalizers of others keep it.
    Ignore,
    /// Take a snapshot of a volume, and write it into the status.
    Create {
        /// The snapshot.
        id: SnapshotId,
        /// The volume.
        volume: VolumeId,
    },
    /// Write an existing snapshot into the status.
    Report(SnapshotId),
    /// Remove the snapshot, then the finalizer.
    Delete(SnapshotId),
    /// Remove the finalizer, and keep the snapshot, if there is one.
    Release,
    /// Write into the status why nothing can be done, and wait until the content changes.
    Reject(SnapshotRejection),
}

/// The reason why nothing can be done for a VolumeSnapshotContent. The message is written into its status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotRejection {
    /// Names a volume that this driver did not create.
    #[error("invalid volume handle {handle:?}: not a volume of this driver")]
    InvalidVolume {
        /// The handle, truncated to what fits into an event.
        handle: String,
    },
    /// Names a snapshot that this driver did not create.
    #[error("invalid snapshot handle {handle:?}: not a snapshot of this driver; nothing was deleted")]
    InvalidSnapshot {
        /// The handle, truncated to what fits into an event.
        handle: String,
    },
    /// Names a snapshot that is not on its node.
    #[error(
        "snapshot {id} does not exist on this node: restore its directory, or label the content with its node"
    )]
    Missing {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The UID of its VolumeSnapshot is not a UUID, so it cannot name a snapshot.
    #[error("the VolumeSnapshot's UID {uid:?} is not a UUID, and snapshots are named by it")]
    InvalidUid {
        /// The UID.
        uid: String,
    },
}

/// Plans the action for a VolumeSnapshotContent.
///
/// A snapshot is named by the UID of its VolumeSnapshot. So one that was created and never reported is found again,
/// and needs no annotation.
pub fn plan_snapshot(identity: &ProvisionerIdentity, content: &VolumeSnapshotContent) -> SnapshotAction {
    let is_ours =
        content.spec.driver == identity.driver.as_str() && content.node() == Some(identity.node.as_str());
    if !is_ours {
        return SnapshotAction::Ignore;
    }
    if is_to_be_deleted(content) {
        if has_content_finalizer(content) { plan_deletion(content) } else { SnapshotAction::Ignore }
    } else if content.is_ready() {
        SnapshotAction::Ignore
    } else {
        plan_creation(content).unwrap_or_else(SnapshotAction::Reject)
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

/// Returns whether a content is being deleted together with its VolumeSnapshot. Otherwise it is still needed.
fn is_to_be_deleted(content: &VolumeSnapshotContent) -> bool {
    let annotations = content.metadata.annotations.as_ref();
    // No VolumeSnapshot uses a content that an administrator has created and that names none. The
    // snapshot-controller annotates any other content after its VolumeSnapshot was deleted.
    let is_unbound = content.spec.source.snapshot_handle.is_some()
        && content.spec.volume_snapshot_ref.uid.as_deref().unwrap_or_default().is_empty();
    let has_no_snapshot = annotations.is_some_and(|annotations| annotations.contains_key(BEING_DELETED));
    content.metadata.deletion_timestamp.is_some() && (is_unbound || has_no_snapshot)
}

/// Returns whether a content has the finalizer that keeps it until its snapshot is removed.
pub(crate) fn has_content_finalizer(content: &VolumeSnapshotContent) -> bool {
    content.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == CONTENT_FINALIZER)
}

fn plan_deletion(content: &VolumeSnapshotContent) -> SnapshotAction {
    let is_kept = content.spec.deletion_policy != "Delete";
    match content.snapshot_handle() {
        Some(_) if is_kept => SnapshotAction::Release,
        Some(handle) => match handle.parse() {
            Ok(id) => SnapshotAction::Delete(id),
            Err(_) => SnapshotAction::Reject(SnapshotRejection::InvalidSnapshot { handle: shown(handle) }),
        },
        // A crash came between its creation and the status: no object names it.
        None => match plan_creation(content) {
            Ok(SnapshotAction::Create { id, .. }) => SnapshotAction::Delete(id),
            // The content was to use an existing snapshot, or names no valid one: this driver has taken none for it.
            _ => SnapshotAction::Release,
        },
    }
}

fn plan_creation(content: &VolumeSnapshotContent) -> Result<SnapshotAction, SnapshotRejection> {
    let source = &content.spec.source;
    if let Some(handle) = source.snapshot_handle.as_deref() {
        let invalid = |_| SnapshotRejection::InvalidSnapshot { handle: shown(handle) };
        return handle.parse().map(SnapshotAction::Report).map_err(invalid);
    }
    let handle = source.volume_handle.as_deref().unwrap_or_default();
    let volume = handle.parse().map_err(|_| SnapshotRejection::InvalidVolume { handle: shown(handle) })?;
    let uid = content.spec.volume_snapshot_ref.uid.as_deref().unwrap_or_default();
    let id = SnapshotId::from_uid(uid).map_err(|_| SnapshotRejection::InvalidUid { uid: shown(uid) })?;
    Ok(SnapshotAction::Create { id, volume })
}

fn shown(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}

#[cfg(test)]
#[path = "decide_test.rs"]
mod tests;
