//! Failures of reconciling an object, which are counted and reported in the same way for claims, volumes and snapshots.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::Notify;

use crate::api::call::{ApiError, status_code};
use crate::api::event::{EventReason, EventRecorder};
use crate::api::work_queue::NextRun;
use crate::claim::attributes::AttributesRejection;
use crate::claim::spec::ClaimRejection;
use crate::deletion::reservation::GuardError;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::metrics::VolumeMetrics;
use crate::snapshot::{SnapshotId, SnapshotStoreError};
use crate::store::VolumeStoreError;
use crate::store_id::StoreId;

/// The reason why an object could not be reconciled now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ReconcileError {
    /// The store failed.
    #[error(transparent)]
    Store(VolumeStoreError),
    /// The store of snapshots failed.
    #[error(transparent)]
    Snapshot(SnapshotStoreError),
    /// The data source of a claim does not exist yet, or is not ready.
    #[error("can't copy the claim's data source: {reason}")]
    SourceNotReady {
        /// The missing object or state.
        reason: String,
    },
    /// The API server failed, or rejected the call.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The volume's claim exists, in spite of the volume's phase.
    #[error(
        "PersistentVolumeClaim {claim} still exists, so its volume was not deleted: delete the claim first"
    )]
    ClaimExists {
        /// The claim's name.
        claim: String,
    },
    /// The volume is neither in this store, nor was it: a missing directory does not prove its removal.
    #[error(
        "volume {id} is in the directory with store-id {named}, not in this one: mount its disk; nothing was \
         deleted"
    )]
    OtherStore {
        /// The volume.
        id: VolumeId,
        /// The store that its PersistentVolume names.
        named: StoreId,
    },
    /// The snapshot was ready, and is not in this store: that does not prove its removal.
    #[error(
        "can't delete snapshot {id}: it was ready, and is not in the directory of this node: mount its disk; if that is lost \
         for good, remove the finalizers of the VolumeSnapshotContent"
    )]
    SnapshotMissing {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The snapshot is in a store that the node does not have.
    #[error(
        "snapshot {id} is in store {store:?}, which this node does not have: add it to the stores in the configuration of the \
         node; if its disk is lost for good, remove the finalizers of the VolumeSnapshotContent"
    )]
    SnapshotStoreUnknown {
        /// The snapshot.
        id: SnapshotId,
        /// The name of the store.
        store: String,
    },
    /// The volume is in use on this node, or checking it failed.
    #[error(transparent)]
    Guard(GuardError),
    /// The node can't create volumes, and the claim's data are on no other node.
    #[error("this node can't create volumes: {why}")]
    NodeUnable {
        /// The reason.
        why: String,
    },
    /// The claim requests a size that no volume can have.
    #[error(transparent)]
    Rejected(ClaimRejection),
    /// The API server accepted a patch and dropped a field of it, so that no further step would be the last.
    #[error(
        "the API server dropped a field of a patch that resizes volume {id}: use Kubernetes 1.33 or newer, with the \
         feature gates RecoverVolumeExpansionFailure and, if claims name classes, VolumeAttributesClass"
    )]
    FieldDropped {
        /// The volume.
        id: VolumeId,
    },
    /// The claim's VolumeAttributesClass does not apply to the volume now.
    #[error(transparent)]
    Attributes(AttributesRejection),
    /// A panic, which is a bug in this crate or a dependency. The object is retried.
    #[error("internal error (panic): {text}")]
    Panicked {
        /// The panic message.
        text: String,
    },
}

impl ReconcileError {
    /// Returns whether a failure gets an event: temporary errors of the API server do not, because they are retried.
    fn is_worth_an_event(&self) -> bool {
        match self {
            Self::Api(error) => {
                // 409 is a conflict, and 429 and 5xx come from a busy server: a retry solves these. The server repeats
                // any other rejection until an administrator acts.
                status_code(&error.source).is_some_and(|code| (400..409).contains(&code) || code == 422)
            }
            _ => true,
        }
    }
}

/// Counts failures and emits events about them.
#[derive(Debug, Clone)]
pub(crate) struct FailureReporter {
    pub(crate) metrics: Arc<dyn VolumeMetrics>,
    pub(crate) recorder: Arc<EventRecorder>,
    /// Notified when the store has failed: whether it can be used at all is looked at then.
    pub(crate) store_failed: Arc<Notify>,
}

impl FailureReporter {
    /// Counts an error of the API server, and has the store probed after one of the store.
    pub(crate) fn count(&self, error: &ReconcileError) {
        match error {
            ReconcileError::Api(error) => self.metrics.record_api_error(error.call.metric_label()),
            ReconcileError::Store(_) | ReconcileError::Snapshot(_) => self.store_failed.notify_one(),
            _ => {}
        }
    }

    /// Counts a failure, and emits an event if it is not temporary.
    pub(crate) async fn report(&self, error: &ReconcileError, about: &ObjectReference, reason: EventReason) {
        self.count(error);
        if error.is_worth_an_event() {
            self.recorder.record_event(about, reason, &format_chain(error)).await;
        }
    }
}

/// Turns a panic into an error: a bug must affect one object, not the node.
pub(crate) async fn catch_panic(
    work: impl Future<Output = Result<NextRun, ReconcileError>>,
) -> Result<NextRun, ReconcileError> {
    // The payload of `panic!` is a `&str` for a literal, and a `String` for a formatted message.
    let panicked = |payload: Box<dyn std::any::Any + Send>| {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(ReconcileError::Panicked { text })
    };
    // A panic leaves nothing locked: volume locks end when they are dropped, and mutexes ignore the poison.
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}
