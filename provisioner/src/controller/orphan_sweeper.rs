//! Sweeps volumes without a PersistentVolume, and counts orphans.

use std::collections::BTreeSet;

use kube::runtime::reflector::ObjectRef;
use nodekeel_supervisor::Backoff;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until};

use crate::apply::{ApplyError, ClaimState, SweepOutcome};
use crate::controller::ReconcileContext;
use crate::controller::event_filter::SweepRequest;
use crate::controller::retry_tracker::random_fraction;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::plan::required_volume;

/// Maximum number of signals handled at once: several lists may follow one another.
const MAX_BATCH: usize = 256;

/// The volumes to check.
#[derive(Debug, Default)]
struct SweepBatch {
    all: bool,
    ids: BTreeSet<VolumeId>,
}

impl SweepBatch {
    fn is_empty(&self) -> bool {
        !self.all && self.ids.is_empty()
    }

    fn merge_batch(&mut self, other: Self) {
        self.all |= other.all;
        self.ids.extend(other.ids);
    }
}

/// Sweeps after each signal, and retries failures.
pub(super) async fn run_sweeper(context: &ReconcileContext, mut signals: UnboundedReceiver<SweepRequest>) {
    let mut sweeper =
        OrphanSweeper { context, orphaned_volumes: BTreeSet::new(), orphaned_objects: BTreeSet::new() };
    let (mut batch, mut failed, mut failures) = (Vec::new(), SweepBatch::default(), 0);
    let mut due = Instant::now();
    loop {
        let mut wanted = SweepBatch::default();
        tokio::select! {
            count = signals.recv_many(&mut batch, MAX_BATCH) => if count == 0 {
                return;
            },
            () = sleep_until(due), if !failed.is_empty() => wanted = std::mem::take(&mut failed),
        }
        for signal in batch.drain(..) {
            match signal {
                SweepRequest::All => wanted.all = true,
                SweepRequest::One(id) => drop(wanted.ids.insert(id)),
            }
        }
        // While the store is lost, nothing can be said of its volumes.
        context.served_store().await;
        let mut left = sweeper.sweep_batch(wanted).await;
        sweeper.publish_orphans().await;
        // A directory that is restored makes no event: look for it from time to time.
        left.ids.extend(sweeper.orphaned_objects.iter().cloned());
        if !left.is_empty() {
            failures += 1;
            let backoff: Backoff = context.provisioner.config.backoff;
            due = Instant::now() + backoff.jittered_delay(failures, random_fraction());
            failed.merge_batch(left);
        } else if failed.is_empty() {
            failures = 0;
        }
    }
}

struct OrphanSweeper<'a> {
    context: &'a ReconcileContext,
    /// Volumes that may hold data and have no PersistentVolume; already logged.
    orphaned_volumes: BTreeSet<VolumeId>,
    /// PersistentVolumes whose volume does not exist: the condition reporter names them.
    orphaned_objects: BTreeSet<VolumeId>,
}

impl OrphanSweeper<'_> {
    /// Sweeps a batch; a failure does not block other volumes. Returns what to retry.
    async fn sweep_batch(&mut self, wanted: SweepBatch) -> SweepBatch {
        let applier = &self.context.provisioner.applier;
        let (mut left, mut ids) = (SweepBatch::default(), wanted.ids);
        if wanted.all {
            match applier.store.list().await {
                Ok(all) => {
                    ids.extend(all);
                    self.find_orphaned_objects(&ids).await;
                }
                Err(error) => {
                    self.report_failure(&ApplyError::Store(error));
                    left.all = true;
                }
            }
        }
        let ids = self.volumes_without_object(ids).await;
        if ids.is_empty() {
            return left;
        }
        let states = match applier.claim_states(&ids).await {
            Ok(states) => states,
            Err(error) => {
                self.report_failure(&error);
                left.ids = ids;
                return left;
            }
        };
        for (id, state) in states {
            if let Err(error) = self.sweep_volume(&id, state).await {
                self.report_failure(&error);
                left.ids.insert(id);
            }
        }
        left
    }

    /// Finds PersistentVolumes whose volume is neither in the list, which may be older than the object, nor
    /// found by a separate query.
    async fn find_orphaned_objects(&mut self, listed: &BTreeSet<VolumeId>) {
        let applier = &self.context.provisioner.applier;
        for volume in self.context.volumes.state() {
            let id = required_volume(&applier.identity, &volume);
            let Some(id) = id.filter(|id| !listed.contains(id)) else { continue };
            if !applier.volume_exists(&id).await {
                self.orphaned_objects.insert(id);
            }
        }
    }

    /// Drops resolved orphans, updates the metrics, and has the rest reported.
    async fn publish_orphans(&mut self) {
        let applier = &self.context.provisioner.applier;
        for (ids, stays) in [(&mut self.orphaned_volumes, true), (&mut self.orphaned_objects, false)] {
            let mut resolved = Vec::new();
            for id in ids.iter() {
                let has_object = self.context.volumes.get(&ObjectRef::new(id.as_str())).is_some();
                if has_object == stays || applier.volume_exists(id).await != stays {
                    resolved.push(id.clone());
                }
            }
            ids.retain(|id| !resolved.contains(id));
        }
        applier.metrics.set_orphans(self.orphaned_volumes.len(), self.orphaned_objects.len());
        self.context.missing_volumes.send_if_modified(|missing| {
            let is_new = *missing != self.orphaned_objects;
            missing.clone_from(&self.orphaned_objects);
            is_new
        });
    }

    /// Those volumes that exist and have no PersistentVolume in the cache.
    async fn volumes_without_object(&self, mut ids: BTreeSet<VolumeId>) -> BTreeSet<VolumeId> {
        ids.retain(|id| self.context.volumes.get(&ObjectRef::new(id.as_str())).is_none());
        let mut existing = BTreeSet::new();
        for id in ids {
            if self.context.provisioner.applier.volume_exists(&id).await {
                existing.insert(id);
            }
        }
        existing
    }

    fn report_failure(&self, error: &ApplyError) {
        self.context.record_api_error(error);
        tracing::warn!("sweep unused volumes: {}; retrying", format_chain(error));
    }

    async fn sweep_volume(&mut self, id: &VolumeId, state: ClaimState) -> Result<(), ApplyError> {
        match self.context.provisioner.applier.sweep_volume(id, state).await? {
            SweepOutcome::Orphan if self.orphaned_volumes.insert(id.clone()) => {
                tracing::warn!(handle = %id, "volume has no PersistentVolume and may hold data: not deleted");
            }
            SweepOutcome::Orphan => {}
            SweepOutcome::Kept | SweepOutcome::Removed => drop(self.orphaned_volumes.remove(id)),
        }
        Ok(())
    }
}
