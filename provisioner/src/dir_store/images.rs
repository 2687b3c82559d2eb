//! Volumes that are images: a volume's directory with one sparse file, which is a block device or a file system.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::{Dir, FileKind, FileMode};

use crate::dir_store::trash::TrashEntry;
use crate::dir_store::{DirStoreError, StoreInner};
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind, directory_limits, file_size, loops, promised_bytes};
use crate::snapshot::StoredId;
use crate::step::VolumeStep;
use crate::store::VolumeUsage;

/// The name of the file of a block or strict volume in its directory, [`StoredVolume::path`](crate::StoredVolume).
pub const IMAGE_FILE: &str = "image";

/// By how much a copy may be larger than requested: file systems round sizes up to their blocks.
const MAX_ROUNDING: u64 = 64 << 10;

/// Does something with an image; the error names the step.
pub(super) fn try_image<T>(
    step: &'static str,
    dir: &Dir,
    act: impl FnOnce() -> io::Result<T>,
) -> Result<T, DirStoreError> {
    act().map_err(|source| DirStoreError::Image { step, path: dir.path().join(IMAGE_FILE), source })
}

/// The file of an image volume, for reading.
pub(super) fn read_image(dir: &Dir) -> Result<File, DirStoreError> {
    dir.open_file(IMAGE_FILE).map_err(DirStoreError::Directory)
}

/// The file of an image volume, for reading and writing.
pub(super) fn open_image(dir: &Dir) -> Result<File, DirStoreError> {
    dir.open_file_to_write(IMAGE_FILE).map_err(DirStoreError::Directory)
}

/// Creates the sparse file of an image volume.
fn create_file(dir: &Dir, size: Bytes) -> Result<File, DirStoreError> {
    let file = dir.open_or_create_file(IMAGE_FILE, FileMode::PRIVATE_FILE);
    let file = file.map_err(DirStoreError::Directory)?;
    try_image("set the size of", dir, || file.set_len(size.0))?;
    Ok(file)
}

/// The size of an image volume: that of its file.
pub(super) fn image_size(dir: &Dir) -> Result<Bytes, DirStoreError> {
    dir.metadata(IMAGE_FILE).map(|found| Bytes(found.size)).map_err(DirStoreError::Directory)
}

/// The limits of a volume of this kind, as its users see them.
pub(super) fn visible_limits(
    kind: VolumeKind,
    dir: &Dir,
    limits: QuotaLimits,
) -> Result<QuotaLimits, DirStoreError> {
    match kind {
        VolumeKind::Directory => Ok(limits),
        VolumeKind::Image(_) => Ok(QuotaLimits { bytes: Some(image_size(dir)?), inodes: None }),
    }
}

/// The size of a copy of an image of `source` bytes, of which `wanted` were requested: images never shrink.
pub(super) fn copied_size(from: &StoredId, source: Bytes, wanted: Bytes) -> Result<Bytes, DirStoreError> {
    let size = file_size(wanted);
    match size.0.div_ceil(MAX_ROUNDING).saturating_mul(MAX_ROUNDING) < source.0 {
        false => Ok(size.max(source)),
        true => Err(DirStoreError::SourceTooLarge {
            source_id: from.clone(),
            used: format!("{} bytes", source.0),
            limit: format!("{} bytes", size.0),
        }),
    }
}

impl StoreInner {
    /// Creates an image volume of this format and size, or raises the size of an existing one.
    pub(super) fn create_image(
        &self,
        id: &VolumeId,
        (format, size): (ImageFormat, Bytes),
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        self.require_identity()?;
        let to = StoredId::from(id.clone());
        let _lock = self.copies.lock_copy(to.clone());
        if self.raise_image(id, (format, size))? {
            return Ok(());
        }
        let size = file_size(size);
        self.with_promise(id.as_str(), Some(promised_bytes(size)), || {
            let made = self.stage_image(&to, (format, size), is_canceled);
            let made = made.and_then(|()| self.publish_staged(&to, format.into()));
            if made.is_err() {
                // The claim may be rescheduled to another node and never retried here.
                self.discard_failed(&to);
            }
            made
        })
    }

    /// Raises the size of an existing image volume; `false` if there is none.
    pub(super) fn raise_image(
        &self,
        id: &VolumeId,
        (format, size): (ImageFormat, Bytes),
    ) -> Result<bool, DirStoreError> {
        let _held = self.lock_volume(id);
        let Some(dir) = self.find_volume(id)? else { return Ok(false) };
        let stored = StoredId::from(id.clone());
        self.check_kind((&stored, &dir), format.into())?;
        let (old, size) = (image_size(&dir)?, file_size(size));
        self.ledger.set_limit(id.as_str(), Some(promised_bytes(old)));
        if size > old {
            self.grow_image(id, &dir, size)?;
        }
        self.sync_dir_of(&stored).map(|()| true)
    }

    /// Makes a complete image in staging, with its limits before its first byte.
    fn stage_image(
        &self,
        to: &StoredId,
        (format, size): (ImageFormat, Bytes),
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        if let Some(entry) = self.discard_staged(to)? {
            self.erasures.enqueue_entry(entry, 0);
        }
        let make = || self.staging.ensure_dir(to.as_str(), FileMode::PRIVATE_DIR);
        let dir = self.steps.run_step(VolumeStep::CreateDirectory, make).map_err(DirStoreError::Directory)?;
        self.steps.run_step(VolumeStep::SetLimits, || self.set_limits(&dir, directory_limits(size)))?;
        let file = self.steps.run_step(VolumeStep::CreateImage, || create_file(&dir, size))?;
        let is_canceled = || is_canceled() || self.copies.are_canceled.load(Ordering::Relaxed);
        let make = || self.formatter.format_image(&file, (format, size), &is_canceled);
        let made = self.steps.run_step(VolumeStep::FormatImage, make);
        made.map_err(|source| DirStoreError::FormatImage { path: dir.path().join(IMAGE_FILE), source })?;
        try_image("sync", &dir, || file.sync_all())?;
        dir.sync().map_err(DirStoreError::Directory)
    }

    /// Sets the size of an image volume, which never shrinks.
    pub(super) fn resize_image(
        &self,
        id: &VolumeId,
        dir: &Dir,
        limits: QuotaLimits,
    ) -> Result<(), DirStoreError> {
        let path = || dir.path().join(IMAGE_FILE);
        let QuotaLimits { bytes: Some(size), inodes: None } = limits else {
            return Err(DirStoreError::ImageLimits { path: path() });
        };
        let (old, size) = (image_size(dir)?, file_size(size));
        match size < old {
            true => Err(DirStoreError::ImageShrunk { path: path(), size: old, wanted: size }),
            false => self.grow_image(id, dir, size),
        }
    }

    /// Grows an image volume: its limits, its file, and what uses that now. Each call completes what one that was killed
    /// has left.
    fn grow_image(&self, id: &VolumeId, dir: &Dir, size: Bytes) -> Result<(), DirStoreError> {
        self.with_promise(id.as_str(), Some(promised_bytes(size)), || {
            self.resize_limits(dir, directory_limits(size))?;
            let file = open_image(dir)?;
            self.extend_image(dir, &file, size)?;
            let grow = || try_image("grow what uses", dir, || loops::grow_attached(file.as_fd()));
            self.steps.run_step(VolumeStep::GrowDevice, grow)
        })
    }

    /// Gives the file of an image its size, durably.
    pub(super) fn extend_image(&self, dir: &Dir, file: &File, size: Bytes) -> Result<(), DirStoreError> {
        let extend = || {
            file.set_len(size.0)?;
            file.sync_all()
        };
        let extend = || try_image("set the size of", dir, extend);
        self.steps.run_step(VolumeStep::GrowImage, extend)
    }

    /// Writes to an image what file systems and devices that use it still have in memory.
    pub(super) fn sync_image(&self, dir: &Dir) -> Result<(), DirStoreError> {
        let file = read_image(dir)?;
        try_image("sync", dir, || loops::sync_mounted(file.as_fd()))
    }

    /// Detaches the devices that still use the file of a removed image. A file of that name that pods have put into a
    /// directory has none, and is erased all the same.
    pub(super) fn detach_image(&self, entry: &TrashEntry) -> Result<(), DirStoreError> {
        let Ok(dir) = self.trash.open_dir(entry.content_path()) else { return Ok(()) };
        match dir.metadata(IMAGE_FILE) {
            Ok(found) if found.kind == FileKind::File => {
                let file = read_image(&dir)?;
                try_image("detach", &dir, || loops::detach_all(file.as_fd()))
            }
            _ => Ok(()),
        }
    }

    /// What is promised to a volume: its limit, or what its image may occupy.
    pub(super) fn promised_to(&self, id: &VolumeId, dir: &Dir, limits: QuotaLimits) -> Option<Bytes> {
        match self.read_kind(&id.clone().into(), dir) {
            Ok(VolumeKind::Image(_)) => image_size(dir).map(promised_bytes).ok().or(limits.bytes),
            _ => limits.bytes,
        }
    }

    /// The limits and the usage of a volume, as its users see them.
    pub(super) fn read_usage(&self, id: &VolumeId, dir: &Dir) -> Result<VolumeUsage, DirStoreError> {
        let (status, kind) = (self.read_status(dir)?, self.read_kind(&id.clone().into(), dir)?);
        Ok(VolumeUsage { limits: visible_limits(kind, dir, status.limits)?, usage: status.usage })
    }
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
