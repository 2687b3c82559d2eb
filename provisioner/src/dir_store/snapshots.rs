//! The directory store as a store of snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, QuotaLimits};

use crate::dir_store::error::store_error;
use crate::dir_store::{CancelOnDrop, DirStore, DirStoreError, StoreInner};
use crate::id::VolumeId;
use crate::image::ImageFormat;
use crate::snapshot::{SnapshotId, SnapshotInfo, SnapshotStore, SnapshotStoreError, StoredId};
use crate::store::VolumeStoreError;

impl DirStore {
    /// Copies, or makes an image, on a blocking thread; a copy whose future is dropped ends soon.
    pub(super) async fn run_copy<T: Send + 'static>(
        &self,
        copy: impl FnOnce(&StoreInner, &dyn Fn() -> bool) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        let is_canceled = Arc::new(AtomicBool::new(false));
        let _cancel = CancelOnDrop(Arc::clone(&is_canceled));
        self.run_blocking(None, move |inner| copy(inner, &|| is_canceled.load(Ordering::Relaxed))).await
    }
}

#[async_trait]
impl SnapshotStore for DirStore {
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError> {
        let (owned, of) = (id.clone(), volume.clone());
        let created =
            self.run_copy(move |inner, is_canceled| inner.create_snapshot(&owned, &of, is_canceled)).await;
        match created {
            Ok(Some(info)) => Ok(info),
            Ok(None) => Err(SnapshotStoreError::NoVolume { id: id.clone(), volume: volume.clone() }),
            Err(DirStoreError::Directory(error)) if error.is_clone_unsupported() => {
                Err(SnapshotStoreError::Unsupported { source: Box::new(error) })
            }
            Err(error) => Err(SnapshotStoreError::Create { id: id.clone(), source: Box::new(error) }),
        }
    }

    async fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, SnapshotStoreError> {
        let owned = id.clone();
        let found = self.run_blocking(None, move |inner| inner.find_snapshot(&owned)).await;
        found.map_err(|error| SnapshotStoreError::Read { id: id.clone(), source: Box::new(error) })
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), SnapshotStoreError> {
        let owned = id.clone();
        let removed = self.run_blocking(None, move |inner| inner.remove_snapshot(&owned)).await;
        removed.map_err(|error| SnapshotStoreError::Remove { id: id.clone(), source: Box::new(error) })
    }

    async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, SnapshotStoreError> {
        let listed = self.run_blocking(None, StoreInner::list_snapshots).await;
        listed.map_err(|error| SnapshotStoreError::List { source: Box::new(error) })
    }

    async fn create_volume_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        limits: QuotaLimits,
    ) -> Result<(), VolumeStoreError> {
        let (owned, from) = (id.clone(), source.clone());
        let copy = move |inner: &StoreInner, is_canceled: &dyn Fn() -> bool| {
            inner.create_volume_from(&owned, &from, limits, is_canceled)
        };
        let created = self.run_copy(copy).await;
        created.map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Create { id, source }))
    }

    async fn create_image_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let (owned, from) = (id.clone(), source.clone());
        let copy = move |inner: &StoreInner, is_canceled: &dyn Fn() -> bool| {
            inner.create_image_from(&owned, &from, (format, size), is_canceled)
        };
        let created = self.run_copy(copy).await;
        created.map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Create { id, source }))
    }

    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        // For all volumes but few, this is all.
        if self.slot.inner().is_ok_and(|inner| !inner.copies.is_unpublished(id)) {
            return Ok(());
        }
        let owned = id.clone();
        let marked = self.run_blocking(None, move |inner| inner.mark_published(&owned)).await;
        marked.map_err(|error| VolumeStoreError::Open { id: id.clone(), source: Box::new(error) })
    }
}
