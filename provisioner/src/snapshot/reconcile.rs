//! Takes and removes the snapshots of this node: the part of the csi-snapshotter, beside the cluster's
//! snapshot-controller.

use std::future::pending;
use std::sync::Arc;

use futures_util::StreamExt as _;
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::{WatchStreamExt as _, watcher};

use crate::api::event::EventReason;
use crate::api::watch_backoff::with_backoff;
use crate::api::work_queue::{NextRun, reconcile_changes};
use crate::apply::{ApplyError, content_reference};
use crate::claim::source::waits_for_snapshot;
use crate::controller::ReconcileContext;
use crate::controller::failures::catch_panic;
use crate::controller::watches::changed_objects;
use crate::error_chain::format_chain;
use crate::snapshot::decide::{SnapshotAction, plan_snapshot};
use crate::snapshot::{MANAGED_BY_LABEL, SnapshotStore, VolumeSnapshotContent};

/// Reconciles the VolumeSnapshotContents of this node. Without the snapshot API in the cluster, or a store of
/// snapshots, it does nothing; it starts when the API is installed. Never returns: a copy in progress when it is
/// dropped has not happened.
pub(crate) async fn run_snapshots(context: &Arc<ReconcileContext>) {
    let provisioner = &context.provisioner;
    if provisioner.applier.snapshots.is_none() {
        return pending().await;
    }
    let (contents, writer) = reflector::store::<VolumeSnapshotContent>();
    let label = format!("{MANAGED_BY_LABEL}={}", provisioner.config.identity.node);
    let events = watcher(context.resource_api(), watcher::Config::default().labels(&label));
    let requeued = Arc::clone(context);
    let events =
        with_backoff(events, context.optional_watches.clone()).reflect(writer).inspect(move |event| {
            let may_be_ready = match event {
                Ok(watcher::Event::Apply(content)) => content.is_ready(),
                // One may have become ready while the watch was disconnected.
                Ok(watcher::Event::InitDone) => true,
                Ok(watcher::Event::Delete(content)) => {
                    requeued.retries.forget(content.metadata.uid.as_deref().unwrap_or_default());
                    false
                }
                _ => false,
            };
            if may_be_ready {
                requeued.requeue_restores();
            }
        });
    let concurrency = provisioner.config.copy_concurrency;
    reconcile_changes(changed_objects(events), (contents, concurrency), async |content| {
        let done = catch_panic(reconcile_content(&content, context)).await;
        done.unwrap_or_else(|error| retry_content(&content, &error, context))
    })
    .await;
    pending().await
}

impl ReconcileContext {
    /// Plans claims again that may wait for a snapshot.
    fn requeue_restores(&self) {
        for claim in self.claims.state() {
            if waits_for_snapshot(&claim) {
                self.signals.requeue_claim(ObjectRef::from_obj(&*claim));
            }
        }
    }

    async fn try_reconcile_content(
        &self,
        content: &VolumeSnapshotContent,
        store: &dyn SnapshotStore,
    ) -> Result<(), ApplyError> {
        self.served_store().await;
        let applier = &self.provisioner.applier;
        let rejection = match plan_snapshot(&applier.identity, content) {
            SnapshotAction::Ignore => None,
            SnapshotAction::Create { id, volume } => {
                applier.create_snapshot(store, content, (&id, &volume)).await?;
                None
            }
            SnapshotAction::Report(id) => applier.report_snapshot(store, content, &id).await?,
            SnapshotAction::Delete(id) => {
                applier.delete_snapshot(store, content, &id).await?;
                None
            }
            SnapshotAction::Release => {
                applier.release_content(content).await?;
                None
            }
            SnapshotAction::Reject(rejection) => Some(rejection),
        };
        match rejection {
            Some(rejection) => applier.report_snapshot_failure(content, &rejection.to_string()).await,
            None => Ok(()),
        }
    }
}

async fn reconcile_content(
    content: &VolumeSnapshotContent,
    context: &ReconcileContext,
) -> Result<NextRun, ApplyError> {
    let applier = &context.provisioner.applier;
    let Some(store) = applier.snapshots.clone() else { return Ok(NextRun::OnChange) };
    let uid = content.metadata.uid.clone().unwrap_or_default();
    // The write of a failure into the status is itself a change, which would be reconciled at once.
    if content.metadata.deletion_timestamp.is_none()
        && let Some(time) = context.retries.remaining_hold(&uid)
    {
        return Ok(NextRun::After(time));
    }
    let done = context.try_reconcile_content(content, &*store).await;
    match &done {
        Ok(()) => context.retries.record_success(&uid),
        Err(error @ ApplyError::Api { .. }) => context.record_api_error(error),
        Err(error) if content.metadata.deletion_timestamp.is_some() => {
            let (about, text) = (content_reference(content), format_chain(error));
            applier.recorder.record_event(&about, EventReason::SnapshotDeleteError, &text).await;
        }
        // A failure to write this is not worse than the error itself, which is retried.
        Err(error) => drop(applier.report_snapshot_failure(content, &format_chain(error)).await),
    }
    done.map(|()| NextRun::OnChange)
}

/// Logs a failure, and returns when the snapshot is tried again.
fn retry_content(content: &VolumeSnapshotContent, error: &ApplyError, context: &ReconcileContext) -> NextRun {
    let time = context.retries.record_reschedule(content.metadata.uid.as_deref().unwrap_or_default());
    let name = content.metadata.name.as_deref().unwrap_or_default();
    tracing::warn!(content = name, "reconcile snapshot: {}; retrying in {time:?}", format_chain(error));
    NextRun::After(time)
}
