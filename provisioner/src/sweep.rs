//! Sweeps volumes without a PersistentVolume, and counts orphans.

use std::collections::BTreeSet;

use kube::runtime::reflector::ObjectRef;
use nodekeel_supervisor::Backoff;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep_until};

use crate::api::retry_tracker::random_fraction;
use crate::apply::{ApplyError, ClaimState, SweepOutcome};
use crate::controller::ReconcileContext;
use crate::controller::event_filter::SweepRequest;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::loss::condition::required_volume;
use crate::loss::store::{is_marked_lost, named_store};
use crate::store_id::{StoreId, StoreIdentity};

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

    fn add_request(&mut self, request: SweepRequest) {
        match request {
            SweepRequest::All => self.all = true,
            SweepRequest::One(id) => drop(self.ids.insert(id)),
        }
    }
}

/// When something that is not done yet is tried again, with growing delays.
#[derive(Debug, Default)]
struct RetryTimer {
    attempts: u32,
    due: Option<Instant>,
}

impl RetryTimer {
    /// Whether it is due; then it waits no longer.
    fn take_due(&mut self) -> bool {
        let is_due = self.due.is_some_and(|due| due <= Instant::now());
        self.due = self.due.filter(|_| !is_due);
        is_due
    }

    /// Starts the next delay, unless one is running, or there is nothing to try again.
    fn schedule(&mut self, is_needed: bool, backoff: Backoff) {
        if !is_needed {
            *self = Self::default();
        } else if self.due.is_none() {
            self.attempts = self.attempts.saturating_add(1);
            self.due = Some(Instant::now() + backoff.jittered_delay(self.attempts, random_fraction()));
        }
    }
}

/// Sweeps after each signal, and retries failures.
pub(crate) async fn run_sweeper(context: &ReconcileContext, mut signals: UnboundedReceiver<SweepRequest>) {
    let backoff = context.provisioner.config.backoff;
    let mut sweeper =
        OrphanSweeper { context, orphaned_volumes: BTreeSet::new(), orphaned_objects: BTreeSet::new() };
    let mut failed = SweepBatch::default();
    // A directory that is restored makes no event: look for it from time to time.
    let (mut retry, mut look) = (RetryTimer::default(), RetryTimer::default());
    loop {
        let mut wanted = SweepBatch::default();
        let due = [retry.due, look.due].into_iter().flatten().min();
        tokio::select! {
            signal = signals.recv() => match signal {
                Some(signal) => wanted.add_request(signal),
                None => return,
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        // While the store is lost, nothing can be said of its volumes. When it is back, all of them are to be swept.
        let store = context.served_store().await;
        while let Ok(signal) = signals.try_recv() {
            wanted.add_request(signal);
        }
        look.take_due();
        if retry.take_due() {
            wanted.merge_batch(std::mem::take(&mut failed));
        }
        failed.merge_batch(sweeper.sweep_batch(wanted, &store).await);
        // Before all are listed, it is not known which are missing.
        if !failed.all {
            sweeper.publish_orphans().await;
        }
        retry.schedule(!failed.is_empty(), backoff);
        look.schedule(!sweeper.orphaned_objects.is_empty(), backoff);
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
    async fn sweep_batch(&mut self, wanted: SweepBatch, store: &StoreIdentity) -> SweepBatch {
        let applier = &self.context.provisioner.applier;
        let (mut left, mut ids) = (SweepBatch::default(), wanted.ids);
        if wanted.all {
            match applier.store.list().await {
                Ok(all) => {
                    let all: BTreeSet<_> = all.into_iter().collect();
                    self.find_orphaned_objects(&all).await;
                    if let Err(error) = self.remove_wrong_marks(&all, store).await {
                        self.report_failure(&error);
                        left.all = true;
                    }
                    ids.extend(all);
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
            if let Err(error) = self.sweep_volume(&id, (state, store.id())).await {
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

    /// Takes back that volumes were declared lost which the served store has.
    async fn remove_wrong_marks(
        &self,
        listed: &BTreeSet<VolumeId>,
        store: &StoreIdentity,
    ) -> Result<(), ApplyError> {
        let applier = &self.context.provisioner.applier;
        for volume in self.context.volumes.state() {
            let id: Option<VolumeId> = volume.metadata.name.as_deref().and_then(|name| name.parse().ok());
            let is_here = named_store(&volume).is_some_and(|named| store.id() == Some(&named))
                && id.is_some_and(|id| listed.contains(&id));
            if is_here && is_marked_lost(&applier.identity, &volume) {
                applier.remove_lost_mark(&volume).await?;
            }
        }
        Ok(())
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

    async fn sweep_volume(
        &mut self,
        id: &VolumeId,
        (state, store): (ClaimState, Option<&StoreId>),
    ) -> Result<(), ApplyError> {
        match self.context.provisioner.applier.sweep_volume(id, (state, store)).await? {
            SweepOutcome::Orphan if self.orphaned_volumes.insert(id.clone()) => {
                tracing::warn!(handle = %id, "volume has no PersistentVolume and may hold data: not deleted");
            }
            SweepOutcome::Orphan => {}
            SweepOutcome::Kept | SweepOutcome::Removed => drop(self.orphaned_volumes.remove(id)),
        }
        Ok(())
    }
}
