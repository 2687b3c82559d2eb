//! Metrics of provisioning and deletion.

use std::fmt;
use std::time::Duration;

use nodekeel_fsquota::AuditSummary;

#[cfg(feature = "metrics")]
mod prometheus;

#[cfg(feature = "metrics")]
pub use prometheus::PrometheusMetrics;

/// Records provisioned and deleted volumes and how long it took. `()` records nothing.
///
/// # Contract
/// Methods are called once per completed attempt, and after each search for orphans, from any thread. They
/// must not block. An attempt that failed before it reached the store counts, too, and so does a rejected
/// claim, once per reason.
pub trait VolumeMetrics: Send + Sync + fmt::Debug {
    /// An attempt to create a volume of this class succeeded or failed after this time.
    fn record_provision(&self, class: &str, took: Duration, succeeded: bool);

    /// An attempt to delete a volume of this class succeeded or failed after this time.
    fn record_delete(&self, class: &str, took: Duration, succeeded: bool);

    /// An attempt to expand a volume of this class succeeded or failed after this time.
    fn record_resize(&self, class: &str, took: Duration, succeeded: bool) {
        let _ = (class, took, succeeded);
    }

    /// An attempt to give a volume of this class its VolumeAttributesClass succeeded or failed after this time.
    fn record_modification(&self, class: &str, took: Duration, succeeded: bool) {
        let _ = (class, took, succeeded);
    }

    /// The number of volumes that may hold data and have no PersistentVolume, and of PersistentVolumes that
    /// have no volume. The search runs at start, after a watch has listed again, and after a claim or a
    /// PersistentVolume was deleted; the log names each orphan.
    fn set_orphans(&self, volumes: usize, objects: usize) {
        let _ = (volumes, objects);
    }

    /// The number of snapshots that no VolumeSnapshotContent names, of the same search, which also runs after a content was
    /// deleted.
    fn set_orphaned_snapshots(&self, snapshots: usize) {
        let _ = snapshots;
    }

    /// The totals of an audit of the volumes' limits, when it has ended.
    fn set_audit(&self, summary: &AuditSummary) {
        let _ = summary;
    }

    /// The limits of a volume were lost, and are set again.
    fn record_restored_limits(&self) {}

    /// The number of volumes whose limits are not those of their PersistentVolume, and can't be set, or that have files
    /// which don't count against them. Set after each comparison and each audit.
    fn set_wrong_limits(&self, volumes: usize) {
        let _ = volumes;
    }

    /// The CSIStorageCapacity objects of this node: how many it should have, how many of them are up to date, and how
    /// many others are still to be deleted. Set before each publication.
    fn set_capacity_objects(&self, desired: usize, current: usize, obsolete: usize) {
        let _ = (desired, current, obsolete);
    }

    /// A call of the API server failed: it was not answered, or rejected. `call` is a verb and a kind, such as
    /// `create_persistentvolume`.
    fn record_api_error(&self, call: &str) {
        let _ = call;
    }
}

impl VolumeMetrics for () {
    fn record_provision(&self, _class: &str, _took: Duration, _succeeded: bool) {}

    fn record_delete(&self, _class: &str, _took: Duration, _succeeded: bool) {}
}
