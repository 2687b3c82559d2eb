//! Snapshots in memory.

use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};

use crate::id::VolumeId;
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
        let info = SnapshotInfo { created: UNIX_EPOCH + CREATED, restore_size };
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
        let (exists, found) = {
            let state = self.lock_state();
            let found = match source {
                StoredId::Volume(id) => state.volumes.get(id).copied(),
                StoredId::Snapshot(id) => state.snapshots.get(id).map(|(_, usage)| *usage),
            };
            (state.volumes.contains_key(id), found)
        };
        if exists {
            // Only its limits may change.
            return self.create(id, limits).await;
        }
        let failed = |why| {
            let source = format!("{source} is {why}").into();
            VolumeStoreError::Create { id: id.clone(), source }
        };
        let VolumeUsage { usage, .. } = found.ok_or_else(|| failed("missing"))?;
        if !fits(usage, limits) {
            return Err(failed("larger than the volume"));
        }
        self.create(id, limits).await?;
        self.set_usage(id, usage);
        self.lock_state().unpublished.insert(id.clone());
        Ok(())
    }

    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.lock_state().unpublished.remove(id);
        Ok(())
    }
}

fn fits(usage: QuotaUsage, limits: QuotaLimits) -> bool {
    usage.bytes <= limits.bytes.unwrap_or(Bytes(u64::MAX))
        && usage.inodes <= limits.inodes.unwrap_or(Inodes(u64::MAX))
}
