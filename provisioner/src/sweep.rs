//! Sweeps volumes without a PersistentVolume: removes those that are empty, and counts and reports the orphans.

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::Patch;
use kube::runtime::reflector::{ObjectRef, Store};
use nodekeel_supervisor::Backoff;
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::api::call::{ApiCall, status_code};
use crate::api::retry_tracker::random_fraction;
use crate::api::volume_cache::VolumeCache;
use crate::api::writer::ApiWriter;
use crate::claim::decide::{ClaimIgnoreReason, claim_ignore_reason};
use crate::deletion::apply::VolumeRemover;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError};
use crate::id::VolumeId;
use crate::loss::condition::required_volume;
use crate::loss::status::ServedStore;
use crate::objects::{class_name, is_in_store, is_marked_lost, named_store};
use crate::scope::is_class_of_store;
use crate::snapshot::{SnapshotId, SnapshotStore, list_snapshot_owners};
use crate::step::VolumeStep;
use crate::store_id::{StoreId, StoreIdentity};

/// The volumes that may have lost their claim or their PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SweepRequest {
    /// All volumes: a watch has listed again, and changes before it may have been missed.
    All,
    /// One volume: its claim or its PersistentVolume was deleted, or the claim no longer needs this node.
    One(VolumeId),
    /// The snapshots: a VolumeSnapshotContent was deleted, or one was created for an existing snapshot.
    Snapshots,
}

/// The result of sweeping a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SweepOutcome {
    /// Has a PersistentVolume, or will get one.
    Kept,
    /// Was empty and was removed.
    Removed,
    /// May hold data and was kept.
    Orphan,
}

/// The state of a volume's claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimState {
    /// Is pending on this node, so its volume will be provisioned again.
    Pending,
    /// Is bound to a volume, or has lost it.
    BoundOrLost,
    /// Is deleted, or belongs to another node or driver by now.
    Gone,
}

/// The volumes to check.
#[derive(Debug, Default)]
struct SweepBatch {
    all: bool,
    snapshots: bool,
    ids: BTreeSet<VolumeId>,
}

impl SweepBatch {
    fn is_empty(&self) -> bool {
        !self.all && !self.snapshots && self.ids.is_empty()
    }

    fn merge_batch(&mut self, other: Self) {
        self.all |= other.all;
        self.snapshots |= other.snapshots;
        self.ids.extend(other.ids);
    }

    fn add_request(&mut self, request: SweepRequest) {
        match request {
            SweepRequest::All => (self.all, self.snapshots) = (true, true),
            SweepRequest::One(id) => drop(self.ids.insert(id)),
            SweepRequest::Snapshots => self.snapshots = true,
        }
    }
}

/// The time of the next retry, with growing delays.
#[derive(Debug, Default)]
struct RetryTimer {
    attempts: u32,
    due: Option<Instant>,
}

impl RetryTimer {
    /// Returns whether it is due; then it waits no longer.
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

pub(crate) struct OrphanSweeper {
    pub(crate) api: ApiWriter,
    pub(crate) remover: Arc<VolumeRemover>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    /// The cached PersistentVolumes of this node.
    pub(crate) objects: VolumeCache,
    pub(crate) classes: Store<StorageClass>,
    pub(crate) served: ServedStore,
    /// The volumes with a PersistentVolume that the served store does not have, as of the last sweep.
    pub(crate) missing: Arc<watch::Sender<BTreeSet<VolumeId>>>,
    pub(crate) failures: FailureReporter,
    pub(crate) backoff: Backoff,
}

/// The orphans that were found and are not resolved yet.
#[derive(Debug, Default)]
struct Orphans {
    /// Volumes that may hold data and have no PersistentVolume; already logged.
    volumes: BTreeSet<VolumeId>,
    /// PersistentVolumes whose volume does not exist: the condition reporter names them.
    objects: BTreeSet<VolumeId>,
    /// Snapshots that no VolumeSnapshotContent names; already logged.
    snapshots: BTreeSet<SnapshotId>,
}

impl OrphanSweeper {
    /// Sweeps after each request, and retries failures.
    pub(crate) async fn run(&self, requests: &mut UnboundedReceiver<SweepRequest>) {
        self.served.wait_until_served().await;
        let (mut orphans, mut failed) = (Orphans::default(), SweepBatch::default());
        // A directory that is restored makes no event: look for it from time to time.
        let (mut retry, mut look) = (RetryTimer::default(), RetryTimer::default());
        loop {
            let mut wanted = SweepBatch::default();
            let due = [retry.due, look.due].into_iter().flatten().min();
            tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => wanted.add_request(request),
                    None => return,
                },
                // `select!` evaluates this expression even if nothing is due, but then does not wait for it.
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
            // While the store is lost, nothing is known of its volumes. When it is back, all of them are to be swept.
            let store = self.served.wait_until_served().await;
            // Requests that have arrived by now become one batch: each batch lists the claims of the cluster once.
            while let Ok(request) = requests.try_recv() {
                wanted.add_request(request);
            }
            // An operator who removes a snapshot makes no event either.
            wanted.snapshots |= look.take_due() && !orphans.snapshots.is_empty();
            if retry.take_due() {
                wanted.merge_batch(std::mem::take(&mut failed));
            }
            failed.merge_batch(self.sweep_batch(wanted, &store, &mut orphans).await);
            // Before all are listed, it is not known which are missing.
            if !failed.all {
                self.publish_orphans(&mut orphans).await;
            }
            retry.schedule(!failed.is_empty(), self.backoff);
            look.schedule(!orphans.objects.is_empty() || !orphans.snapshots.is_empty(), self.backoff);
        }
    }

    /// Sweeps a batch; a failure does not block other volumes. Returns what to retry.
    async fn sweep_batch(
        &self,
        wanted: SweepBatch,
        store: &StoreIdentity,
        orphans: &mut Orphans,
    ) -> SweepBatch {
        let (mut left, mut ids) = (SweepBatch::default(), wanted.ids);
        if wanted.snapshots
            && let Err(error) = self.find_orphaned_snapshots(orphans).await
        {
            self.report_failure(&error);
            left.snapshots = true;
        }
        if wanted.all {
            match self.remover.store.list().await {
                Ok(all) => {
                    let all: BTreeSet<_> = all.into_iter().collect();
                    self.find_orphaned_objects(&all, orphans).await;
                    if let Err(error) = self.remove_wrong_marks(&all, store).await {
                        self.report_failure(&error);
                        left.all = true;
                    }
                    ids.extend(all);
                }
                Err(error) => {
                    self.report_failure(&ReconcileError::Store(error));
                    left.all = true;
                }
            }
        }
        // Nearly all volumes have a PersistentVolume in the cache. Only the others cost calls of the API server.
        let mut unowned = BTreeSet::new();
        for id in ids {
            if !self.has_object(&id) && self.remover.volume_exists(&id).await {
                unowned.insert(id);
            }
        }
        if unowned.is_empty() {
            return left;
        }
        let states = match self.claim_states(&unowned).await {
            Ok(states) => states,
            Err(error) => {
                self.report_failure(&error);
                left.ids = unowned;
                return left;
            }
        };
        for (id, state) in states {
            match self.sweep_volume(&id, state, store.id()).await {
                Ok(SweepOutcome::Orphan) => {
                    if orphans.volumes.insert(id.clone()) {
                        tracing::warn!(handle = %id, "volume has no PersistentVolume and may hold data: not deleted");
                    }
                }
                Ok(SweepOutcome::Kept | SweepOutcome::Removed) => drop(orphans.volumes.remove(&id)),
                Err(error) => {
                    self.report_failure(&error);
                    left.ids.insert(id);
                }
            }
        }
        left
    }

    /// Finds PersistentVolumes whose volume is neither in the list, which may be older than the object, nor
    /// found by a separate query.
    async fn find_orphaned_objects(&self, listed: &BTreeSet<VolumeId>, orphans: &mut Orphans) {
        for volume in self.objects.iter() {
            let id = required_volume(&self.api.identity, &volume);
            let Some(id) = id.filter(|id| !listed.contains(id)) else { continue };
            if !self.remover.volume_exists(&id).await {
                orphans.objects.insert(id);
            }
        }
    }

    /// Finds the snapshots that no content of the driver names in this store. They stay: their contents were deleted in order to
    /// keep them, or they are copies of those of another store.
    async fn find_orphaned_snapshots(&self, orphans: &mut Orphans) -> Result<(), ReconcileError> {
        let Some(store) = &self.snapshots else { return Ok(()) };
        let mut found: BTreeSet<_> =
            store.list_snapshots().await.map_err(ReconcileError::Snapshot)?.into_iter().collect();
        if !found.is_empty() {
            // Afterwards: the content of a snapshot is older than the snapshot.
            let owners = match list_snapshot_owners(self.api.client(), &self.api.identity).await {
                // Without the permission or the snapshot API, nothing is known of them.
                Err(error) if matches!(status_code(&error), Some(403 | 404)) => return Ok(()),
                owners => owners.map_err(|error| ApiCall::ListSnapshotContents.wrap_error(error))?,
            };
            let store = self.api.identity.store.as_ref();
            found.retain(|id| !owners.get(id).is_some_and(|owner| owner.is_in_store(store)));
        }
        for id in found.difference(&orphans.snapshots) {
            tracing::warn!(handle = %id, "snapshot has no VolumeSnapshotContent in this store: not deleted");
        }
        orphans.snapshots = found;
        Ok(())
    }

    /// Removes the mark of a lost disk from volumes that the served store has.
    async fn remove_wrong_marks(
        &self,
        listed: &BTreeSet<VolumeId>,
        store: &StoreIdentity,
    ) -> Result<(), ReconcileError> {
        for volume in self.objects.iter() {
            let name = volume.metadata.name.as_deref().unwrap_or_default();
            let is_here = named_store(&volume).is_some_and(|named| store.id() == Some(&named))
                && name.parse::<VolumeId>().is_ok_and(|id| listed.contains(&id));
            if !is_here || !is_marked_lost(&self.api.identity, &volume) {
                continue;
            }
            tracing::warn!(
                pv = name,
                "the disk of the volume was declared lost, but is here: taking that back"
            );
            // With the version that was read: an operator may have declared the disk lost again since.
            let patch = Patch::Merge(json!({ "metadata": {
                "uid": volume.metadata.uid,
                "resourceVersion": volume.metadata.resource_version,
                "annotations": { self.api.identity.driver.lost_annotation(): null },
            } }));
            self.api.patch_volume(VolumeStep::MarkLost, &volume, &patch).await?;
        }
        Ok(())
    }

    /// Lists all claims once, for the states of the claims of volumes. A missing claim is deleted for good,
    /// because a volume is younger than its claim, and UIDs are never reused.
    async fn claim_states(
        &self,
        ids: &BTreeSet<VolumeId>,
    ) -> Result<HashMap<VolumeId, ClaimState>, ReconcileError> {
        let mut states: HashMap<_, _> = ids.iter().map(|id| (id.clone(), ClaimState::Gone)).collect();
        // Visited page by page, and not kept: a cluster may have more claims than a node should hold in memory.
        let visit = |claim: PersistentVolumeClaim| {
            let id = VolumeId::from_uid(claim.metadata.uid.as_deref().unwrap_or_default());
            if let Some(state) = id.ok().and_then(|id| states.get_mut(&id)) {
                *state = match claim_ignore_reason(&self.api.identity, &claim) {
                    // Its volume will be in another store.
                    None if !self.may_provision(&claim) => ClaimState::Gone,
                    None => ClaimState::Pending,
                    Some(ClaimIgnoreReason::HasVolume | ClaimIgnoreReason::NotPending) => {
                        ClaimState::BoundOrLost
                    }
                    Some(_) => ClaimState::Gone,
                };
            }
            ControlFlow::Continue(())
        };
        self.api.for_each(ApiCall::ListClaims, visit).await?;
        Ok(states)
    }

    /// Removes a volume that was created and never published: a crash came between its directory and its
    /// PersistentVolume, and its claim was deleted since, or has its volume on another node.
    ///
    /// Only an empty volume, or a marked copy or image: one with data was in use, and its PersistentVolume may have been deleted in
    /// order to keep them. None that a PersistentVolume of another node needs, which names the served store.
    async fn sweep_volume(
        &self,
        id: &VolumeId,
        state: ClaimState,
        store: Option<&StoreId>,
    ) -> Result<SweepOutcome, ReconcileError> {
        // Under this lock the provisioner creates no PersistentVolume for the volume, so what is read now is current.
        let _lock = self.remover.locks.lock(id).await;
        // From the API server: the cache may not have a PersistentVolume that was created just now.
        let object = self.api.read_volume(id.as_str()).await?;
        match (&object, state) {
            (Some(volume), _) if is_in_store(&self.api.identity, volume) => return Ok(SweepOutcome::Kept),
            // The volume is another node's, or another store's, whose disk was moved here.
            (Some(volume), _) if store.is_some() && named_store(volume).as_ref() == store => {
                return Ok(SweepOutcome::Kept);
            }
            // Either the claim was rescheduled to another node, or its class names another store, which has the object and a
            // directory of its own, or the claim is gone.
            (Some(_), _) | (None, ClaimState::Gone) => {}
            // Reconciling its claim publishes the volume.
            (None, ClaimState::Pending) => return Ok(SweepOutcome::Kept),
            // The claim has had a volume, possibly this one: its data may be needed.
            (None, ClaimState::BoundOrLost) => return Ok(SweepOutcome::Orphan),
        }
        let is_removed = self.remover.remove_if_empty(id).await?;
        Ok(if is_removed { SweepOutcome::Removed } else { SweepOutcome::Orphan })
    }

    /// Drops resolved orphans, updates the metrics, and has the rest reported.
    async fn publish_orphans(&self, orphans: &mut Orphans) {
        // An orphaned volume is resolved once it has a PersistentVolume or is gone; an orphaned
        // PersistentVolume is the reverse.
        for (ids, stays) in [(&mut orphans.volumes, true), (&mut orphans.objects, false)] {
            let mut resolved = Vec::new();
            for id in ids.iter() {
                if self.has_object(id) == stays || self.remover.volume_exists(id).await != stays {
                    resolved.push(id.clone());
                }
            }
            ids.retain(|id| !resolved.contains(id));
        }
        self.failures.metrics.set_orphans(orphans.volumes.len(), orphans.objects.len());
        self.failures.metrics.set_orphaned_snapshots(orphans.snapshots.len());
        self.missing.send_if_modified(|missing| {
            let is_new = *missing != orphans.objects;
            missing.clone_from(&orphans.objects);
            is_new
        });
    }

    fn has_object(&self, id: &VolumeId) -> bool {
        let object = self.objects.get(id.as_str());
        object.is_some_and(|object| is_in_store(&self.api.identity, &object))
    }

    /// Returns whether a claim may get its volume in this store: also if its class is not known.
    fn may_provision(&self, claim: &PersistentVolumeClaim) -> bool {
        let class = class_name(claim).and_then(|name| self.classes.get(&ObjectRef::new(name)));
        class.is_none_or(|class| is_class_of_store(&self.api.identity, &class))
    }

    fn report_failure(&self, error: &ReconcileError) {
        self.failures.count(error);
        tracing::warn!("sweep unused volumes: {}; retrying", format_chain(error));
    }
}
