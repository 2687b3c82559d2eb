//! A store of volumes and snapshots in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use nodekeel_fsquota::{AuditOptions, Bytes, Inodes, QuotaLimits, QuotaUsage};
use tokio::sync::{Notify, watch};

use crate::capacity::policy::{CapacityPolicy, DiskSpace, StoreCapacity};
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind, file_size};
use crate::snapshot::{SnapshotId, SnapshotInfo, SnapshotStore, SnapshotStoreError, StoredId};
use crate::store::{
    ErrorSource, FoundLimits, LimitAudit, PublishAttempts, VolumeStore, VolumeStoreError, VolumeUsage,
    larger_limit,
};

/// Creation time of all snapshots, since 1970.
const CREATED: Duration = Duration::from_secs(1_700_000_000);

/// Keeps volumes in memory; writes nothing to disk. Clones share their volumes.
#[derive(Clone, Default)]
pub struct MemStore(Arc<Mutex<MemStoreState>>);

#[derive(Default)]
struct MemStoreState {
    volumes: BTreeMap<VolumeId, VolumeUsage>,
    /// The formats of those that are images.
    formats: BTreeMap<VolumeId, ImageFormat>,
    capacity: Option<Bytes>,
    failures: Vec<ErrorSource>,
    /// The source of the error of each call that changes something.
    fault: Option<fn() -> ErrorSource>,
    is_hung: watch::Sender<bool>,
    /// The format whose program is missing.
    missing_format: Option<ImageFormat>,
    probes: u32,
    creates: BTreeMap<VolumeId, u32>,
    removes: BTreeMap<VolumeId, u32>,
    audit: Option<LimitAudit>,
    publishes: watch::Sender<PublishAttempts>,
    changed: Arc<Notify>,
    snapshots: BTreeMap<SnapshotId, (SnapshotInfo, VolumeUsage)>,
    /// Volumes that were not empty when they were created, and are not known to be published.
    unpublished: BTreeSet<VolumeId>,
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
        // At the front, since calls take failures from the end.
        self.lock_state().failures.insert(0, cause.into());
    }

    /// Makes each call that changes a volume, and each probe, fail with this source, until it is `None`: as a disk that
    /// fails, or a file system that is read-only.
    pub fn set_fault(&self, fault: Option<fn() -> ErrorSource>) {
        self.lock_state().fault = fault;
    }

    /// Makes each probe wait, as on a disk that hangs, for as long as this is true.
    pub fn set_hung(&self, is_hung: bool) {
        self.lock_state().is_hung.send_replace(is_hung);
    }

    /// Makes the program that formats volumes of this format missing, and no other one.
    pub fn set_missing_format(&self, format: Option<ImageFormat>) {
        self.lock_state().missing_format = format;
    }

    /// Number of probes.
    pub fn probe_count(&self) -> u32 {
        self.lock_state().probes
    }

    /// Sets the usage of a volume, as if a pod had written; its limits are not checked.
    pub fn set_usage(&self, id: &VolumeId, usage: QuotaUsage) {
        if let Some(volume) = self.lock_state().volumes.get_mut(id) {
            volume.usage = usage;
        }
    }

    /// Replaces the limits of a volume behind the store's back, as another program can.
    pub fn set_limits(&self, id: &VolumeId, limits: QuotaLimits) {
        if let Some(volume) = self.lock_state().volumes.get_mut(id) {
            volume.limits = limits;
        }
    }

    /// The limits of a volume; `None` if it does not exist.
    pub fn limits_of(&self, id: &VolumeId) -> Option<QuotaLimits> {
        self.lock_state().volumes.get(id).map(|volume| volume.limits)
    }

    /// The kind of a volume; `None` if it does not exist.
    pub fn volume_kind(&self, id: &VolumeId) -> Option<VolumeKind> {
        let state = self.lock_state();
        state.volumes.contains_key(id).then(|| state.kind(id))
    }

    /// Sets what audits find from now on; before, limits of this store can't be left.
    pub fn set_audit(&self, audit: LimitAudit) {
        self.lock_state().audit = Some(audit);
    }

    /// Records attempts to open volumes for pods: this store opens none.
    pub fn set_publishes(&self, attempts: PublishAttempts) {
        self.lock_state().publishes.send_replace(attempts);
    }

    /// Number of times that a volume with this id was created (a `create` of an existing volume does not count).
    pub fn create_count(&self, id: &VolumeId) -> u32 {
        self.lock_state().creates.get(id).copied().unwrap_or(0)
    }

    /// Number of times that a volume with this id was removed (a `remove` of a missing volume does not count).
    pub fn remove_count(&self, id: &VolumeId) -> u32 {
        self.lock_state().removes.get(id).copied().unwrap_or(0)
    }

    /// The source of a copy of this kind.
    fn find_source(
        &self,
        id: &VolumeId,
        source: &StoredId,
        wanted: VolumeKind,
    ) -> Result<VolumeUsage, VolumeStoreError> {
        let state = self.lock_state();
        let found = match source {
            StoredId::Volume(id) => state.volumes.get(id).map(|usage| (*usage, state.kind(id))),
            StoredId::Snapshot(id) => state.snapshots.get(id).map(|(info, usage)| (*usage, info.kind)),
        };
        match found {
            None => Err(copy_error(id, source, "missing")),
            Some((_, kind)) if kind != wanted => Err(copy_error(id, source, "of another kind")),
            Some((usage, _)) => Ok(usage),
        }
    }

    fn lock_state(&self) -> MutexGuard<'_, MemStoreState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemStoreState {
    fn next_failure(&mut self) -> Option<ErrorSource> {
        self.failures.pop().or_else(|| self.fault.map(|fault| fault()))
    }

    fn kind(&self, id: &VolumeId) -> VolumeKind {
        self.formats.get(id).copied().map_or(VolumeKind::Directory, VolumeKind::Image)
    }

    /// Checks that a volume is of this kind, if it exists.
    fn check_kind(&self, id: &VolumeId, wanted: VolumeKind) -> Result<(), VolumeStoreError> {
        let found = self.kind(id);
        if !self.volumes.contains_key(id) || found == wanted {
            return Ok(());
        }
        let source = format!("the kind of the volume is {found}, not {wanted}").into();
        Err(VolumeStoreError::Create { id: id.clone(), source })
    }

    /// Creates a volume, or raises the limits of an existing one. Returns whether it is new.
    fn create(
        &mut self,
        id: &VolumeId,
        kind: VolumeKind,
        limits: QuotaLimits,
    ) -> Result<bool, VolumeStoreError> {
        if let Some(source) = self.next_failure() {
            return Err(VolumeStoreError::Create { id: id.clone(), source });
        }
        self.check_kind(id, kind)?;
        let old = self.volumes.get(id).copied();
        let limits = match old {
            Some(old) => QuotaLimits {
                bytes: larger_limit(old.limits.bytes, limits.bytes),
                inodes: larger_limit(old.limits.inodes, limits.inodes),
            },
            None => limits,
        };
        self.check_capacity(id, limits)?;
        if old.is_none() {
            *self.creates.entry(id.clone()).or_default() += 1;
        }
        let usage = old.map_or(QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) }, |old| old.usage);
        self.volumes.insert(id.clone(), VolumeUsage { limits, usage });
        self.changed.notify_waiters();
        Ok(old.is_none())
    }

    /// The limits of an image: its size, which never shrinks.
    fn check_image_limits(
        &self,
        id: &VolumeId,
        limits: QuotaLimits,
    ) -> Result<QuotaLimits, VolumeStoreError> {
        let failed = |why: &str| VolumeStoreError::Resize { id: id.clone(), source: why.into() };
        let old = self.volumes.get(id).and_then(|volume| volume.limits.bytes).unwrap_or_default();
        match limits {
            QuotaLimits { bytes: Some(size), inodes: None } if file_size(size) >= old => {
                Ok(QuotaLimits { bytes: Some(file_size(size)), inodes: None })
            }
            QuotaLimits { inodes: None, bytes: Some(_) } => Err(failed("an image can't shrink")),
            _ => Err(failed("an image has a size, and no inode limit")),
        }
    }

    /// The promised part of the capacity, if that is limited.
    fn store_capacity(&self) -> Option<StoreCapacity> {
        let total = self.capacity?;
        let limits = self.volumes.values().filter_map(|volume| volume.limits.bytes);
        let promised = limits.fold(Bytes(0), |sum, bytes| Bytes(sum.0.saturating_add(bytes.0)));
        Some(CapacityPolicy::default().store_capacity(DiskSpace { total, free: total }, Bytes(0), promised))
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
        self.lock_state().create(id, VolumeKind::Directory, limits).map(drop)
    }

    async fn create_image(
        &self,
        id: &VolumeId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        let limits = QuotaLimits { bytes: Some(file_size(size)), inodes: None };
        if state.create(id, format.into(), limits)? {
            state.formats.insert(id.clone(), format);
            state.unpublished.insert(id.clone());
        }
        Ok(())
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.next_failure() {
            return Err(VolumeStoreError::Resize { id: id.clone(), source });
        }
        let limits = match state.kind(id) {
            VolumeKind::Image(_) => state.check_image_limits(id, limits)?,
            VolumeKind::Directory => limits,
        };
        state.check_capacity(id, limits)?;
        let volume =
            state.volumes.get_mut(id).ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })?;
        volume.limits = limits;
        state.changed.notify_waiters();
        Ok(())
    }

    async fn find_limits(&self, id: &VolumeId, _: bool) -> Result<Option<FoundLimits>, VolumeStoreError> {
        let VolumeUsage { limits, usage } = self.usage(id).await?;
        Ok(Some(FoundLimits { limits, usage, is_own: true }))
    }

    async fn restore_limits(&self, id: &VolumeId, limits: QuotaLimits) -> Result<u64, VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.next_failure() {
            return Err(VolumeStoreError::Resize { id: id.clone(), source });
        }
        let missing = || VolumeStoreError::NotFound { id: id.clone() };
        state.volumes.get_mut(id).ok_or_else(missing)?.limits = limits;
        state.changed.notify_waiters();
        Ok(0)
    }

    async fn wait_for_publish(&self) -> PublishAttempts {
        let publishes = self.lock_state().publishes.clone();
        let mut attempts = publishes.subscribe();
        // Fails only if the store is gone.
        let _ = attempts.wait_for(|attempts| *attempts != PublishAttempts::default()).await;
        publishes.send_replace(PublishAttempts::default())
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        let state = self.lock_state();
        state.volumes.get(id).copied().ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.next_failure() {
            return Err(VolumeStoreError::Remove { id: id.clone(), source });
        }
        state.formats.remove(id);
        state.unpublished.remove(id);
        if state.volumes.remove(id).is_some() {
            *state.removes.entry(id.clone()).or_default() += 1;
            state.changed.notify_waiters();
        }
        Ok(())
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        // The lock ends with this block: `remove` takes it again.
        let is_empty = {
            let state = self.lock_state();
            let is_empty =
                |volume: &VolumeUsage| state.kind(id) == VolumeKind::Directory && volume.usage.inodes.0 <= 1;
            state.unpublished.contains(id) || state.volumes.get(id).is_none_or(is_empty)
        };
        if is_empty { self.remove(id).await.map(|()| true) } else { Ok(false) }
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

    async fn probe(&self) -> Result<(), VolumeStoreError> {
        let mut is_hung = self.lock_state().is_hung.subscribe();
        // Fails only if the store is gone.
        let _ = is_hung.wait_for(|is_hung| !is_hung).await;
        let mut state = self.lock_state();
        state.probes += 1;
        let fault = state.fault.map(|fault| fault());
        fault.map_or(Ok(()), |source| Err(VolumeStoreError::Probe { source }))
    }

    async fn check_format(&self, format: ImageFormat) -> Result<(), VolumeStoreError> {
        match self.lock_state().missing_format {
            Some(missing) if missing == format => {
                Err(VolumeStoreError::Probe { source: format!("mkfs.{} is missing", format.as_str()).into() })
            }
            _ => Ok(()),
        }
    }

    async fn audit_limits(&self, _: AuditOptions) -> Result<Option<LimitAudit>, VolumeStoreError> {
        Ok(self.lock_state().audit.clone())
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        Ok(self.lock_state().volumes.keys().cloned().collect())
    }
}

/// The "files" of a volume are what it uses.
#[async_trait]
impl SnapshotStore for MemStore {
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.next_failure() {
            return Err(SnapshotStoreError::Create { id: id.clone(), source });
        }
        if let Some((info, _)) = state.snapshots.get(id) {
            return Ok(*info);
        }
        let missing = || SnapshotStoreError::NoVolume { id: id.clone(), volume: volume.clone() };
        let source = state.volumes.get(volume).copied().ok_or_else(missing)?;
        let restore_size = source.limits.bytes.unwrap_or(source.usage.bytes);
        let info = SnapshotInfo { created: UNIX_EPOCH + CREATED, restore_size, kind: state.kind(volume) };
        state.snapshots.insert(id.clone(), (info, source));
        Ok(info)
    }

    async fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, SnapshotStoreError> {
        Ok(self.lock_state().snapshots.get(id).map(|(info, _)| *info))
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), SnapshotStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.next_failure() {
            return Err(SnapshotStoreError::Remove { id: id.clone(), source });
        }
        state.snapshots.remove(id);
        Ok(())
    }

    async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, SnapshotStoreError> {
        Ok(self.lock_state().snapshots.keys().cloned().collect())
    }

    async fn create_volume_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        limits: QuotaLimits,
    ) -> Result<(), VolumeStoreError> {
        if self.volume_kind(id).is_some() {
            // Only its limits may change.
            return self.create(id, limits).await;
        }
        let VolumeUsage { usage, .. } = self.find_source(id, source, VolumeKind::Directory)?;
        if !fits(usage, limits) {
            return Err(copy_error(id, source, "larger than the volume"));
        }
        self.create(id, limits).await?;
        self.set_usage(id, usage);
        self.lock_state().unpublished.insert(id.clone());
        Ok(())
    }

    async fn create_image_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        if self.volume_kind(id).is_some() {
            return self.create_image(id, format, size).await;
        }
        let VolumeUsage { usage, limits } = self.find_source(id, source, format.into())?;
        if limits.bytes > Some(file_size(size)) {
            return Err(copy_error(id, source, "larger than the volume"));
        }
        self.create_image(id, format, size).await?;
        self.set_usage(id, usage);
        Ok(())
    }

    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.lock_state().unpublished.remove(id);
        Ok(())
    }
}

fn copy_error(id: &VolumeId, source: &StoredId, why: &str) -> VolumeStoreError {
    VolumeStoreError::Create { id: id.clone(), source: format!("{source} is {why}").into() }
}

fn fits(usage: QuotaUsage, limits: QuotaLimits) -> bool {
    usage.bytes <= limits.bytes.unwrap_or(Bytes(u64::MAX))
        && usage.inodes <= limits.inodes.unwrap_or(Inodes(u64::MAX))
}

impl fmt::Debug for MemStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.lock_state().volumes.keys()).finish()
    }
}
