//! Snapshots in memory.

use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};

use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind, file_size};
use crate::snapshot::{SnapshotId, SnapshotInfo, SnapshotStore, SnapshotStoreError, StoredId};
use crate::store::{VolumeStore as _, VolumeStoreError, VolumeUsage};
use crate::testing::MemStore;

/// When all snapshots were created.
const CREATED: Duration = Duration::from_secs(1_700_000_000);

/// The "files" of a volume are what it uses.
#[async_trait]
impl SnapshotStore for MemStore {
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError> {
        let mut state = self.lock_state();
        if let Some(source) = state.failures.pop() {
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
        if let Some(source) = state.failures.pop() {
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

impl MemStore {
    /// What a volume of this kind is to be a copy of.
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
}

fn copy_error(id: &VolumeId, source: &StoredId, why: &str) -> VolumeStoreError {
    VolumeStoreError::Create { id: id.clone(), source: format!("{source} is {why}").into() }
}

fn fits(usage: QuotaUsage, limits: QuotaLimits) -> bool {
    usage.bytes <= limits.bytes.unwrap_or(Bytes(u64::MAX))
        && usage.inodes <= limits.inodes.unwrap_or(Inodes(u64::MAX))
}
