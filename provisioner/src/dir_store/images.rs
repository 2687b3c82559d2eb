//! Block and strict volumes: makes and grows their files.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::{Dir, FileMode};

use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::{IMAGE_FILE, create_image, image_size, open_image, try_image};
use crate::dir_store::parts::StoreParts;
use crate::dir_store::staging::StagingArea;
use crate::id::VolumeId;
use crate::image::{Formatter, ImageSpec, MAX_ROUNDING, directory_limits, file_size, loops, promised_bytes};
use crate::snapshot::StoredId;
use crate::step::VolumeStep;

/// Makes and grows the volumes of a store that are images.
pub(super) struct ImageVolumes {
    pub(super) parts: StoreParts,
    pub(super) formatter: Formatter,
    pub(super) ledger: Arc<CapacityLedger>,
    pub(super) staging: Arc<StagingArea>,
}

impl ImageVolumes {
    /// Creates an image volume, or raises the size of an existing one.
    pub(super) fn create(
        &self,
        id: &VolumeId,
        spec: ImageSpec,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        let to = StoredId::from(id.clone());
        let _lock = self.parts.locks.lock_copy(&to);
        if self.raise(id, spec)? {
            return Ok(());
        }
        let spec = ImageSpec { size: file_size(spec.size), ..spec };
        self.ledger.with_promise(id.as_str(), Some(promised_bytes(spec.size)), || {
            let made = self.make(&to, spec, is_canceled);
            let made = made.and_then(|()| self.staging.commit(&to, spec.format.into()));
            made.inspect_err(|_| self.staging.discard_failed(&to))
        })
    }

    /// Makes a complete image in staging, with its limits before its first byte.
    fn make(
        &self,
        to: &StoredId,
        spec: ImageSpec,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        // A program that formats an image must not find one that is half formatted.
        self.staging.discard(to)?;
        let dir = self.staging.create(to, FileMode::PRIVATE_DIR, directory_limits(spec.size))?;
        let file = self.parts.steps.run_step(VolumeStep::CreateImage, || create_image(&dir, spec.size))?;
        let format = || self.formatter.format_image(&file, spec, is_canceled);
        let formatted = self.parts.steps.run_step(VolumeStep::FormatImage, format);
        formatted
            .map_err(|source| DirStoreError::FormatImage { path: dir.path().join(IMAGE_FILE), source })?;
        // Durable before the rename that follows: a volume in place is complete.
        try_image("sync", &dir, || file.sync_all())?;
        dir.sync().map_err(DirStoreError::Directory)
    }

    /// Raises the size of an existing image volume; `false` if there is none.
    pub(super) fn raise(&self, id: &VolumeId, spec: ImageSpec) -> Result<bool, DirStoreError> {
        let stored = StoredId::from(id.clone());
        let _held = self.parts.locks.lock(id.as_str());
        let Some(dir) = self.parts.dirs.find(&stored)? else { return Ok(false) };
        self.parts.kinds.check(&stored, &dir, spec.format.into())?;
        let (old, size) = (image_size(&dir)?, file_size(spec.size));
        self.ledger.set_limit(id.as_str(), Some(promised_bytes(old)));
        if size > old {
            self.grow(id, &dir, size)?;
        }
        // The rename of a killed call may not be durable yet.
        self.parts.dirs.sync(&stored).map(|()| true)
    }

    /// Sets the size of an image volume, which never shrinks.
    pub(super) fn resize(&self, id: &VolumeId, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        let path = || dir.path().join(IMAGE_FILE);
        let QuotaLimits { bytes: Some(size), inodes: None } = limits else {
            return Err(DirStoreError::ImageLimits { path: path() });
        };
        let (old, size) = (image_size(dir)?, file_size(size));
        if size < old {
            return Err(DirStoreError::ImageShrunk { path: path(), size: old, wanted: size });
        }
        self.grow(id, dir, size)
    }

    /// Grows an image volume: its limits, its file, and then the devices that use it. Each call completes what one that
    /// was killed has left.
    fn grow(&self, id: &VolumeId, dir: &Dir, size: Bytes) -> Result<(), DirStoreError> {
        self.ledger.with_promise(id.as_str(), Some(promised_bytes(size)), || {
            // In this order: the file needs room in the limits of its directory, and a device has the size of
            // its file.
            self.parts.limits.resize(dir, directory_limits(size))?;
            let file = open_image(dir)?;
            self.extend(dir, &file, size)?;
            let grow = || try_image("grow what uses", dir, || loops::grow_attached(file.as_fd()));
            self.parts.steps.run_step(VolumeStep::GrowDevice, grow)
        })
    }

    /// Gives the file of an image its size, durably.
    pub(super) fn extend(&self, dir: &Dir, file: &File, size: Bytes) -> Result<(), DirStoreError> {
        let extend = || file.set_len(size.0).and_then(|()| file.sync_all());
        self.parts.steps.run_step(VolumeStep::GrowImage, || try_image("set the size of", dir, extend))
    }
}

/// The size of a copy of an image of `source` bytes, of which `wanted` were requested: images never shrink.
pub(super) fn copied_size(from: &StoredId, source: Bytes, wanted: Bytes) -> Result<Bytes, DirStoreError> {
    let size = file_size(wanted);
    if size.0.div_ceil(MAX_ROUNDING).saturating_mul(MAX_ROUNDING) < source.0 {
        return Err(DirStoreError::SourceTooLarge {
            source_id: from.clone(),
            used: format!("{} bytes", source.0),
            limit: format!("{} bytes", size.0),
        });
    }
    Ok(size.max(source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::objects::sample_uid;

    #[test]
    fn a_copy_is_never_smaller_than_its_source() {
        let from = StoredId::from(VolumeId::from_uid(&sample_uid(1)).expect("a UUID"));
        let copied =
            |source, wanted| copied_size(&from, Bytes(source), Bytes(wanted)).ok().map(|size| size.0);
        assert_eq!(copied(1 << 20, 1 << 20), Some(1 << 20));
        assert_eq!(copied(1 << 20, (1 << 20) + 1), Some((1 << 20) + 4096));
        assert_eq!(copied(1_000_001_536, 1_000_000_000), Some(1_000_001_536));
        assert_eq!(copied((1 << 20) + 8192, (1 << 20) + 1), Some((1 << 20) + 8192), "within its rounding");
        assert_eq!(copied((1 << 20) + 4096, 1 << 20), None);
    }
}
