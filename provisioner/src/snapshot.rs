//! Snapshots of volumes, and volumes created from them or from other volumes.

pub(crate) mod apply;
pub(crate) mod decide;
mod id;
mod listing;
mod objects;
pub(crate) mod reconcile;
mod store;

pub use id::{SnapshotId, SnapshotIdError, StoredId};
pub use listing::{SnapshotOwner, adopted_snapshot};
pub(crate) use listing::{list_ready_snapshots, list_snapshot_owners};
pub use objects::{
    BEING_DELETED, CONTENT_FINALIZER, MANAGED_BY_LABEL, SNAPSHOT_GROUP, SnapshotContentError,
    SnapshotContentSource, VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotContentSpec,
    VolumeSnapshotContentStatus, VolumeSnapshotStatus,
};
pub(crate) use objects::{ContentStore, content_store, recorded_store, store_annotation};
pub use store::{SnapshotInfo, SnapshotStore, SnapshotStoreError};
