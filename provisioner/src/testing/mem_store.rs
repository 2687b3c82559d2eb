//! A volume store in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodekeel_fsquota::{AuditOptions, AuditSummary, Bytes, Inodes, QuotaLimits, QuotaUsage};
use tokio::sync::Notify;

use crate::id::VolumeId;
use crate::plan::{CapacityPolicy, StoreCapacity};
use crate::snapshot::{SnapshotId, SnapshotInfo};
use crate::store::{ErrorSource, VolumeStore, VolumeStoreError, VolumeUsage, larger_limit};

/// Keeps volumes in memory; writes nothing to disk. Clones share their volumes.
#[derive(Clone, Default)]
pub struct MemStore(Arc<Mutex<MemStoreState>>);

#[derive(Default)]
pub(super) struct MemStoreState {
    pub(super) volumes: BTreeMap<VolumeId, VolumeUsage>,
    capacity: Option<Bytes>,
    pub(super) failures: Vec<ErrorSource>,
    pub(super) creates: BTreeMap<VolumeId, u32>,
    removes: BTreeMap<VolumeId, u32>,
    audit: Option<AuditSummary>,
    changed: Arc<Notify>,
    pub(super) snapshots: BTreeMap<SnapshotId, (SnapshotInfo, VolumeUsage)>,
    /// Volumes that were created from a source and are not known to be published.
    pub(super) unpublished: BTreeSet<VolumeId>,
}

impl MemStore {
    /// A store that rejects a volume if the sum of all byte limits would exceed `capacity`.
    pub fn with_capacity(capacity: Bytes) -> Self {
        let store = Self::default();
        store.lock_state().capacity = Some(capacity);
        store
    }

    /// Makes the next call that changes a volume fail with this source. Several failures occur in turn.
    pub fn fail_next(&self, cause: impl Into<ErrorSource>) {
        self.lock_state().failures.insert(0, cause.into());
    }

    /// Sets the usage of a volume, as if a pod had written, whatever its limits are.
    pub fn set_usage(&self, id: &VolumeId, usage: QuotaUsage) {
        if let Some(volume) = self.lock_state().volumes.get_mut(id) {
            volume.usage = usage;
        }
    }

    /// Sets what audits find from now on; before, limits of this store can't be left.
    pub fn set_audit(&self, summary: AuditSummary) {
        self.lock_state().audit = Some(summary);
    }

    /// How often a volume with this id was created (a `create` of an existing volume does not count).
    pub fn create_count(&self, id: &VolumeId) -> u32 {
        self.lock_state().creates.get(id).copied().unwrap_or(0)
    }

    /// How often a volume with this id was removed (a `remove` of a missing volume does not count).
    pub fn remove_count(&self, id: &VolumeId) -> u32 {
        self.lock_state().removes.get(id).copied().unwrap_or(0)
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, MemStoreState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemStoreState {
    /// What is promised of the capacity, if that is limited.
    fn store_capacity(&self) -> Option<StoreCapacity> {
        let total = self.capacity?;
        let limits = self.volumes.values().filter_map(|volume| volume.limits.bytes);
        let promised = limits.fold(Bytes(0), |sum, bytes| Bytes(sum.0.saturating_add(bytes.0)));
        Some(CapacityPolicy::default().store_capacity((total, total), Bytes(0), promised))
    }

    fn check_capacity(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let old = self.volumes.get(id).and_then(|volume| volume.limits.bytes).unwrap_or_default();
        let checked = self
            .store_capacity()
            .map_or(Ok(()), |capacity| capacity.check_limit(old, limits.bytes.unwrap_or_default()));
        checked.map_err(|shortage| VolumeStoreError::Exhausted { id: id.clone(), source: Box::new(shortage) })
    }
}

#[async_trait]
impl VolumeStore for MemStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.failures.pop() {
            return Err(VolumeStoreError::Create { id: id.clone(), source });
        }
        let old = state.volumes.get(id).copied();
        let limits = match old {
            Some(old) => QuotaLimits {
                bytes: larger_limit(old.limits.bytes, limits.bytes),
                inodes: larger_limit(old.limits.inodes, limits.inodes),
            },
            None => limits,
        };
        state.check_capacity(id, limits)?;
        if old.is_none() {
            *state.creates.entry(id.clone()).or_default() += 1;
        }
        let usage = old.map_or(QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) }, |old| old.usage);
        state.volumes.insert(id.clone(), VolumeUsage { limits, usage });
        state.changed.notify_waiters();
        Ok(())
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.failures.pop() {
            return Err(VolumeStoreError::Resize { id: id.clone(), source });
        }
        state.check_capacity(id, limits)?;
        let volume =
            state.volumes.get_mut(id).ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })?;
        volume.limits = limits;
        state.changed.notify_waiters();
        Ok(())
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        let state = self.lock_state();
        state.volumes.get(id).copied().ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.failures.pop() {
            return Err(VolumeStoreError::Remove { id: id.clone(), source });
        }
        if state.volumes.remove(id).is_some() {
            *state.removes.entry(id.clone()).or_default() += 1;
            state.changed.notify_waiters();
        }
        Ok(())
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        let is_empty = |volume: &VolumeUsage| volume.usage.inodes.0 <= 1;
        let is_empty = {
            let state = self.lock_state();
            state.unpublished.contains(id) || state.volumes.get(id).is_none_or(is_empty)
        };
        match is_empty {
            true => self.remove(id).await.map(|()| true),
            false => Ok(false),
        }
    }

    async fn capacity(&self) -> Result<Option<StoreCapacity>, VolumeStoreError> {
        Ok(self.lock_state().store_capacity())
    }

    async fn wait_for_capacity_change(&self, seen: &StoreCapacity) {
        let changed = Arc::clone(&self.lock_state().changed);
        loop {
            let mut changed = pin!(changed.notified());
            // Before the check, so that no change is missed.
            changed.as_mut().enable();
            if self.lock_state().store_capacity().is_none_or(|now| now.promised != seen.promised) {
                return;
            }
            changed.await;
        }
    }

    async fn audit_limits(&self, _: AuditOptions) -> Result<Option<AuditSummary>, VolumeStoreError> {
        Ok(self.lock_state().audit)
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        Ok(self.lock_state().volumes.keys().cloned().collect())
    }
}

impl fmt::Debug for MemStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock_state().volumes.keys()).finish()
    }
}
