//! Takes and removes the snapshots of this node: the part of the csi-snapshotter, next to the cluster's
//! snapshot-controller.

use std::future::pending;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use kube::runtime::reflector;
use kube::runtime::{WatchStreamExt as _, watcher};
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;

use crate::ability::prober::ability_changes;
use crate::api::claim_queue::ClaimQueue;
use crate::api::event::EventReason;
use crate::api::retry_tracker::RetryTracker;
use crate::api::volume_cache::VolumeCache;
use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;
use crate::api::watches::changed_objects;
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::claim::source::waits_for_snapshot;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError, catch_panic};
use crate::loss::status::{ServedStore, StoreStatus};
use crate::objects::{is_in_store, object_reference};
use crate::snapshot::apply::SnapshotApplier;
use crate::snapshot::decide::{SnapshotAction, plan_snapshot};
use crate::snapshot::{
    ContentStore, MANAGED_BY_LABEL, SnapshotStoreError, VolumeSnapshotContent, content_store,
};
use crate::sweep::SweepRequest;

/// The longest delay of a content whose store is not served: it may be served again before the delay begins.
const UNSERVED_DELAY: Duration = Duration::from_secs(60);

/// Time for which a store is asked whether it has a snapshot.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// A store of the node, and what depends on its snapshots.
pub(crate) struct SnapshotUnit {
    pub(crate) applier: SnapshotApplier,
    pub(crate) claims: ClaimQueue,
    pub(crate) sweeps: UnboundedSender<SweepRequest>,
    pub(crate) served: ServedStore,
    pub(crate) failures: FailureReporter,
}

pub(crate) struct SnapshotReconciler {
    /// The stores with snapshots; at least one.
    pub(crate) units: Vec<SnapshotUnit>,
    /// The PersistentVolumes of this node.
    pub(crate) volumes: VolumeCache,
    pub(crate) retries: Arc<RetryTracker>,
    pub(crate) watch_errors: WatchErrors,
    /// The number of snapshots that are taken at once.
    pub(crate) concurrency: NonZeroU16,
}

impl SnapshotReconciler {
    /// Reconciles contents that change. Without the snapshot API in the cluster it does nothing; it starts when the API
    /// is installed. Never returns: a copy in progress when it is dropped has not happened.
    pub(crate) async fn run(&self) {
        let (contents, writer) = reflector::store::<VolumeSnapshotContent>();
        // The label limits the watch to the contents that the snapshot-controller has assigned to this node.
        let label = format!("{MANAGED_BY_LABEL}={}", self.first().applier.api.identity.node);
        let events = watcher(self.first().applier.api.all(), watcher::Config::default().labels(&label));
        let retries = Arc::clone(&self.retries);
        let signals = self.units.iter().map(|unit| (unit.claims.clone(), unit.sweeps.clone()));
        let signals: Vec<_> = signals.collect();
        let events = with_backoff(events, self.watch_errors.clone()).reflect(writer).inspect(move |event| {
            // One that is deleted may leave its snapshot, and one for an existing snapshot has found it.
            let changes_owner = match event {
                Ok(watcher::Event::Apply(content)) => content.spec.source.snapshot_handle.is_some(),
                Ok(watcher::Event::Delete(_)) => true,
                _ => false,
            };
            if changes_owner {
                // Without a receiver, the run ends.
                signals.iter().for_each(|(_, sweeps)| drop(sweeps.send(SweepRequest::Snapshots)));
            }
            let may_be_ready = match event {
                Ok(watcher::Event::Apply(content)) => content.is_ready(),
                // One may have become ready while the watch was disconnected.
                Ok(watcher::Event::InitDone) => true,
                Ok(watcher::Event::Delete(content)) => {
                    retries.forget(content.metadata.uid.as_deref().unwrap_or_default());
                    false
                }
                _ => false,
            };
            if may_be_ready {
                signals.iter().for_each(|(claims, _)| claims.requeue_where(waits_for_snapshot));
            }
        });
        let wakes = self.units.iter().map(|unit| ability_changes(&unit.served).boxed());
        let wakes = stream::select_all(wakes);
        reconcile_changes(changed_objects(events), wakes, contents, self.concurrency, async |content| {
            let done = catch_panic(self.reconcile(&content)).await;
            done.unwrap_or_else(|error| self.retry(&content, &error))
        })
        .await;
        // Volumes are served without snapshots, so the end of this watch must not end the run.
        pending().await
    }

    async fn reconcile(&self, content: &VolumeSnapshotContent) -> Result<NextRun, ReconcileError> {
        let uid = content.metadata.uid.as_deref().unwrap_or_default();
        // The write of a failure into the status is itself a change, which would be reconciled at once.
        if content.metadata.deletion_timestamp.is_none()
            && let Some(time) = self.retries.remaining_hold(uid)
        {
            return Ok(NextRun::After(time));
        }
        let (unit, done) = match self.find_unit(content).await {
            // The wake when it is served ends the delay. It does not wait here, in one of the slots of all stores.
            Ok(unit) if !matches!(unit.served.status(), StoreStatus::Served(_)) => {
                return Ok(NextRun::After(UNSERVED_DELAY));
            }
            Ok(unit) => (unit, Self::try_reconcile(unit, content).await),
            Err(error) => (self.first(), Err(error)),
        };
        match &done {
            Ok(()) => self.retries.record_success(uid),
            // While the API server fails, the status can't be written either.
            Err(error @ ReconcileError::Api(_)) => unit.failures.count(error),
            // The error in the status is one of the creation, so an error of the deletion becomes an event.
            Err(error) if content.metadata.deletion_timestamp.is_some() => {
                let (about, text) = (object_reference(content), format_chain(error));
                let recorder = &unit.failures.recorder;
                recorder.record_event(&about, EventReason::SnapshotDeleteError, &text).await;
            }
            // A failure to write this is not worse than the error itself, which is retried.
            Err(error) => drop(unit.applier.report_failure(content, &format_chain(error)).await),
        }
        done.map(|()| NextRun::OnChange)
    }

    fn first(&self) -> &SnapshotUnit {
        &self.units[0]
    }

    /// The store that a content is about: that of its volume, the one that it was taken in, or else the one that has its
    /// snapshot. A snapshot that none of them has may be in one that is absent.
    async fn find_unit(&self, content: &VolumeSnapshotContent) -> Result<&SnapshotUnit, ReconcileError> {
        let identity = &self.first().applier.api.identity;
        let action = plan_snapshot(identity, content);
        if let SnapshotAction::Report(id) | SnapshotAction::Delete(id) = &action
            && let ContentStore::Named(store) = content_store(identity, content)
        {
            let is_recorded = |unit: &&SnapshotUnit| unit.applier.store_name() == Some(store);
            return self.units.iter().find(is_recorded).ok_or_else(|| ReconcileError::SnapshotStoreUnknown {
                id: id.clone(),
                store: store.to_owned(),
            });
        }
        let [_, _, ..] = &self.units[..] else { return Ok(self.first()) };
        let id = match action {
            SnapshotAction::Create { volume, .. } => {
                let volume = self.volumes.get(volume.as_str());
                let is_here = |unit: &&SnapshotUnit| {
                    volume.as_ref().is_some_and(|it| is_in_store(&unit.applier.api.identity, it))
                };
                return Ok(self.units.iter().find(is_here).unwrap_or(self.first()));
            }
            SnapshotAction::Report(id) | SnapshotAction::Delete(id) => id,
            SnapshotAction::Ignore | SnapshotAction::Release | SnapshotAction::Reject(_) => {
                return Ok(self.first());
            }
        };
        let unnamed = self.units.iter().find(|unit| unit.applier.store_name().is_none());
        // What other stores have of this name is a copy of its files.
        if let Some(unit) = unnamed.filter(|_| content_store(identity, content) == ContentStore::Unnamed) {
            return Ok(unit);
        }
        // All at once, and each for a while only: a disk that hangs does not hide the snapshots of the others. If several have
        // it, it is that of the first of them, and the others have copies.
        let looks = self.units.iter().map(async |unit| {
            let found = timeout(LOOK_TIMEOUT, unit.applier.store.find_snapshot(&id)).await;
            (unit, found)
        });
        let mut absent = None;
        for (unit, found) in join_all(looks).await {
            match found {
                Ok(Ok(Some(_))) => return Ok(unit),
                Ok(Ok(None)) => {}
                Ok(Err(error)) => absent = Some(error),
                Err(_) => {
                    let source = "the disk does not answer".into();
                    absent = Some(SnapshotStoreError::Read { id: id.clone(), source });
                }
            }
        }
        absent.map_or(Ok(self.first()), |error| Err(ReconcileError::Snapshot(error)))
    }

    async fn try_reconcile(
        unit: &SnapshotUnit,
        content: &VolumeSnapshotContent,
    ) -> Result<(), ReconcileError> {
        let applier = &unit.applier;
        let rejection = match plan_snapshot(&applier.api.identity, content) {
            SnapshotAction::Ignore => return Ok(()),
            // The change of the content brings it back.
            SnapshotAction::Create { .. } | SnapshotAction::Report(_)
                if !applier.has_recorded_store(content) =>
            {
                return applier.record_store(content).await;
            }
            SnapshotAction::Create { id, volume } => {
                return applier.create_snapshot(content, &id, &volume).await;
            }
            SnapshotAction::Delete(id) => return applier.delete_snapshot(content, &id).await,
            SnapshotAction::Release => return applier.release_content(content).await,
            SnapshotAction::Report(id) => applier.report_snapshot(content, &id).await?,
            SnapshotAction::Reject(rejection) => Some(rejection),
        };
        match rejection {
            Some(rejection) => applier.report_failure(content, &rejection.to_string()).await,
            None => Ok(()),
        }
    }

    /// Logs a failure, and returns when the snapshot is tried again.
    fn retry(&self, content: &VolumeSnapshotContent, error: &ReconcileError) -> NextRun {
        let time = self.retries.record_reschedule(content.metadata.uid.as_deref().unwrap_or_default());
        let name = content.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(content = name, "reconcile snapshot: {}; retrying in {time:?}", format_chain(error));
        NextRun::After(time)
    }
}
